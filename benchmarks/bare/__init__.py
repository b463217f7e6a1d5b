"""Clients without our engine, which send the requests recorded by ``benchmarks/replay.py`` through a library."""
