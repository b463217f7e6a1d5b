"""The storage contract, run on each storage implementation."""
