"""Stage, audit, publish."""
