"""Declarations of operations, from which commands, Dagster jobs and Airflow tasks are generated."""
