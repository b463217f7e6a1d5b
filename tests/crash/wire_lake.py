"""A small lakehouse on a real S3 server behind the fault-injecting proxy, and one commit to it.

The tree has several levels, and the commit writes a lakehouse definition, definitions of objects, nodes, the root and
the hint. A separate client restores the base before each run. Afterwards it downloads all files to check them in
memory, so that neither the storage under test nor a fault can hide the content of the server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from tests.lakes import check_lake, objects, table
from tests.proxy import Exchange, FaultyProxy, WireFault
from tests.servers.s3_server import S3Server
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import CommitOutcomeUnknownError, TrinityLakeError
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.file_names import HINT_PATH, parse_root_path
from trinitylake_ops.format.limits import smallest_node_file_limit_bytes
from trinitylake_ops.storage import MemoryStorage, RetryStorage, drop_memory_root, open_storage

SIZES: dict[str, Any] = {"order": 3, "namespace_name_max_size_bytes": 8, "table_name_max_size_bytes": 8}
LONG_MESSAGE = "m" * 3_400  # leaves little space in the root, so that the commit also writes nodes
BASE_VERSION = 2
NEXT_VERSION = 3
SHORT_TIMEOUT_S = 0.5  # for delays; with other faults, a slow machine must not cause timeouts
LONG_TIMEOUT_S = 20.0


def make_base() -> dict[str, bytes]:
    """Return the files of a lakehouse with a tree of several levels, by path."""
    with _in_memory({}) as storage:
        limit_bytes = smallest_node_file_limit_bytes(LakehouseDef(id="", **SIZES))
        lake = Lakehouse.create(storage.root, storage=storage, node_file_max_size_bytes=limit_bytes, **SIZES)
        with lake.transaction(message=LONG_MESSAGE) as txn:
            txn.create_namespace("ns")
            for number in range(3):
                txn.create_table("ns", f"t{number}", table())
        with lake.transaction() as txn:  # fills the buffer of the root, so that the next commit flushes it
            for number in range(9):
                txn.create_table("ns", f"u{number}", table())
        lake.close()
        return {info.path: storage.read(info.path) for info in storage.list()}


def change(lake: Lakehouse) -> int:
    """Commit changes of all kinds and return the acknowledged version."""
    with lake.transaction(message=LONG_MESSAGE) as txn:
        txn.alter_definition(replace(txn.definition, properties={"changed": "yes"}))
        txn.create_namespace("new")
        txn.create_table("new", "t", table())
        txn.drop_table("ns", "t0")
    assert txn.committed_version is not None
    return txn.committed_version


@dataclass
class Outcome:
    """The outcome of a commit: a version, or a typed error."""

    version: int | None = None
    error: TrinityLakeError | None = None

    @property
    def kind(self) -> str:
        if self.version is not None:
            return "committed"
        return "unknown" if isinstance(self.error, CommitOutcomeUnknownError) else "failed"


class WireLake:
    """A lakehouse behind the proxy that is reset to its base before each run."""

    def __init__(self, server: S3Server, proxy: FaultyProxy, client: str, base: Mapping[str, bytes]):
        self.server = server
        self.proxy = proxy
        self.root = server.fresh_root()
        self._bucket, _, self._prefix = self.root.removeprefix("s3://").partition("/")
        self._base = base
        self._before, self._after = _objects_before_and_after(base)
        self._etags = {path: f'"{hashlib.md5(data).hexdigest()}"' for path, data in base.items()}
        self._options = {**server.storage_options, "endpoint": proxy.url, "client": client}
        self._storages: dict[float, RetryStorage] = {}

    def _storage(self, read_timeout_s: float) -> RetryStorage:
        """Open the storage under test. Requests are sent sequentially, so that their numbers are reproducible."""
        if read_timeout_s not in self._storages:
            opened = open_storage(self.root, {**self._options, "read_timeout_seconds": str(read_timeout_s)})
            assert isinstance(opened, RetryStorage)
            storage = RetryStorage(opened.inner, 3, base_delay_seconds=0.002, max_delay_seconds=0.02)
            storage.concurrency = 1
            self._storages[read_timeout_s] = storage
            Lakehouse.open(self.root, storage=storage)
        return self._storages[read_timeout_s]

    def open(self) -> Lakehouse:
        """Open the lakehouse without cached state."""
        return Lakehouse.open(self.root, storage=self._storage(LONG_TIMEOUT_S))

    def commit(self, faults: tuple[WireFault, ...] = ()) -> Outcome:
        """Commit on the base with faults. Their numbers count from the first request of the transaction."""
        self._restore_base()
        has_delay = any(fault.action in ("hold_request", "delay_response") for fault in faults)
        lake = Lakehouse(self._storage(SHORT_TIMEOUT_S if has_delay else LONG_TIMEOUT_S))
        lake.storage.now_ms()  # read the server's time now, so that no run has a request for it
        self.proxy.begin(*faults)
        try:
            return Outcome(version=change(lake))
        except TrinityLakeError as error:
            return Outcome(error=error)

    def _restore_base(self) -> None:
        self.proxy.begin()
        stored = self._stored()
        extra = [{"Key": self._prefix + path} for path in stored.keys() - self._base.keys()]
        if extra:
            self.server.client.delete_objects(Bucket=self._bucket, Delete={"Objects": extra, "Quiet": True})
        for path, data in self._base.items():
            if stored.get(path) != self._etags[path]:
                self.server.client.put_object(Bucket=self._bucket, Key=self._prefix + path, Body=data)

    def _stored(self) -> dict[str, str]:
        """Return the ETag, which is the MD5 sum, of each file under the root, as listed by an independent client."""
        listing = self.server.client.list_objects_v2(Bucket=self._bucket, Prefix=self._prefix)
        assert not listing["IsTruncated"]
        return {item["Key"].removeprefix(self._prefix): item["ETag"] for item in listing.get("Contents", ())}

    def files(self) -> dict[str, bytes]:
        """Return every file under the root. Files that equal the base are not downloaded."""
        return {
            path: self._base[path] if etag == self._etags.get(path) else self._download(path)
            for path, etag in self._stored().items()
        }

    def _download(self, path: str) -> bytes:
        data: bytes = self.server.client.get_object(Bucket=self._bucket, Key=self._prefix + path)["Body"].read()
        return data

    def assert_state(self, *, is_committed: bool, is_fenced: bool = False) -> None:
        """Assert that the change was committed exactly once or not at all, and that the lakehouse is valid."""
        with _in_memory(self.files()) as storage:
            lake = Lakehouse(storage)
            assert lake.latest_version() == (NEXT_VERSION if is_committed or is_fenced else BASE_VERSION)
            history = list(lake.history())
            assert len({info.commit_id for info in history}) == len(history)
            assert sum(info.message == LONG_MESSAGE for info in history) == 1 + is_committed
            for info in history:
                if info.version >= BASE_VERSION:
                    expected = self._after if is_committed and info.version == NEXT_VERSION else self._before
                    assert set(objects(lake.snapshot(info.version))) == expected
            check_lake(lake)
            assert operations.verify(lake).is_clean
            with lake.transaction() as txn:
                txn.create_namespace("next")
            assert txn.committed_version == lake.latest_version()


@contextmanager
def _in_memory(files: Mapping[str, bytes]) -> Iterator[MemoryStorage]:
    root = f"memory://{uuid4().hex}/"
    storage = MemoryStorage(root)
    for path, data in files.items():
        storage.create(path, data)
    try:
        yield storage
    finally:
        drop_memory_root(root)


def _objects_before_and_after(base: Mapping[str, bytes]) -> tuple[set[tuple[str, ...]], set[tuple[str, ...]]]:
    """Return the objects before and after the change, from a commit in memory."""
    with _in_memory(base) as storage:
        lake = Lakehouse(storage)
        before = set(objects(lake.snapshot()))
        change(lake)
        return before, set(objects(lake.snapshot()))


def file_kind(exchange: Exchange) -> str:
    """Return the kind of file of a request."""
    name = exchange.path.rpartition("/")[2]
    if name == HINT_PATH:
        return "hint"
    if name.endswith(".binpb"):
        return "definition"
    if "-node-" in name:
        return "node"
    return "root" if parse_root_path(name) is not None else "other"


def assert_creates_are_conditional(log: tuple[Exchange, ...]) -> None:
    """Assert that each file except the hint is created by one conditional PUT, without multipart uploads."""
    for exchange in log:
        assert "upload" not in exchange.query, f"{exchange.target} is part of a multipart upload"
        if exchange.method == "PUT":
            condition = None if file_kind(exchange) == "hint" else "*"
            assert exchange.headers.get("if-none-match") == condition, exchange
        elif exchange.method == "POST":
            assert exchange.query.rstrip("=") == "delete", exchange
