"""The command line: `trinitylake`. Importing it loads no more than the beginning of the process needs."""

from trinitylake_ops.cli.entry import main

__all__ = ["main"]
