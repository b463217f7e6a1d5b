"""The engine beside its peers, each in a process of its own: ``python -m benchmarks.peers``."""
