"""The space that a lakehouse uses, by namespace, table and reason, from a summary that is kept up to date."""
