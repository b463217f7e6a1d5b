"""What maintenance remembers between runs: whose turn it is, and what needs no check again.

The file is only a hint. If it is lost, damaged or out of date, or if two runs overwrite each other's, some checks are
repeated and the order of tables starts over; nothing else changes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trinitylake_ops.errors import FileMissingError, StorageError
from trinitylake_ops.format.checksums import MAX_NOTE_BYTES
from trinitylake_ops.format.file_names import MAINTENANCE_STATE_PATH, MAX_VERSION
from trinitylake_ops.format.keys import MAX_TIME_MS
from trinitylake_ops.format.sealed_files import decode_sealed_json, encode_sealed_json
from trinitylake_ops.operations.policy.document import Step
from trinitylake_ops.storage import Storage

logger = logging.getLogger(__name__)

#: The maximum number of tables that each mapping remembers by name.
MAX_TABLES = 256
#: The maximum size of a name in the file, and of the position of a pass. With them, the file is smaller than 1 MiB.
_MAX_NAME_BYTES = 512
_MAX_POSITION_BYTES = 65_536


@dataclass(slots=True)
class TablePass:
    """A pass over tables in the order of their names, which may take several runs."""

    #: Tables that did not change since this version need no check; None if unknown.
    checked_version: int | None = None
    #: The version when the current pass began; None if none is in progress.
    begun_version: int | None = None
    #: The last table that the current pass has handled.
    after: str | None = None
    #: Tables that wait for their turn, in order, with the time since when. They come first.
    waiting_since_ms: dict[str, int] = field(default_factory=dict)
    #: Tables that had their turn and are not finished, in order. They come last.
    unfinished_since_ms: dict[str, int] = field(default_factory=dict)
    #: Whether a table of the current pass could not be remembered, so that the pass has to be repeated.
    has_forgotten: bool = False

    def wait(self, name: str, now_ms: int) -> None:
        """Remember a table that did not have its turn."""
        self.unfinished_since_ms.pop(name, None)
        self._remember(self.waiting_since_ms, name, now_ms)

    def leave_unfinished(self, name: str, now_ms: int) -> None:
        """Remember a table that had its turn and is not finished."""
        self.settle(name)
        self._remember(self.unfinished_since_ms, name, now_ms)

    def settle(self, name: str) -> None:
        """Forget a table that was handled."""
        self.waiting_since_ms.pop(name, None)
        self.unfinished_since_ms.pop(name, None)

    def _remember(self, tables: dict[str, int], name: str, now_ms: int) -> None:
        if name in tables:
            return
        if len(tables) == MAX_TABLES or _size_bytes(name) > _MAX_NAME_BYTES:
            self.has_forgotten = True
        else:
            tables[name] = now_ms

    @property
    def is_pending(self) -> bool:
        """Whether a pass is not finished, or tables are left."""
        return self.begun_version is not None or bool(self.waiting_since_ms or self.unfinished_since_ms)

    @property
    def remembered(self) -> frozenset[str]:
        """The tables that are remembered by name."""
        return frozenset({*self.waiting_since_ms, *self.unfinished_since_ms})

    def ordered(self, names: Iterable[str]) -> list[str]:
        """Return the tables of a pass: those that wait, the others after the last one handled, the unfinished ones.

        Args:
            names: The tables to check, besides those that are remembered.
        """
        known = self.remembered
        rest = sorted(name for name in names if name not in known and (self.after is None or name > self.after))
        return [*self.waiting_since_ms, *rest, *self.unfinished_since_ms]

    def begin(self, version: int) -> None:
        """Begin a pass on a version, unless one is in progress."""
        if self.begun_version is None:
            self.begun_version, self.has_forgotten = version, False

    def advance(self, name: str) -> None:
        """Record that the pass has handled all tables up to this one."""
        if _size_bytes(name) <= _MAX_POSITION_BYTES:
            self.after = name

    def finish(self) -> None:
        """End the pass. Tables that did not change since it began need no check again."""
        if not self.has_forgotten:
            self.checked_version = self.begun_version
        self.begun_version = self.after = None

    def end_turn(self) -> None:
        """Let unfinished tables wait for their turn in the next run."""
        waiting = {**self.waiting_since_ms, **self.unfinished_since_ms}
        self.has_forgotten |= len(waiting) > MAX_TABLES
        self.waiting_since_ms = dict(list(waiting.items())[:MAX_TABLES])
        self.unfinished_since_ms = {}

    def to_json(self) -> dict[str, Any]:
        """Return the content as JSON values."""
        return {
            "checked_version": self.checked_version,
            "begun_version": self.begun_version,
            "after": self.after,
            "waiting_since_ms": self.waiting_since_ms,
            "unfinished_since_ms": self.unfinished_since_ms,
            "has_forgotten": self.has_forgotten,
        }

    @classmethod
    def of(cls, content: Any) -> TablePass:
        """Read the content of a file, and ignore what is invalid."""
        if not isinstance(content, dict):
            return cls()
        after = content.get("after")
        return cls(
            checked_version=_number(content.get("checked_version"), MAX_VERSION),
            begun_version=_number(content.get("begun_version"), MAX_VERSION),
            after=after if isinstance(after, str) and _size_bytes(after) <= _MAX_POSITION_BYTES else None,
            waiting_since_ms=_times(content.get("waiting_since_ms")),
            unfinished_since_ms=_times(content.get("unfinished_since_ms")),
            has_forgotten=content.get("has_forgotten") is True,
        )


@dataclass(slots=True)
class MaintenanceState:
    """The content of the file."""

    #: When each step last had its turn, in milliseconds since the epoch.
    turns_ms: dict[str, int] = field(default_factory=dict)
    #: The steps that the last run left or did not finish.
    unfinished: set[str] = field(default_factory=set)
    #: When orphans were last checked, in milliseconds since the epoch. A check that finds none leaves no other record.
    orphans_checked_ms: int | None = None
    #: The version whose tree was last checked.
    tree_checked_version: int | None = None
    #: Whether the last verification did not finish.
    is_verify_unfinished: bool = False
    compaction: TablePass = field(default_factory=TablePass)
    trim: TablePass = field(default_factory=TablePass)

    def ordered(self, steps: Iterable[Step]) -> list[Step]:
        """Return steps in their order, but unfinished ones first, those that waited longest at the beginning."""
        order = list(steps)
        return sorted(
            order,
            key=lambda step: (
                step.value not in self.unfinished,
                self.turns_ms.get(step.value, 0) if step.value in self.unfinished else 0,
                order.index(step),
            ),
        )

    def end_turns(self) -> None:
        """Let tables that are not finished wait for their turn in the next run."""
        self.compaction.end_turn()
        self.trim.end_turn()

    @classmethod
    def read(cls, storage: Storage) -> MaintenanceState:
        """Read the file, or return an empty state if there is none, or it is damaged."""
        try:
            data = storage.read(MAINTENANCE_STATE_PATH, limit_bytes=MAX_NOTE_BYTES)
            return cls.of(decode_sealed_json(data, MAINTENANCE_STATE_PATH))
        except FileMissingError:
            return cls()
        except StorageError as error:
            logger.warning("ignoring what maintenance remembers: %s", error)
            return cls()

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> MaintenanceState:
        """Read the content of a file, and ignore what is invalid."""
        steps = {step.value for step in Step}
        unfinished = content.get("unfinished")
        turns_ms = _times(content.get("turns_ms"))
        return cls(
            turns_ms={name: time_ms for name, time_ms in turns_ms.items() if name in steps},
            unfinished={name for name in unfinished if isinstance(name, str) and name in steps}
            if isinstance(unfinished, list)
            else set(),
            orphans_checked_ms=_number(content.get("orphans_checked_ms"), MAX_TIME_MS),
            tree_checked_version=_number(content.get("tree_checked_version"), MAX_VERSION),
            is_verify_unfinished=content.get("is_verify_unfinished") is True,
            compaction=TablePass.of(content.get("compaction")),
            trim=TablePass.of(content.get("trim")),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the content as JSON values."""
        return {
            "turns_ms": self.turns_ms,
            "unfinished": sorted(self.unfinished),
            "orphans_checked_ms": self.orphans_checked_ms,
            "tree_checked_version": self.tree_checked_version,
            "is_verify_unfinished": self.is_verify_unfinished,
            "compaction": self.compaction.to_json(),
            "trim": self.trim.to_json(),
        }

    def write(self, storage: Storage) -> None:
        """Write the file, best effort."""
        try:
            storage.write(MAINTENANCE_STATE_PATH, encode_sealed_json(self.to_json(), MAINTENANCE_STATE_PATH))
        except StorageError as error:
            logger.warning("could not write what maintenance remembers: %s", error)


def _size_bytes(name: str) -> int:
    """Return the size of a name in the file, where other characters than those of ASCII are escaped."""
    return len(json.dumps(name))


def _number(value: Any, maximum: int) -> int | None:
    return value if type(value) is int and 0 <= value <= maximum else None


def _times(content: Any) -> dict[str, int]:
    """Return the first valid entries of a mapping of names to times."""
    if not isinstance(content, dict):
        return {}
    valid = {
        name: time_ms
        for name, time_ms in content.items()
        if isinstance(name, str) and _size_bytes(name) <= _MAX_NAME_BYTES and _number(time_ms, MAX_TIME_MS) is not None
    }
    return dict(list(valid.items())[:MAX_TABLES])
