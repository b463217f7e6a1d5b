"""Node files, and the keys and rows in them (FORMAT.md, "Node files")."""
