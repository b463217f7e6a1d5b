"""The command line: `trinitylake`."""

from trinitylake_ops.cli.app import main

__all__ = ["main"]
