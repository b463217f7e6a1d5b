"""A project for Dagster's dg, with a YAML file in defs for each lakehouse."""
