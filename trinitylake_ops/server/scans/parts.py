"""Parts of a scan, the cost of filters, and windows of manifest entries.

The text of a part is validated when a client sends it back, like any other request. It is not signed, because it grants
nothing: a principal who may plan one scan of a table may plan any scan of it, and the same rights are checked.

pyiceberg evaluates a filter for each file: for its partition, its metrics, and the residual. A weaker filter selects
the same files and possibly more, so a plan remains correct if the residual of its files is the whole filter.
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

#: The maximum size of a request for a scan that is planned in parts. The limit exists because each part repeats the
#: request.
MAX_REQUEST_BYTES = 32 << 10
_MAX_TASK_CHARS = 64 << 10
_MAX_BYTES = 128 << 10
_VERSION = 2
_MAX_MANIFESTS = 10_000_000
_MAX_FILES = 2**40


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a scan of a snapshot."""

    #: The table's UUID.
    table_uuid: str
    #: The snapshot that is scanned.
    snapshot_id: int
    #: The client's request for the whole scan.
    request: dict[str, Any]
    #: The index of its first manifest among the data manifests in the manifest list.
    first: int
    #: The index after its last manifest.
    last: int
    #: For a part of a single manifest, the number of entries that precede the part.
    after: int = 0

    def text(self) -> str:
        """Encode the part for the client. Raises RejectedError (400) if the request is too long to be repeated."""
        request = json.dumps(self.request, separators=(",", ":"))
        if len(request) > MAX_REQUEST_BYTES:
            raise bad_request(
                f"the scan has too many files for one response, and its filter has more than {MAX_REQUEST_BYTES}"
                " bytes; plan with a shorter filter"
            )
        content = [_VERSION, self.table_uuid, self.snapshot_id, request, self.first, self.last, self.after]
        packed = zlib.compress(json.dumps(content, separators=(",", ":")).encode(), level=6)
        return base64.urlsafe_b64encode(packed).decode().rstrip("=")


def part_of(text: str) -> Part:
    """Decode the text of a part. Raises RejectedError (404) if it is not valid."""
    if len(text) > _MAX_TASK_CHARS:
        raise no_such_task()
    try:
        packed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        decompressor = zlib.decompressobj()
        content = json.loads(decompressor.decompress(packed, _MAX_BYTES))
        if not decompressor.eof or not isinstance(content, list):
            raise no_such_task()
        version, table_uuid, snapshot_id, request, first, last, after = content
        document = json.loads(request)
    except (ValueError, TypeError, binascii.Error, zlib.error, RecursionError):
        raise no_such_task() from None
    numbers = (version, snapshot_id, first, last, after)
    if (
        not isinstance(table_uuid, str)
        or not isinstance(document, dict)
        or any(type(number) is not int for number in numbers)
    ):
        raise no_such_task()
    if version != _VERSION or not 0 <= first <= last <= _MAX_MANIFESTS or not 0 <= after <= _MAX_FILES:
        raise no_such_task()
    return Part(table_uuid, snapshot_id, document, first, last, after)


def no_such_task() -> RejectedError:
    """Return the error for a plan task that does not belong to this table."""
    return RejectedError(404, "NoSuchPlanTaskException", "Plan task does not exist; plan the scan again")


#: The maximum number of units in a filter: 50,000 values, or 5,000 predicates and operators.
MAX_UNITS = 50_000
_NODE_UNITS = 10
#: The maximum product of filter units and files that one plan evaluates.
MAX_STEPS = 2_000_000
#: A partition spec costs as much as this number of files, because the filter is projected to its partitions.
_FILES_PER_SPEC = 10
#: A weaker filter replaces sets with more values by ranges. pyiceberg does not compare such sets with a file's metrics.
_MAX_VALUES = 200


def units_of(content: Any) -> int:
    """Count the units of a JSON filter before it is parsed. Raises RejectedError (413) if there are too many."""
    units, pending = 0, [content]
    while pending:
        value = pending.pop()
        units += _NODE_UNITS if isinstance(value, dict) else 1
        if isinstance(value, dict):
            pending += [member for member in value.values() if isinstance(member, dict | list)]
        elif isinstance(value, list):
            pending += value
        if units + len(pending) > MAX_UNITS:
            raise RejectedError(
                413,
                "BadRequestException",
                f"the filter has more than {MAX_UNITS} values or {MAX_UNITS // _NODE_UNITS} predicates and operators;"
                " plan with a shorter filter, or read the manifests in the client",
            )
    return units


def is_too_much(units: int, n_files: int, n_specs: int) -> bool:
    """Return whether evaluating a filter for all files is too much work.

    Args:
        units: The number of units in the filter.
        n_files: The number of files.
        n_specs: The number of their partition specs.
    """
    return units * (n_files + n_specs * _FILES_PER_SPEC) > MAX_STEPS


def weaken(expression: BooleanExpression, schema: Schema, *, case_sensitive: bool) -> BooleanExpression:
    """Return a weaker filter, which selects all rows of the expression, with ranges instead of large sets of values.

    Args:
        expression: The filter, which must match the schema.
        schema: The schema of the table.
        case_sensitive: Whether column names are case-sensitive.
    """

    def weaker(part: BooleanExpression) -> BooleanExpression:
        if isinstance(part, And):
            return And(weaker(part.left), weaker(part.right))
        if isinstance(part, Or):
            return Or(weaker(part.left), weaker(part.right))
        if isinstance(part, NotIn) and len(part.literals) > _MAX_VALUES:
            return AlwaysTrue()
        if isinstance(part, In) and len(part.literals) > _MAX_VALUES:
            return _range(part, schema, case_sensitive=case_sensitive)
        return part

    return weaker(rewrite_not(expression))


def _range(part: In, schema: Schema, *, case_sensitive: bool) -> BooleanExpression:
    bound = part.bind(schema, case_sensitive)  # values are ordered by the column's type, not as in JSON
    if not isinstance(bound, BoundIn):
        return part
    literals = bound.literals
    if any(isinstance(literal, AboveMax | BelowMin) or literal.value != literal.value for literal in literals):  # NaN
        return AlwaysTrue()
    return And(
        GreaterThanOrEqual(term=part.term, value=min(literals)), LessThanOrEqual(term=part.term, value=max(literals))
    )


def n_units(expression: BooleanExpression) -> int:
    """Return the number of units in a filter without its large sets."""
    if isinstance(expression, And | Or):
        return _NODE_UNITS + n_units(expression.left) + n_units(expression.right)
    return _NODE_UNITS


class TooManyEntriesError(TrinityLakeError):
    """The manifests have more entries than one request may decode."""


class EntryBudget:
    """The number of manifest entries that a request may decode. It is shared by threads.

    Args:
        n_entries: The maximum number of entries.
    """

    def __init__(self, n_entries: int):
        self._most = n_entries
        self.n_taken = 0
        self._lock = threading.Lock()

    def take(self, n_entries: int) -> None:
        """Use up part of the budget. Raises TooManyEntriesError if it is exceeded."""
        with self._lock:
            self.n_taken += n_entries
            if self.n_taken > self._most:
                raise TooManyEntriesError("manifests: too many entries for one request; plan in parts")


class WindowedManifest(ManifestFile):
    """A manifest of which only the entries in ``window`` are visible to pyiceberg. It is read from the storage once.

    Entries are numbered as in the file, including those of deleted files. ``n_entries`` is their total number, or
    None before the first read, because pyiceberg skips manifests whose summary excludes the filter.
    """

    window: range
    budget: EntryBudget
    n_entries: int | None
    #: The locations of the files that the entries in the window add.
    added: set[str]
    _stored: bytes | None
    _decoded: tuple[range, list[ManifestEntry]] | None

    @classmethod
    def of(cls, manifest: ManifestFile, window: range, budget: EntryBudget) -> WindowedManifest:
        """Return a manifest with a window.

        Args:
            manifest: The manifest's entry in the manifest list.
            window: The indexes of the entries to decode.
            budget: The budget that is charged for decoded entries.
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
            discard_deleted: Whether to leave out entries of deleted files.

        Raises:
            TooManyEntriesError: If the entries exceed the budget.
            CorruptFileError: If the manifest is not valid Avro, or declares more content than it has.
        """
        assert isinstance(io, StorageFileIO)
        if self._decoded is None or self._decoded[0] != self.window:
            if self._stored is None:
                self._stored = io.new_input(self.manifest_path).read_whole()
            entries, self.n_entries = entries_within(
                ManifestFile(*self._data), self._stored, self.window, self.budget.take
            )
            self._decoded = (self.window, entries)
            self.added = {entry.data_file.file_path for entry in entries if entry.status == ManifestEntryStatus.ADDED}
        entries = self._decoded[1]
        return [entry for entry in entries if not discard_deleted or entry.status != ManifestEntryStatus.DELETED]
