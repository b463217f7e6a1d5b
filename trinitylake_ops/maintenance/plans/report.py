"""What plans and reports have in common: figures, JSON, tables, digests.

A plan is read-only until it is executed. Its digest is ``<base version>-<sha256>`` over the base
version and all that the plan would do, so that what was approved is what happens.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import time
import unicodedata
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime
from enum import Enum, IntEnum
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trinitylake_ops.errors import PlanChangedError
from trinitylake_ops.format.nodes.node_file import MAX_TIME_MS
from trinitylake_ops.maintenance.plans.budget import Spending, counting
from trinitylake_ops.storage import MeteredStorage, Storage
from trinitylake_ops.transaction.lakehouse import Change, Lakehouse
from trinitylake_ops.versions.snapshot import utc_datetime

_WIDEST_TABLE_CHARS = 100_000  # text that is no terminal's is never cut or folded


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What an operation asked of its storage: requests by kind, sequential rounds, bytes, and how long it took."""

    requests: Mapping[str, int]
    rounds: int
    bytes_read: int
    bytes_written: int
    duration_ms: int

    @property
    def total_requests(self) -> int:
        """Requests of all kinds."""
        return sum(self.requests.values())


class MeteredLakehouse:
    """A lakehouse whose requests are counted, past all caches, and the time since it was opened."""

    def __init__(self, lake: Lakehouse, spending: Spending | None = None):
        self._storage = MeteredStorage(lake.storage) if spending is None else counting(lake.storage, spending)
        self._others: list[MeteredStorage] = []
        self._begun_s = time.monotonic()
        self.lake = Lakehouse(self._storage, lake.storage_options, cache="off")

    def also(self, storage: Storage) -> Storage:
        """Return another storage whose requests are counted, too."""
        self._others.append(MeteredStorage(storage))
        return self._others[-1]

    def cost(self) -> Cost:
        """Return what was asked of the storage so far."""
        counted = [storage.snapshot() for storage in (self._storage, *self._others)]
        requests: Counter[str] = Counter()
        for counts in counted:
            requests.update(counts.requests)
        return Cost(
            requests=dict(sorted(requests.items())),
            rounds=sum(counts.rounds for counts in counted),
            bytes_read=sum(counts.bytes_read for counts in counted),
            bytes_written=sum(counts.bytes_written for counts in counted),
            duration_ms=round((time.monotonic() - self._begun_s) * 1000),
        )


class Document(ABC):
    """Base of plans and reports, which are frozen dataclasses.

    Fields declared with ``repr=False`` are not part of what is shown.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return the content as values of JSON."""
        return _shown_fields(self)

    def to_json(self) -> str:
        """Return the content as one JSON object."""
        return json.dumps(self.to_dict(), ensure_ascii=False)

    @abstractmethod
    def table(self) -> Table:
        """Return the content as a table for people."""

    def __rich__(self) -> Table:
        return self.table()

    def __str__(self) -> str:
        return table_text(self.table(), _WIDEST_TABLE_CHARS)


class Plan(Document):
    """Base of plans."""

    base_version: int

    @property
    @abstractmethod
    def digest(self) -> str:
        """Return ``<base version>-<sha256>`` of what the plan would do."""

    def to_dict(self) -> dict[str, Any]:
        """Return the content as values of JSON, the digest included."""
        return {**super().to_dict(), "digest": self.digest}

    def check_approved(self, approved_digest: str) -> None:
        """Raise PlanChangedError when this is not the plan that was approved."""
        if approved_digest != self.digest:
            raise PlanChangedError(
                f"the approved plan {approved_digest!r} is not what would happen now; its digest is {self.digest}:"
                " look at the plan again"
            )


def digest_of(base_version: int, *content: object) -> str:
    """Return the digest of a plan with this content, which is made of values of JSON."""
    text = json.dumps([base_version, *content], sort_keys=True, separators=(",", ":"))
    return f"{base_version}-{hashlib.sha256(text.encode('ascii')).hexdigest()}"


def jsonable(value: Any) -> Any:
    """Return a value as JSON holds it: dataclasses as objects, times as ISO 8601, enums by their lower-case names.

    Unknown fields of definitions are bytes: base64, and left out where there are none.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return _shown_fields(value)
    if isinstance(value, Enum):
        return value.name.lower() if isinstance(value, IntEnum) else value.value
    if isinstance(value, datetime):
        return value.isoformat(timespec="milliseconds")
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return value


def _shown_fields(value: Any) -> dict[str, Any]:
    shown = ((spec.name, getattr(value, spec.name)) for spec in fields(value) if spec.repr)
    return {name: jsonable(content) for name, content in shown if not (name == "unknown_fields" and not content)}


# Tables for people


def table_text(table: Table, width_chars: int) -> str:
    """Return a table as text of that width, its title as a line of its own, without trailing spaces."""
    title, table.title = table.title, None
    if title and not table.row_count:
        return str(title)
    text = io.StringIO()
    console = Console(file=text, width=width_chars, color_system=None)
    console.print(table)
    lines = [str(title)] if title else []
    return "\n".join([*lines, *(line.rstrip() for line in text.getvalue().splitlines())])


def new_table(title: str, *columns: str, rows: Iterable[Sequence[object]] = ()) -> Table:
    """Return a table whose cells show their text as it is, nothing cut."""
    made = Table(title=Text(visible(title)), title_justify="left", box=None, pad_edge=False)
    for column in columns:
        made.add_column(Text(column), overflow="fold")
    for row in rows:
        made.add_row(*map(cell, row))
    return made


def cell(value: object) -> Text:
    """Return a value as one line of literal text: no markup, control characters as escapes."""
    if value is None:
        return Text("")
    if isinstance(value, datetime):
        return Text(value.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z")
    return Text(visible(str(value)))


def visible(text: str) -> str:
    """Return text with control and other invisible characters as escapes, so that no terminal obeys them."""
    return "".join(
        char.encode("unicode_escape").decode("ascii") if unicodedata.category(char) in _INVISIBLE else char
        for char in text
    )


_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def change_rows(changes: Iterable[Change]) -> list[tuple[str, str]]:
    """Return changes as rows: what happened, and to which namespace or table."""
    return [
        (change.kind, f"namespace {change.namespace}" if change.table is None else f"{change.namespace}.{change.table}")
        for change in changes
    ]


def utc_of(time_ms: int) -> datetime:
    """Return milliseconds since the epoch as a time in UTC; one that no calendar holds as the nearest that one does."""
    return utc_datetime(min(max(time_ms, 0), MAX_TIME_MS))
