"""The server for engines as Dagster sees it: by its address, from outside."""
