"""The mark: all roots, the files that they reach, and the files that exist."""
