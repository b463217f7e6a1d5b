"""Node files: Arrow IPC files of three sections (FORMAT.md, "Node files")."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from trinitylake_ops.errors import CorruptFileError, InvalidDefinitionError
from trinitylake_ops.format.arrow_ipc import MAX_DECOMPRESSED_BYTES, SCHEMA, surrounding_bytes, write_file
from trinitylake_ops.format.file_names import RootNaming
from trinitylake_ops.format.keys import (
    CLOCK_RESET,
    COMMIT_ID,
    COMMIT_INFO,
    CREATED_AT_MILLIS,
    N_KEYS,
    PREVIOUS_ROOT,
    SEALED_AT_MILLIS,
    STAMPED_VERSION,
    TextColumn,
    built_texts,
    decode_commit_info,
    own_rows,
    text_array,
)
from trinitylake_ops.format.node_sections import MalformedError, Rows, ascend, not_ascending_error

#: The values of ``node_compression``: none, and the codecs that Arrow supports for IPC files.
NODE_COMPRESSIONS = ("", "lz4", "zstd")


@dataclass(slots=True)
class NodeFile:
    """The content of one node file.

    Keys, values and children that were read from a file are views of its bytes (:class:`TextColumn`), which are
    decompressed if necessary.
    """

    #: The keys, in strictly ascending order of their UTF-8 bytes.
    keys: Sequence[str] = field(default_factory=list)
    #: The location of each key's value.
    values: Sequence[str] = field(default_factory=list)
    #: The locations of the ``len(keys) + 1`` children; empty for a leaf. ``children[i]`` contains the keys between
    #: ``keys[i - 1]`` and ``keys[i]``.
    children: Sequence[str] = field(default_factory=list)
    #: The newest message for each key, in order of arrival: a location, or None for a deletion.
    buffer: dict[str, str | None] = field(default_factory=dict)
    #: The system rows except ``n_keys``.
    system: dict[str, str] = field(default_factory=dict)
    #: Whether the file had no row without a key: it is a leaf of the older layout, which may contain more keys than the
    #: order allows.
    is_flat: bool = field(default=False, compare=False)
    #: The size of the file; 0 for a node that was not read.
    file_size_bytes: int = field(default=0, compare=False)
    #: The memory that the views retain; 0 for a node that was not read.
    memory_bytes: int = field(default=0, compare=False)

    def rebased(self, place: Callable[[str], str]) -> NodeFile:
        """Return a copy of the node in which each location is replaced by ``place(location)``."""
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
    """Encode a node file with exactly ``order`` pointer rows.

    Args:
        node: The node.
        order: The order of the tree.
        compression: One of ``NODE_COMPRESSIONS``. The body is only compressed if that makes the file smaller, so the
            file never exceeds :func:`encoded_size_bytes` plus its seals.
        path: The path where the file will be written. The seals contain the file name. If empty, the file is not
            sealed.
        max_bytes: Maximum size of a sealed file. If the file would be larger with seals, it is not sealed.

    Raises:
        InvalidDefinitionError: The compression is unknown.
        ValueError: The node has too many keys for the order.
    """
    check_node_compression(compression)
    n_keys = len(node.keys)
    spare = order - 1 - n_keys
    if spare < 0:
        raise ValueError(f"{n_keys} keys do not fit into a node of order {order}")
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
    """Raise InvalidDefinitionError if this program cannot write nodes with a ``node_compression``."""
    if compression not in NODE_COMPRESSIONS:
        raise InvalidDefinitionError(
            f"node_compression is {compression!r}, which is not supported; use '' (none), 'lz4' or 'zstd';"
            " alter_definition changes it in an existing lakehouse"
        )


def encoded_size_bytes(
    order: int,
    keys: Sequence[str],
    values: Sequence[str],
    children_bytes: int,
    buffer: Mapping[str, str | None],
    system: Mapping[str, str],
) -> int:
    """Compute the exact size of the uncompressed file that :func:`encode_node` creates, without its seals.

    Arrow pads each of the three buffers of a column (validity, offsets, text) to 8 bytes; everything else is constant.
    :func:`seal_room_bytes` is the maximum size of the seals.

    Args:
        order: The number of pointer rows.
        keys: The keys of the node.
        values: The values of the node.
        children_bytes: The size of all child locations in UTF-8.
        buffer: The messages of the node.
        system: The system rows except ``n_keys``.
    """
    return size_of_rows_bytes(
        len(system) + 1 + order + len(buffer),
        text_bytes(keys) + text_bytes(buffer) + text_bytes(system) + len(N_KEYS),
        text_bytes(values) + text_bytes(buffer.values()) + text_bytes(system.values()) + len(str(len(keys))),
        children_bytes,
    )


def size_of_rows_bytes(rows: int, key_bytes: int, pvalue_bytes: int, pnode_bytes: int) -> int:
    """Compute the size of an uncompressed node file without seals.

    Args:
        rows: The number of rows.
        key_bytes: The size of the text in the column ``key``.
        pvalue_bytes: The size of the text in the column ``pvalue``.
        pnode_bytes: The size of the text in the column ``pnode``.
    """
    return (
        _framing_bytes()
        + 3 * (_pad8((rows + 7) // 8) + _pad8(4 * (rows + 1)))
        + _pad8(key_bytes)
        + _pad8(pvalue_bytes)
        + _pad8(pnode_bytes)
    )


def text_bytes(texts: Iterable[str | None]) -> int:
    """Return the total size of strings, in bytes of UTF-8."""
    joined = "".join(filter(None, texts))
    return len(joined) if joined.isascii() else len(joined.encode("utf-8"))


def _pad8(size_bytes: int) -> int:
    return (size_bytes + 7) & ~7


@functools.cache
def seal_room_bytes() -> int:
    """Return the maximum size of a node file's seals, which is the size for a root whose name has 64 digits."""
    return surrounding_bytes(RootNaming(64).path(0)) - surrounding_bytes("")


@functools.cache
def _framing_bytes() -> int:
    """Return the size of the parts of a node file that do not depend on its rows: schema, headers, footer, magic."""
    two_rows_body_bytes = 3 * (_pad8(1) + _pad8(12)) + _pad8(len(N_KEYS)) + _pad8(len("0"))
    return len(encode_node(NodeFile(), order=1)) - two_rows_body_bytes


#: The operations whose properties are preserved in a sealed root.
_KEEP_PROPERTIES = ("export", "rollback", "restore")


def encode_sealed_root(system: Mapping[str, str], sealed_at_ms: int, path: str = "") -> bytes:
    """Encode the sealed root that replaces the root of a purged version, so that its name is never reused (FORMAT.md).

    The sealed root preserves the commit's id, its position in the chain, its operation and its members. It also
    preserves the properties of an export, which the next export needs, and those of a rollback or restore, which
    identify the versions that it undid.

    Args:
        system: The system rows of the root.
        sealed_at_ms: The time of sealing, in milliseconds since the epoch.
        path: The path of the root.
    """
    preserved_names = (CREATED_AT_MILLIS, PREVIOUS_ROOT, COMMIT_ID, CLOCK_RESET)
    preserved = {name: system[name] for name in preserved_names if name in system}
    info = decode_commit_info(system)
    names = [
        STAMPED_VERSION,
        "operation",
        "members",
        *(["properties"] if info.get("operation") in _KEEP_PROPERTIES else []),
    ]
    fields = {name: info[name] for name in names if name in info}
    if fields:
        preserved[COMMIT_INFO] = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    rows = {**preserved, N_KEYS: "0", SEALED_AT_MILLIS: str(sealed_at_ms)}
    columns = [
        built_texts(rows),
        built_texts(rows.values()),
        pa.nulls(len(rows), pa.utf8()),
    ]
    return write_file(pa.record_batch(columns, schema=SCHEMA), "", path)


def decode_node(data: bytes, path: str) -> NodeFile:
    """Decode a node file, which an older writer may have written (FORMAT.md, "What is read beyond what is written").

    If the stamp of a root was written for a version other than that of ``path``, the stamp is removed from ``system``.

    Args:
        data: The content of the file.
        path: The path of the file.

    Raises:
        CorruptFileError: The file is not an Arrow IPC file, has other columns, violates the order of sections, or does
            not match its seals.
    """
    node, keys = _decoded(data, path)
    if not ascend([keys]):
        raise not_ascending_error(keys).of(path)
    return node


def decode_nodes(files: Sequence[tuple[bytes, str]]) -> list[NodeFile | CorruptFileError]:
    """Return the result of :func:`decode_node` for each file, or its error.

    One pass over all nodes checks that keys ascend. If that check fails, each node is checked separately.
    """
    nodes: list[NodeFile | CorruptFileError] = []
    columns = []
    for data, path in files:
        try:
            node, keys = _decoded(data, path)
        except CorruptFileError as error:
            nodes.append(error)
        else:
            nodes.append(node)
            columns.append(keys)
    return nodes if ascend(columns) else [_decoded_or_error(data, path) for data, path in files]


def _decoded_or_error(data: bytes, path: str) -> NodeFile | CorruptFileError:
    try:
        return decode_node(data, path)
    except CorruptFileError as error:
        return error


def _decoded(data: bytes, path: str) -> tuple[NodeFile, TextColumn]:
    """Return the node in a file and its keys, whose order is not yet checked. Raise CorruptFileError on damage."""
    rows = Rows.read(data, path)
    del rows.system[N_KEYS]
    try:
        keys, children, buffer = rows.keys(), rows.children(), rows.buffer()
    except MalformedError as error:
        raise error.of(path) from error
    node = NodeFile(keys, rows.values(), children, buffer, own_rows(rows.system, path), rows.is_flat, len(data))
    # The columns of an uncompressed file are views that keep all bytes of the file in memory.
    node.memory_bytes = max(len(data), rows.batch.get_total_buffer_size())
    return node, keys


def decode_system_rows(data: bytes, path: str) -> dict[str, str]:
    """Decode only the system rows of a node file. Arguments and errors are the same as for :func:`decode_node`."""
    return own_rows(Rows.read(data, path).system, path)
