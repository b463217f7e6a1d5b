"""Tables as other engines write them: with delete files, evolved schemas and specs, branches, tags and statistics.

The writers of PyIceberg write all files, and the catalog commits them. PyIceberg does not write manifests of delete
files, so a subclass of its manifest writer does. Tests read these tables with DuckDB and PyIceberg.
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


def field_with_id(name: str, data_type: pa.DataType, field_id: int) -> pa.Field:
    return pa.field(name, data_type, nullable=False, metadata={b"PARQUET:field_id": str(field_id).encode()})


@dataclass(frozen=True)
class EngineTable:
    """A managed table ``ns.<name>`` that is written like a table of another engine."""

    lake: Lakehouse
    name: str

    @property
    def loaded(self) -> Table:
        return catalog_at(self.lake).load_table(("ns", self.name))

    @property
    def data_files(self) -> list[str]:
        """The paths of the data files of the current snapshot, sorted."""
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
        pairs = sorted((path, pos) for path, file_positions in positions.items() for pos in file_positions)
        schema = pa.schema([field_with_id("file_path", pa.string(), PATH_ID), field_with_id("pos", pa.int64(), POS_ID)])
        table = pa.table([[path for path, _ in pairs], [pos for _, pos in pairs]], schema=schema)
        data = {"parquet": _parquet, "avro": _avro_positions, "orc": _orc}[suffix](table)
        bounds = {PATH_ID: pairs[0][0].encode()}, {PATH_ID: pairs[-1][0].encode()}
        return self._delete(DataFileContent.POSITION_DELETES, data, suffix, len(pairs), bounds, spec_id=spec_id)

    def delete_equal(self, rows: pa.Table, partition: Record | None = None, suffix: str = "parquet") -> str:
        """Delete rows by an equality delete file with the table's column names. Return its path."""
        columns = {field.name: field.field_id for schema in self.loaded.metadata.schemas for field in schema.fields}
        ids = [columns[name] for name in rows.column_names]
        fields = [
            field_with_id(field.name, field.type, field_id) for field, field_id in zip(rows.schema, ids, strict=True)
        ]
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
        files = self.statistics_files()
        self.set_table_statistics(files)
        self.set_partition_statistics(files)
        return files[0][0], files[1][0]

    def statistics_files(self) -> list[tuple[str, int]]:
        """Write a statistics file and a partition statistics file. Return their paths and sizes."""
        files = []
        for suffix in ("puffin", "parquet"):
            path, data = f"{self.loaded.location()}/metadata/{uuid.uuid4()}.stats.{suffix}", _statistics(suffix)
            self.lake.storage.create(path.removeprefix(self.lake.root), data)
            files.append((path, len(data)))
        return files

    def set_table_statistics(self, files: Sequence[tuple[str, int]]) -> None:
        table, (path, size_bytes) = self.loaded, files[0]
        puffin_fields = {"file-footer-size-in-bytes": 28, "blob-metadata": []}
        file = StatisticsFile.model_validate({**_statistics_entry(table, path, size_bytes), **puffin_fields})
        table.catalog.commit_table(table, (), (SetStatisticsUpdate(statistics=file),))

    def set_partition_statistics(self, files: Sequence[tuple[str, int]]) -> None:
        table, (path, size_bytes) = self.loaded, files[1]
        file = PartitionStatisticsFile.model_validate(_statistics_entry(table, path, size_bytes))
        table.catalog.commit_table(table, (), (SetPartitionStatisticsUpdate(partition_statistics=file),))

    def ids(self, version: int | str | None = None) -> list[int]:
        """Return the ids that PyIceberg reads, without applying equality deletes, which it does not support."""
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
        self._added_data_files = self._deletes  # so that the summary counts them
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


def _statistics_entry(table: Table, path: str, size_bytes: int) -> dict[str, Any]:
    snapshot_id = table.metadata.current_snapshot_id
    return {"snapshot-id": snapshot_id, "statistics-path": path, "file-size-in-bytes": size_bytes}


def _statistics(suffix: str) -> bytes:
    if suffix == "parquet":
        return _parquet(pa.table({"spec_id": pa.array([0], pa.int32()), "data_file_count": pa.array([1], pa.int32())}))
    footer = json.dumps({"blobs": [], "properties": {}}).encode()
    return b"PFA1PFA1" + footer + len(footer).to_bytes(4, "little") + bytes(4) + b"PFA1"


#: The remaining rows of each table, as (id, place).
POSITIONS = [(2, "a"), (3, "a"), (4, "a")]
EQUALITY = [(1, "a"), (1, "b"), (2, "a"), (3, "a"), (9, "b")]
EVOLVED = [(2, "a"), (4, "b"), (5, "b")]


def with_positions(lake: Lakehouse, suffix: str = "parquet", name: str = "positions") -> EngineTable:
    """Write two data files of three rows and two position delete files.

    The first delete file deletes one row of each data file, and the second one deletes another row of the second file.
    """
    table = make_table(lake, name)
    first, second = table.append(rows(1, 2, 3)), table.append(rows(4, 5, 6))
    table.delete_positions({first: [0], second: [1]}, suffix)
    table.delete_positions({second: [2]}, suffix)
    return table


def with_equality(lake: Lakehouse) -> EngineTable:
    """Delete rows by value, including a null value, and write one of them again."""
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
    """Write with several partition specs, schemas and sort orders, and delete by a column that is dropped later."""
    table = make_table(lake, "evolved", rows().append_column("old", pa.array([], pa.int64())).schema)
    old_file = table.append(rows(1, 2, 3).append_column("old", pa.array([10, 20, 30], pa.int64())))
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
    table.delete_positions_of_spec(0, {old_file: [2]})
    return table


KINDS: dict[str, Callable[[Lakehouse], EngineTable]] = {
    "positions": with_positions,
    "equality": with_equality,
    "statistics": with_statistics,
    "evolved": with_evolution,
}
