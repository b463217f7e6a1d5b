"""The engine of this project: objects are tables, changed by its transactions or its pyiceberg catalog."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

from benchmarks.lakes import LaterStorage, filled
from benchmarks.peers.peer import Peer, object_name, value
from trinitylake_ops import Lakehouse, TableDef, operations
from trinitylake_ops.errors import CommitAttemptsExhaustedError, CommitConflictError
from trinitylake_ops.iceberg import catalog_at, catalog_for
from trinitylake_ops.storage import LocalStorage, Storage, open_storage

#: Number of Iceberg tables, in addition to those with a definition only. Commits go to them in turn.
_CHANGED = 100


class Ours(Peer):
    """A transaction that changes one table's definition."""

    packages = ("trinitylake-ops",)
    object_kind = "table"
    commit_kind = "a transaction that alters one table's definition"
    durability = "nothing is synced (`LocalStorage(fsync=False)`)"
    conflicts = (CommitConflictError, CommitAttemptsExhaustedError)
    client: ClassVar[str] = "s3fs"

    def _storage(self) -> Storage:
        if not self.location.endpoint:
            return LocalStorage(self.location.uri, fsync=self.is_synced)
        names = self.location.s3_options(
            endpoint="endpoint", key="access_key_id", secret="secret_access_key", region="region"
        )
        return open_storage(self.location.uri, {**names, "client": self.client})

    def load(self, n_objects: int) -> None:
        self._lake = filled(self._storage(), n_objects)

    def attach(self) -> None:
        self._lake = Lakehouse(self._storage())

    def commit(self, number: int) -> None:
        with self._lake.transaction() as txn:
            txn.alter_table("ns", object_name(number), TableDef(properties={"stamp": value(number)}))

    def _cold(self) -> Lakehouse:
        return Lakehouse(self._storage(), cache="off")

    def lookup(self, number: int) -> str:
        return self._cold().snapshot().table("ns", object_name(number)).id

    def list(self) -> int:
        return len(self._cold().snapshot().tables("ns"))

    def version(self) -> object:
        return self._lake.latest_version()

    def old_version(self, version: object, number: int) -> str:
        assert isinstance(version, int)
        return self._cold().snapshot(version).table("ns", object_name(number)).id

    def expire(self) -> None:
        policy = operations.RetentionPolicy(maximum_age_ms=0, minimum_versions=1, protected_ms=0)
        operations.plan_expiration(Lakehouse(LaterStorage(self._storage(), 1)), policy).execute()
        operations.plan_purge(Lakehouse(LaterStorage(self._storage(), 2))).execute()


class OursSynced(Ours):
    """The same, with each file and folder synced before a commit returns."""

    durability = "files and folders are synced, as by default"
    is_synced = True


class OursByObstore(Ours):
    """The same with the other S3 client."""

    client = "obstore"


class OursByCatalog(Ours):
    """A property of an Iceberg table, set through pyiceberg."""

    commit_kind = "pyiceberg sets a property of an Iceberg table in our catalog"
    max_objects = 10_000
    unsupported: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("load", "list", "old_version", "expire", "threads", "processes", "s3"), "as with the engine itself"
    )

    def load(self, n_objects: int) -> None:
        super().load(n_objects)
        schema = Schema(NestedField(1, "id", LongType(), required=False))
        with self._lake.transaction() as txn:
            for number in range(_CHANGED):
                catalog_for(txn).create_table(_iceberg(number), schema)
        self._catalog = catalog_at(self._lake)

    def commit(self, number: int) -> None:
        table = self._catalog.load_table(_iceberg(number))
        table.transaction().set_properties(stamp=value(number)).commit_transaction()

    def lookup(self, number: int) -> str:
        table = catalog_at(self._cold()).load_table(_iceberg(number))
        return table.metadata_location


class OursByCatalogSynced(OursByCatalog):
    """The same, synced."""

    durability = OursSynced.durability
    is_synced = True


def _iceberg(number: int) -> str:
    return f"ns.iceberg{number % _CHANGED}"
