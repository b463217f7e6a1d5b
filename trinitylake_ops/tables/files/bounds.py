"""Rewrites the manifests of a snapshot whose bounds are faulty, before a commit adds the snapshot (decision 110).

Engines that read manifests themselves cannot use such a table, so that the bounds are repaired in the files. Only the
bounds change. The new files have names that follow from those of the originals, so that an attempt that is repeated
writes the same files again.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Iterable
from typing import Any

from pyiceberg.manifest import ManifestEntry, ManifestFile
from pyiceberg.table.snapshots import Snapshot

from trinitylake_ops.format.file_names import derived_uuid
from trinitylake_ops.tables.claims.avro_header import AvroHeader
from trinitylake_ops.tables.claims.bounds import column_types, repair_record
from trinitylake_ops.tables.files.copying import avro_with
from trinitylake_ops.tables.files.reach import entries_in
from trinitylake_ops.tables.io.file_io import StorageFileIO

_LONGEST_NAME_CHARS = 150


def repaired_uri(uri: str) -> str:
    """Return the URI of the repaired form of a manifest or manifest list."""
    folder, _, name = uri.rpartition("/")
    return f"{folder}/{derived_uuid(uuid.NAMESPACE_URL, uri)}-{name[-_LONGEST_NAME_CHARS:]}"


def with_valid_bounds(snapshot: Snapshot, faulty: Iterable[ManifestFile], io: StorageFileIO) -> Snapshot:
    """Write the manifest list of a snapshot and its faulty manifests with valid bounds, under other names.

    Args:
        snapshot: The snapshot, which no version of the table has.
        faulty: Manifests that the snapshot adds, whose entries have faulty bounds.
        io: Reads and writes the files of the table.

    Returns:
        The snapshot with the new manifest list.

    Raises:
        CorruptFileError: A file cannot be decoded.
        StorageError: A file cannot be read or written.
    """
    sizes_bytes: dict[str, int] = {}
    summaries: dict[str, list[tuple[bytes, bytes] | None]] = {}
    for manifest in faulty:
        uri = manifest.manifest_path
        data = io.new_input(uri).read_whole()
        header = AvroHeader.of(data)
        types = column_types(header.metadata.get("schema") if header is not None else None)
        repaired = avro_with(uri, data, functools.partial(repair_record, types=types))
        sizes_bytes[uri] = _write(repaired_uri(uri), repaired, io)
        summaries[uri] = _text_ranges(entries_in(manifest, io))

    def place(record: dict[str, Any]) -> None:
        uri = record["manifest_path"]
        if uri in sizes_bytes:
            record["manifest_path"], record["manifest_length"] = repaired_uri(uri), sizes_bytes[uri]
            for summary, texts in zip(record.get("partitions") or (), summaries[uri], strict=False):
                if texts is not None:
                    summary["lower_bound"], summary["upper_bound"] = texts

    listed = io.new_input(snapshot.manifest_list).read_whole()
    _write(repaired_uri(snapshot.manifest_list), avro_with(snapshot.manifest_list, listed, place), io)
    return snapshot.model_copy(update={"manifest_list": repaired_uri(snapshot.manifest_list)})


def _write(uri: str, data: bytes, io: StorageFileIO) -> int:
    output = io.new_output(uri)
    with output.create() as stream:
        stream.write(data)
    return len(output)


def _text_ranges(entries: Iterable[ManifestEntry]) -> list[tuple[bytes, bytes] | None]:
    """Return the least and the greatest value of each partition field that has texts, None for other fields."""
    partitions = [entry.data_file.partition for entry in entries]
    ranges: list[tuple[bytes, bytes] | None] = []
    for at in range(len(partitions[0]) if partitions else 0):
        texts = [partition[at].encode() for partition in partitions if isinstance(partition[at], str)]
        ranges.append((min(texts), max(texts)) if texts else None)
    return ranges
