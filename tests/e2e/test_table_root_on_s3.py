"""Test a lakehouse in Redis with a table root on S3. Each storage has separate options."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner

from tests.lakes import lakes
from tests.operations.aging import Aging
from tests.operations.changes import append_rows, overwrite_rows
from tests.operations.copies import clean_up, rows
from tests.operations.table_roots import TableRoots, needed_paths, put_orphans, table_roots
from tests.servers.redis import RedisServer
from tests.servers.s3_server import S3Server
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.cli.app import trinitylake
from trinitylake_ops.errors import InvalidDefinitionError
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.storage import open_storage

__all__ = ["lakes", "table_roots"]

_SCHEMA = pa.schema([("id", pa.int64())])
_ROWS = pa.table({"id": [1, 2, 3]})


@dataclass
class TwoStorages:
    """The root in Redis, the table root on S3, and the options for both."""

    root: str
    table_root: str
    options: dict[str, str]
    server: S3Server

    def table_paths(self) -> set[str]:
        storage = open_storage(self.table_root, self.server.storage_options)
        return {file.path for file in storage.list()}


@pytest.fixture
def storages(redis_server: RedisServer, moto: S3Server) -> Iterator[TwoStorages]:
    root, table_root = redis_server.fresh_root(), moto.fresh_root("tables")
    options = {**redis_server.storage_options, **{f"s3.{name}": value for name, value in moto.storage_options.items()}}
    yield TwoStorages(root, table_root, options, moto)
    redis_server.delete_all(root)
    moto.delete_all(table_root)


def test_tables_are_written_read_and_verified_at_table_root(storages: TwoStorages, tmp_path: Path) -> None:
    lake = Lakehouse.create(storages.root, storages.options, table_root=storages.table_root)
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    table = catalog.create_table("ns.t", _SCHEMA)
    table.append(_ROWS)
    assert table.location().startswith(storages.table_root)
    assert len(storages.table_paths()) >= 5, "owner file, two metadata files, manifest, manifest list, data file"
    reopened_catalog = catalog_at(Lakehouse.open(storages.root, storages.options))
    assert reopened_catalog.load_table("ns.t").scan().to_arrow()["id"].to_pylist() == [1, 2, 3]
    assert operations.verify(lake, deep=True).findings == ()
    operations.plan_export(lake, "external", "full", target=str(tmp_path / "copy")).execute()
    storages.server.delete_all(storages.table_root)
    copy = catalog_at(Lakehouse.open(str(tmp_path / "copy")))
    assert copy.load_table("ns.t").scan().to_arrow()["id"].to_pylist() == [1, 2, 3]


def test_options_of_one_storage_do_not_reach_the_other(storages: TwoStorages) -> None:
    lake = Lakehouse.create(storages.root, storages.options, table_root=storages.table_root)
    catalog_at(lake).create_namespace("ns")
    wrong_options = {**storages.options, "s3.secret_access_key": "wrong", "s3.access_key_id": "wrong"}
    options_text = repr(Lakehouse.open(storages.root, wrong_options).storage_options)
    assert "'s3.secret_access_key': '***'" in options_text
    redis_options = {name: value for name, value in storages.options.items() if not name.startswith("s3.")}
    assert Lakehouse.open(storages.root, redis_options).snapshot().namespaces() == ["ns"]


def test_relocation_uses_options_of_table_root(storages: TwoStorages) -> None:
    lake = Lakehouse.create(storages.root, {**storages.options, "durability": "always"}, table_root=storages.table_root)
    catalog_at(lake).create_namespace("ns")
    catalog_at(lake).create_table("ns.t", _SCHEMA)
    assert operations.plan_relocation(lake).is_empty


def test_init_command_sets_table_root(storages: TwoStorages) -> None:
    arguments = [
        argument for name, value in storages.options.items() for argument in ("--storage-option", f"{name}={value}")
    ]
    command = ["--root", storages.root, *arguments]
    result = CliRunner().invoke(trinitylake, [*command, "init", "--table-root", storages.table_root, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["definition"]["table_root"] == storages.table_root
    rejected = CliRunner().invoke(trinitylake, [*command, "init", "--table-root", "relative"])
    assert isinstance(rejected.exception, InvalidDefinitionError)


def lakehouse_with_unneeded_files(storages: TwoStorages, table_roots: TableRoots) -> Aging:
    """Create a lakehouse with orphans, and with a table that has files that no version needs."""
    aging = table_roots.aging(
        open_storage(storages.root, storages.options), storages.options, table_root=storages.table_root
    )
    append_rows(aging.lake)
    overwrite_rows(aging.lake, "ns.t")
    put_orphans(aging, storages.table_root)
    return aging


def test_unneeded_files_are_deleted_at_table_root(storages: TwoStorages, table_roots: TableRoots) -> None:
    aging = lakehouse_with_unneeded_files(storages, table_roots)
    before = len(storages.table_paths())
    clean_up(aging)
    assert storages.table_paths() == needed_paths(aging.lake, storages.table_root)
    assert len(storages.table_paths()) < before
    assert list(aging.lake.storage.list("tables/")) == []
    report = operations.verify(aging.lake, deep=True)
    assert (report.findings, report.orphan_files) == ((), 0)


@pytest.mark.soak
def test_exports_restore_and_relocation_keep_tables_at_table_root(
    storages: TwoStorages, table_roots: TableRoots
) -> None:
    aging = lakehouse_with_unneeded_files(storages, table_roots)
    lake, expected = aging.lake, rows(aging.lake)
    operations.plan_export(lake, "internal", "full").execute()
    assert operations.verify_export(lake, "internal", deep=True).changed == ()
    append_rows(lake)
    operations.plan_restore(lake, "internal").execute()
    assert rows(lake) == expected
    operations.drop_export(lake, "internal")
    target = storages.server.fresh_root("new-tables")
    source = open_storage(storages.table_root, storages.server.storage_options)
    storage = open_storage(target, storages.server.storage_options)
    for info in list(source.list()):
        storage.write(info.path, source.read(info.path))
        source.delete(info.path)
    operations.plan_relocation(lake, target).execute()
    assert rows(lake) == expected
    assert operations.verify(lake, deep=True).findings == ()
    clean_up(aging)
    assert {info.path for info in storage.list()} == needed_paths(lake, target)
    storages.server.delete_all(target)
