"""A worker process: it holds one peer and answers over a pipe. ``python -m benchmarks.peers.serve CLASS PIPE``."""

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

from benchmarks.peers.peer import About, Peer, Place, Timed, Written


class Server:
    """The calls that a worker answers."""

    def __init__(self, peer_class: type[Peer]):
        self._class = peer_class
        self._peer: Peer | None = None
        self._n_objects = 0
        self._old_version: object = None
        self._chance = random.Random(0)

    def about(self) -> About:
        """Say what is measured."""
        found = self._class
        versions = {package: version(package) for package in found.packages}
        return About(
            versions,
            found.object_kind,
            found.commit_kind,
            found.durability,
            found.is_synced,
            found.lacks,
            found.largest,
        )

    def warm_up(self, place: Place) -> None:
        """Do each thing once with few objects elsewhere: code that is loaded at its first use is not measured."""
        self._at(place, 10).load(10)
        self.commits(4, 60)
        for call in ("lookup", "list", "old_version", "expire"):
            if call not in self._class.lacks:
                getattr(self, call)()
        self._old_version = None

    def load(self, place: Place, n_objects: int) -> Timed:
        """Load objects at a place, and commit once."""
        peer = self._at(place, n_objects)
        begun = time.monotonic()
        peer.load(n_objects)
        ended = time.monotonic()
        self.commit()
        gc.collect()
        return Timed(begun, ended)

    def attach(self, place: Place, n_objects: int) -> None:
        """Be ready for what is at a place, and commit once."""
        self._at(place, n_objects).attach()
        self.commit()

    def _at(self, place: Place, n_objects: int) -> Peer:
        place.folder.mkdir(parents=True, exist_ok=True)
        self._peer, self._n_objects = self._class(place), n_objects
        return self._peer

    @property
    def _ready(self) -> Peer:
        assert self._peer is not None, "load or attach comes first"
        return self._peer

    def _number(self) -> int:
        assert self._n_objects, "load or attach comes first"
        return self._chance.randrange(self._n_objects)

    def commit(self) -> Timed:
        """Change a random object."""
        number = self._number()
        begun = time.monotonic()
        self._ready.commit(number)
        return Timed(begun, time.monotonic())

    def lookup(self) -> Timed:
        """Look a random object up, cold."""
        number = self._number()
        begun = time.monotonic()
        found = self._ready.lookup(number)
        ended = time.monotonic()
        assert found, f"object {number} has no value"
        return Timed(begun, ended)

    def list(self) -> Timed:
        """List all names, cold."""
        begun = time.monotonic()
        found = self._ready.list()
        ended = time.monotonic()
        assert found >= self._n_objects, f"{found} of {self._n_objects} objects"
        return Timed(begun, ended)

    def commits(self, n_commits: int, most_seconds: float) -> int:
        """Commit so often, as far as the seconds reach; the version in the middle becomes the old one."""
        begun, n_done = time.monotonic(), 0
        for half in (n_commits // 2, n_commits - n_commits // 2):
            until = n_done + half
            end = begun + most_seconds * (1 if n_done else 0.5)
            while n_done < until and time.monotonic() < end:
                self._ready.commit(self._number())
                n_done += 1
            if self._old_version is None and "old_version" not in self._class.lacks:
                self._old_version = self._ready.version()
        return n_done

    def old_version(self) -> Timed:
        """Open the version in the middle and look a random object up in it."""
        number = self._number()
        begun = time.monotonic()
        found = self._ready.old_version(self._old_version, number)
        ended = time.monotonic()
        assert found, f"object {number} had no value"
        return Timed(begun, ended)

    def expire(self) -> Timed:
        """Free all versions but the latest; returns how many files are gone, or smaller: a sealed root is that."""
        before = self._sizes()
        begun = time.monotonic()
        self._ready.expire()
        ended = time.monotonic()
        after = self._sizes()
        return Timed(begun, ended, sum(after.get(path, -1) < size for path, size in before.items()))

    def write(self, n_writers: int, seconds: float, first: int, step: int) -> Written:
        """Let threads commit; writer ``w`` changes objects ``first + w`` and every ``step``-th after it."""

        def number(writer: int) -> int:
            return (first + writer + step * random.randrange(1 + self._n_objects // step)) % self._n_objects

        return self._ready.write(n_writers, seconds, number)

    def _sizes(self) -> dict[str, int]:
        paths = (Path(where, name) for where, _, names in os.walk(self._ready.place.folder) for name in names)
        return {str(path): path.stat().st_size for path in paths}


def main() -> None:
    """Answer until the pipe is closed."""
    module, _, name = sys.argv[1].partition(":")
    pipe = Connection(int(sys.argv[2]))
    try:
        server = Server(getattr(importlib.import_module(module), name))
    except ModuleNotFoundError as error:
        pipe.send(("absent", f"{error.name} is not installed"))
        return
    pipe.send(("done", server.about()))
    while True:
        try:
            call, arguments = pipe.recv()
        except EOFError:
            break
        try:
            answer = ("done", getattr(server, call)(*arguments))
        except Exception as error:  # noqa: BLE001 - told over the pipe
            traceback.print_exc()
            answer = ("failed", f"{type(error).__name__}: {error}")
        pipe.send(answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of libraries have nothing left to do


if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))
    main()
