"""Requests and times of ``space`` on a large lakehouse: the first run, and runs after commits.

Run from the project's root: ``.venv/bin/python -m benchmarks.space``. It writes ``benchmarks/results/space.md``.
Requests, round trips and bytes do not depend on the machine. The catalog's files are on local disk. The files of tables
are Iceberg files that the storage generates when they are read, to save writing half a million files.
"""

from __future__ import annotations

import functools
import json
import random
import re
import sys
import tempfile
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO

from pyiceberg.io import OutputFile, OutputStream
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    write_manifest,
    write_manifest_list,
)
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import new_table_metadata
from pyiceberg.table.snapshots import Operation, Snapshot, Summary
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER
from pyiceberg.typedef import Record
from pyiceberg.types import LongType, NestedField

from benchmarks.report import table, write_result
from benchmarks.scale import N_TABLES, N_VERSIONS, run
from trinitylake_ops import Lakehouse, TableDef
from trinitylake_ops.storage import LocalStorage, Storage, StorageWrapper

N_NAMESPACES = 100
SIZES = ((1_000, 100), (10_000, 1_000), (N_TABLES, N_VERSIONS))
DELAY_SECONDS = 0.005
_BYTES_PER_FILE = 4_000_000
_TEMPLATE_ID = "00000000-0000-4000-8000-000000000000"
_TABLE_FILE = re.compile(
    r"tables/([0-9a-f-]{36})/metadata/(?:(\d{5})-\1\.metadata\.json|(snap|manifest)-(\d{5})-\1\.avro)"
)


def metadata_path(table_id: str, n_appends: int) -> str:
    """Return the path of the metadata of a table after some appends of one file."""
    return f"tables/{table_id}/metadata/{n_appends:05}-{table_id}.metadata.json"


class _Output(OutputFile):
    """A file in memory."""

    def __init__(self, location: str):
        super().__init__(location)
        self.stream = _Stream()

    def __len__(self) -> int:
        return len(self.stream.getvalue())

    def exists(self) -> bool:
        return False

    def to_input_file(self) -> PyArrowFileIO:
        raise NotImplementedError

    def create(self, overwrite: bool = False) -> OutputStream:
        del overwrite
        return self.stream


class _Stream(BytesIO):
    """A stream whose content stays readable after it is closed."""

    content = b""

    def close(self) -> None:
        self.content = self.getvalue()


@dataclass(frozen=True)
class Templates:
    """The files of a table with a certain id at a certain root, by which those of other tables are made."""

    root: str

    def _uri(self, name: str) -> str:
        return f"{self.root}tables/{_TEMPLATE_ID}/{name}-{_TEMPLATE_ID}"

    @functools.cache  # noqa: B019 - there is one per process
    def manifest(self, number: int) -> tuple[bytes, ManifestFile]:
        """Return the manifest that an append added, and its entry in manifest lists."""
        schema = Schema(NestedField(1, "id", LongType(), required=False))
        output = _Output(f"{self._uri(f'metadata/manifest-{number:05}')}.avro")
        file = DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=f"{self._uri(f'data/{number:05}')}.parquet",
            file_format=FileFormat.PARQUET,
            partition=Record(),
            record_count=1_000,
            file_size_in_bytes=_BYTES_PER_FILE,
        )
        entry = ManifestEntry.from_args(
            status=ManifestEntryStatus.ADDED, snapshot_id=number + 1, sequence_number=number + 1, data_file=file
        )
        with write_manifest(2, UNPARTITIONED_PARTITION_SPEC, schema, output, number + 1, "null") as writer:
            writer.add_entry(entry)
        listed = writer.to_manifest_file()
        listed.sequence_number = listed.min_sequence_number = number + 1
        data = output.stream.content
        return data, listed

    @functools.cache  # noqa: B019
    def manifest_list(self, number: int) -> bytes:
        """Return the manifest list of a snapshot, which names the manifests of all appends so far."""
        output = _Output(f"{self._uri(f'metadata/snap-{number:05}')}.avro")
        parent = number if number else None
        with write_manifest_list(2, output, number + 1, parent, number + 1, "null") as writer:
            writer.add_manifests([self.manifest(earlier)[1] for earlier in range(number + 1)])
        return output.stream.content

    @functools.cache  # noqa: B019
    def metadata(self, n_appends: int) -> bytes:
        """Return the metadata file after some appends."""
        metadata = new_table_metadata(
            schema=Schema(NestedField(1, "id", LongType(), required=False)),
            partition_spec=UNPARTITIONED_PARTITION_SPEC,
            sort_order=UNSORTED_SORT_ORDER,
            location=f"{self.root}tables/{_TEMPLATE_ID}",
            table_uuid=uuid.UUID(_TEMPLATE_ID),
        )
        snapshots = [
            Snapshot(
                snapshot_id=number + 1,
                parent_snapshot_id=number if number else None,
                sequence_number=number + 1,
                timestamp_ms=1_700_000_000_000 + number,
                manifest_list=f"{self._uri(f'metadata/snap-{number:05}')}.avro",
                summary=Summary(Operation.APPEND, **{"total-data-files": str(number + 1)}),
                schema_id=0,
            )
            for number in range(n_appends)
        ]
        changed = metadata.model_copy(
            update={"snapshots": snapshots, "current_snapshot_id": n_appends, "last_sequence_number": n_appends}
        )
        return changed.model_dump_json(exclude_none=True).encode()

    def file(self, path: str) -> bytes | None:
        """Return the content of a table's file, or None for another path."""
        match = _TABLE_FILE.fullmatch(path)
        if match is None:
            return None
        if match[2] is not None:
            data = self.metadata(int(match[2]))
        elif match[3] == "snap":
            data = self.manifest_list(int(match[4]))
        else:
            data = self.manifest(int(match[4]))[0]
        return data.replace(_TEMPLATE_ID.encode(), match[1].encode())


class GeneratedTables(StorageWrapper):
    """A storage that generates the metadata files, manifest lists and manifests of tables."""

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self._templates = Templates(inner.root)

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        data = self._templates.file(path) if path.startswith("tables/") else None
        if data is None:
            return self.inner.read(path, offset=offset, length=length, limit_bytes=limit_bytes)
        return data[offset:] if length is None else data[offset : offset + length]


def _definition(table_id: str, n_appends: int) -> TableDef:
    return TableDef(id=table_id, format_properties={"metadata_location": metadata_path(table_id, n_appends)})


def _table_id(number: int) -> str:
    return str(uuid.UUID(int=number + 1, version=4))


def _name(number: int, n_tables: int) -> tuple[str, str]:
    return f"ns{number * N_NAMESPACES // n_tables:03}", f"t{number:07}"


def append(lake: Lakehouse, numbers: Iterable[int], n_tables: int) -> None:
    """Append a file to tables in one commit."""
    with lake.transaction() as txn:
        for number in numbers:
            before = txn.table(*_name(number, n_tables)).format_properties["metadata_location"]
            n_appends = int(before.rpartition("/")[2][:5]) + 1
            txn.alter_table(*_name(number, n_tables), _definition(_table_id(number), n_appends))


def generate(root: str, n_tables: int, n_versions: int) -> None:
    """Create the lakehouse: one commit of all tables, then commits of one to five random ones."""
    lake = Lakehouse.create(root, storage=GeneratedTables(LocalStorage(root, fsync=False)))
    with lake.transaction() as txn:
        for namespace in sorted({_name(number, n_tables)[0] for number in range(n_tables)}):
            txn.create_namespace(namespace)
        for number in range(n_tables):
            txn.create_table(*_name(number, n_tables), _definition(_table_id(number), 1))
    generator = random.Random(0)
    while lake.latest_version() < n_versions - 1:
        append(lake, {generator.randrange(n_tables) for _ in range(generator.randint(1, 5))}, n_tables)


#: Runs ``space`` in a separate process, and prints its cost.
_SPACE = """
import json
from benchmarks import lakes
from benchmarks.space import DELAY_SECONDS, GeneratedTables
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.storage import LocalStorage
from tests.faults import FaultyStorage
storage = GeneratedTables(LocalStorage(root, fsync=False))
storage = lakes.SlowStorage(storage, DELAY_SECONDS) if {is_slow} else FaultyStorage(storage, concurrency=32)
report = operations.measure_space(Lakehouse(storage, cache="off"), read_only={read_only})
cost = report.cost
print(json.dumps(dict(requests=cost.total_requests, rounds=cost.rounds, read=cost.bytes_read,
    written=cost.bytes_written, seconds=cost.duration_ms / 1000, tables_read=report.tables_read,
    headline=report.headline, tables=report.n_tables, files=report.total.files)))
"""

#: Appends to tables in one commit.
_APPEND = """
from benchmarks.space import GeneratedTables, append
from trinitylake_ops import Lakehouse
from trinitylake_ops.storage import LocalStorage
lake = Lakehouse(GeneratedTables(LocalStorage(root, fsync=False)))
append(lake, {numbers}, {n_tables})
"""


@dataclass(frozen=True)
class Measured:
    """The cost of one run."""

    step: str
    cost: dict[str, float]
    peak_mb: float

    def cells(self) -> Sequence[object]:
        """Return the row of the run."""
        cost = self.cost
        return (
            self.step,
            f"{cost['requests']:,}",
            f"{cost['rounds']:,}",
            f"{cost['tables_read']:,}",
            f"{cost['read'] / 1e6:,.1f}",
            f"{cost['written'] / 1e6:,.1f}",
            f"{cost['seconds']:,.1f}",
            f"{self.peak_mb:,.0f}",
        )


def measure(root: str, step: str, *, is_slow: bool = False, read_only: bool = False) -> Measured:
    """Run ``space`` in a new process."""
    code = _SPACE.replace("{is_slow}", str(is_slow)).replace("{read_only}", str(read_only))
    output, _, peak_mb = run(code, root)
    cost = json.loads(output)
    print(step, cost, flush=True)
    return Measured(step, cost, peak_mb)


def measure_all(folder: str, n_tables: int, n_versions: int) -> list[str]:
    """Measure all steps on a lakehouse of one size."""
    root = f"file://{folder}/{n_tables}/"
    generate(root, n_tables, n_versions)
    rows = [measure(root, "the first run"), measure(root, "nothing committed since")]
    for n_changed in (1, 5, 100):
        numbers = [n_changed + number * (n_tables // 103) for number in range(n_changed)]
        code = _APPEND.replace("{numbers}", str(numbers)).replace("{n_tables}", str(n_tables))
        run(code, root)
        rows.append(measure(root, f"after a commit of {n_changed} table{'s' if n_changed > 1 else ''}"))
    delay = f"{DELAY_SECONDS * 1000:.0f} ms"
    rows.append(measure(root, f"nothing committed since, {delay} for each request", is_slow=True))
    header = ["run", "requests", "round trips", "tables read", "MB read", "MB written", "seconds", "peak MB"]
    return [
        f"## {n_tables:,} tables, {n_versions:,} versions",
        "",
        f"{rows[0].cost['files']:,} files are counted.",
        "",
        *table(header, (row.cells() for row in rows)),
        "",
    ]


def main() -> None:
    """Generate, measure, print and write the results."""
    sizes = SIZES[: int(sys.argv[1])] if len(sys.argv) > 1 else SIZES
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="trinitylake-bench-") as folder:
        for n_tables, n_versions in sizes:
            lines += measure_all(folder, n_tables, n_versions)
    write_result(
        "space",
        [
            "# Space",
            "",
            "Made by `benchmarks/space.py`, on local disk, with 32 parallel requests. Each run is a separate process"
            " that has nothing in memory. Each version after the first appends a file to one to five tables. `space`"
            " reads all tables once, and afterwards only what was committed since. Times are those of a busy machine"
            " with two cores.",
            "",
            *lines,
        ],
    )


if __name__ == "__main__":
    main()
