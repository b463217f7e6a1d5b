"""Program for ``spark-submit``; its arguments are those of the ``trinitylake`` command (docs/spark/cluster.md)."""

from trinitylake_ops.cli import main

main()
