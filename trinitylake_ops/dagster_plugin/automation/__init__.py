"""What begins runs: sensors and schedules."""
