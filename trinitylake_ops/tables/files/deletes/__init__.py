"""Delete files: which of them apply to a data file, rows without those that they delete, and copies of them."""
