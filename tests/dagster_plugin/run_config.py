"""Run configuration for runs that print nothing. Jobs of operations accept only their options."""

QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
