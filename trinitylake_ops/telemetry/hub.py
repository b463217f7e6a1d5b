"""Definitions of the engine's metrics, and the hub that passes measurements to listeners.

Labels have few values: kinds, outcomes, storage schemes, and the operator's names for lakehouses. They never
contain the name of a table, a person or a token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

logger = logging.getLogger(__name__)


class Listener(Protocol):
    """Receives measurements by the name of an instrument. Any thread may call it."""

    def add(self, name: str, amount: float, labels: dict[str, str]) -> None:
        """Increase a counter."""

    def observe(self, name: str, value: float, labels: dict[str, str]) -> None:
        """Add a value to a histogram."""

    def put(self, name: str, value: float, labels: dict[str, str]) -> None:
        """Set a gauge."""


_listeners: tuple[Listener, ...] = ()


def is_heard() -> bool:
    """Whether any listener is registered."""
    return bool(_listeners)


def listen(listener: Listener) -> Callable[[], None]:
    """Register a listener for all subsequent measurements, and return a function that removes it.

    Only storages that are opened after this call report their requests.
    """
    global _listeners  # noqa: PLW0603 - the listeners of the process
    _listeners = (*_listeners, listener)

    def end() -> None:
        global _listeners  # noqa: PLW0603
        _listeners = tuple(other for other in _listeners if other is not listener)

    return end


def add(name: str, amount: float = 1, **labels: str) -> None:
    """Increase a counter."""
    for listener in _listeners:
        _notify(listener.add, name, amount, labels)


def observe(name: str, value: float, **labels: str) -> None:
    """Add a value to a histogram."""
    for listener in _listeners:
        _notify(listener.observe, name, value, labels)


def put(name: str, value: float, **labels: str) -> None:
    """Set a gauge."""
    for listener in _listeners:
        _notify(listener.put, name, value, labels)


def _notify(
    notify: Callable[[str, float, dict[str, str]], None], name: str, value: float, labels: dict[str, str]
) -> None:
    try:
        notify(name, value, labels)
    except Exception:  # a listener must not fail a commit
        logger.warning("a listener of %s failed; the work continues", name, exc_info=True)


class Kind(StrEnum):
    """How the measurements of an instrument are aggregated."""

    COUNTER = "counter"
    HISTOGRAM = "histogram"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Instrument:
    """A metric of the engine."""

    #: The name without the prefix ``trinitylake_``.
    name: str
    kind: Kind
    description: str
    #: The names of the labels.
    labels: tuple[str, ...] = ()
    #: The bucket boundaries of a histogram.
    bounds: tuple[float, ...] = ()
    #: A UCUM unit.
    unit: str = "1"


_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0, 300.0, 3_600.0)
_FEW = (1, 2, 4, 8, 16, 32, 64, 128)

TRANSACTIONS = "transactions"
VERSION_SECONDS = "version_seconds"
VERSION_ATTEMPTS = "version_attempts"
LOST_ATTEMPTS = "engine_lost_attempts"
GROUP_SIZE = "commit_group_size"
STORAGE_REQUESTS = "storage_requests"
STORAGE_BYTES = "storage_bytes"
STORAGE_RETRIES = "storage_retries"
CACHE_READS = "cache_reads"
FREED_FILES = "freed_files"
FREED_BYTES = "freed_bytes"
OPERATIONS = "operations"
OPERATION_SECONDS = "operation_seconds"
VERSION = "lakehouse_version"
AGE_SECONDS = "age_seconds"
DUE_SECONDS = "due_seconds"
RECLAIMABLE_BYTES = "reclaimable_bytes"
FINDINGS = "findings"
RECENT_ATTEMPTS = "recent_attempts"
RECENT_LOST = "recent_lost_attempts"
READ_AT = "status_timestamp_seconds"
SPACE_BYTES = "space_bytes"
SPACE_FILES = "space_files"
SMALL_FILES = "small_files"
DELETE_FILES = "delete_files"

_COUNTER, _HISTOGRAM, _GAUGE = Kind.COUNTER, Kind.HISTOGRAM, Kind.GAUGE

INSTRUMENTS: dict[str, Instrument] = {
    instrument.name: instrument
    for instrument in (
        Instrument(TRANSACTIONS, _COUNTER, "Transactions by outcome.", ("outcome",)),
        Instrument(VERSION_SECONDS, _HISTOGRAM, "Duration of a commit with all its attempts.", (), _SECONDS, "s"),
        Instrument(VERSION_ATTEMPTS, _HISTOGRAM, "Attempts per commit.", (), (1, 2, 3, 5, 8, 13, 21, 50, 100)),
        Instrument(LOST_ATTEMPTS, _COUNTER, "Commit attempts that conflicted and were retried."),
        Instrument(GROUP_SIZE, _HISTOGRAM, "Transactions of this process per version.", (), _FEW),
        Instrument(STORAGE_REQUESTS, _COUNTER, "Requests to the storage.", ("storage", "kind")),
        Instrument(STORAGE_BYTES, _COUNTER, "Bytes read and written.", ("storage", "way"), (), "By"),
        Instrument(STORAGE_RETRIES, _COUNTER, "Requests that failed temporarily, by cause.", ("storage", "cause")),
        Instrument(CACHE_READS, _COUNTER, "Reads of immutable files by source.", ("source",)),
        Instrument(FREED_FILES, _COUNTER, "Files deleted by operations."),
        Instrument(FREED_BYTES, _COUNTER, "Bytes of files deleted by operations.", (), (), "By"),
        Instrument(OPERATIONS, _COUNTER, "Operations by outcome.", ("operation", "outcome")),
        Instrument(OPERATION_SECONDS, _HISTOGRAM, "Duration of operations.", ("operation",), _SECONDS, "s"),
        Instrument(VERSION, _GAUGE, "The latest version.", ("lakehouse",)),
        Instrument(
            AGE_SECONDS,
            _GAUGE,
            "Seconds since the last event of this kind; +Inf if there was none.",
            ("lakehouse", "of"),
            (),
            "s",
        ),
        Instrument(
            DUE_SECONDS,
            _GAUGE,
            "Seconds since an operation became due; 0 if it is not due.",
            ("lakehouse", "what"),
            (),
            "s",
        ),
        Instrument(RECLAIMABLE_BYTES, _GAUGE, "Reclaimable bytes, as far as known.", ("lakehouse",), (), "By"),
        Instrument(FINDINGS, _GAUGE, "Findings of the status.", ("lakehouse", "severity")),
        Instrument(RECENT_ATTEMPTS, _GAUGE, "Commit attempts for the newest versions, of all writers.", ("lakehouse",)),
        Instrument(
            RECENT_LOST, _GAUGE, "Conflicting attempts for the newest versions, of all writers.", ("lakehouse",)
        ),
        Instrument(READ_AT, _GAUGE, "Time when the status was read, in seconds since 1970.", ("lakehouse",), (), "s"),
        Instrument(SPACE_BYTES, _GAUGE, "Bytes by the reason for which they are kept.", ("lakehouse", "use"), (), "By"),
        Instrument(SPACE_FILES, _GAUGE, "Files by the reason for which they are kept.", ("lakehouse", "use")),
        Instrument(SMALL_FILES, _GAUGE, "Small data files of the current snapshots of all tables.", ("lakehouse",)),
        Instrument(DELETE_FILES, _GAUGE, "Delete files of the current snapshots of all tables.", ("lakehouse",)),
    )
}
