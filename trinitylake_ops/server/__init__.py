"""The Iceberg REST catalog server: any engine reads and writes lakehouses, without a database behind it."""
