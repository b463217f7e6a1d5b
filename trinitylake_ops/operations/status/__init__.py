"""The state of a lakehouse on one screen, read with a bounded number of requests."""
