"""Shared by all storages on servers: client caches, requests, errors, options and the server's clock."""
