"""Read versions: find and open a version, and list the history."""
