"""The metadata tables of the data source."""
