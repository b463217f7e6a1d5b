"""A worker process, which serves calls to one peer over a pipe: ``python -m benchmarks.peers.serve CLASS PIPE``."""

from __future__ import annotations

import gc
import importlib
import os
import random
import sys
import time
import traceback
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.peers.peer import Location, Peer, PeerInfo, TimedCall, WriteTotals


class Server:
    """The calls of a worker."""

    def __init__(self, peer_class: type[Peer]):
        self._class = peer_class
        self._peer: Peer | None = None
        self._n_objects = 0
        self._old_version: object = None
        self._random = random.Random(0)

    def info(self) -> PeerInfo:
        """Return the description of the peer."""
        peer_class = self._class
        versions = {package: version(package) for package in peer_class.packages}
        return PeerInfo(
            versions,
            peer_class.object_kind,
            peer_class.commit_kind,
            peer_class.durability,
            peer_class.is_synced,
            peer_class.unsupported,
            peer_class.max_objects,
        )

    def warm_up(self, location: Location) -> None:
        """Run each call once with few objects at another location, so that lazily loaded code is not measured."""
        self._open(location, 10).load(10)
        self.commits(4, 60)
        for call in ("lookup", "list", "old_version", "expire"):
            if call not in self._class.unsupported:
                getattr(self, call)()
        self._old_version = None

    def load(self, location: Location, n_objects: int) -> TimedCall:
        """Load objects at a location, and commit once."""
        peer = self._open(location, n_objects)
        started = time.monotonic()
        peer.load(n_objects)
        ended = time.monotonic()
        self.commit()
        gc.collect()
        return TimedCall(started, ended)

    def attach(self, location: Location, n_objects: int) -> None:
        """Attach to the objects at a location, and commit once."""
        self._open(location, n_objects).attach()
        self.commit()

    def _open(self, location: Location, n_objects: int) -> Peer:
        location.folder.mkdir(parents=True, exist_ok=True)
        self._peer, self._n_objects = self._class(location), n_objects
        return self._peer

    @property
    def _open_peer(self) -> Peer:
        assert self._peer is not None, "load or attach comes first"
        return self._peer

    def _random_number(self) -> int:
        assert self._n_objects, "load or attach comes first"
        return self._random.randrange(self._n_objects)

    def commit(self) -> TimedCall:
        """Change a random object."""
        number = self._random_number()
        started = time.monotonic()
        self._open_peer.commit(number)
        return TimedCall(started, time.monotonic())

    def lookup(self) -> TimedCall:
        """Look up a random object, cold."""
        number = self._random_number()
        started = time.monotonic()
        stored = self._open_peer.lookup(number)
        ended = time.monotonic()
        assert stored, f"object {number} has no value"
        return TimedCall(started, ended)

    def list(self) -> TimedCall:
        """List all names, cold."""
        started = time.monotonic()
        n_found = self._open_peer.list()
        ended = time.monotonic()
        assert n_found >= self._n_objects, f"{n_found} of {self._n_objects} objects"
        return TimedCall(started, ended)

    def commits(self, n_commits: int, max_seconds: float) -> int:
        """Commit up to ``n_commits`` times within the time limit. The version in the middle becomes the old version."""
        started, n_done = time.monotonic(), 0
        for half in (n_commits // 2, n_commits - n_commits // 2):
            until = n_done + half
            end = started + max_seconds * (1 if n_done else 0.5)
            while n_done < until and time.monotonic() < end:
                self._open_peer.commit(self._random_number())
                n_done += 1
            if self._old_version is None and "old_version" not in self._class.unsupported:
                self._old_version = self._open_peer.version()
        return n_done

    def old_version(self) -> TimedCall:
        """Open the old version and look up a random object in it."""
        number = self._random_number()
        started = time.monotonic()
        stored = self._open_peer.old_version(self._old_version, number)
        ended = time.monotonic()
        assert stored, f"object {number} had no value"
        return TimedCall(started, ended)

    def expire(self) -> TimedCall:
        """Reclaim all versions except the latest. Return the number of deleted and truncated (sealed) files."""
        before = self._sizes()
        started = time.monotonic()
        self._open_peer.expire()
        ended = time.monotonic()
        after = self._sizes()
        return TimedCall(started, ended, sum(after.get(path, -1) < size for path, size in before.items()))

    def write(self, n_writers: int, seconds: float, first: int, step: int) -> WriteTotals:
        """Commit in several threads. Writer ``w`` changes object ``first + w`` and every ``step``-th object after it.

        Args:
            n_writers: The number of threads.
            seconds: The duration.
            first: The number of the first object.
            step: The distance between the objects of one writer.
        """

        def number(writer: int) -> int:
            return (first + writer + step * random.randrange(1 + self._n_objects // step)) % self._n_objects

        return self._open_peer.write(n_writers, seconds, number)

    def _sizes(self) -> dict[str, int]:
        paths = (Path(folder, name) for folder, _, names in os.walk(self._open_peer.location.folder) for name in names)
        return {str(path): path.stat().st_size for path in paths}


def main() -> None:
    """Serve calls until the pipe is closed."""
    module, _, name = sys.argv[1].partition(":")
    pipe = Connection(int(sys.argv[2]))
    try:
        server = Server(getattr(importlib.import_module(module), name))
    except ModuleNotFoundError as error:
        pipe.send(("absent", f"{error.name} is not installed"))
        return
    pipe.send(("done", server.info()))
    while True:
        try:
            call, arguments = pipe.recv()
        except EOFError:
            break
        try:
            reply = ("done", getattr(server, call)(*arguments))
        except Exception as error:  # noqa: BLE001 - reported over the pipe
            traceback.print_exc()
            reply = ("failed", f"{type(error).__name__}: {error}")
        pipe.send(reply)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of libraries have nothing left to do


if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))
    main()
