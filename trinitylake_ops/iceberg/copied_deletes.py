"""Rewrite position delete files for copies of the data files that they refer to.

Position delete files contain the paths of data files: in their rows or, for deletion vectors, in the Puffin footer. An
unchanged copy would delete nothing, so these files are rewritten. Manifests also record the path to which a delete file
refers.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trinitylake_ops.errors import ContentChangedError, InvalidInputError
from trinitylake_ops.iceberg.io.checked_files import check_parquet_pages
from trinitylake_ops.iceberg.validation.files import MAGIC as PUFFIN_MAGIC
from trinitylake_ops.iceberg.validation.files import check_puffin

_PARQUET_MAGIC = b"PAR1"
_PATH, _POSITION = "file_path", "pos"
#: Field id of ``file_path`` in every position delete file.
PATH_FIELD_ID = 2147483546
_REFERENCED = "referenced-data-file"
#: Number of bytes after a Puffin file's footer: footer length, flags and magic number.
_END_BYTES = 12

#: Suffixes of position delete files that cannot be rewritten.
UNCOPIED_SUFFIXES = (".orc",)


def is_copied_format(location: str) -> bool:
    """Whether a position delete file can be rewritten with other paths, by its suffix."""
    return not location.endswith(UNCOPIED_SUFFIXES)


def parquet_deletes(data: bytes, source: str, target: str, new_uri: Callable[[str], str]) -> bytes:
    """Return a Parquet position delete file with new paths, sorted by path and position.

    Column ids and properties do not change. Equal inputs always produce equal bytes.

    Args:
        data: Contents of the source file.
        source: Location of the source file.
        target: Name of the new file.
        new_uri: Maps the path of a data file to the path of its copy.

    Raises:
        CorruptFileError: The file declares sizes that do not match its contents.
        KeyError: The file has no column of paths.
        ContentChangedError: The new file does not delete the same positions.
        pyarrow.ArrowException: Arrow cannot read the file.
    """
    from trinitylake_ops.iceberg.io.parquet_writer import SealingWriter  # importing it loads pandas

    check_parquet_pages(len(data), lambda start, length: data[start : start + length], source)
    table = pq.ParquetFile(pa.BufferReader(data)).read()
    index = table.schema.get_field_index(_PATH)
    paths = table.column(_PATH).cast(pa.string())
    unique_paths = paths.unique()
    new_paths = pa.array([new_uri(path) for path in unique_paths.to_pylist()], pa.string())
    new_column = new_paths.take(pc.index_in(paths, value_set=unique_paths).combine_chunks())
    field = table.schema.field(index)
    table = table.set_column(index, field.with_type(pa.string()), new_column)
    order = pc.sort_indices(
        table.select([_PATH, _POSITION]), sort_keys=[(_PATH, "ascending"), (_POSITION, "ascending")]
    )
    sink = io.BytesIO()
    with SealingWriter(sink, target, schema=table.schema, compression="zstd", store_schema=False) as writer:
        writer.write_table(table.take(order))
    written = pq.ParquetFile(pa.BufferReader(sink.getvalue())).read([_PATH, _POSITION])
    before = _by_path(pa.table({_PATH: paths, _POSITION: table.column(_POSITION)}))
    check_same_positions({new_uri(path): positions for path, positions in before.items()}, _by_path(written), source)
    return sink.getvalue()


def _by_path(deletes: pa.Table) -> dict[str, pa.Array]:
    """Return the deleted positions by path, in ascending order."""
    order = pc.sort_indices(deletes, sort_keys=[(_PATH, "ascending"), (_POSITION, "ascending")])
    runs = pc.run_end_encode(deletes.column(_PATH).cast(pa.string()).take(order).combine_chunks())
    positions = deletes.column(_POSITION).take(order).combine_chunks()
    first, by_path = 0, {}
    for path, end in zip(runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True):
        by_path[path] = positions.slice(first, end - first)
        first = end
    return by_path


def check_same_positions(before: object, after: object, source: str) -> None:
    """Check that a rewritten file deletes the same rows.

    Args:
        before: Positions that the source deletes, by the paths of the copied data files.
        after: Positions that the copy deletes, in the same form.
        source: Location of the source.

    Raises:
        ContentChangedError: The positions differ.
    """
    if before != after:
        raise ContentChangedError(
            f"copy of delete file {source!r} does not delete the same rows; nothing was committed, keep the source and"
            " report this",
            path=source,
        )


def puffin_vectors(data: bytes, source: str, new_uri: Callable[[str], str]) -> bytes:
    """Return a Puffin file of deletion vectors with new paths in its footer. Blobs keep their offsets.

    Args:
        data: Contents of the source file.
        source: Location of the source file.
        new_uri: Maps the path of a data file to the path of its copy.

    Raises:
        CorruptFileError: The file contains no valid vectors.
        InvalidInputError: The footer is compressed.
        ContentChangedError: The new file does not contain the same vectors.
    """
    check_puffin(data, source)
    end = len(data) - _END_BYTES
    footer_bytes = int.from_bytes(data[end : end + 4], "little")
    flags = data[end + 4 : end + 8]
    if any(flags):
        raise InvalidInputError(
            f"cannot rewrite {source!r}: its footer is compressed; rewrite the table's data files with the engine that"
            " wrote it",
            path=source,
        )
    footer = json.loads(data[end - footer_bytes : end])
    before = sorted((new_uri(path), vector) for path, vector in _vectors(data))
    for blob in footer["blobs"]:
        blob["properties"][_REFERENCED] = new_uri(blob["properties"][_REFERENCED])
    text = json.dumps(footer, separators=(",", ":"), ensure_ascii=False).encode()
    written = data[: end - footer_bytes] + text + len(text).to_bytes(4, "little") + flags + PUFFIN_MAGIC
    check_puffin(written, source)
    check_same_positions(before, sorted(_vectors(written)), source)
    return written


def _vectors(data: bytes) -> list[tuple[str, bytes]]:
    """Return the paths of the data files that a Puffin file refers to, with the bytes of their vectors."""
    end = len(data) - _END_BYTES
    footer = json.loads(data[end - int.from_bytes(data[end : end + 4], "little") : end])
    return [
        (blob["properties"][_REFERENCED], data[blob["offset"] : blob["offset"] + blob["length"]])
        for blob in footer["blobs"]
    ]


def is_parquet(data: bytes) -> bool:
    """Whether a file starts with the Parquet magic."""
    return data.startswith(_PARQUET_MAGIC)


def is_puffin(data: bytes) -> bool:
    """Whether a file starts with the Puffin magic."""
    return data.startswith(PUFFIN_MAGIC)


def update_delete_entry(data_file: dict[str, Any], new_uri: Callable[[str], str], size_bytes: int) -> None:
    """Update the size and path bounds of a rewritten position delete file in its manifest entry.

    If both bounds are the same path, readers apply the delete file only to that data file. Other bounds are dropped,
    because the order of the new paths may differ.

    Args:
        data_file: The ``data_file`` record of the entry, changed in place.
        new_uri: Maps the path of a data file to the path of its copy.
        size_bytes: Size of the rewritten file.
    """
    data_file["file_size_in_bytes"] = size_bytes
    for name in ("column_sizes", "split_offsets"):
        if name in data_file:
            data_file[name] = None
    bounds = [_path_bound(data_file.get(name)) for name in ("lower_bounds", "upper_bounds")]
    is_single_path = bounds[0] is not None and bounds[0] == bounds[1]
    for name in ("lower_bounds", "upper_bounds"):
        data_file[name] = [
            {**bound, "value": new_uri(bound["value"].decode()).encode()} if bound["key"] == PATH_FIELD_ID else bound
            for bound in data_file.get(name) or ()
            if is_single_path or bound["key"] != PATH_FIELD_ID
        ] or None


def _path_bound(bounds: list[dict[str, Any]] | None) -> bytes | None:
    return next((bound["value"] for bound in bounds or () if bound["key"] == PATH_FIELD_ID), None)
