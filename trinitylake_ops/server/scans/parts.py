"""Parts of a scan, the cost of their filters, and windows of files.

The text is checked when it comes back, like any request. It is not signed, since it allows nothing. Who may plan a scan
of a table may plan any of its scans, and asks with the same rights.

pyiceberg evaluates a filter for each file: for its partition, its metrics, and what is left of it. A weaker filter
selects more files and no fewer, so a plan stays correct if its files name the whole filter as what is left to evaluate.
"""

from __future__ import annotations

import base64
import binascii
import json
import threading
import zlib
from dataclasses import dataclass
from typing import Any

from pyiceberg.expressions import (
    AlwaysTrue,
    And,
    BooleanExpression,
    BoundIn,
    GreaterThanOrEqual,
    In,
    LessThanOrEqual,
    NotIn,
    Or,
)
from pyiceberg.expressions.literals import AboveMax, BelowMin
from pyiceberg.expressions.visitors import rewrite_not
from pyiceberg.io import FileIO
from pyiceberg.manifest import ManifestEntry, ManifestEntryStatus, ManifestFile
from pyiceberg.schema import Schema

from trinitylake_ops.errors import TrinityLakeError
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.reach import entries_within
from trinitylake_ops.server.responses import RejectedError, bad_request

#: The longest request for a scan that is planned in parts, as each part repeats it.
LONGEST_REQUEST_BYTES = 32 << 10
_LONGEST_TASK_CHARS = 64 << 10
_MOST_BYTES = 128 << 10
_VERSION = 2
_MOST_MANIFESTS = 10_000_000
_MOST_FILES = 2**40


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a scan of a snapshot.

    ``first`` and ``last`` bound its manifests of data files, counted in the manifest list. For a part of a single
    manifest, ``after`` is how many entries of it come before the part. ``request`` is what the client asked for.
    """

    table_uuid: str
    snapshot_id: int
    request: dict[str, Any]
    first: int
    last: int
    after: int = 0

    def text(self) -> str:
        """Return the part as a client gets it. Raises RejectedError, 400, where the request is too long to repeat."""
        request = json.dumps(self.request, separators=(",", ":"))
        if len(request) > LONGEST_REQUEST_BYTES:
            raise bad_request(
                f"the scan has too many files for one answer, and a filter of more than {LONGEST_REQUEST_BYTES} bytes;"
                " plan with a shorter one"
            )
        content = [_VERSION, self.table_uuid, self.snapshot_id, request, self.first, self.last, self.after]
        packed = zlib.compress(json.dumps(content, separators=(",", ":")).encode(), level=6)
        return base64.urlsafe_b64encode(packed).decode().rstrip("=")


def part_of(text: str) -> Part:
    """Return the part that a text is. Raises RejectedError, 404, for any other text."""
    if len(text) > _LONGEST_TASK_CHARS:
        raise no_such_task()
    try:
        packed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        inflating = zlib.decompressobj()
        content = json.loads(inflating.decompress(packed, _MOST_BYTES))
        if not inflating.eof or not isinstance(content, list):
            raise no_such_task()
        version, table_uuid, snapshot_id, request, first, last, after = content
        asked = json.loads(request)
    except (ValueError, TypeError, binascii.Error, zlib.error, RecursionError):
        raise no_such_task() from None
    numbers = (version, snapshot_id, first, last, after)
    if not isinstance(table_uuid, str) or not isinstance(asked, dict) or any(type(one) is not int for one in numbers):
        raise no_such_task()
    if version != _VERSION or not 0 <= first <= last <= _MOST_MANIFESTS or not 0 <= after <= _MOST_FILES:
        raise no_such_task()
    return Part(table_uuid, snapshot_id, asked, first, last, after)


def no_such_task() -> RejectedError:
    """Return the error for a task that no plan of this table has."""
    return RejectedError(404, "NoSuchPlanTaskException", "Plan task does not exist; plan the scan again")


#: The units of the largest filter: 50,000 values, or 5,000 predicates and operators.
MOST_UNITS = 50_000
_NODE_UNITS = 10
#: The units that are evaluated for all files of a plan together.
MOST_STEPS = 2_000_000
#: A partition spec costs as much as so many files, as the filter is projected to its partitions.
_FILES_PER_SPEC = 10
#: Sets of more values are ranges in a weaker filter. pyiceberg compares no larger ones with the metrics of a file.
_MOST_VALUES = 200


def units_of(content: Any) -> int:
    """Return the units of a filter in JSON, before anything is parsed of it. Raise RejectedError, 413, if too many."""
    units, rest = 0, [content]
    while rest:
        value = rest.pop()
        units += _NODE_UNITS if isinstance(value, dict) else 1
        if isinstance(value, dict):
            rest += [member for member in value.values() if isinstance(member, dict | list)]
        elif isinstance(value, list):
            rest += value
        if units + len(rest) > MOST_UNITS:
            raise RejectedError(
                413,
                "BadRequestException",
                f"the filter has more than {MOST_UNITS} values or {MOST_UNITS // _NODE_UNITS} predicates and operators;"
                " plan with a shorter filter, or from the manifests",
            )
    return units


def is_too_much(units: int, n_files: int, n_specs: int) -> bool:
    """Return whether to evaluate a filter for so many files is too much work.

    Args:
        units: The units of the filter.
        n_files: The number of files.
        n_specs: The number of their partition specs.
    """
    return units * (n_files + n_specs * _FILES_PER_SPEC) > MOST_STEPS


def weakened(expression: BooleanExpression, schema: Schema, *, case_sensitive: bool) -> BooleanExpression:
    """Return a filter that every row of the expression satisfies, with ranges instead of large sets of values.

    Args:
        expression: The filter, which fits the schema.
        schema: The schema of the table.
        case_sensitive: Whether the names of its columns are.
    """

    def weaker(part: BooleanExpression) -> BooleanExpression:
        if isinstance(part, And):
            return And(weaker(part.left), weaker(part.right))
        if isinstance(part, Or):
            return Or(weaker(part.left), weaker(part.right))
        if isinstance(part, NotIn) and len(part.literals) > _MOST_VALUES:
            return AlwaysTrue()
        if isinstance(part, In) and len(part.literals) > _MOST_VALUES:
            return _range(part, schema, case_sensitive=case_sensitive)
        return part

    return weaker(rewrite_not(expression))


def _range(part: In, schema: Schema, *, case_sensitive: bool) -> BooleanExpression:
    bound = part.bind(schema, case_sensitive)  # values are in the order of the column's type, not of JSON
    if not isinstance(bound, BoundIn):
        return part
    literals = bound.literals
    if any(isinstance(one, AboveMax | BelowMin) or one.value != one.value for one in literals):  # or no number at all
        return AlwaysTrue()
    return And(
        GreaterThanOrEqual(term=part.term, value=min(literals)), LessThanOrEqual(term=part.term, value=max(literals))
    )


def n_units(expression: BooleanExpression) -> int:
    """Return the units of a filter that has only small sets."""
    if isinstance(expression, And | Or):
        return _NODE_UNITS + n_units(expression.left) + n_units(expression.right)
    return _NODE_UNITS


class TooManyEntriesError(TrinityLakeError):
    """Manifests have more entries than one request decodes."""


class EntryBudget:
    """How many entries a request may decode. Threads share it.

    Args:
        n_entries: The number of entries.
    """

    def __init__(self, n_entries: int):
        self._most = n_entries
        self.n_taken = 0
        self._lock = threading.Lock()

    def take(self, n_entries: int) -> None:
        """Use some of the budget. Raises TooManyEntriesError."""
        with self._lock:
            self.n_taken += n_entries
            if self.n_taken > self._most:
                raise TooManyEntriesError("the manifests have too many entries for one request; plan in parts")


class WindowedManifest(ManifestFile):
    """A manifest of which pyiceberg sees the entries in ``window``. It is read from the storage once.

    Entries count by their numbers in the file, with those of deleted files. ``n_entries`` is the number of all of them,
    None before the first read: pyiceberg reads no manifest whose summary excludes the filter.
    """

    window: range
    budget: EntryBudget
    n_entries: int | None
    #: The locations of files that the entries of the window add.
    added: set[str]
    _stored: bytes | None
    _decoded: tuple[range, list[ManifestEntry]] | None

    @classmethod
    def of(cls, manifest: ManifestFile, window: range, budget: EntryBudget) -> WindowedManifest:
        """Return a manifest with a window.

        Args:
            manifest: The entry of the manifest list.
            window: The numbers of the entries to decode.
            budget: What the entries count for.
        """
        windowed = cls(*manifest._data)
        windowed.window, windowed.budget = window, budget
        windowed.n_entries = windowed._stored = windowed._decoded = None
        windowed.added = set()
        return windowed

    def fetch_manifest_entry(self, io: FileIO, discard_deleted: bool = True) -> list[ManifestEntry]:
        """Return the entries in the window.

        Args:
            io: Reads the manifest.
            discard_deleted: Whether entries of deleted files are left out.

        Raises:
            TooManyEntriesError: The entries exceed the budget.
            CorruptFileError: The manifest is not Avro, or claims more than it has.
        """
        assert isinstance(io, StorageFileIO)
        if self._decoded is None or self._decoded[0] != self.window:
            if self._stored is None:
                self._stored = io.new_input(self.manifest_path).read_whole()
            entries, self.n_entries = entries_within(
                ManifestFile(*self._data), self._stored, self.window, self.budget.take
            )
            self._decoded = (self.window, entries)
            self.added = {one.data_file.file_path for one in entries if one.status == ManifestEntryStatus.ADDED}
        entries = self._decoded[1]
        return [one for one in entries if not discard_deleted or one.status != ManifestEntryStatus.DELETED]
