"""Stage, audit and publish tables."""
