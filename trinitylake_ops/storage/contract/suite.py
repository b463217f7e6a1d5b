"""Tests that every storage and every wrapper must pass: S1-S7 of docs/storages/README.md.

A subclass whose name begins with "Test" implements ``make_storage``. Only subclasses are collected.
"""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest

from trinitylake_ops.errors import (
    CorruptFileError,
    FileExistsAlreadyError,
    FileMissingError,
    InvalidInputError,
    InvalidLocationError,
)
from trinitylake_ops.storage import FileInfo, Storage, drop_memory_root
from trinitylake_ops.storage.interface import WHOLE_FILE_LIMIT_BYTES

MIB = 1024 * 1024

REFUSED_PATHS = [
    "", "/", "/etc/passwd", "..", ".", "../escape", "a/../../escape", "a/..", "./a", "a/./b",
    "a//b", "a/", "//a", "nul\0name", "lone\udc80surrogate",
]  # fmt: skip
REFUSED_PREFIXES = [
    "/", "/etc", "..", "../", "../escape", "a/../", "a/../b", ".", "./", "a//", "a//b", "nul\0", "lone\udc80",
]  # fmt: skip
ODD_NAMES = [
    "%20", "a%2Fb", "with space", "#", "a#b", "?", "a?versionId=1", "*", "**", "[", "[a]", "{a,b}", "~", "$HOME",
    "back\\slash", "'quote\"", "a:b", "a&b=c+d;e", "new\nline", "tab\t", "-rf", "..a", "a..", "...", ".hidden",
    "Ünïcødé", "e\u0301", "\u00e9", "日本語/表", "🏔/🌊", "x" * 255, "deep/" * 30 + "leaf",
]  # fmt: skip


def body(seed: int, size_bytes: int) -> bytes:
    """Return random bytes that depend only on the seed."""
    return random.Random(seed).randbytes(size_bytes)


def sealed_body(seed: int, size_bytes: int) -> bytes:
    """Return random bytes followed by their hash, so that a partial read can be detected."""
    content = body(seed, size_bytes)
    return content + hashlib.sha256(content).digest()


def is_whole(data: bytes) -> bool:
    """Whether bytes are a complete result of ``sealed_body``."""
    return len(data) > 32 and hashlib.sha256(data[:-32]).digest() == data[-32:]


def paths(files: Iterator[FileInfo]) -> list[str]:
    """Return the sorted paths of files."""
    return sorted(file.path for file in files)


@contextmanager
def finally_set(event: threading.Event) -> Iterator[None]:
    """Set the event even if the block fails, so that waiting threads end."""
    try:
        yield
    finally:
        event.set()


@contextmanager
def frequent_thread_switches() -> Iterator[None]:
    """Switch threads as often as possible, to detect checks that are not atomic with their actions."""
    switch_interval_seconds = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(switch_interval_seconds)


def run_together(calls: list[Callable[[], object]]) -> list[object]:
    """Start all calls at the same time in separate threads. Return their results or errors in order."""
    barrier = threading.Barrier(len(calls))

    def at_once(call: Callable[[], object]) -> object:
        barrier.wait(timeout=30)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(at_once, call) for call in calls]
    return [future.exception() or future.result() for future in futures]


class StorageContract:
    """The contract. A subclass implements ``make_storage``: two calls with the same folder open the same files."""

    #: Precision of modification times.
    time_precision_ms = 1
    #: Valid names that this storage rejects, because its service does not support them.
    refused_names: frozenset[str] = frozenset()
    #: Number of files that are created and deleted during a listing.
    n_passing_files = 150
    #: Number of files in a long listing: more than one page on S3.
    n_listed_files = 1200

    def make_storage(self, folder: Path) -> Storage:
        raise NotImplementedError

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Iterator[Storage]:
        storage = self.make_storage(tmp_path)
        yield storage
        if storage.root.startswith("memory://"):
            drop_memory_root(storage.root)

    # --- S1: one of several creates succeeds --------------------------------------------------

    def test_create_then_read(self, storage: Storage) -> None:
        storage.create("a/b", b"body")
        assert storage.read("a/b") == b"body"
        assert storage.stat("a/b").size_bytes == 4

    def test_create_fails_if_the_file_exists(self, storage: Storage) -> None:
        storage.create("name", b"first")
        with pytest.raises(FileExistsAlreadyError) as caught:
            storage.create("name", b"second")
        assert caught.value.path == "name"
        assert "\n" not in str(caught.value)
        assert storage.read("name") == b"first"

    def test_create_loses_to_a_written_and_an_empty_file(self, storage: Storage) -> None:
        storage.write("written", b"x")
        storage.create("empty", b"")
        for name in ("written", "empty"):
            with pytest.raises(FileExistsAlreadyError):
                storage.create(name, b"other")
        assert storage.read("empty") == b""

    def test_create_after_delete(self, storage: Storage) -> None:
        storage.create("name", b"first")
        storage.delete("name")
        storage.create("name", b"second")
        assert storage.read("name") == b"second"

    @pytest.mark.parametrize("size_bytes", [0, 7, 70_000])
    def test_concurrent_creates_of_32_threads_have_one_winner(self, storage: Storage, size_bytes: int) -> None:
        bodies = [str(i).encode().ljust(size_bytes, b"-") if size_bytes else b"" for i in range(32)]
        for round_number in range(4):
            name = f"race/{round_number}"

            def create(data: bytes, name: str = name) -> None:
                storage.create(name, data)

            with frequent_thread_switches():
                outcomes = run_together([lambda data=data: create(data) for data in bodies])  # type: ignore[misc]
            winners = [i for i, outcome in enumerate(outcomes) if outcome is None]
            assert len(winners) == 1
            assert storage.read(name) == bodies[winners[0]]
            assert {type(outcome) for outcome in outcomes} == {type(None), FileExistsAlreadyError}
        assert len(paths(storage.list())) == 4

    # --- S2: completed writes are visible -----------------------------------------------------

    def test_finished_writes_are_seen_by_another_opening(self, storage: Storage, tmp_path: Path) -> None:
        other = self.make_storage(tmp_path)
        assert not other.exists("a/name")
        storage.create("a/name", b"1")
        assert other.exists("a/name")
        assert paths(other.list("a/")) == ["a/name"]
        storage.write("a/name", b"22")
        assert other.read("a/name") == b"22"
        assert other.stat("a/name").size_bytes == 2
        storage.delete("a/name")
        assert not other.exists("a/name")
        assert paths(other.list("a/")) == []

    # --- S3, S4: only complete files are visible ----------------------------------------------

    @pytest.mark.parametrize("size_bytes", [0, 1, MIB, 9 * MIB])
    def test_bodies_of_any_size_round_trip(self, storage: Storage, size_bytes: int) -> None:
        data = body(1, size_bytes)
        storage.create("created", data)
        storage.write("written", data)
        for name in ("created", "written"):
            assert storage.read(name) == data
            assert storage.stat(name).size_bytes == size_bytes

    def test_create_copies_mutable_buffers(self, storage: Storage) -> None:
        buffer = bytearray(b"abc")
        storage.create("created", cast(bytes, buffer))
        storage.write("written", cast(bytes, memoryview(buffer)[1:]))
        buffer[:] = b"xyz"
        assert storage.read("created") == b"abc"
        assert storage.read("written") == b"bc"

    def test_readers_during_overwrites_see_one_version(self, storage: Storage) -> None:
        versions = [sealed_body(seed, size_bytes) for seed, size_bytes in enumerate([2 * MIB, 10_000, MIB])]
        storage.write("name", versions[0])
        done = threading.Event()

        def overwrite() -> None:
            with finally_set(done):
                for turn in range(12):
                    storage.write("name", versions[turn % 3])

        def keep_reading() -> int:
            n_reads = 0
            while not done.is_set() or n_reads == 0:
                assert is_whole(storage.read("name"))
                assert storage.stat("name").size_bytes in {len(version) for version in versions}
                n_reads += 1
            return n_reads

        outcomes = run_together([overwrite, keep_reading, keep_reading, keep_reading])
        assert [outcome for outcome in outcomes if isinstance(outcome, BaseException)] == []

    def test_readers_never_see_part_of_a_new_file(self, storage: Storage) -> None:
        data = sealed_body(5, 2 * MIB)
        done = threading.Event()

        def create_files() -> None:
            with finally_set(done):
                for number in range(8):
                    storage.create(f"new/{number}", data)

        def keep_listing() -> None:
            while not done.is_set():
                assert {file.size_bytes for file in storage.list("new/")} <= {len(data)}

        def keep_reading() -> None:
            while not done.is_set():
                for result in storage.read_available([f"new/{number}" for number in range(8)]):
                    assert isinstance(result, FileMissingError) or result == data

        outcomes = run_together([create_files, keep_listing, keep_reading])
        assert outcomes == [None, None, None]
        assert len(paths(storage.list("new/"))) == 8

    def test_write_replaces(self, storage: Storage) -> None:
        storage.write("name", b"a long first body")
        storage.write("name", b"short")
        assert storage.read("name") == b"short"
        assert paths(storage.list()) == ["name"]

    def test_ranges(self, storage: Storage) -> None:
        storage.create("name", b"0123456789")
        assert storage.read("name", offset=3) == b"3456789"
        assert storage.read("name", offset=3, length=4) == b"3456"
        assert storage.read("name", length=2) == b"01"
        assert storage.read("name", offset=8, length=10) == b"89"
        assert storage.read("name", offset=4, length=0) == b""
        assert storage.read("name", offset=10) == b""
        assert storage.read("name", offset=99, length=1) == b""
        for offset, length in ((-1, None), (0, -1)):
            with pytest.raises(InvalidInputError):
                storage.read("name", offset=offset, length=length)

    def test_read_rejects_a_file_above_the_limit(self, storage: Storage) -> None:
        storage.create("name", body(1, 5000))
        for _ in range(2):  # once from the storage, and once from a cache
            with pytest.raises(CorruptFileError, match=r"'name': it has 5000 bytes, more than the limit of 4999 bytes"):
                storage.read("name", limit_bytes=4999)
            assert storage.read("name", limit_bytes=5000) == storage.read("name")
        assert storage.read("name", offset=4000, limit_bytes=1000) == body(1, 5000)[4000:]
        with pytest.raises(CorruptFileError, match="1001 bytes"):
            storage.read("name", offset=3999, limit_bytes=1000)
        assert storage.read("name", offset=1, length=4000, limit_bytes=10) == body(1, 5000)[1:4001]
        with pytest.raises(FileMissingError):
            storage.read("missing", limit_bytes=1)
        large, missing = storage.read_available(["name", "missing"], limit_bytes=1)
        assert isinstance(large, CorruptFileError)
        assert isinstance(missing, FileMissingError)
        assert storage.whole_file_limit_bytes == WHOLE_FILE_LIMIT_BYTES
        assert pickle.loads(pickle.dumps(storage)).whole_file_limit_bytes == WHOLE_FILE_LIMIT_BYTES

    # --- S5: delete ---------------------------------------------------------------------------

    def test_delete(self, storage: Storage) -> None:
        storage.create("a/b", b"x")
        storage.create("a/c", b"x")
        storage.delete("a/b")
        storage.delete("a/b")
        storage.delete("never/there")
        storage.delete("a/c/below-a-file")
        storage.delete("a")
        assert paths(storage.list()) == ["a/c"]

    # --- S6: list -----------------------------------------------------------------------------

    def test_list_by_string_prefix(self, storage: Storage) -> None:
        names = ["_0", "_1", "__x", "_ops/lease", "_ops/tmpx", "tables/ab/1", "tables/ab2/1", "tables/abc", "tables/b"]
        for name in names:
            storage.create(name, b"x")
        for prefix in (
            "", "_", "__", "_o", "_ops", "_ops/", "_ops/tmp", "t", "tables", "tables/", "tables/a", "tables/ab",
            "tables/ab/", "tables/abc", "tables/abcd", "tables/abc/", "none/", "_0/x",
        ):  # fmt: skip
            assert paths(storage.list(prefix)) == sorted(name for name in names if name.startswith(prefix)), prefix

    def test_list_gives_size_and_time(self, storage: Storage) -> None:
        slack_ms = 100 + self.time_precision_ms  # file systems use a coarser clock for modification times
        earliest_ms = storage.now_ms() - slack_ms
        storage.create("a/b", b"12345")
        latest_ms = storage.now_ms() + slack_ms
        (file,) = storage.list("a/")
        assert (file.path, file.size_bytes) == ("a/b", 5)
        assert earliest_ms <= file.last_modified_ms <= latest_ms
        assert storage.stat("a/b") == file

    def test_list_many_files(self, storage: Storage) -> None:
        names = [f"{number % 7}/{number:05}" for number in range(self.n_listed_files)]
        storage.create_many(dict.fromkeys(names, b""))
        assert paths(storage.list()) == sorted(names)
        assert paths(storage.list("3/")) == sorted(name for name in names if name.startswith("3/"))

    def test_list_of_nothing_and_an_abandoned_list(self, storage: Storage) -> None:
        assert list(storage.list()) == []
        assert list(storage.list("a/b/c")) == []
        for number in range(5):
            storage.create(f"a/{number}", b"")
        next(storage.list())
        interrupted = storage.list()
        next(interrupted)
        assert len(list(storage.list())) == 5
        assert len(list(interrupted)) == 4, "a list goes on where it was left"

    def test_list_hides_temporary_files_unless_asked(self, storage: Storage) -> None:
        storage.create("_ops/tmp/left", b"x")
        storage.create("_ops/tmp/a/b", b"x")
        storage.create("_ops/tmpx", b"x")
        for prefix in ("", "_", "_ops/", "_ops/tmp"):
            assert paths(storage.list(prefix)) == ["_ops/tmpx"]
        assert paths(storage.list("_ops/tmp/")) == ["_ops/tmp/a/b", "_ops/tmp/left"]
        assert paths(storage.list("_ops/tmp/l")) == ["_ops/tmp/left"]

    def test_list_while_files_come_and_go(self, storage: Storage) -> None:
        lasting = [f"mixed/lasting-{number}" for number in range(50)]
        for name in lasting:
            storage.write(name, b"x")
        done = threading.Event()

        def come_and_go() -> None:
            with finally_set(done):
                for number in range(self.n_passing_files):
                    storage.write(f"mixed/sub-{number}/passing", b"x")
                    storage.delete(f"mixed/sub-{number}/passing")

        def keep_listing() -> None:
            while not done.is_set():
                listed = [path for path in paths(storage.list("mixed/")) if "lasting" in path]
                assert listed == sorted(lasting)

        assert run_together([come_and_go, keep_listing]) == [None, None]

    # --- S7: errors, names --------------------------------------------------------------------

    def test_missing_files(self, storage: Storage) -> None:
        storage.create("folder/file", b"x")
        for name in ("missing", "folder/missing", "folder", "folder/file/below", "a/b/c"):
            for operation in (storage.read, storage.stat):
                with pytest.raises(FileMissingError) as caught:
                    operation(name)
                assert caught.value.path == name
                assert repr(name) in str(caught.value)
            assert not storage.exists(name)

    @pytest.mark.parametrize("path", REFUSED_PATHS)
    def test_invalid_paths_are_rejected(self, storage: Storage, path: str) -> None:
        self.check_refused(storage, path)

    def check_refused(self, storage: Storage, path: str) -> None:
        before = paths(storage.list())
        operations: list[Callable[[], object]] = [
            lambda: storage.read(path),
            lambda: storage.read(path, offset=1, length=1),
            lambda: storage.stat(path),
            lambda: storage.exists(path),
            lambda: storage.create(path, b"x"),
            lambda: storage.write(path, b"x"),
            lambda: storage.delete(path),
            lambda: storage.read_many([path]),
            lambda: storage.read_available([path]),
            lambda: storage.create_many({path: b"x"}),
            lambda: storage.delete_many([path]),
            lambda: storage.delete_batch([path]),
        ]
        for operation in operations:
            with pytest.raises(InvalidLocationError) as caught:
                operation()
            assert "\n" not in str(caught.value)
        assert paths(storage.list()) == before

    @pytest.mark.parametrize("prefix", REFUSED_PREFIXES)
    def test_invalid_prefixes_are_rejected(self, storage: Storage, prefix: str) -> None:
        with pytest.raises(InvalidLocationError):
            storage.list(prefix)

    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_names_are_literal(self, storage: Storage, name: str) -> None:
        storage.create("bystander", b"other")
        if name in self.refused_names:
            self.check_refused(storage, name)
            return
        storage.create(name, b"1")
        with pytest.raises(FileExistsAlreadyError):
            storage.create(name, b"2")
        storage.write(name, b"33")
        assert storage.read(name) == b"33"
        assert storage.stat(name).path == name
        assert paths(storage.list(name)) == [name]
        assert paths(storage.list()) == sorted(["bystander", name])
        storage.delete(name)
        assert paths(storage.list()) == ["bystander"]

    # --- several files ------------------------------------------------------------------------

    def test_many(self, storage: Storage) -> None:
        files = {f"many/{number}": str(number).encode() for number in range(40)}
        storage.create_many(files)
        assert storage.read_many(list(files)) == list(files.values())
        result = storage.read_available(["many/3", "missing", "many/1"])
        assert (result[0], result[2]) == (b"3", b"1")
        assert isinstance(result[1], FileMissingError)
        assert storage.delete_many([*files, "missing"]) == {}
        assert list(storage.list()) == []
        assert storage.read_many([]) == []
        assert storage.delete_many([]) == {}
        storage.create_many({})

    def test_delete_batch(self, storage: Storage) -> None:
        names = [f"batch/{number}" for number in range(3)]
        storage.create_many(dict.fromkeys([*names, "batch/other"], b"x"))
        assert storage.delete_batch([*names, "batch/missing"]) == {}
        assert storage.delete_batch(names) == {}
        assert storage.delete_batch([]) == {}
        assert paths(storage.list()) == ["batch/other"]

    def test_create_many_ends_all_before_it_raises(self, storage: Storage) -> None:
        storage.create("many/1", b"occupied")
        with pytest.raises(FileExistsAlreadyError) as caught:
            storage.create_many({f"many/{number}": b"new" for number in range(20)})
        assert caught.value.path == "many/1"
        assert storage.read("many/1") == b"occupied"
        with pytest.raises(FileMissingError):
            storage.read_many(["many/1", "missing", "missing too"])

    def test_pickled_copy_opens_the_same_files(self, storage: Storage) -> None:
        storage.create("a", b"x")
        copy = pickle.loads(pickle.dumps(storage))
        assert copy.root == storage.root
        assert copy.concurrency == storage.concurrency
        assert copy.read("a") == b"x"
        copy.create("b", b"y")
        assert storage.read_many(["a", "b"]) == [b"x", b"y"]
