"""Small commits and damage for tests of operations."""

from __future__ import annotations

import uuid

import pyarrow as pa

from tests.lakes import table
from trinitylake_ops import Lakehouse
from trinitylake_ops.format.definitions import ExpirationBatch, LakehouseDef
from trinitylake_ops.format.limits import smallest_node_file_limit_bytes
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.storage import Storage

ROWS = pa.table({"id": pa.array([1, 2, 3], pa.int64())})


def create(lake: Lakehouse, namespace: str, *tables: str) -> int:
    """Commit a new namespace with tables."""
    with lake.transaction(message=namespace) as txn:
        txn.create_namespace(namespace)
        for name in tables:
            txn.create_table(namespace, name, table())
    assert txn.committed_version is not None
    return txn.committed_version


def alter(lake: Lakehouse, namespace: str, name: str) -> int:
    with lake.transaction() as txn:
        txn.alter_table(namespace, name, table(stamp=str(uuid.uuid4())))
    assert txn.committed_version is not None
    return txn.committed_version


def drop(lake: Lakehouse, namespace: str, *tables: str) -> int:
    """Drop tables, or the namespace with all of its tables."""
    with lake.transaction() as txn:
        for name in tables:
            txn.drop_table(namespace, name)
        if not tables:
            txn.drop_namespace(namespace, cascade=True)
    assert txn.committed_version is not None
    return txn.committed_version


def append_rows(lake: Lakehouse, name: str = "ns.t") -> int:
    """Append rows to a managed table. Create the table and its namespace if they are missing."""
    with catalog_at(lake) as catalog:
        catalog.create_namespace_if_not_exists(name.split(".", maxsplit=1)[0])
        catalog.create_table_if_not_exists(name, ROWS.schema).append(ROWS)
    return lake.latest_version()


def overwrite_rows(lake: Lakehouse, *names: str) -> None:
    """Append to managed tables and overwrite them twice, so that the latest version uses few of their files."""
    with catalog_at(lake) as catalog:
        for name in names:
            table = catalog.create_table_if_not_exists(name, ROWS.schema)
            table.append(ROWS)
            for _ in range(2):
                table.overwrite(ROWS)


def expire(lake: Lakehouse, versions: str) -> None:
    """Record versions as expired, like an expire commit."""
    batch = ExpirationBatch(id=str(uuid.uuid4()), versions=versions)
    lake.alter_definition(expirations=(*lake.snapshot().definition.expirations, batch))


def small_sizes(order: int) -> dict[str, int]:
    """Return settings with small nodes, so that small lakehouses have deep trees."""
    sizes = {"namespace_name_max_size_bytes": 8, "table_name_max_size_bytes": 8}
    limit_bytes = smallest_node_file_limit_bytes(LakehouseDef(id="", order=order, **sizes))
    return {**sizes, "node_file_max_size_bytes": limit_bytes}


def node_bytes(columns: dict[str, list[str | None]]) -> bytes:
    """Encode any rows, valid or not, as a node file."""
    schema = pa.schema([("key", pa.utf8()), ("pvalue", pa.utf8()), ("pnode", pa.utf8())])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch(columns, schema=schema))
    return bytes(sink.getvalue())


def node_columns(data: bytes) -> dict[str, list[str | None]]:
    """Return the rows of a node file."""
    columns: dict[str, list[str | None]] = pa.ipc.open_file(data).read_all().to_pydict()
    return columns


def flip(storage: Storage, path: str, position: int) -> None:
    """Invert one byte of a file."""
    data = bytearray(storage.read(path))
    data[position] ^= 0xFF
    storage.write(path, bytes(data))


def truncate(storage: Storage, path: str, size_bytes: int | None = None) -> None:
    """Truncate a file to ``size_bytes``, or to half of its size."""
    data = storage.read(path)
    storage.write(path, data[: len(data) // 2 if size_bytes is None else size_bytes])


def make_untidy(lake: Lakehouse) -> None:
    """Commit changes that result in a tree of several levels with sparse nodes and buffered messages."""
    for namespace in ("a", "b", "c"):
        create(lake, namespace, *(f"t{number}" for number in range(12)))
    with lake.transaction() as txn:
        for number in range(10):
            txn.drop_table("b", f"t{number}")
            txn.alter_table("c", f"t{number}", table(changed="yes"))


def content(lake: Lakehouse) -> dict[str, bytes]:
    """Return path -> bytes of all files of a lakehouse."""
    lake.close()
    return {info.path: lake.storage.read(info.path) for info in lake.storage.list()}
