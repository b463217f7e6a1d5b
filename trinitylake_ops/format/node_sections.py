"""Read and check the sections of a node file (FORMAT.md, "Node files")."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pyarrow as pa
import pyarrow.compute as pc

from trinitylake_ops.errors import CorruptFileError
from trinitylake_ops.format.arrow_ipc import (
    SCHEMA,
    Present,
    check_body,
    check_file_seals,
    check_not_copied,
    read_own_batch,
)
from trinitylake_ops.format.keys import (
    CREATED_AT_MILLIS,
    LAKEHOUSE_DEF,
    MAX_TIME_MS,
    N_KEYS,
    NAMESPACE_KEY_PREFIX,
    OLD_LAKEHOUSE_DEF,
    SEALED_AT_MILLIS,
    SYSTEM_KEYS,
    TABLE_KEY_PREFIX,
    TextColumn,
    has_schema_id,
)

_READ_OPTIONS = pa.ipc.IpcReadOptions(use_threads=False)  # threads would be slower for nine small buffers
_MAX_ROWS = 2**31 - 1
_MAX_DIGITS = 20
_KEY, _PVALUE, _PNODE = range(len(SCHEMA))
_VALUE_COLUMNS = ("pvalue", "value")  # the second name is used in the older layout
_TRANSACTION_COLUMN = "txn"  # a column of the older layout, which is ignored
_OBJECT_KEY_PREFIXES = (NAMESPACE_KEY_PREFIX, TABLE_KEY_PREFIX)


class MalformedError(Exception):
    """The rows of a file violate a rule of the format, which the message describes."""

    def of(self, path: str) -> CorruptFileError:
        """Return the error for the file that violates the rule."""
        return CorruptFileError(f"node file {path!r} is malformed: {self}", path=path)


def _read(data: bytes, path: str) -> tuple[pa.RecordBatch, Present]:
    """Return a file's validated rows and bit masks of non-null rows. Raise CorruptFileError for a damaged file."""
    try:
        return read_own_batch(data, path) or _read_other_batch(data, path)
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CorruptFileError(f"{path!r} is not a readable Arrow IPC file: {reason}", path=path) from error


def _read_other_batch(data: bytes, path: str) -> tuple[pa.RecordBatch, Present]:
    """Return the rows of a file that does not have our exact form: compressed, several batches, or the older layout.

    If the file has no column ``pnode``, all pnodes are null.
    """
    schema = pa.ipc.open_file(data, options=_READ_OPTIONS).schema
    check_file_seals(data, schema, path)
    check_body(data)
    indices = [index for index, name in enumerate(schema.names) if name != _TRANSACTION_COLUMN]
    names = [schema.names[index] for index in indices]
    if (
        names[:1] != ["key"]
        or names[1:2] not in ([name] for name in _VALUE_COLUMNS)
        or names[2:] not in ([], ["pnode"])
        or any(schema.field(index).type not in (pa.utf8(), pa.large_utf8()) for index in indices)
    ):
        raise CorruptFileError(
            f"{path!r} is not a node file: it has the columns {schema.names}, instead of {SCHEMA.names} as strings",
            path=path,
        )
    options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=indices)
    table = pa.ipc.open_file(data, options=options).read_all()
    table.validate(full=True)
    columns = [column.cast(pa.utf8()).combine_chunks() for column in table.columns]
    columns += [pa.nulls(len(table), pa.utf8())] * (len(SCHEMA) - len(columns))
    key, pvalue, pnode = (_bits(column.is_valid()) for column in columns)
    return pa.record_batch(columns, schema=SCHEMA), (key, pvalue, pnode)


@dataclass(slots=True)
class Rows:
    """The rows of a file and the positions of its sections."""

    #: All rows of the file.
    batch: pa.RecordBatch
    #: The bit masks of non-null rows.
    present: Present
    #: The system rows.
    system: dict[str, str] = field(default_factory=dict)
    #: The row without a key with which section 2 begins; None in a sealed root or a leaf of the older layout.
    pointers: int | None = None
    #: The first row with a key.
    first: int = 0
    #: The row after the last row with a key.
    end: int = 0

    @classmethod
    def read(cls, data: bytes, path: str) -> Rows:
        """Read the rows of a file and check its system rows.

        Args:
            data: The content of the file.
            path: The path of the file.

        Raises:
            CorruptFileError: The file is damaged.
        """
        batch, present = _read(data, path)
        try:
            rows = cls(batch, present)
        except MalformedError as error:
            raise error.of(path) from error
        # Rollbacks never copy the root of a purged version, because such a copy would hide a live version.
        if SEALED_AT_MILLIS in rows.system:
            check_not_copied(data, path)
        return rows

    @property
    def is_flat(self) -> bool:
        """Whether the file is a leaf of the older layout, where each row has a key."""
        return self.pointers is None and SEALED_AT_MILLIS not in self.system

    def __post_init__(self) -> None:
        n_rows = self.batch.num_rows
        n_system = self._n_system_rows(n_rows)
        self._add_system_rows(n_system)
        _check_number(self.system, CREATED_AT_MILLIS, MAX_TIME_MS)
        _check_number(self.system, N_KEYS, _MAX_ROWS)
        n_keys = int(self.system[N_KEYS])
        if SEALED_AT_MILLIS in self.system and (n_keys or n_system != n_rows):
            raise MalformedError("a sealed root has keys or pointer rows")
        self.first = n_system if self.pointers is None else n_system + 1
        self.end = self.first + n_keys
        if self.end > n_rows:
            raise MalformedError(f"n_keys is {n_keys}, but only {n_rows - self.first} rows follow")
        if self.pointers is None:
            self._check_flat()

    def _n_system_rows(self, n_rows: int) -> int:
        """Return the number of system rows.

        The system rows end at the row without a key or, in a file without such a row, after the last known system row.
        """
        absent = ~self.present[_KEY] & _rows(0, n_rows)
        if absent:
            self.pointers = _lowest(absent)
            return self.pointers
        names = self._column(_KEY).to_pylist()
        if SEALED_AT_MILLIS in names:
            return len(names)
        return next((row for row, name in enumerate(names) if name not in SYSTEM_KEYS), len(names))

    def _add_system_rows(self, n_rows: int) -> None:
        names, values = (self._column(column, 0, n_rows).to_pylist() for column in (_KEY, _PVALUE))
        invalid = _rows(0, n_rows) & (~self.present[_PVALUE] | self.present[_PNODE])
        if invalid:
            raise MalformedError(f"system row {names[_lowest(invalid)]!r} lacks its value or has a child")
        for name, value in zip(names, values, strict=True):
            if name.startswith(_OBJECT_KEY_PREFIXES):
                raise MalformedError(f"object key {name!r} is among the system rows")
            self.system[LAKEHOUSE_DEF if name == OLD_LAKEHOUSE_DEF else name] = value

    def _column(self, column: int, first: int = 0, end: int = _MAX_ROWS) -> pa.StringArray:
        return self.batch.column(column).slice(first, end - first)

    def _check_flat(self) -> None:
        """Check a leaf of the older layout, where only the form of a key distinguishes objects from system rows."""
        for row, key in enumerate(self._column(_KEY, self.first).to_pylist(), self.first):
            if not has_schema_id(key):
                raise MalformedError(
                    f"row {row} has the key {key!r}, which is neither that of an object nor that of a known system row;"
                    " a file in which every row has a key cannot contain other keys"
                )
        if self.present[_PNODE]:
            raise MalformedError("there are child pointers, but no row without a key for the first of them")

    def keys(self) -> TextColumn:
        """Return the keys. :func:`ascend` checks their order. Raise MalformedError if a row is invalid."""
        if self.pointers is not None and self.present[_PVALUE] >> self.pointers & 1:
            raise MalformedError("the first pointer row has a value")
        of_keys = _rows(self.first, self.end)
        if of_keys & ~(self.present[_KEY] & self.present[_PVALUE]):
            raise MalformedError("a row of the pointers lacks its key or value; n_keys is wrong")
        keys = TextColumn(self._column(_KEY, self.first, self.end))
        # Keys ascend: if the first key is greater than all keys that start with a space, so are the others.
        if of_keys and keys[0] < "!" and any(key.startswith(" ") for key in keys):
            raise MalformedError("a row of the pointers has a key that starts with a space")
        return keys

    def values(self) -> TextColumn:
        """Return the values of the keys."""
        return TextColumn(self._column(_PVALUE, self.first, self.end))

    def children(self) -> TextColumn:
        """Return the pointers to children, none for a leaf. Raise MalformedError if some are missing."""
        first = self.first if self.pointers is None else self.pointers
        of_pointers = _rows(first, self.end)
        children = self.present[_PNODE] & of_pointers
        if children and children != of_pointers:
            raise MalformedError("some of the child pointers are missing")
        return TextColumn(self._column(_PNODE, first, self.end if children else first))

    def buffer(self) -> dict[str, str | None]:
        """Return the newest message for each key, in order of arrival. Raise MalformedError if a row is invalid."""
        keys, values, children = (present >> self.end for present in self.present)
        if not keys | values | children:
            return {}  # only blank pointer rows follow, as in nearly every leaf
        n_blank = _lowest(keys) if keys else 0
        n_rows = self.batch.num_rows - self.end
        if keys == _rows(n_blank, n_rows) and not values & _rows(0, n_blank) and not children:
            names, texts = (self._column(column, self.end + n_blank).to_pylist() for column in (_KEY, _PVALUE))
            buffer = dict(zip(names, texts, strict=True))
            if len(buffer) == len(names) and SYSTEM_KEYS.isdisjoint(buffer) and min(buffer) >= "!":
                return buffer  # all rows have the form that we write
        return self._any_buffer([self._column(column, self.end) for column in range(len(SCHEMA))])

    def _any_buffer(self, tails: Sequence[pa.StringArray]) -> dict[str, str | None]:
        buffer: dict[str, str | None] = {}
        for row, (key, value, child) in enumerate(zip(*(tail.to_pylist() for tail in tails), strict=True), self.end):
            if child is not None:
                raise MalformedError(f"row {row} after the pointers has a child; n_keys is wrong")
            if key is None:
                if value is not None or buffer:
                    raise MalformedError(f"row {row} after the pointers has no key")
                continue
            if key in SYSTEM_KEYS or key.startswith(" "):
                raise MalformedError(f"buffer row {row} has the key {key!r}, which no object can have")
            # Re-inserting keeps the order of arrival of the newest message.
            buffer.pop(key, None)
            buffer[key] = value
        return buffer


def ascend(columns: Iterable[TextColumn]) -> bool:
    """Whether the keys of each node ascend. The keys of all nodes are compared in one pass."""
    arrays = [keys.array for keys in columns if len(keys) > 1]
    lower, upper = [keys.slice(0, len(keys) - 1) for keys in arrays], [keys.slice(1) for keys in arrays]
    if len(arrays) == 1:  # faster than chunked arrays
        return not pc.greater_equal(lower[0], upper[0]).true_count
    is_descending = pc.greater_equal(pa.chunked_array(lower, pa.utf8()), pa.chunked_array(upper, pa.utf8()))
    return not pc.any(is_descending, min_count=0).as_py()


def not_ascending_error(keys: Iterable[str]) -> MalformedError:
    """Return the error for keys that do not ascend."""
    lower, upper = next(pair for pair in pairwise(keys) if pair[0] >= pair[1])
    return MalformedError(f"key {upper!r} does not ascend after {lower!r}")


def _bits(mask: pa.BooleanArray) -> int:
    """Return the values of an array without nulls as the bits of an integer, the first value in the lowest bit."""
    values: int = int.from_bytes(mask.buffers()[1] or b"", "little") >> mask.offset
    return values & _rows(0, len(mask))


def _lowest(rows: int) -> int:
    """Return the lowest set bit. At least one bit must be set."""
    return (rows & -rows).bit_length() - 1


def _rows(first: int, end: int) -> int:
    """Return an integer in which the bits from ``first`` (inclusive) to ``end`` (exclusive) are set."""
    return (1 << end) - (1 << first)


def _check_number(system: dict[str, str], name: str, maximum: int) -> None:
    value = system.get(name, "")
    if not (value.isascii() and value.isdecimal() and len(value) <= _MAX_DIGITS and int(value) <= maximum):
        raise MalformedError(f"system row {name} is {value[:_MAX_DIGITS]!r}, not a number from 0 to {maximum}")
