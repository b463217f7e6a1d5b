"""The differences between versions: objects, rows, files and bytes of tables."""
