"""The rows of a node file in their sections, read and checked (FORMAT.md, "Node files")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pyarrow as pa
import pyarrow.compute as pc

from trinitylake_ops.errors import CorruptFileError
from trinitylake_ops.format.nodes.ipc_body import check_body
from trinitylake_ops.format.nodes.ipc_file import SCHEMA, check_file_seals, check_is_no_copy, read_own_batch
from trinitylake_ops.format.nodes.keys import NAMESPACE_KEY_PREFIX, TABLE_KEY_PREFIX, has_schema_id
from trinitylake_ops.format.nodes.system_rows import (
    CREATED_AT_MILLIS,
    LAKEHOUSE_DEF,
    MAX_TIME_MS,
    N_KEYS,
    OLD_LAKEHOUSE_DEF,
    SEALED_AT_MILLIS,
    SYSTEM_KEYS,
)
from trinitylake_ops.format.nodes.text_column import TextColumn

_READ_OPTIONS = pa.ipc.IpcReadOptions(use_threads=False)  # threads for nine small buffers take longer
_MAX_ROWS = 2**31 - 1
_MAX_DIGITS = 20
_FEW_ROWS = 16  # more rows than our system rows
_VALUE_COLUMNS = ("pvalue", "value")  # the second name is that of the older layout
_TRANSACTION_COLUMN = "txn"  # a column of the older layout; nothing in it is needed
_OBJECT_KEY_PREFIXES = (NAMESPACE_KEY_PREFIX, TABLE_KEY_PREFIX)


class MalformedError(Exception):
    """A rule of the sections does not hold; the message says which."""

    def of(self, path: str) -> CorruptFileError:
        """Return the error of a file that breaks the rule."""
        return CorruptFileError(f"node file {path!r} is malformed: {self}", path=path)


def _columns(data: bytes, path: str) -> tuple[pa.StringArray, pa.StringArray, pa.StringArray]:
    """Return key, pvalue and pnode. In a file without pnode all of these are null."""
    try:
        batch = read_own_batch(data, path)
        if batch is not None:
            batch.validate(full=True)
            key, pvalue, pnode = batch.columns
            return key, pvalue, pnode
        return _columns_of_other_form(data, path)
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CorruptFileError(f"{path!r} is no readable Arrow IPC file: {reason}", path=path) from error


def _columns_of_other_form(data: bytes, path: str) -> tuple[pa.StringArray, pa.StringArray, pa.StringArray]:
    """Return the columns of a file not of our exact form: compressed, several batches, or the older layout."""
    schema = pa.ipc.open_file(data, options=_READ_OPTIONS).schema
    check_file_seals(data, schema, path)
    check_body(data)
    places = [place for place, name in enumerate(schema.names) if name != _TRANSACTION_COLUMN]
    names = [schema.names[place] for place in places]
    if (
        names[:1] != ["key"]
        or names[1:2] not in ([name] for name in _VALUE_COLUMNS)
        or names[2:] not in ([], ["pnode"])
        or any(schema.field(place).type not in (pa.utf8(), pa.large_utf8()) for place in places)
    ):
        raise CorruptFileError(
            f"{path!r} has columns {schema.names}, a node file has {SCHEMA.names} as strings", path=path
        )
    options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=places)
    table = pa.ipc.open_file(data, options=options).read_all()
    table.validate(full=True)
    key, pvalue, *rest = (column.cast(pa.utf8()).combine_chunks() for column in table.columns)
    return key, pvalue, rest[0] if rest else pa.nulls(len(table), pa.utf8())


@dataclass(slots=True)
class Rows:
    """The rows of a file, with the begin and end of the sections after the system rows.

    ``pointers`` is the row without a key that begins section 2. It is None in a file without such a row: a sealed root,
    or a leaf of the older layout. ``first`` and ``end`` enclose the rows of keys.
    """

    key: pa.StringArray
    pvalue: pa.StringArray
    pnode: pa.StringArray
    system: dict[str, str] = field(default_factory=dict)
    pointers: int | None = None
    first: int = 0
    end: int = 0

    @classmethod
    def read(cls, data: bytes, path: str) -> Rows:
        """Return the rows of a file whose system rows were checked. Raises CorruptFileError, naming ``path``."""
        key, pvalue, pnode = _columns(data, path)
        try:
            rows = cls(key, pvalue, pnode)
        except MalformedError as error:
            raise error.of(path) from error
        # a rollback never leads to a purged version, and a copied one would hide a live version
        if SEALED_AT_MILLIS in rows.system:
            check_is_no_copy(data, path)
        return rows

    @property
    def is_flat(self) -> bool:
        """Whether the file is a leaf of the older layout, where each row has a key."""
        return self.pointers is None and SEALED_AT_MILLIS not in self.system

    def __post_init__(self) -> None:
        n_system = self._n_system_rows()
        self._add_system_rows(n_system)
        _check_number(self.system, CREATED_AT_MILLIS, MAX_TIME_MS)
        _check_number(self.system, N_KEYS, _MAX_ROWS)
        n_keys = int(self.system[N_KEYS])
        if SEALED_AT_MILLIS in self.system and (n_keys or n_system != len(self.key)):
            raise MalformedError("a sealed root has keys or pointer rows")
        self.first = n_system if self.pointers is None else n_system + 1
        self.end = self.first + n_keys
        if self.end > len(self.key):
            raise MalformedError(f"n_keys is {n_keys}, but only {len(self.key) - self.first} rows follow")
        if self.pointers is None:
            self._check_flat()

    def _n_system_rows(self) -> int:
        """Return the number of system rows.

        They end at the row without a key, otherwise after the rows that we know.
        """
        if self.key.null_count:
            head = self.key.slice(0, _FEW_ROWS).to_pylist()
            self.pointers = (head if None in head else self.key.to_pylist()).index(None)
            return self.pointers
        names = self.key.to_pylist()
        if SEALED_AT_MILLIS in names:
            return len(names)
        return next((row for row, name in enumerate(names) if name not in SYSTEM_KEYS), len(names))

    def _add_system_rows(self, n_rows: int) -> None:
        names, values = self.key.slice(0, n_rows).to_pylist(), self.pvalue.slice(0, n_rows).to_pylist()
        has_children = self.pnode.slice(0, n_rows).null_count < n_rows
        for name, value in zip(names, values, strict=True):
            if value is None or has_children:
                raise MalformedError(f"system row {name!r} lacks its value or has a child")
            if name.startswith(_OBJECT_KEY_PREFIXES):
                raise MalformedError(f"object key {name!r} stands among the system rows")
            self.system[LAKEHOUSE_DEF if name == OLD_LAKEHOUSE_DEF else name] = value

    def _check_flat(self) -> None:
        """In such a file only the form of keys tells objects from unknown system rows."""
        for row, key in enumerate(self.key.slice(self.first).to_pylist(), self.first):
            if not has_schema_id(key):
                raise MalformedError(
                    f"row {row} has the key {key!r}, which is neither an object's nor a known system row's;"
                    " a file without a row without a key can hold no other"
                )
        if self.pnode.null_count != len(self.pnode):
            raise MalformedError("there are child pointers, but no row without a key for the first of them")

    def keys(self) -> tuple[TextColumn, TextColumn]:
        """Return the keys and their values. Raises MalformedError."""
        if self.pointers is not None and self.pvalue[self.pointers].is_valid:
            raise MalformedError("the first pointer row has a value")
        n_keys = self.end - self.first
        keys, values = self.key.slice(self.first, n_keys), self.pvalue.slice(self.first, n_keys)
        if keys.null_count or values.null_count:
            raise MalformedError("a row of the pointers lacks its key or value; n_keys is wrong")
        if n_keys > 1 and pc.greater_equal(keys.slice(0, n_keys - 1), keys.slice(1)).true_count:
            lower, upper = next(pair for pair in pairwise(keys.to_pylist()) if pair[0] >= pair[1])
            raise MalformedError(f"key {upper!r} does not ascend after {lower!r}")
        texts = TextColumn(keys)
        # Keys ascend: if the first is above all keys that start with a space, so are the others.
        if n_keys and texts[0] < "!" and any(key.startswith(" ") for key in texts):
            raise MalformedError("a row of the pointers has a key that starts with a space")
        return texts, TextColumn(values)

    def children(self) -> TextColumn:
        """Return the pointers to children, none in a leaf. Raises MalformedError."""
        first = self.first if self.pointers is None else self.pointers
        children = self.pnode.slice(first, self.end - first)
        if children.null_count == len(children):
            children = children.slice(0, 0)
        if children.null_count:
            raise MalformedError("some of the child pointers are missing")
        return TextColumn(children)

    def buffer(self) -> dict[str, str | None]:
        """Return the newest message of each key, in order of arrival. Raises MalformedError."""
        tails = [column.slice(self.end) for column in (self.key, self.pvalue, self.pnode)]
        if all(tail.null_count == len(tail) for tail in tails):
            return {}  # blank pointer rows alone, as in nearly every leaf
        return self._plain_buffer(*tails) or self._any_buffer(tails)

    @staticmethod
    def _plain_buffer(keys: pa.StringArray, values: pa.StringArray, children: pa.StringArray) -> dict[str, str | None]:
        """Return the messages if all rows are as we write them, else none."""
        n_blank = keys.null_count
        if keys.slice(n_blank).null_count or values.slice(0, n_blank).null_count < n_blank:
            return {}
        buffer = dict(zip(keys.slice(n_blank).to_pylist(), values.slice(n_blank).to_pylist(), strict=True))
        is_plain = (
            len(buffer) == len(keys) - n_blank and SYSTEM_KEYS.isdisjoint(buffer) and min(buffer, default="") >= "!"
        )
        return buffer if is_plain and children.null_count == len(children) else {}

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


def _check_number(system: dict[str, str], name: str, maximum: int) -> None:
    value = system.get(name, "")
    if not (value.isascii() and value.isdecimal() and len(value) <= _MAX_DIGITS and int(value) <= maximum):
        raise MalformedError(f"system row {name} is {value[:_MAX_DIGITS]!r}, not a number from 0 to {maximum}")
