"""icechunk: objects are groups of a Zarr hierarchy, and an object's value is an attribute."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, ClassVar

import icechunk
from zarr.core.buffer import default_buffer_prototype

from benchmarks.peers.peer import BUCKET, Peer, object_name, value

_PROTOTYPE = default_buffer_prototype()


class Icechunk(Peer):
    """A session that sets the attributes of one group and commits."""

    packages = ("icechunk", "zarr")
    object_kind = "group"
    commit_kind = "a session that writes the attributes of one group, and its commit"
    durability = "nothing is synced (no fsync in a trace of its system calls)"
    unsupported: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("threads", "processes"), "its local storage is not safe for concurrent commits, according to its warning"
    )

    def __init__(self, location: Any):
        super().__init__(location)
        self._run = asyncio.new_event_loop().run_until_complete

    def _storage(self) -> icechunk.Storage:
        if not self.location.endpoint:
            return icechunk.local_filesystem_storage(str(self.location.folder / "repository"))
        return icechunk.s3_storage(
            bucket=BUCKET,
            prefix=self.location.prefix,
            allow_http=True,
            force_path_style=True,
            **self.location.s3_options(
                endpoint="endpoint_url", key="access_key_id", secret="secret_access_key", region="region"
            ),
        )

    def load(self, n_objects: int) -> None:
        self._repository = icechunk.Repository.create(self._storage())
        session = self._repository.writable_session("main")

        async def groups() -> None:
            for path in ("zarr.json", "ns/zarr.json"):
                await session.store.set(path, _document(""))
            for number in range(n_objects):
                await session.store.set(_path(number), _document(value(number)))

        self._run(groups())
        session.commit("load")

    def attach(self) -> None:
        self._repository = icechunk.Repository.open(self._storage())

    def commit(self, number: int) -> None:
        session = self._repository.writable_session("main")
        self._run(session.store.set(_path(number), _document(value(number))))
        session.commit("change")

    def _cold(self, **version: Any) -> icechunk.IcechunkStore:
        return icechunk.Repository.open(self._storage()).readonly_session(**(version or {"branch": "main"})).store

    def _value(self, store: icechunk.IcechunkStore, number: int) -> str:
        buffer = self._run(store.get(_path(number), _PROTOTYPE))
        assert buffer is not None
        return str(json.loads(buffer.to_bytes())["attributes"]["stamp"])

    def lookup(self, number: int) -> str:
        return self._value(self._cold(), number)

    def list(self) -> int:
        async def names(listing: AsyncIterator[str]) -> int:
            return len([name async for name in listing])

        return self._run(names(self._cold().list_dir("ns"))) - 1  # the group's own document

    def version(self) -> object:
        return self._repository.lookup_branch("main")

    def old_version(self, version: object, number: int) -> str:
        return self._value(self._cold(snapshot_id=version), number)

    def expire(self) -> None:
        now = dt.datetime.now(dt.UTC)
        repository = icechunk.Repository.open(self._storage())
        repository.expire_snapshots(now)
        repository.garbage_collect(now)


def _path(number: int) -> str:
    return f"ns/{object_name(number)}/zarr.json"


def _document(stamp: str) -> Any:
    document = {"attributes": {"stamp": stamp}, "zarr_format": 3, "node_type": "group"}
    return _PROTOTYPE.buffer.from_bytes(json.dumps(document).encode())
