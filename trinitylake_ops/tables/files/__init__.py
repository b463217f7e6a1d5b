"""Reading, naming and copying files of tables."""
