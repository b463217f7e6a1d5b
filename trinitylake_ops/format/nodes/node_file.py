"""Node files: Arrow IPC files of three sections (FORMAT.md, "Node files")."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from trinitylake_ops.errors import CorruptFileError, InvalidDefinitionError, InvalidInputError
from trinitylake_ops.format.file_names import RootNaming, version_named
from trinitylake_ops.format.nodes.ipc_body import MAX_DECOMPRESSED_BYTES, check_body
from trinitylake_ops.format.nodes.ipc_file import (
    SCHEMA,
    check_file_seals,
    check_is_no_copy,
    read_own_batch,
    surrounding_bytes,
    write_file,
)
from trinitylake_ops.format.nodes.keys import NAMESPACE_KEY_PREFIX, TABLE_KEY_PREFIX, has_schema_id
from trinitylake_ops.format.nodes.text_column import TextColumn, built_texts, text_array

CREATED_AT_MILLIS = "created_at_millis"
N_KEYS = "n_keys"
LAKEHOUSE_DEF = "lakehouse_def"
PREVIOUS_ROOT = "previous_root"
ROLLBACK_FROM_ROOT = "rollback_from_root"
COMMIT_ID = "commit_id"
COMMIT_INFO = "commit_info"
SEALED_AT_MILLIS = "sealed_at_millis"

#: The entry of ``commit_info`` that names the version it was written for.
STAMPED_VERSION = "version"

MAX_COMMIT_INFO_BYTES = 4096
#: What ``node_compression`` of a lakehouse may be: none, and the codecs that Arrow has for IPC files.
NODE_COMPRESSIONS = ("", "lz4", "zstd")

MAX_TIME_MS = 253_402_300_799_999  # the end of the year 9999, in milliseconds since the epoch

_READ_OPTIONS = pa.ipc.IpcReadOptions(use_threads=False)  # handing nine small buffers to threads takes longer
_OLD_DEF_KEY = "lakehouse"
_MAX_ROWS = 2**31 - 1
_MAX_DIGITS = 20
_FEW_ROWS = 16  # more than our system rows
_VALUE_COLUMNS = ("pvalue", "value")  # the second is the name in the older layout
_TRANSACTION_COLUMN = "txn"  # of the older layout; nothing in it is needed
_OBJECT_KEY_PREFIXES = (NAMESPACE_KEY_PREFIX, TABLE_KEY_PREFIX)

#: The keys of system rows that this version knows; others are kept and ignored, where they can be told from objects.
SYSTEM_KEYS = frozenset(
    {
        CREATED_AT_MILLIS,
        N_KEYS,
        LAKEHOUSE_DEF,
        _OLD_DEF_KEY,
        PREVIOUS_ROOT,
        ROLLBACK_FROM_ROOT,
        COMMIT_ID,
        COMMIT_INFO,
        SEALED_AT_MILLIS,
    }
)


@dataclass(slots=True)
class NodeFile:
    """The content of one node file.

    ``keys`` ascend strictly by UTF-8 bytes; ``values[i]`` belongs to ``keys[i]``. ``children`` has
    ``len(keys) + 1`` entries, ``children[i]`` holding the keys below ``keys[i]`` and above
    ``keys[i - 1]``; in a leaf it is empty. ``buffer`` maps a key to its newest message, a location
    or None for a deletion, in order of arrival. ``system`` holds the system rows except ``n_keys``.

    ``is_flat`` says that the file it was read from had no row without a key: a leaf of the older
    layout, which may hold more keys than the order allows. It is no part of the content. Keys,
    values and children that were read from a file are views of its bytes, decompressed where need
    be (:class:`TextColumn`); ``file_size_bytes`` is the size of the file and ``memory_bytes`` what
    the views hold of memory, both 0 for a node that was not read.
    """

    keys: Sequence[str] = field(default_factory=list)
    values: Sequence[str] = field(default_factory=list)
    children: Sequence[str] = field(default_factory=list)
    buffer: dict[str, str | None] = field(default_factory=dict)
    system: dict[str, str] = field(default_factory=dict)
    is_flat: bool = field(default=False, compare=False)
    file_size_bytes: int = field(default=0, compare=False)
    memory_bytes: int = field(default=0, compare=False)

    def rebased(self, place: Callable[[str], str]) -> NodeFile:
        """Return the node with other locations: what ``place`` makes of each."""
        return NodeFile(
            list(self.keys),
            [place(value) for value in self.values],
            [place(child) for child in self.children],
            {key: None if value is None else place(value) for key, value in self.buffer.items()},
            self.system,
            self.is_flat,
        )

    @property
    def is_leaf(self) -> bool:
        return not self.children

    @property
    def is_sealed(self) -> bool:
        return SEALED_AT_MILLIS in self.system

    @property
    def created_at_ms(self) -> int:
        return int(self.system[CREATED_AT_MILLIS])


def encode_node(
    node: NodeFile, order: int, compression: str = "", path: str = "", max_bytes: int | None = None
) -> bytes:
    """Return the bytes of a node file with exactly ``order`` pointer rows, sealed for the name of ``path``.

    It has no seal without a path, and where it would take more than ``max_bytes`` with one.

    With a ``compression`` the body is compressed where that makes the file smaller, so it never takes
    more than :func:`encoded_size_bytes`. Raises InvalidDefinitionError for one that is not in
    ``NODE_COMPRESSIONS``.
    """
    check_node_compression(compression)
    n_keys = len(node.keys)
    spare = order - 1 - n_keys
    if spare < 0:
        raise ValueError(f"{n_keys} keys do not fit a node of order {order}")
    children: list[str | None] = list(node.children) if node.children else [None] * (n_keys + 1)
    blank: list[str | None] = [None] * spare
    system = {**node.system, N_KEYS: str(n_keys)}
    key = [*system, None, *node.keys, *blank, *node.buffer]
    pvalue = [*system.values(), None, *node.values, *blank, *node.buffer.values()]
    pnode = [*[None] * len(system), *children, *blank, *[None] * len(node.buffer)]
    batch = pa.record_batch([text_array(key), text_array(pvalue), text_array(pnode)], schema=SCHEMA)
    data = _smallest_file(batch, compression, path)
    return data if not path or max_bytes is None or len(data) <= max_bytes else _smallest_file(batch, compression, "")


def _smallest_file(batch: pa.RecordBatch, compression: str, path: str) -> bytes:
    if compression:
        batch_bytes = pa.ipc.get_record_batch_size(batch)
        compressed = write_file(batch, compression, path) if batch_bytes <= MAX_DECOMPRESSED_BYTES else None
        if compressed is not None and len(compressed) < surrounding_bytes(path) + batch_bytes:
            return compressed
    return write_file(batch, "", path)


def check_node_compression(compression: str) -> None:
    """Raise InvalidDefinitionError for a ``node_compression`` that this program cannot write."""
    if compression not in NODE_COMPRESSIONS:
        raise InvalidDefinitionError(
            f"node_compression is {compression!r}, this program writes '' (none), 'lz4' or 'zstd';"
            " choose one of these, in an existing lakehouse with alter_definition"
        )


def encoded_size_bytes(
    order: int,
    keys: Sequence[str],
    values: Sequence[str],
    children_bytes: int,
    buffer: Mapping[str, str | None],
    system: Mapping[str, str],
) -> int:
    """Return the size of the file that :func:`encode_node` makes of these rows, to the byte, without making it.

    That is the uncompressed file without its seals, for which :func:`seal_room_bytes` are left: Arrow pads each of
    a column's three buffers (validity, offsets, text) to 8 bytes; all else is constant.
    """
    return size_of_rows_bytes(
        len(system) + 1 + order + len(buffer),
        text_bytes(keys) + text_bytes(buffer) + text_bytes(system) + len(N_KEYS),
        text_bytes(values) + text_bytes(buffer.values()) + text_bytes(system.values()) + len(str(len(keys))),
        children_bytes,
    )


def size_of_rows_bytes(rows: int, key_bytes: int, pvalue_bytes: int, pnode_bytes: int) -> int:
    """Return the size of an uncompressed node file from the number of its rows and the text in each column."""
    return (
        _framing_bytes()
        + 3 * (_pad8((rows + 7) // 8) + _pad8(4 * (rows + 1)))
        + _pad8(key_bytes)
        + _pad8(pvalue_bytes)
        + _pad8(pnode_bytes)
    )


def text_bytes(texts: Iterable[str | None]) -> int:
    """Return the size of all texts together, in bytes of UTF-8."""
    joined = "".join(filter(None, texts))
    return len(joined) if joined.isascii() else len(joined.encode("utf-8"))


def _pad8(size_bytes: int) -> int:
    return (size_bytes + 7) & ~7


@functools.cache
def seal_room_bytes() -> int:
    """Return what the seals of a node file take at most: those of a root whose name has 64 digits."""
    return surrounding_bytes(RootNaming(64).path(0)) - surrounding_bytes("")


@functools.cache
def _framing_bytes() -> int:
    """Return the bytes of a node file that do not depend on its rows: schema, batch header, footer, magic."""
    two_rows_body_bytes = 3 * (_pad8(1) + _pad8(12)) + _pad8(len(N_KEYS)) + _pad8(len("0"))
    return len(encode_node(NodeFile(), order=1)) - two_rows_body_bytes


def encode_sealed_root(system: Mapping[str, str], sealed_at_ms: int, path: str = "") -> bytes:
    """Return the sealed root that takes the place, at ``path``, of one with these system rows (FORMAT.md).

    Of the commit remain its id, its place in the chain, and what it was and whose: the name stays taken. What an export
    says about its source remains, too: the next one needs it.
    """
    kept = {name: system[name] for name in (CREATED_AT_MILLIS, PREVIOUS_ROOT, COMMIT_ID) if name in system}
    info = decode_commit_info(system)
    names = [STAMPED_VERSION, "operation", "members", *(["properties"] if info.get("operation") == "export" else [])]
    said = {name: info[name] for name in names if name in info}
    if said:
        kept[COMMIT_INFO] = json.dumps(said, ensure_ascii=False, separators=(",", ":"))
    rows = {**kept, N_KEYS: "0", SEALED_AT_MILLIS: str(sealed_at_ms)}
    columns = [
        built_texts(rows),
        built_texts(rows.values()),
        pa.nulls(len(rows), pa.utf8()),
    ]
    return write_file(pa.record_batch(columns, schema=SCHEMA), "", path)


def decode_node(data: bytes, path: str) -> NodeFile:
    """Return the content of a node file.

    The forms of older writers are read too (FORMAT.md, "What is read beyond what is written"). Of a root
    whose stamp was written for another version than ``path`` names, ``system`` lacks the stamp. Raises
    CorruptFileError, naming ``path``, for bytes that are no Arrow IPC file, for other columns, and
    for rows that break the order of sections.
    """
    rows = _rows(data, path)
    try:
        node = rows.node()
    except _MalformedError as error:
        raise _corrupt(path, error) from error
    node.system = _own_rows(node.system, path)
    node.file_size_bytes = len(data)
    # Columns of an uncompressed file are views of its bytes, which they keep as a whole.
    columns = (rows.key, rows.pvalue, rows.pnode)
    node.memory_bytes = max(len(data), sum(column.get_total_buffer_size() for column in columns))
    return node


def decode_system_rows(data: bytes, path: str) -> dict[str, str]:
    """Return the system rows of a node file alone, as :func:`decode_node` does.

    Raises CorruptFileError, naming ``path``.
    """
    return _own_rows(_rows(data, path).system, path)


def _rows(data: bytes, path: str) -> _Rows:
    key, pvalue, pnode = _columns(data, path)
    try:
        rows = _Rows(key, pvalue, pnode)
    except _MalformedError as error:
        raise _corrupt(path, error) from error
    if SEALED_AT_MILLIS in rows.system:  # a rollback leads to no purged version: a copy would hide a live one
        check_is_no_copy(data, path)
    return rows


def _own_rows(system: dict[str, str], path: str) -> dict[str, str]:
    """Return the system rows of a file without a stamp that was written for another version.

    Programs that know the published format alone may carry the stamp of the version before on, or of one that they
    go back to. Stamps from before they named their version are believed, as far as one file can tell.
    """
    if COMMIT_ID not in system and COMMIT_INFO not in system:
        return system
    version = version_named(path)
    if version is None:  # the root of an export, which may be a copy of another program's: after which does it come?
        before = version_named(system.get(PREVIOUS_ROOT, ""))
        version = 0 if before is None else before + 1
    stamped = decode_commit_info(system).get(STAMPED_VERSION, version)
    return system if type(stamped) is int and stamped == version else _unstamped(system)


def without_carried_stamp(system: dict[str, str], before: Mapping[str, str]) -> dict[str, str]:
    """Return the system rows of a root without a stamp that the root ``before`` it has, too.

    So those are told that were carried on from a root which does not name its version in its stamp.
    """
    commit_id = system.get(COMMIT_ID)
    return _unstamped(system) if commit_id is not None and commit_id == before.get(COMMIT_ID) else system


def _unstamped(system: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in system.items() if name not in (COMMIT_ID, COMMIT_INFO)}


class _MalformedError(Exception):
    """A rule of the sections does not hold; the message says which."""


def _corrupt(path: str, error: _MalformedError) -> CorruptFileError:
    return CorruptFileError(f"node file {path!r} is malformed: {error}", path=path)


def _columns(data: bytes, path: str) -> tuple[pa.StringArray, pa.StringArray, pa.StringArray]:
    """Return key, pvalue and pnode; a file without pnode is one in which they are all null."""
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
    """Return the columns of a file that is not ours to the letter: compressed, several batches, the older layout."""
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
class _Rows:
    """The rows of a file, and where the sections after the system rows begin and end.

    ``pointers`` is the row without a key that begins section 2; None in a file without such a row:
    a sealed root, or a leaf of the older layout. ``first`` and ``end`` enclose the rows of keys.
    """

    key: pa.StringArray
    pvalue: pa.StringArray
    pnode: pa.StringArray
    system: dict[str, str] = field(default_factory=dict)
    pointers: int | None = None
    first: int = 0
    end: int = 0

    def __post_init__(self) -> None:
        n_system = self._n_system_rows()
        self._add_system_rows(n_system)
        _check_number(self.system, CREATED_AT_MILLIS, MAX_TIME_MS)
        _check_number(self.system, N_KEYS, _MAX_ROWS)
        n_keys = int(self.system[N_KEYS])
        if SEALED_AT_MILLIS in self.system and (n_keys or n_system != len(self.key)):
            raise _MalformedError("a sealed root has keys or pointer rows")
        self.first = n_system if self.pointers is None else n_system + 1
        self.end = self.first + n_keys
        if self.end > len(self.key):
            raise _MalformedError(f"n_keys is {n_keys}, but only {len(self.key) - self.first} rows follow")
        if self.pointers is None:
            self._check_flat()

    def _n_system_rows(self) -> int:
        """Return the number of system rows: up to the row without a key; where there is none, all that we know."""
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
                raise _MalformedError(f"system row {name!r} lacks its value or has a child")
            if name.startswith(_OBJECT_KEY_PREFIXES):
                raise _MalformedError(f"object key {name!r} stands among the system rows")
            self.system[LAKEHOUSE_DEF if name == _OLD_DEF_KEY else name] = value

    def _check_flat(self) -> None:
        """Without a row without a key only their form tells keys of objects from unknown system rows."""
        for row, key in enumerate(self.key.slice(self.first).to_pylist(), self.first):
            if not has_schema_id(key):
                raise _MalformedError(
                    f"row {row} has the key {key!r}, which is neither an object's nor a known system row's;"
                    " a file without a row without a key can hold no other"
                )
        if self.pnode.null_count != len(self.pnode):
            raise _MalformedError("there are child pointers, but no row without a key for the first of them")

    def node(self) -> NodeFile:
        system = {name: value for name, value in self.system.items() if name != N_KEYS}
        keys, values = self._keys()
        is_flat = self.pointers is None and SEALED_AT_MILLIS not in system
        return NodeFile(keys, values, self._children(), self._buffer(), system, is_flat)

    def _keys(self) -> tuple[TextColumn, TextColumn]:
        if self.pointers is not None and self.pvalue[self.pointers].is_valid:
            raise _MalformedError("the first pointer row has a value")
        n_keys = self.end - self.first
        keys, values = self.key.slice(self.first, n_keys), self.pvalue.slice(self.first, n_keys)
        if keys.null_count or values.null_count:
            raise _MalformedError("a row of the pointers lacks its key or value; n_keys is wrong")
        if n_keys > 1 and pc.greater_equal(keys.slice(0, n_keys - 1), keys.slice(1)).true_count:
            lower, upper = next(pair for pair in pairwise(keys.to_pylist()) if pair[0] >= pair[1])
            raise _MalformedError(f"key {upper!r} does not ascend after {lower!r}")
        texts = TextColumn(keys)
        # They ascend: where the first is above all that start with a space, so are the others.
        if n_keys and texts[0] < "!" and any(key.startswith(" ") for key in texts):
            raise _MalformedError("a row of the pointers has a key that starts with a space")
        return texts, TextColumn(values)

    def _children(self) -> TextColumn:
        first = self.first if self.pointers is None else self.pointers
        children = self.pnode.slice(first, self.end - first)
        if children.null_count == len(children):
            children = children.slice(0, 0)
        if children.null_count:
            raise _MalformedError("some of the child pointers are missing")
        return TextColumn(children)

    def _buffer(self) -> dict[str, str | None]:
        tails = [column.slice(self.end) for column in (self.key, self.pvalue, self.pnode)]
        if all(tail.null_count == len(tail) for tail in tails):
            return {}  # blank pointer rows alone, as in nearly every leaf
        return self._plain_buffer(*tails) or self._any_buffer(tails)

    @staticmethod
    def _plain_buffer(keys: pa.StringArray, values: pa.StringArray, children: pa.StringArray) -> dict[str, str | None]:
        """Return the messages where all rows are as we write them, else none."""
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
                raise _MalformedError(f"row {row} after the pointers has a child; n_keys is wrong")
            if key is None:
                if value is not None or buffer:
                    raise _MalformedError(f"row {row} after the pointers has no key")
                continue
            if key in SYSTEM_KEYS or key.startswith(" "):
                raise _MalformedError(f"buffer row {row} has the key {key!r}, which no object can have")
            # Re-inserting keeps the order of arrival of the newest message.
            buffer.pop(key, None)
            buffer[key] = value
        return buffer


def _check_number(system: dict[str, str], name: str, maximum: int) -> None:
    value = system.get(name, "")
    if not (value.isascii() and value.isdecimal() and len(value) <= _MAX_DIGITS and int(value) <= maximum):
        raise _MalformedError(f"system row {name} is {value[:_MAX_DIGITS]!r}, not a number from 0 to {maximum}")


def encode_commit_info(info: dict[str, Any]) -> str:
    """Return ``commit_info`` as one JSON object of at most 4 KiB. Raises InvalidInputError when larger or no JSON."""
    try:
        text = json.dumps(info, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
        size_bytes = len(text.encode("utf-8"))
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"message and properties of a commit are text only: {error}") from error
    if size_bytes > MAX_COMMIT_INFO_BYTES:
        raise InvalidInputError(
            f"message and properties of this commit take {size_bytes} bytes, more than {MAX_COMMIT_INFO_BYTES};"
            " shorten them"
        )
    return text


def decode_commit_info(system: Mapping[str, str]) -> dict[str, Any]:
    """Return the ``commit_info`` of a root's system rows; empty when absent or written by others as no JSON object."""
    text = system.get(COMMIT_INFO, "{}")
    try:
        info = json.loads(text, parse_constant=_refused_constant)
        if "\\u" in text:
            json.dumps(info, ensure_ascii=False).encode()  # escapes can be halves of characters, which no text holds
    except (ValueError, RecursionError):
        return {}
    return info if isinstance(info, dict) else {}


def _refused_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
