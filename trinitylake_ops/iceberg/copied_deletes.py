"""Copies of files that delete rows by position, for copies of the data files that they name.

Such files hold the paths of data files: position deletes in their rows, deletion vectors in the footer of their Puffin
file. A copy of the bytes would delete nothing, so they are written anew. A manifest says of them which path they are
of, too.
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
#: The field id of ``file_path`` in each file of position deletes.
PATH_FIELD_ID = 2147483546
_REFERENCED = "referenced-data-file"
#: What follows a Puffin file's footer: its length, flags and the magic.
_END_BYTES = 12

#: Endings of names of position deletes that cannot be written anew.
UNCOPIED_ENDINGS = (".orc",)


def is_copied_format(location: str) -> bool:
    """Whether a file of position deletes, by the end of its name, can be written anew with other paths."""
    return not location.endswith(UNCOPIED_ENDINGS)


def parquet_deletes(data: bytes, source: str, target: str, new_uri: Callable[[str], str]) -> bytes:
    """Return a Parquet file of position deletes with new paths, for a file named ``target``, sorted by them.

    Column ids and properties stay. The same bytes and paths always give the same file. Raises CorruptFileError for a
    file whose claims are not believed, KeyError for one without paths, ContentChangedError if the new file does not
    delete the same positions, and what Arrow raises.
    """
    from trinitylake_ops.iceberg.io.parquet_writer import SealingWriter  # importing it loads pandas

    check_parquet_pages(len(data), lambda at, length: data[at : at + length], source)
    table = pq.ParquetFile(pa.BufferReader(data)).read()
    at = table.schema.get_field_index(_PATH)
    paths = table.column(_PATH).cast(pa.string())
    known = paths.unique()
    renamed = pa.array([new_uri(path) for path in known.to_pylist()], pa.string())
    placed = renamed.take(pc.index_in(paths, value_set=known).combine_chunks())
    field = table.schema.field(at)
    table = table.set_column(at, field.with_type(pa.string()), placed)
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
    """Return the positions by path, in ascending order."""
    order = pc.sort_indices(deletes, sort_keys=[(_PATH, "ascending"), (_POSITION, "ascending")])
    runs = pc.run_end_encode(deletes.column(_PATH).cast(pa.string()).take(order).combine_chunks())
    positions = deletes.column(_POSITION).take(order).combine_chunks()
    first, by_path = 0, {}
    for path, end in zip(runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True):
        by_path[path] = positions.slice(first, end - first)
        first = end
    return by_path


def check_same_positions(before: object, after: object, source: str) -> None:
    """Check that a copied file deletes the same rows.

    Args:
        before: The positions that the source deletes, with the paths of the copied data files.
        after: The positions that the copy deletes, in the same form.
        source: The location of the source.

    Raises:
        ContentChangedError: They differ.
    """
    if before != after:
        raise ContentChangedError(
            f"a copy of the deletes {source!r} does not delete the same rows; nothing was committed, keep the source"
            " and report this",
            path=source,
        )


def puffin_vectors(data: bytes, source: str, new_uri: Callable[[str], str]) -> bytes:
    """Return a Puffin file of deletion vectors with new paths in its footer. Each blob stays where it is.

    Raises CorruptFileError for a file that holds no vectors, InvalidInputError for a compressed footer,
    ContentChangedError if the new file does not hold the same vectors.
    """
    check_puffin(data, source)
    end = len(data) - _END_BYTES
    footer_bytes = int.from_bytes(data[end : end + 4], "little")
    flags = data[end + 4 : end + 8]
    if any(flags):
        raise InvalidInputError(
            f"{source!r} has a compressed footer, which cannot be written anew; let the engine that wrote it rewrite"
            " the table's data files",
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
    """Return the paths of the data files of a Puffin file, with the bytes of their vectors."""
    end = len(data) - _END_BYTES
    footer = json.loads(data[end - int.from_bytes(data[end : end + 4], "little") : end])
    return [
        (blob["properties"][_REFERENCED], data[blob["offset"] : blob["offset"] + blob["length"]])
        for blob in footer["blobs"]
    ]


def is_parquet(data: bytes) -> bool:
    """Whether a file begins as Parquet."""
    return data.startswith(_PARQUET_MAGIC)


def is_puffin(data: bytes) -> bool:
    """Whether a file begins as Puffin."""
    return data.startswith(PUFFIN_MAGIC)


def update_delete_entry(data_file: dict[str, Any], new_uri: Callable[[str], str], size_bytes: int) -> None:
    """Change what a manifest says of a file of position deletes that was written anew: its size, and its path bounds.

    Where both bounds are one path, readers take the file as that data file's own. Other bounds are left out: paths of
    other files lie elsewhere in their order now.
    """
    data_file["file_size_in_bytes"] = size_bytes
    for name in ("column_sizes", "split_offsets"):
        if name in data_file:
            data_file[name] = None
    bounds = [_path_bound(data_file.get(name)) for name in ("lower_bounds", "upper_bounds")]
    is_one = bounds[0] is not None and bounds[0] == bounds[1]
    for name in ("lower_bounds", "upper_bounds"):
        data_file[name] = [
            {**one, "value": new_uri(one["value"].decode()).encode()} if one["key"] == PATH_FIELD_ID else one
            for one in data_file.get(name) or ()
            if is_one or one["key"] != PATH_FIELD_ID
        ] or None


def _path_bound(bounds: list[dict[str, Any]] | None) -> bytes | None:
    return next((one["value"] for one in bounds or () if one["key"] == PATH_FIELD_ID), None)
