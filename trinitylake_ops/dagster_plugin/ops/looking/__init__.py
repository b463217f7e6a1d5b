"""Jobs that look at versions and change nothing: log, history, diff."""
