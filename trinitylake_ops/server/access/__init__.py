"""Access to the files of tables for clients without keys: sessions for one table's place, and signed requests."""
