"""For ``spark-submit``: its arguments are those of the command ``trinitylake`` (docs/engines.md)."""

from trinitylake_ops.cli import main

main()
