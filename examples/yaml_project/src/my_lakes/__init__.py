"""A project for Dagster's dg, with a YAML file below defs for each lakehouse."""
