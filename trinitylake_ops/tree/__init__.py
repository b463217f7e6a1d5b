"""The copy-on-write B-epsilon tree: search, editing, walk, diff, invariants."""
