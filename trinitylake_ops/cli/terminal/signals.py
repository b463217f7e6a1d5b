"""How a signal ends a command."""

from __future__ import annotations


class Terminated(KeyboardInterrupt):
    """SIGTERM came. The process closes the same things on its way out as after an interrupt."""
