"""Operations as data: options, plans, steps and reports. Dagster's jobs and Airflow's tasks are made of them."""
