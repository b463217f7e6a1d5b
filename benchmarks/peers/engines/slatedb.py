"""SlateDB, a key-value store on object storage: objects are keys."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import slatedb.uniffi as slatedb

from benchmarks.peers.peer import Peer, WriteTotals, object_name, value

_NO_VERSIONS = "it does not keep a version per commit"
_ALL = slatedb.KeyRange(start=None, start_inclusive=True, end=None, end_inclusive=True)


class Slatedb(Peer):
    """One key, put and flushed."""

    packages = ("slatedb",)
    object_kind = "key"
    commit_kind = "a put and a flush, without a named version and with a single writer"
    durability = "nothing is synced (no fsync in a trace of its system calls)"
    unsupported: ClassVar[Mapping[str, str]] = {
        "old_version": _NO_VERSIONS,
        "expire": _NO_VERSIONS,
        "processes": "it has a single writer; a second one fences off the first",
    }

    def __init__(self, location: Any):
        super().__init__(location)
        self._run = asyncio.new_event_loop().run_until_complete
        options = location.s3_options(
            endpoint="AWS_ENDPOINT", key="AWS_ACCESS_KEY_ID", secret="AWS_SECRET_ACCESS_KEY", region="AWS_REGION"
        )
        os.environ.update({**options, "AWS_ALLOW_HTTP": "true"})
        if location.endpoint:
            self._path = location.prefix
            self._store = slatedb.ObjectStore.resolve(location.uri.removesuffix(f"{location.prefix}/"))
        else:
            self._path = str(location.folder / "db").removeprefix("/")
            self._store = slatedb.ObjectStore.resolve("file:///")

    def load(self, n_objects: int) -> None:
        async def load() -> None:
            self._db = await slatedb.DbBuilder(self._path, self._store).build()
            batch = slatedb.WriteBatch()
            for number in range(n_objects):
                batch.put(object_name(number).encode(), value(number).encode())
            await self._db.write(batch)
            await self._db.flush_with_options(slatedb.FlushOptions(flush_type=slatedb.FlushType.MEM_TABLE))

        self._run(load())

    def attach(self) -> None:
        self._db = self._run(slatedb.DbBuilder(self._path, self._store).build())

    def commit(self, number: int) -> None:
        self._run(self._commit(number))

    async def _commit(self, number: int) -> None:
        await self._db.put(object_name(number).encode(), value(number).encode())
        await self._db.flush()

    def lookup(self, number: int) -> str:
        async def get() -> bytes | None:
            reader = await slatedb.DbReaderBuilder(self._path, self._store).build()
            stored = await reader.get(object_name(number).encode())
            await reader.shutdown()
            return stored  # type: ignore[no-any-return]

        stored = self._run(get())
        assert stored is not None
        return stored.decode()

    def list(self) -> int:
        async def names() -> list[str]:
            reader = await slatedb.DbReaderBuilder(self._path, self._store).build()
            entries, keys = await reader.scan(_ALL), []
            while (entry := await entries.next()) is not None:
                keys.append(entry.key.decode())
            await reader.shutdown()
            return keys

        return len(self._run(names()))

    def write(self, n_writers: int, seconds: float, numbers: Callable[[int], int]) -> WriteTotals:
        """Commit in tasks of one event loop, because a handle belongs to one loop."""
        commits, begun = [0] * n_writers, time.monotonic()

        async def work(writer: int) -> None:
            while time.monotonic() < begun + seconds:
                await self._commit(numbers(writer))
                commits[writer] += 1

        async def all_writers() -> None:
            await asyncio.gather(*map(work, range(n_writers)))

        self._run(all_writers())
        return WriteTotals(sum(commits), 0, time.monotonic() - begun)
