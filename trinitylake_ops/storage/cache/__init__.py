"""The cache: in memory, and a folder that processes share."""
