"""File access for pyiceberg: reads and writes the files of tables."""
