"""Operations as data, from which commands, jobs of Dagster and tasks of Airflow are generated."""
