"""The differences between versions: objects, and the rows, files and bytes of tables."""
