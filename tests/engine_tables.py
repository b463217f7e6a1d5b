"""Tables like those of other engines: delete files, evolved schemas and specs, branches, tags, statistics.

pyiceberg's writers write everything, and the catalog commits it. pyiceberg does not write manifests of delete files, so
a subclass of its writer does. DuckDB and pyiceberg read these tables in tests.
"""

from __future__ import annotations

import io
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import orc
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat, ManifestEntry, ManifestEntryStatus, ManifestFile
from pyiceberg.table import Table, Transaction
from pyiceberg.table.snapshots import Operation, Summary
from pyiceberg.table.statistics import PartitionStatisticsFile, StatisticsFile
from pyiceberg.table.update import SetPartitionStatisticsUpdate, SetStatisticsUpdate
from pyiceberg.table.update.snapshot import _FastAppendFiles
from pyiceberg.transforms import IdentityTransform
from pyiceberg.typedef import EMPTY_DICT, Record

from trinitylake_ops import Lakehouse
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.write.compact import DeleteManifestWriter

PATH_ID, POS_ID = 2147483546, 2147483545


def of_id(name: str, kind: pa.DataType, number: int) -> pa.Field:
    return pa.field(name, kind, nullable=False, metadata={b"PARQUET:field_id": str(number).encode()})


@dataclass(frozen=True)
class EngineTable:
    """A managed table ``ns.<name>`` that another engine writes."""

    lake: Lakehouse
    name: str

    @property
    def loaded(self) -> Table:
        return catalog_at(self.lake).load_table(("ns", self.name))

    @property
    def data_files(self) -> list[str]:
        """The data files of the current snapshot, oldest first."""
        inspected = self.loaded.inspect.data_files()
        return sorted(inspected["file_path"].to_pylist())

    def append(self, rows: pa.Table) -> str:
        """Append rows as one file and return its path."""
        before = set(self.data_files) if self.loaded.current_snapshot() is not None else set()
        self.loaded.append(rows)
        (path,) = set(self.data_files) - before
        return path

    def delete_positions_of_spec(self, spec_id: int, positions: Mapping[str, Sequence[int]]) -> str:
        """Delete rows of unpartitioned data files of an older spec."""
        return self.delete_positions(positions, spec_id=spec_id)

    def delete_positions(
        self, positions: Mapping[str, Sequence[int]], suffix: str = "parquet", *, spec_id: int | None = None
    ) -> str:
        """Delete rows of data files by one position delete file. Return its path."""
        pairs = sorted((path, pos) for path, found in positions.items() for pos in found)
        schema = pa.schema([of_id("file_path", pa.string(), PATH_ID), of_id("pos", pa.int64(), POS_ID)])
        table = pa.table([[path for path, _ in pairs], [pos for _, pos in pairs]], schema=schema)
        data = {"parquet": _parquet, "avro": _avro_positions, "orc": _orc}[suffix](table)
        bounds = {PATH_ID: pairs[0][0].encode()}, {PATH_ID: pairs[-1][0].encode()}
        return self._delete(DataFileContent.POSITION_DELETES, data, suffix, len(pairs), bounds, spec_id=spec_id)

    def delete_equal(self, rows: pa.Table, partition: Record | None = None, suffix: str = "parquet") -> str:
        """Delete rows by an equality delete file with the table's column names. Return its path."""
        columns = {field.name: field.field_id for schema in self.loaded.metadata.schemas for field in schema.fields}
        ids = [columns[name] for name in rows.column_names]
        fields = [of_id(field.name, field.type, number) for field, number in zip(rows.schema, ids, strict=True)]
        data = _parquet(rows.cast(pa.schema([field.with_nullable(True) for field in fields])))
        kind = DataFileContent.EQUALITY_DELETES
        return self._delete(kind, data, suffix, len(rows), ({}, {}), equality_ids=ids, partition=partition)

    def _delete(
        self,
        content: DataFileContent,
        data: bytes,
        suffix: str,
        rows: int,
        bounds: tuple[Any, Any],
        *,
        equality_ids: list[int] | None = None,
        partition: Record | None = None,
        spec_id: int | None = None,
    ) -> str:
        table = self.loaded
        path = f"{table.location()}/data/{uuid.uuid4()}-deletes.{suffix}"
        self.lake.storage.create(path.removeprefix(self.lake.root), data)
        file = DataFile.from_args(
            content=content, file_path=path, file_format=FileFormat[suffix.upper()], partition=partition or Record(),
            record_count=rows, file_size_in_bytes=len(data), column_sizes={}, value_counts={}, null_value_counts={},
            nan_value_counts={}, lower_bounds=bounds[0], upper_bounds=bounds[1], key_metadata=None, split_offsets=[4],
            sort_order_id=None, equality_ids=equality_ids,
        )  # fmt: skip
        file.spec_id = table.metadata.default_spec_id if spec_id is None else spec_id
        with table.transaction() as change, _RowDelta(change, [file]):
            pass
        return path

    def set_statistics(self) -> tuple[str, str]:
        """Set a statistics file and a partition statistics file of the current snapshot. Return their paths."""
        found = self.statistics_files()
        self.set_table_statistics(found)
        self.set_partition_statistics(found)
        return found[0][0], found[1][0]

    def statistics_files(self) -> list[tuple[str, int]]:
        """Write a statistics file and a partition statistics file. Return their paths and sizes."""
        found = []
        for suffix in ("puffin", "parquet"):
            path, data = f"{self.loaded.location()}/metadata/{uuid.uuid4()}.stats.{suffix}", _statistics(suffix)
            self.lake.storage.create(path.removeprefix(self.lake.root), data)
            found.append((path, len(data)))
        return found

    def set_table_statistics(self, files: Sequence[tuple[str, int]]) -> None:
        table, (path, size_bytes) = self.loaded, files[0]
        said = {"file-footer-size-in-bytes": 28, "blob-metadata": []}
        file = StatisticsFile.model_validate({**_named(table, path, size_bytes), **said})
        table.catalog.commit_table(table, (), (SetStatisticsUpdate(statistics=file),))

    def set_partition_statistics(self, files: Sequence[tuple[str, int]]) -> None:
        table, (path, size_bytes) = self.loaded, files[1]
        file = PartitionStatisticsFile.model_validate(_named(table, path, size_bytes))
        table.catalog.commit_table(table, (), (SetPartitionStatisticsUpdate(partition_statistics=file),))

    def ids(self, version: int | str | None = None) -> list[int]:
        """Return the ids that PyIceberg reads. It does not apply equality deletes."""
        with catalog_at(self.lake, version) as catalog:
            return sorted(catalog.load_table(("ns", self.name)).scan().to_arrow()["id"].to_pylist())


class _RowDelta(_FastAppendFiles):
    """A snapshot that adds delete files."""

    def __init__(self, change: Transaction, deletes: Sequence[DataFile]):
        super().__init__(operation=Operation.OVERWRITE, transaction=change, io=change._table.io)
        self._deletes = list(deletes)

    def _process_manifests(self, manifests: list[ManifestFile]) -> list[ManifestFile]:
        spec = self.spec(self._deletes[0].spec_id)
        output = self.new_manifest_output()
        with DeleteManifestWriter(spec, self.schema(), output, self._snapshot_id, self._compression) as writer:
            for file in self._deletes:
                writer.add(
                    ManifestEntry.from_args(
                        status=ManifestEntryStatus.ADDED,
                        snapshot_id=self._snapshot_id,
                        sequence_number=None,
                        file_sequence_number=None,
                        data_file=file,
                    )
                )
        return [*manifests, writer.to_manifest_file()]

    def _summary(self, snapshot_properties: dict[str, str] = EMPTY_DICT) -> Summary:
        self._added_data_files = self._deletes  # so that they are counted
        try:
            return super()._summary(snapshot_properties)
        finally:
            self._added_data_files = []


def make_table(lake: Lakehouse, name: str, schema: pa.Schema | None = None) -> EngineTable:
    """Create ``ns.<name>`` with the columns ``id`` and ``place``."""
    with catalog_at(lake) as catalog:
        catalog.create_namespace_if_not_exists("ns")
        catalog.create_table(("ns", name), schema or rows().schema)
    return EngineTable(lake, name)


def rows(*ids: int | None, place: str | None = "a") -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64()), "place": pa.array([place] * len(ids), pa.string())})


def _parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, store_schema=False)
    return sink.getvalue()


def _orc(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    orc.write_table(table, sink)
    return sink.getvalue()


def _avro_positions(table: pa.Table) -> bytes:
    fields = [
        {"name": "file_path", "type": "string", "field-id": PATH_ID},
        {"name": "pos", "type": "long", "field-id": POS_ID},
    ]
    schema = {"type": "record", "name": "position_deletes", "fields": fields}
    sink = io.BytesIO()
    fastavro.writer(sink, schema, table.to_pylist(), codec="deflate")
    return sink.getvalue()


def _named(table: Table, path: str, size_bytes: int) -> dict[str, Any]:
    snapshot_id = table.metadata.current_snapshot_id
    return {"snapshot-id": snapshot_id, "statistics-path": path, "file-size-in-bytes": size_bytes}


def _statistics(suffix: str) -> bytes:
    if suffix == "parquet":
        return _parquet(pa.table({"spec_id": pa.array([0], pa.int32()), "data_file_count": pa.array([1], pa.int32())}))
    footer = json.dumps({"blobs": [], "properties": {}}).encode()
    return b"PFA1PFA1" + footer + len(footer).to_bytes(4, "little") + bytes(4) + b"PFA1"


#: The remaining rows (id, place) of each table.
POSITIONS = [(2, "a"), (3, "a"), (4, "a")]
EQUALITY = [(1, "a"), (1, "b"), (2, "a"), (3, "a"), (9, "b")]
EVOLVED = [(2, "a"), (4, "b"), (5, "b")]


def with_positions(lake: Lakehouse, suffix: str = "parquet", name: str = "positions") -> EngineTable:
    """Write two files of three rows. One delete file deletes a row of each, a second one another row of the second."""
    table = make_table(lake, name)
    first, second = table.append(rows(1, 2, 3)), table.append(rows(4, 5, 6))
    table.delete_positions({first: [0], second: [1]}, suffix)
    table.delete_positions({second: [2]}, suffix)
    return table


def with_equality(lake: Lakehouse) -> EngineTable:
    """Delete rows by value, including null, and write one of them again."""
    table = make_table(lake, "equality")
    table.append(rows(1, 2, 3, None))
    table.append(rows(1, 9, place="b"))
    table.delete_equal(pa.table({"place": ["a", "a"], "id": pa.array([1, None], pa.int64())}))
    table.append(rows(1))
    return table


def with_statistics(lake: Lakehouse) -> EngineTable:
    """Create a table with statistics files, a branch and a tag of earlier snapshots, and an audit snapshot."""
    table = make_table(lake, "statistics")
    table.append(rows(1))
    first = table.loaded.current_snapshot()
    assert first is not None
    table.set_statistics()
    table.loaded.manage_snapshots().create_tag(first.snapshot_id, "begin").commit()
    table.loaded.append(rows(7), branch=None, snapshot_properties={"wap.id": "audit-7"})
    table.loaded.manage_snapshots().create_branch(first.snapshot_id, "dev").commit()
    table.loaded.append(rows(8), branch="dev")
    table.append(rows(2))
    table.append(rows(3))
    table.set_statistics()
    return table


def with_evolution(lake: Lakehouse) -> EngineTable:
    """Write with two partition specs, schemas and sort orders, and delete by a column that is dropped later."""
    table = make_table(lake, "evolved", rows().append_column("old", pa.array([], pa.int64())).schema)
    of_old = table.append(rows(1, 2, 3).append_column("old", pa.array([10, 20, 30], pa.int64())))
    table.delete_equal(pa.table({"old": pa.array([10], pa.int64())}))
    with table.loaded.update_spec() as spec:
        spec.add_identity("place")
    with table.loaded.update_schema() as schema:
        schema.delete_column("old")
        schema.rename_column("id", "number")
    with table.loaded.update_schema() as schema:
        schema.rename_column("number", "id")
    with table.loaded.update_sort_order() as order:
        order.asc("id", IdentityTransform())
    table.append(rows(6, 5, 4, place="b"))
    table.delete_equal(pa.table({"id": pa.array([6], pa.int64())}), partition=Record("b"))
    table.delete_positions_of_spec(0, {of_old: [2]})
    return table


KINDS: dict[str, Callable[[Lakehouse], EngineTable]] = {
    "positions": with_positions,
    "equality": with_equality,
    "statistics": with_statistics,
    "evolved": with_evolution,
}
