"""HDFS, through hdfs-native.

No Hadoop is needed beside it. A file is written under a fresh name in ``_ops/tmp/`` and then renamed. The rename is one
request to the NameNode. In a create it replaces nothing, in a write it replaces atomically. See docs/storages/README.md
for the guarantees and their limits.
"""
