"""Reading versions: which there are, one of them, the history."""
