"""The cache of immutable files: what it caches, which requests it saves, and that results are unchanged."""

from __future__ import annotations

import contextlib
import functools
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.faults import FaultyStorage, fail, lose_response
from tests.processes import fork
from trinitylake_ops.errors import (
    AmbiguousWriteError,
    FileExistsAlreadyError,
    FileMissingError,
    InvalidInputError,
    StorageError,
    StoragePermissionError,
)
from trinitylake_ops.storage import MemoryStorage, MeteredStorage, Storage, StorageWrapper, drop_memory_root
from trinitylake_ops.storage.cache.folder import CacheFolder
from trinitylake_ops.storage.cache.memory import ENTRY_OVERHEAD_BYTES, ByteLru, CacheOptions, storage_identity
from trinitylake_ops.storage.cache.storage import (
    CacheStorage,
    FileCache,
    clear_process_caches,
    private_cache_view,
    shared_cache_view,
)
from trinitylake_ops.storage.contract.suite import run_together
from trinitylake_ops.storage.s3.settings import S3_ENVIRONMENT

pytestmark = pytest.mark.usefixtures("fixed_requests")

ROOT = "memory://cache/"
MIB = 1024 * 1024


def is_immutable(path: str) -> bool:
    return path.startswith("immutable/")


def any_path(path: str) -> bool:
    return True


@pytest.fixture
def meter() -> Iterator[MeteredStorage]:
    yield MeteredStorage(MemoryStorage(ROOT))
    drop_memory_root(ROOT)


@pytest.fixture
def cached(meter: MeteredStorage) -> CacheStorage:
    return CacheStorage(meter, is_immutable, FileCache(MIB), "identity")


def requests(meter: MeteredStorage, operation: Callable[[], object]) -> dict[str, int]:
    with meter.measure() as measured:
        operation()
    return dict(measured.counts.requests)


# Cached files


def test_file_is_read_once(meter: MeteredStorage, cached: CacheStorage) -> None:
    meter.create("immutable/a", b"content")
    assert requests(meter, lambda: cached.read("immutable/a")) == {"read": 1}
    assert requests(meter, lambda: cached.read_many(["immutable/a", "immutable/a"])) == {}
    assert cached.read("immutable/a") == b"content"


def test_mutable_files_are_read_each_time(meter: MeteredStorage, cached: CacheStorage) -> None:
    cached.create("_root", b"old")
    assert cached.read("_root") == b"old"
    meter.write("_root", b"sealed by another process")
    assert requests(meter, lambda: cached.read("_root")) == {"read": 1}
    assert cached.read("_root") == b"sealed by another process"


def test_ranges_are_served_from_the_cache_and_not_cached(meter: MeteredStorage, cached: CacheStorage) -> None:
    meter.create("immutable/a", b"content")
    assert requests(meter, lambda: [cached.read("immutable/a", offset=1, length=2) for _ in range(2)]) == {"read": 2}
    cached.read("immutable/a")
    ranges = [(0, None), (1, None), (1, 2), (0, 0), (6, 9), (7, 1), (99, None)]
    expected = [meter.read("immutable/a", offset=offset, length=length) for offset, length in ranges]
    with meter.measure() as measured:
        assert [cached.read("immutable/a", offset=offset, length=length) for offset, length in ranges] == expected
    assert measured.counts.total == 0
    for offset, length in [(-1, None), (0, -1)]:
        with pytest.raises(InvalidInputError):
            cached.read("immutable/a", offset=offset, length=length)


def test_stat_exists_and_list_are_not_cached(meter: MeteredStorage, cached: CacheStorage) -> None:
    cached.create("immutable/a", b"content")
    meter.delete("immutable/a")
    assert cached.read("immutable/a") == b"content"
    assert not cached.exists("immutable/a")
    assert list(cached.list()) == []
    with pytest.raises(FileMissingError):
        cached.stat("immutable/a")


def test_created_file_is_cached_with_its_content_at_the_call(meter: MeteredStorage, cached: CacheStorage) -> None:
    buffer = bytearray(b"content")
    cached.create("immutable/a", buffer)  # type: ignore[arg-type]
    buffer[:] = b"changed"
    assert requests(meter, lambda: cached.read("immutable/a")) == {}
    assert cached.read("immutable/a") == b"content"


@pytest.mark.parametrize("fault", [fail(1, StoragePermissionError, kind="create"), lose_response(1, kind="create")])
def test_ambiguously_created_file_is_not_cached(fault: object) -> None:
    inner = FaultyStorage(MemoryStorage(ROOT), [fault])  # type: ignore[list-item]
    cached = CacheStorage(inner, is_immutable, FileCache(MIB), "identity")
    with pytest.raises((StoragePermissionError, AmbiguousWriteError)):
        cached.create("immutable/a", b"ours")
    MemoryStorage(ROOT).write("immutable/a", b"theirs")
    assert cached.read("immutable/a") == b"theirs"
    drop_memory_root(ROOT)


def test_conflicting_create_is_not_cached(meter: MeteredStorage, cached: CacheStorage) -> None:
    meter.create("immutable/a", b"theirs")
    with pytest.raises(FileExistsAlreadyError):
        cached.create("immutable/a", b"ours")
    assert cached.read("immutable/a") == b"theirs"


def test_missing_files_are_not_cached(meter: MeteredStorage, cached: CacheStorage) -> None:
    for _ in range(2):
        with pytest.raises(FileMissingError):
            cached.read("immutable/a")
    meter.create("immutable/a", b"content")
    assert cached.read("immutable/a") == b"content"


def test_failed_delete_drops_the_cached_copy() -> None:
    inner = FaultyStorage(MemoryStorage(ROOT), [lose_response(1, kind="delete")])
    cached = CacheStorage(inner, is_immutable, FileCache(MIB), "identity")
    cached.create("immutable/a", b"content")
    with pytest.raises(AmbiguousWriteError):
        cached.delete("immutable/a")
    with pytest.raises(FileMissingError):
        cached.read("immutable/a")


def test_batches_drop_each_file(meter: MeteredStorage) -> None:
    meter.delete_batch_size = 10
    cached = CacheStorage(meter, is_immutable, FileCache(MIB), "identity")
    cached.create_many({f"immutable/{number}": b"x" for number in range(5)})
    assert requests(meter, lambda: cached.delete_many([f"immutable/{number}" for number in range(5)])) == {"delete": 1}
    for number in range(5):
        with pytest.raises(FileMissingError):
            cached.read(f"immutable/{number}")


def test_wrappers_forward_drop_cached(meter: MeteredStorage, cached: CacheStorage) -> None:
    outer = StorageWrapper(cached)
    meter.create("immutable/a", b"damaged in transit")
    outer.read("immutable/a")
    meter.write("immutable/a", b"original")
    assert outer.drop_cached("immutable/a") is True
    assert outer.drop_cached("immutable/a") is False
    assert outer.drop_cached("_root") is False
    assert outer.read("immutable/a") == b"original"
    assert meter.drop_cached("immutable/a") is False


# Equivalence to an uncached storage

paths = st.sampled_from(["immutable/a", "immutable/b", "_root"])
bodies = st.binary(max_size=40)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("create"), paths, bodies),
        st.tuples(st.just("write"), paths, bodies),
        st.tuples(st.sampled_from(["read", "delete", "delete_many", "drop", "pickle", "clear"]), paths),
        st.tuples(st.just("range"), paths, st.integers(0, 50), st.none() | st.integers(0, 50)),
    ),
    max_size=30,
)


def outcome(operation: Callable[[], object]) -> object:
    try:
        return operation()
    except StorageError as error:
        return type(error)


def apply_step(storage: Storage, step: tuple[object, ...]) -> object:
    match step:
        case ("create", str(path), bytes(body)):
            return outcome(lambda: storage.create(path, body))
        case ("write", str(path), bytes(body)):
            return outcome(lambda: storage.write(path, body))
        case ("delete", str(path)):
            return outcome(lambda: storage.delete(path))
        case ("delete_many", str(path)):
            return outcome(lambda: storage.delete_many([path]))
        case ("range", str(path), int(offset), length):
            return outcome(lambda: storage.read(path, offset=offset, length=length))  # type: ignore[arg-type]
        case (_, str(path), *_):
            return outcome(lambda: storage.read(path))
    raise AssertionError(step)


@given(steps=steps, capacity_bytes=st.sampled_from([0, 9 * 8 * ENTRY_OVERHEAD_BYTES, MIB]), with_folder=st.booleans())
def test_cached_storage_behaves_like_an_uncached_storage(
    steps: list[tuple[object, ...]], capacity_bytes: int, with_folder: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model, inner = MemoryStorage("memory://cache-model/"), MemoryStorage(ROOT)
    folder = CacheFolder(str(tmp_path_factory.mktemp("cache")), MIB) if with_folder else None
    cached: Storage = CacheStorage(inner, is_immutable, FileCache(capacity_bytes), "identity", folder)
    try:
        for step in steps:
            if step[0] == "drop":
                cached.drop_cached(str(step[1]))
            elif step[0] == "pickle":
                clear_process_caches()
                cached = pickle.loads(pickle.dumps(cached))
            elif step[0] == "clear":
                clear_process_caches()
            assert apply_step(cached, step) == apply_step(model, step), step
        assert {info.path: inner.read(info.path) for info in inner.list()} == {
            info.path: model.read(info.path) for info in model.list()
        }
    finally:
        drop_memory_root(model.root)
        drop_memory_root(ROOT)


# Threads and processes


class GatedStorage(StorageWrapper):
    """A storage whose reads wait until the gate is open."""

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self.entered, self.opened = threading.Semaphore(0), threading.Event()

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        data = self.inner.read(path, offset=offset, length=length, limit_bytes=limit_bytes)
        self.entered.release()
        assert self.opened.wait(30)
        return data


def test_concurrent_cache_misses_read_once(meter: MeteredStorage) -> None:
    meter.create("immutable/a", b"content")
    gate = GatedStorage(meter)
    cached = CacheStorage(gate, is_immutable, FileCache(0), "identity")  # without capacity for any file
    results: list[bytes] = []
    threads = [threading.Thread(target=lambda: results.append(cached.read("immutable/a"))) for _ in range(8)]
    with meter.measure() as measured:
        for thread in threads:
            thread.start()
        assert gate.entered.acquire(timeout=30)
        read_in_progress = cached.cache._reads["identity", "immutable/a"]
        wait_until(lambda: len(read_in_progress.has_ended._cond._waiters) == 7)  # type: ignore[attr-defined]
        gate.opened.set()
        for thread in threads:
            thread.join(30)
    assert results == [b"content"] * 8
    assert measured.counts.requests == {"read": 1}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_failed_read_fails_only_its_thread() -> None:
    inner = FaultyStorage(MemoryStorage(ROOT), [fail(1, StoragePermissionError, kind="read")])
    inner.create("immutable/a", b"content")
    cached = CacheStorage(inner, is_immutable, FileCache(MIB), "identity")
    results = run_together([lambda: outcome(lambda: cached.read("immutable/a"))] * 8)
    assert sorted(map(str, results)) == sorted([str(StoragePermissionError), *[str(b"content")] * 7])
    drop_memory_root(ROOT)


@pytest.mark.parametrize("drop", ["delete", "write", "drop_cached"])
def test_read_started_before_a_drop_is_not_cached(meter: MeteredStorage, tmp_path: Path, drop: str) -> None:
    meter.create("immutable/a", b"old")
    gate, folder = GatedStorage(meter), CacheFolder(str(tmp_path), MIB)
    cached = CacheStorage(gate, is_immutable, FileCache(MIB), "identity", folder)
    reader = threading.Thread(target=lambda: cached.read("immutable/a"))
    reader.start()
    assert gate.entered.acquire(timeout=30)
    if drop == "write":
        cached.write("immutable/a", b"new")
    else:
        getattr(cached, drop)("immutable/a")
        meter.write("immutable/a", b"new")
    gate.opened.set()
    assert cached.read("immutable/a") == b"new"
    reader.join(30)
    assert cached.read("immutable/a") == b"new"
    assert folder.get("identity", "immutable/a") in (None, b"new")


def test_forked_child_starts_empty_with_free_locks(meter: MeteredStorage) -> None:
    cached = shared_cache_view(meter, any_path)
    cached.create("a", b"content")
    release = threading.Event()

    def acquire_all_locks() -> None:
        cache = cached.cache  # type: ignore[attr-defined]
        with cache._lock, cache._files._lock:
            locks_held.set()
            release.wait(60)

    locks_held = threading.Event()
    lock_thread = threading.Thread(target=acquire_all_locks)
    lock_thread.start()
    locks_held.wait(30)
    try:
        child = fork(lambda report: report(str(requests(meter, lambda: [cached.read("a"), cached.read("a")]))))
        assert child.finish() == (0, ["{'read': 1}"])
    finally:
        release.set()
        lock_thread.join(30)
    assert requests(meter, lambda: cached.read("a")) == {}


# Sizes


def test_least_recently_used_files_are_evicted_first() -> None:
    cache = FileCache(10 * (ENTRY_OVERHEAD_BYTES + 101))
    for number in range(10):
        cache.put("", str(number), b"x" * 100, cache.n_dropped)
    assert cache.get("", "0") is not None
    cache.put("", "x", b"x" * 100, cache.n_dropped)
    assert (cache.get("", "0"), cache.get("", "1")) == (b"x" * 100, None)
    assert cache.size_bytes <= cache.capacity_bytes


def test_large_files_do_not_evict_others(meter: MeteredStorage, cached: CacheStorage) -> None:
    cached.create("immutable/small", b"content")
    for size_bytes, n_reads in [(MIB // 8, 2), (MIB // 8 - 2 * ENTRY_OVERHEAD_BYTES, 0)]:
        cached.create(f"immutable/{size_bytes}", b"x" * size_bytes)
        assert meter_reads(meter, cached, f"immutable/{size_bytes}") == n_reads
    assert meter_reads(meter, cached, "immutable/small") == 0


def test_large_values_evict_only_each_other() -> None:
    lru: ByteLru[str, bytes] = ByteLru(8 * 1000, large_bytes=5000)
    for key, size_bytes in (("small", 1000), ("large", 3000), ("too large", 5001)):
        lru.put(key, key.encode(), size_bytes - ENTRY_OVERHEAD_BYTES)
    assert [lru.get(key) for key in ("small", "large", "too large")] == [b"small", b"large", None]
    assert lru.size_bytes == 4000
    lru.put("larger", b"", 4000 - ENTRY_OVERHEAD_BYTES)
    assert (lru.get("large"), lru.get("small"), lru.size_bytes) == (None, b"small", 5000)
    assert (lru.drop("larger"), lru.drop("larger"), lru.size_bytes) == (True, False, 1000)


def meter_reads(meter: MeteredStorage, storage: Storage, path: str) -> int:
    return requests(meter, lambda: [storage.read(path), storage.read(path)]).get("read", 0)


def test_resized_cache_keeps_its_order() -> None:
    lru: ByteLru[int, str] = ByteLru(8 * 1000)
    for number in range(8):
        lru.put(number, str(number), 1000 - ENTRY_OVERHEAD_BYTES)
    lru.get(0)
    lru.grow(9 * 1000)
    lru.grow(1)
    lru.put(8, "8", 1000 - ENTRY_OVERHEAD_BYTES)
    lru.put(9, "9", 1000 - ENTRY_OVERHEAD_BYTES)
    assert [number for number in range(10) if lru.get(number) is None] == [1]
    assert (lru.size_bytes, lru.capacity_bytes) == (9000, 9000)


# Shared caches


def test_storages_with_equal_root_and_options_share_a_cache(meter: MeteredStorage) -> None:
    meter.create("a", b"content")
    first_view = shared_cache_view(meter, any_path, {"access_key_id": "x"})
    same = shared_cache_view(MeteredStorage(meter), any_path, {"access_key_id": "x", "cache_bytes": "9999999"})
    other = shared_cache_view(meter, any_path, {"access_key_id": "y"})
    assert requests(meter, lambda: first_view.read("a")) == {"read": 1}
    assert requests(meter, lambda: same.read("a")) == {}
    assert requests(meter, lambda: other.read("a")) == {"read": 1}
    view_of_other_root = shared_cache_view(MemoryStorage("memory://other/"), any_path, {"access_key_id": "x"})
    with pytest.raises(FileMissingError):
        view_of_other_root.read("a")


def test_private_views_share_only_the_size(meter: MeteredStorage) -> None:
    meter.create("a", b"content")
    views = [private_cache_view(meter, any_path, {"cache_bytes": str(MIB)}) for _ in range(2)]
    assert [requests(meter, lambda view=view: view.read("a")) for view in views] == [{"read": 1}] * 2  # type: ignore[misc]
    assert requests(meter, lambda: [view.read("a") for view in views]) == {}
    for number in range(40):
        for view in views:
            view.create(f"{number}", b"x" * 100_000) if view is views[0] else view.read(f"{number}")
    cache = views[0].cache  # type: ignore[attr-defined]
    assert cache is views[1].cache  # type: ignore[attr-defined]
    assert MIB / 2 < cache.size_bytes <= MIB


def test_size_zero_disables_the_cache(meter: MeteredStorage) -> None:
    options = {"cache_bytes": "0"}
    assert shared_cache_view(meter, any_path, options) is meter
    assert private_cache_view(meter, any_path, {**options, "cache_folder": "/missing"}) is meter
    assert shared_cache_view(meter, any_path, {**options, "cache_folder": "/x", "cache_folder_bytes": "0"}) is meter


def test_cache_folder_without_memory_cache(meter: MeteredStorage, tmp_path: Path) -> None:
    options = {"cache_bytes": "0", "cache_folder": str(tmp_path / "cache")}
    meter.create("a", b"content")
    assert requests(meter, lambda: shared_cache_view(meter, any_path, options).read("a")) == {"read": 1}
    clear_process_caches()
    assert requests(meter, lambda: shared_cache_view(meter, any_path, options).read("a")) == {}


def test_pickled_copy_shares_the_process_cache(meter: MeteredStorage) -> None:
    cached = shared_cache_view(meter, any_path)
    cached.create("a", b"content")
    copy = pickle.loads(pickle.dumps(cached))
    meter.delete("a")
    assert copy.read("a") == b"content"


def test_cache_identity_depends_on_roots_and_credentials() -> None:
    secret = "wJalrXUtnFEMI"
    identities = [
        storage_identity("s3://b/", {}),
        storage_identity("s3://c/", {}),
        storage_identity("s3://b/", {"secret_access_key": secret}),
        storage_identity("s3://b/", {"secret_access_key": "another"}),
        storage_identity("s3://b/", {"endpoint": "http://h"}),
    ]
    assert len(set(identities)) == len(identities)
    assert not any(secret in identity for identity in identities)
    same = {"cache_bytes": "1", "cache_folder": "/x", "cache_folder_bytes": "1", "endpoint": "http://h"}
    assert storage_identity("s3://b/", same) == identities[-1]


@pytest.mark.parametrize("name", S3_ENVIRONMENT)
def test_cache_identity_depends_on_the_environment(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    roots = ("s3://b/", "file:///b/")
    identities = []
    for value in (None, "AKIAONE", "AKIATWO"):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
        identities.append([storage_identity(root, {}) for root in roots])
    on_s3, local = zip(*identities, strict=True)
    assert len(set(on_s3)) == 3
    assert len(set(local)) == 1
    assert not any("AKIA" in identity for identity in on_s3)


# Options


def test_default_cache_options() -> None:
    assert CacheOptions.of(ROOT, {}) == CacheOptions(256 * MIB, None, 1024 * MIB)


@pytest.mark.parametrize("name", ["cache_bytes", "cache_folder_bytes"])
@pytest.mark.parametrize("value", ["", "-1", "1.5", "1e9", "256MiB", " 1", "٣", "9" * 5000])
def test_invalid_sizes_are_rejected(name: str, value: str) -> None:
    with pytest.raises(InvalidInputError, match=f"'{name}' must be a whole number of at least 0"):
        CacheOptions.of(ROOT, {name: value})


@pytest.mark.parametrize("folder", ["", "nul\0"])
def test_invalid_cache_folders_are_rejected(folder: str) -> None:
    with pytest.raises(InvalidInputError, match="'cache_folder'"):
        CacheOptions.of(ROOT, {"cache_folder": folder})


def test_cache_folder_inside_the_lakehouse_is_rejected(tmp_path: Path) -> None:
    root = f"file://{tmp_path}/lake/"
    for folder in ("lake", "lake/cache", "x/../lake"):
        with pytest.raises(InvalidInputError):
            CacheOptions.of(root, {"cache_folder": f"{tmp_path}/{folder}"})
    assert CacheOptions.of(root, {"cache_folder": f"{tmp_path}/lake-cache"}).folder == f"{tmp_path}/lake-cache"


def test_cache_folder_of_the_user_is_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert CacheOptions.of(ROOT, {"cache_folder": "~/cache"}).folder == f"{tmp_path}/cache"
    assert CacheOptions.of(ROOT, {"cache_folder": "cache"}).folder == f"{tmp_path}/cache"


def test_concurrent_reads_and_deletes_leave_a_consistent_cache(meter: MeteredStorage) -> None:
    """Eight threads use four files. At the end, the cache returns the content of the storage."""
    cached = CacheStorage(meter, is_immutable, FileCache(MIB), "identity")

    def work(worker: int) -> None:
        for number in range(300):
            path = f"immutable/{(worker + number) % 4}"
            with contextlib.suppress(StorageError):
                if number % 7 == 0:
                    cached.delete(path)
                elif number % 5 == 0:
                    cached.create(path, f"{worker} {number}".encode())
                else:
                    cached.read(path)

    failures = run_together([functools.partial(work, worker) for worker in range(8)])
    assert failures == [None] * 8
    for number in range(4):
        path = f"immutable/{number}"
        assert outcome(lambda path=path: cached.read(path)) == outcome(lambda path=path: meter.read(path))  # type: ignore[misc]


def test_short_range_from_the_start_is_the_whole_file(meter: MeteredStorage) -> None:
    cached = private_cache_view(meter, lambda path: path.startswith("immutable/"))
    for name in ("immutable/a", "immutable/b", "mutable"):
        meter.create(name, b"0123456789")
    assert cached.read("immutable/a", offset=0, length=10) == b"0123456789", "the file may be longer"
    assert cached.read("immutable/b", offset=5, length=10) == b"56789", "the range does not start at 0"
    for name in ("immutable/a", "immutable/b", "mutable"):
        assert cached.read(name, offset=0, length=11) == b"0123456789"
    with meter.measure() as measured:
        assert [cached.read(name) for name in ("immutable/a", "immutable/b")] == [b"0123456789"] * 2
        assert cached.read("immutable/a", offset=2, length=3) == b"234"
        assert measured.counts.requests == {}
        cached.read("mutable")
    assert measured.counts.requests == {"read": 1}


def test_file_created_through_another_storage_is_cached(meter: MeteredStorage) -> None:
    cached = private_cache_view(meter, lambda path: path.startswith("immutable/"))
    assert isinstance(cached, CacheStorage)
    meter.create("immutable/a", b"x")
    cached.keep("immutable/a", b"x")
    with meter.measure() as measured:
        assert cached.read("immutable/a") == b"x"
    assert measured.counts.requests == {}
    cached.delete("immutable/a")
    with pytest.raises(FileMissingError):
        cached.read("immutable/a")
