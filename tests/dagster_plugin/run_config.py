"""Run configuration that silences the console log. Jobs of operations reject it: they accept only their options."""

QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
