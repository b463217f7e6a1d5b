"""A project of Dagster's dg: its lakehouses are YAML files below defs."""
