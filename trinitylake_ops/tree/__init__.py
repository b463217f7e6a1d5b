"""The copy-on-write B-epsilon tree map: search, write buffer, split and merge, walk, diff, invariants."""
