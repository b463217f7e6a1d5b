"""The command line: `trinitylake`. Importing this package loads only what the start of the process needs."""

from trinitylake_ops.cli.entry import main

__all__ = ["main"]
