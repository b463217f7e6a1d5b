"""Maintenance: one operation that runs all due operations by the policy of the lakehouse."""
