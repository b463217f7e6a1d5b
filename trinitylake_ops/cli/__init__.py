"""The command line: `trinitylake`. Importing this package loads only what process startup needs."""

from trinitylake_ops.cli.entry import main

__all__ = ["main"]
