"""What storages on servers share: requests, failures, ranges, repeated requests, options, the server's clock."""
