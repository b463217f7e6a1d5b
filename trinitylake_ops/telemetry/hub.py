"""Hands numbers to whoever listens. Without a listener a call costs one look at an empty tuple."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)


class Listener(Protocol):
    """Takes numbers by the name of an instrument. It may be called by any thread."""

    def add(self, name: str, amount: float, labels: dict[str, str]) -> None:
        """Count."""

    def observe(self, name: str, value: float, labels: dict[str, str]) -> None:
        """Add a value to a histogram."""

    def put(self, name: str, value: float, labels: dict[str, str]) -> None:
        """Set a gauge."""


_listeners: tuple[Listener, ...] = ()


def is_heard() -> bool:
    """Whether anybody listens."""
    return bool(_listeners)


def listen(listener: Listener) -> Callable[[], None]:
    """Hand all numbers from now on to a listener, too. Returns what ends that.

    Storages that are opened from then on tell of their requests.
    """
    global _listeners  # noqa: PLW0603 - the listeners of the process
    _listeners = (*_listeners, listener)

    def end() -> None:
        global _listeners  # noqa: PLW0603
        _listeners = tuple(one for one in _listeners if one is not listener)

    return end


def add(name: str, amount: float = 1, **labels: str) -> None:
    """Count something."""
    for listener in _listeners:
        _tell(listener.add, name, amount, labels)


def observe(name: str, value: float, **labels: str) -> None:
    """Add a value to a histogram."""
    for listener in _listeners:
        _tell(listener.observe, name, value, labels)


def put(name: str, value: float, **labels: str) -> None:
    """Set a gauge."""
    for listener in _listeners:
        _tell(listener.put, name, value, labels)


def _tell(tell: Callable[[str, float, dict[str, str]], None], name: str, value: float, labels: dict[str, str]) -> None:
    try:
        tell(name, value, labels)
    except Exception:  # whoever counts must not fail a commit
        logger.warning("a listener of %s failed; the work goes on", name, exc_info=True)
