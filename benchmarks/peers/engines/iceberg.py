"""pyiceberg with its SQL catalog on SQLite: objects are Iceberg tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pyiceberg.catalog.sql import IcebergTables, SqlCatalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField
from sqlalchemy import event, insert
from sqlalchemy.exc import OperationalError

from benchmarks.peers.peer import Peer, object_name, value

_NO_VERSIONS = "the catalog has no versions, only single tables have"
#: Commits go to this many tables in turn, as with our own catalog. Their folders exist.
_CHANGED = 100
#: radosgw rejects the chunked uploads of the default FileIO.
_FILE_IO = "py-io-impl"


class SqlCatalogSynced(Peer):
    """A property of a table."""

    packages = ("pyiceberg", "SQLAlchemy")
    object_kind = "table"
    commit_kind = "pyiceberg sets a property of an Iceberg table in a catalog on SQLite"
    durability = "SQLite syncs its file; the table's metadata file is not synced"
    is_synced = True
    conflicts = (CommitFailedException, OperationalError)
    unsupported: ClassVar[Mapping[str, str]] = {
        "load": "it has no bulk interface; rows are inserted into SQLite, all with one metadata file",
        "old_version": _NO_VERSIONS,
        "expire": _NO_VERSIONS,
    }

    def _catalog(self) -> SqlCatalog:
        catalog = SqlCatalog(
            "objects",
            uri=f"sqlite:///{self.location.folder}/catalog.db",
            warehouse=f"{self.location.uri}warehouse",
            **({_FILE_IO: "pyiceberg.io.fsspec.FsspecFileIO"} if self.location.endpoint else {}),
            **self.location.s3_options(
                endpoint="s3.endpoint", key="s3.access-key-id", secret="s3.secret-access-key", region="s3.region"
            ),
        )
        if not self.is_synced:
            event.listen(catalog.engine, "connect", _disable_syncs)
            catalog.engine.dispose()
        return catalog

    def load(self, n_objects: int) -> None:
        self._warm_catalog = catalog = self._catalog()
        catalog.create_namespace("ns")
        schema = Schema(NestedField(1, "id", LongType(), required=False))
        for number in range(min(n_objects, _CHANGED)):
            catalog.create_table(f"ns.{object_name(number)}", schema)
        first = catalog.load_table(f"ns.{object_name(0)}").metadata_location
        rows = [
            {
                "catalog_name": "objects",
                "table_namespace": "ns",
                "table_name": object_name(number),
                "metadata_location": first,
                "iceberg_type": "TABLE",
            }
            for number in range(_CHANGED, n_objects)
        ]
        if rows:
            with catalog.engine.begin() as connection:
                connection.execute(insert(IcebergTables), rows)

    def attach(self) -> None:
        self._warm_catalog = self._catalog()

    def commit(self, number: int) -> None:
        table = self._warm_catalog.load_table(f"ns.{object_name(number % _CHANGED)}")
        table.transaction().set_properties(stamp=value(number)).commit_transaction()

    def lookup(self, number: int) -> str:
        catalog = self._catalog()
        try:
            return catalog.load_table(f"ns.{object_name(number)}").metadata_location
        finally:
            catalog.engine.dispose()

    def list(self) -> int:
        catalog = self._catalog()
        try:
            return len(catalog.list_tables("ns"))
        finally:
            catalog.engine.dispose()


class SqlCatalogUnsynced(SqlCatalogSynced):
    """The same, without SQLite's own syncs."""

    durability = "nothing is synced (`PRAGMA synchronous = OFF`)"
    is_synced = False


def _disable_syncs(connection: Any, _record: Any) -> None:
    connection.execute("PRAGMA synchronous = OFF")
