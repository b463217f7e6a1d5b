"""The mark: all roots, what they reach, and what is listed."""
