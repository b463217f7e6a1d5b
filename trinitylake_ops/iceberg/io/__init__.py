"""Files of tables as pyiceberg reads and writes them."""
