"""Group commit: transactions of one process that wait at the same moment go into one root (docs/protocol.md, C)."""
