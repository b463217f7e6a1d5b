"""What differs between versions: objects, and rows, files and bytes of tables."""
