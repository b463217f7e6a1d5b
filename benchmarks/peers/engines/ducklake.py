"""DuckLake with DuckDB's extension and a catalog in a DuckDB file: objects are rows of a table, or tables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import duckdb
import duckdb_extension_ducklake
import pyarrow as pa

from benchmarks.peers.peer import Peer, object_name, value

_ONE_PROCESS = "only one process can open its catalog, a DuckDB file; with SQLite, a commit took five times as long"
_NOT_ON_S3 = "its catalog is an SQL database that cannot be on S3"


class DuckLakeRows(Peer):
    """An update of one row."""

    packages = ("duckdb", "duckdb_extension_ducklake")
    object_kind = "row"
    commit_kind = "an UPDATE of one row, which DuckLake stores in its catalog"
    durability = "DuckDB syncs the log of its catalog; data files are not synced"
    is_synced = True
    conflicts = (duckdb.TransactionException,)
    unsupported: ClassVar[Mapping[str, str]] = {"processes": _ONE_PROCESS, "s3": _NOT_ON_S3}

    def __init__(self, location: Any):
        super().__init__(location)
        self._connection = duckdb.connect(config={"allow_unsigned_extensions": "true"})
        (extension,) = Path(duckdb_extension_ducklake.__path__[0]).rglob("*.duckdb_extension")
        self._connection.load_extension(str(extension))

    def attach(self, version: object = None) -> None:
        folder, at = self.location.folder, f", SNAPSHOT_VERSION {version}" if version is not None else ""
        self._connection.execute(
            f"ATTACH 'ducklake:{folder}/catalog.ducklake' AS lake (DATA_PATH '{folder}/data/'{at})"
        )

    def _reattach(self, version: object = None) -> None:
        self._connection.execute("DETACH lake")
        self.attach(version)

    def load(self, n_objects: int) -> None:
        self.attach()
        names = [object_name(number) for number in range(n_objects)]
        rows = pa.table({"name": names, "definition": [value(number) for number in range(n_objects)]})
        self._connection.register("rows", rows)
        self._connection.execute("CREATE TABLE lake.objects AS SELECT * FROM rows")
        self._connection.unregister("rows")

    def commit(self, number: int) -> None:
        _update(self._connection, number)

    def writer(self) -> Callable[[int], None]:
        return functools.partial(_update, self._connection.cursor())

    def lookup(self, number: int) -> str:
        self._reattach()
        return self._value(number)

    def _value(self, number: int) -> str:
        query = f"SELECT definition FROM lake.objects WHERE name = '{object_name(number)}'"
        row = self._connection.execute(query).fetchone()
        assert row is not None
        return str(row[0])

    def list(self) -> int:
        self._reattach()
        return len(self._connection.execute("SELECT name FROM lake.objects").fetchall())

    def version(self) -> object:
        row = self._connection.execute("SELECT max(snapshot_id) FROM ducklake_snapshots('lake')").fetchone()
        assert row is not None
        return row[0]

    def old_version(self, version: object, number: int) -> str:
        self._reattach(version)
        return self._value(number)

    def expire(self) -> None:
        self._reattach()
        self._connection.execute("CALL ducklake_expire_snapshots('lake', older_than => now())")
        self._connection.execute("CALL ducklake_cleanup_old_files('lake', cleanup_all => true)")


class DuckLakeTables(DuckLakeRows):
    """A comment on one table."""

    object_kind = "table"
    commit_kind = "a COMMENT ON TABLE"
    max_objects = 10_000
    unsupported: ClassVar[Mapping[str, str]] = {
        "processes": _ONE_PROCESS,
        "s3": _NOT_ON_S3,
        "threads": "as with rows",
        "old_version": "1,000 commits would take minutes; as with rows",
        "expire": "1,000 commits would take minutes; as with rows",
    }

    def load(self, n_objects: int) -> None:
        self.attach()
        self._connection.execute("BEGIN")
        self._connection.execute("CREATE SCHEMA lake.ns")
        for number in range(n_objects):
            self._connection.execute(f"CREATE TABLE lake.ns.{object_name(number)} (id BIGINT)")
        self._connection.execute("COMMIT")

    def commit(self, number: int) -> None:
        self._connection.execute(f"COMMENT ON TABLE lake.ns.{object_name(number)} IS '{value(number)}'")

    def _value(self, number: int) -> str:
        self._connection.execute(f"SELECT * FROM lake.ns.{object_name(number)}")
        return str(self._connection.description)

    def list(self) -> int:
        self._reattach()
        query = "SELECT table_name FROM duckdb_tables() WHERE database_name = 'lake' AND schema_name = 'ns'"
        return len(self._connection.execute(query).fetchall())


def _update(connection: Any, number: int) -> None:
    connection.execute(f"UPDATE lake.objects SET definition = '{value(number)}' WHERE name = '{object_name(number)}'")
