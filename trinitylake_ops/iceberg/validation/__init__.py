"""Files of tables are checked before a decoder believes what they declare."""
