"""Compare the engine with its peers, each in a separate process: ``python -m benchmarks.peers``."""
