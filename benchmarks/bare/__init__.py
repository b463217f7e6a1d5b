"""Client libraries by their own calls, without our engine: each sends requests that ``benchmarks/replay.py`` noted."""
