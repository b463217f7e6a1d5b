"""HDFS, through hdfs-native, which does not need a Hadoop installation.

A file is written with a temporary name in ``_ops/tmp/`` and then renamed by one request to the NameNode. The rename of
a create fails if the file exists, and the rename of a write replaces the file atomically. docs/storages/README.md
describes the guarantees and their limits.
"""
