"""Reading and writing the data of tables by tasks."""
