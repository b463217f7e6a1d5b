"""Dagster resources, assets, checks and jobs that run a lakehouse's pipelines and operations."""
