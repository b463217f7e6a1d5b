"""Records of Dagster runs: reads, staged tables and publications."""
