"""What storages on servers share: clients, requests, errors, options and the server's clock."""
