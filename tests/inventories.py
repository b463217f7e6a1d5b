"""Write inventories in the format of Amazon S3."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote_plus

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import orc

COLUMNS = "Bucket, Key, VersionId, IsLatest, IsDeleteMarker, Size, LastModifiedDate"


def inventory_file(keys: Sequence[str], file_format: str = "CSV") -> bytes:
    """Return an inventory file with these keys. Sizes and times are implausible, because readers must ignore them."""
    if file_format == "CSV":
        text = io.StringIO()
        rows = [("bucket", quote_plus(key), "", "true", "false", 1, "1970-01-01T00:00:00.000Z") for key in keys]
        csv.writer(text, quoting=csv.QUOTE_ALL).writerows(rows)
        return gzip.compress(text.getvalue().encode())
    return columnar_file(pa.array(keys, pa.utf8()), file_format)


def columnar_file(keys: pa.Array, file_format: str) -> bytes:
    """Return an inventory file in Parquet or ORC with these keys, which may be of any type."""
    table = pa.table({"bucket": ["bucket"] * len(keys), "key": keys, "size": [1] * len(keys)})
    sink = pa.BufferOutputStream()
    (pq.write_table if file_format == "Parquet" else orc.write_table)(table, sink)
    return bytes(sink.getvalue())


def manifest(source: str, keys: Sequence[str], file_format: str = "CSV", created_at_ms: int = 0) -> bytes:
    """Return the manifest of a bucket's inventory that consists of the files with these keys."""
    content = {
        "sourceBucket": source,
        "destinationBucket": "arn:aws:s3:::inventories",
        "version": "2016-11-30",
        "creationTimestamp": str(created_at_ms),
        "fileFormat": file_format,
        "fileSchema": COLUMNS if file_format == "CSV" else "message s3.inventory { required binary key (STRING); }",
        "files": [{"key": key, "size": 1, "MD5checksum": "0"} for key in keys],
    }
    return json.dumps(content).encode()


def write_inventory(
    folder: Path, source: str, keys: Sequence[str], file_format: str = "CSV", files: int = 2, created_at_ms: int = 0
) -> str:
    """Write an inventory of several files into a folder and return the path of its manifest."""
    (folder / "data").mkdir(parents=True)
    names = [f"data/{number}" for number in range(files)]
    for number, name in enumerate(names):
        (folder / name).write_bytes(inventory_file(keys[number::files], file_format))
    (folder / "manifest.json").write_bytes(manifest(source, names, file_format, created_at_ms))
    return str(folder / "manifest.json")
