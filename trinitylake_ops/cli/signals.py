"""How a signal ends a command."""

from __future__ import annotations


class Terminated(KeyboardInterrupt):
    """SIGTERM came: whatever an interrupt closes on its way out is closed."""
