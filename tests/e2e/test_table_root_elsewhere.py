"""A catalog in Redis whose tables stand on S3: each storage has options of its own."""

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
class Places:
    """The root in Redis, that of the tables on S3, and the options that reach both."""

    root: str
    table_root: str
    options: dict[str, str]
    server: S3Server

    def on_s3(self) -> set[str]:
        storage = open_storage(self.table_root, self.server.storage_options)
        return {file.path for file in storage.list()}


@pytest.fixture
def places(redis_server: RedisServer, moto: S3Server) -> Iterator[Places]:
    root, table_root = redis_server.fresh_root(), moto.fresh_root("tables")
    options = {**redis_server.storage_options, **{f"s3.{name}": value for name, value in moto.storage_options.items()}}
    yield Places(root, table_root, options, moto)
    redis_server.delete_all(root)
    moto.delete_all(table_root)


def test_tables_are_written_read_and_verified_there(places: Places, tmp_path: Path) -> None:
    lake = Lakehouse.create(places.root, places.options, table_root=places.table_root)
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    table = catalog.create_table("ns.t", _SCHEMA)
    table.append(_ROWS)
    assert table.location().startswith(places.table_root)
    assert len(places.on_s3()) >= 5, "owner file, two of metadata, manifest, manifest list, data"
    again = catalog_at(Lakehouse.open(places.root, places.options))
    assert again.load_table("ns.t").scan().to_arrow()["id"].to_pylist() == [1, 2, 3]
    assert operations.verify(lake, deep=True).findings == ()
    operations.plan_export(lake, "away", "full", target=str(tmp_path / "copy")).execute()
    places.server.delete_all(places.table_root)
    copy = catalog_at(Lakehouse.open(str(tmp_path / "copy")))
    assert copy.load_table("ns.t").scan().to_arrow()["id"].to_pylist() == [1, 2, 3]


def test_the_options_of_one_storage_do_not_reach_the_other(places: Places) -> None:
    lake = Lakehouse.create(places.root, places.options, table_root=places.table_root)
    catalog_at(lake).create_namespace("ns")
    wrong = {**places.options, "s3.secret_access_key": "wrong", "s3.access_key_id": "wrong"}
    shown = repr(Lakehouse.open(places.root, wrong).storage_options)
    assert "'s3.secret_access_key': '***'" in shown
    plain = {name: value for name, value in places.options.items() if not name.startswith("s3.")}
    assert Lakehouse.open(places.root, plain).snapshot().namespaces() == ["ns"]


def test_a_relocation_asks_at_the_table_root_with_its_own_options(places: Places) -> None:
    lake = Lakehouse.create(places.root, {**places.options, "durability": "always"}, table_root=places.table_root)
    catalog_at(lake).create_namespace("ns")
    catalog_at(lake).create_table("ns.t", _SCHEMA)
    assert operations.plan_relocation(lake).is_empty


def test_the_command_line_sets_it(places: Places) -> None:
    given = [word for name, value in places.options.items() for word in ("--storage-option", f"{name}={value}")]
    command = ["--root", places.root, *given]
    done = CliRunner().invoke(trinitylake, [*command, "init", "--table-root", places.table_root, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["definition"]["table_root"] == places.table_root
    refused = CliRunner().invoke(trinitylake, [*command, "init", "--table-root", "nowhere"])
    assert isinstance(refused.exception, InvalidDefinitionError)


def grown(places: Places, table_roots: TableRoots) -> Aging:
    """Return a lakehouse whose table has files that no version needs any more, and orphans."""
    made = table_roots.aging(open_storage(places.root, places.options), places.options, table_root=places.table_root)
    append_rows(made.lake)
    overwrite_rows(made.lake, "ns.t")
    put_orphans(made, places.table_root)
    return made


def test_what_nothing_needs_is_deleted_there(places: Places, table_roots: TableRoots) -> None:
    aging = grown(places, table_roots)
    before = len(places.on_s3())
    clean_up(aging)
    assert places.on_s3() == needed_paths(aging.lake, places.table_root)
    assert len(places.on_s3()) < before
    assert list(aging.lake.storage.list("tables/")) == []
    report = operations.verify(aging.lake, deep=True)
    assert (report.findings, report.orphan_files) == ((), 0)


@pytest.mark.soak
def test_exports_restores_and_relocation_keep_tables_there(places: Places, table_roots: TableRoots) -> None:
    aging = grown(places, table_roots)
    lake, expected = aging.lake, rows(aging.lake)
    operations.plan_export(lake, "here", "full").execute()
    assert operations.verify_export(lake, "here", deep=True).changed == ()
    append_rows(lake)
    operations.plan_restore(lake, "here").execute()
    assert rows(lake) == expected
    operations.drop_export(lake, "here")
    target = places.server.fresh_root("new-tables")
    source = open_storage(places.table_root, places.server.storage_options)
    storage = open_storage(target, places.server.storage_options)
    for info in list(source.list()):
        storage.write(info.path, source.read(info.path))
        source.delete(info.path)
    operations.plan_relocation(lake, target).execute()
    assert rows(lake) == expected
    assert operations.verify(lake, deep=True).findings == ()
    clean_up(aging)
    assert {info.path for info in storage.list()} == needed_paths(lake, target)
    places.server.delete_all(target)
