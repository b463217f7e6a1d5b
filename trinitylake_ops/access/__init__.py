"""Which files may be opened: allowed roots, external files, and the lakehouses that use a table root."""
