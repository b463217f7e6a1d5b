"""For ``spark-submit``: its arguments are those of the command ``trinitylake`` (docs/spark/cluster.md)."""

from trinitylake_ops.cli import main

main()
