"""The state of a lakehouse on one screen, for a bounded number of requests."""
