"""Run configuration of runs that print nothing; operations take none but their options."""

QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
