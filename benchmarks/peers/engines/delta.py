"""Delta Lake with delta-rs: objects are rows of a table."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from deltalake.exceptions import CommitFailedError

from benchmarks.peers.peer import Peer, object_name, value

_RETENTION = "delta.logRetentionDuration"


class Delta(Peer):
    """An update of one row."""

    packages = ("deltalake",)
    object_kind = "row"
    commit_kind = "`DeltaTable.update` of one row, from the version that the writer has open"
    durability = "nothing is synced (no fsync in a trace of its system calls)"
    conflicts = (CommitFailedError,)

    def _uri(self) -> str:
        return f"{self.location.uri}table" if self.location.endpoint else str(self.location.folder / "table")

    def _options(self) -> dict[str, str]:
        options = self.location.s3_options(
            endpoint="AWS_ENDPOINT_URL", key="AWS_ACCESS_KEY_ID", secret="AWS_SECRET_ACCESS_KEY", region="AWS_REGION"
        )
        return {**options, "AWS_ALLOW_HTTP": "true", "aws_conditional_put": "etag"} if options else {}

    def _cold(self, version: int | None = None) -> DeltaTable:
        return DeltaTable(self._uri(), version=version, storage_options=self._options())

    def load(self, n_objects: int) -> None:
        names = [object_name(number) for number in range(n_objects)]
        rows = pa.table({"name": names, "definition": [value(number) for number in range(n_objects)]})
        write_deltalake(self._uri(), rows, storage_options=self._options())
        self.attach()

    def attach(self) -> None:
        self._table = self._cold()

    def commit(self, number: int) -> None:
        _update(self._table, number)

    def writer(self) -> Callable[[int], None]:
        table = self._cold()

        def commit(number: int) -> None:
            table.update_incremental()
            _update(table, number)

        return commit

    def lookup(self, number: int) -> str:
        return _value(self._cold(), number)

    def list(self) -> int:
        return len(_queried(self._cold(), "SELECT name FROM objects")["name"].to_pylist())

    def version(self) -> object:
        return self._table.version()

    def old_version(self, version: object, number: int) -> str:
        assert isinstance(version, int)
        return _value(self._cold(version), number)

    def expire(self) -> None:
        table = self._cold()
        table.alter.set_table_properties({_RETENTION: "interval 0 days"})
        table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
        table.create_checkpoint()
        table.cleanup_metadata()
        # Restore the default, or a checkpoint of one writer would delete files that another reads.
        table.alter.set_table_properties({_RETENTION: "interval 30 days"})


def _update(table: DeltaTable, number: int) -> None:
    table.update(updates={"definition": f"'{value(number)}'"}, predicate=f"name = '{object_name(number)}'")


def _queried(table: DeltaTable, query: str) -> pa.Table:
    return pa.table(QueryBuilder().register("objects", table).execute(query).read_all())


def _value(table: DeltaTable, number: int) -> str:
    rows = _queried(table, f"SELECT definition FROM objects WHERE name = '{object_name(number)}'")
    return str(rows["definition"][0])
