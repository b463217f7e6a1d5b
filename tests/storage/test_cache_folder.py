"""The cache folder is shared by processes and verified, and never causes errors or returns wrong bytes."""

from __future__ import annotations

import logging
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.processes import fork
from tests.storage.file_systems import NOBODY_UID, mounted_read_only, read_only_modes, small_disk
from trinitylake_ops.storage import MemoryStorage, MeteredStorage, drop_memory_root
from trinitylake_ops.storage.cache import folder as cache_folder
from trinitylake_ops.storage.cache.folder import CacheFolder
from trinitylake_ops.storage.cache.storage import CacheStorage, FileCache, clear_process_caches, shared_cache_view
from trinitylake_ops.storage.local import posix_files

ROOT = "memory://cache-folder/"
KIB = 1024
MIB = 1024 * 1024


@pytest.fixture
def cache_path(tmp_path: Path) -> Path:
    return tmp_path / "parent" / "cache"


@pytest.fixture
def folder(cache_path: Path) -> CacheFolder:
    return CacheFolder(str(cache_path), MIB)


@pytest.fixture
def meter() -> Iterator[MeteredStorage]:
    yield MeteredStorage(MemoryStorage(ROOT))
    drop_memory_root(ROOT)


def files(cache_path: Path) -> list[Path]:
    subfolder = cache_path / "trinitylake-cache"
    return sorted(subfolder.iterdir()) if subfolder.exists() else []


def disk_bytes(cache_path: Path) -> int:
    return sum(-(-file.stat().st_size // 4096) * 4096 for file in files(cache_path))


def body(number: int, size_bytes: int = 10 * KIB) -> bytes:
    return (f"{number} " * size_bytes)[:size_bytes].encode()


# Cached files


def test_cached_file_is_visible_to_other_processes(folder: CacheFolder, cache_path: Path) -> None:
    folder.put("identity", "a/b", b"content")
    folder.put("identity", "empty", b"")
    other = CacheFolder(str(cache_path), MIB)
    assert (other.get("identity", "a/b"), other.get("identity", "empty")) == (b"content", b"")
    assert other.get("another", "a/b") is None
    assert other.get("identity", "a") is None


def test_cache_folder_is_private_and_contains_no_plain_names(folder: CacheFolder, cache_path: Path) -> None:
    old_umask = os.umask(0)
    try:
        folder.put("identity", "table-secret-name.binpb", b"content")
    finally:
        os.umask(old_umask)
    (file,) = files(cache_path)
    assert "secret" not in str(file)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (cache_path, cache_path / "trinitylake-cache", file)]
    assert modes == [0o700, 0o700, 0o600]


def test_drop_deletes_the_cached_file(folder: CacheFolder, cache_path: Path) -> None:
    assert folder.drop("identity", "a") is False
    folder.put("identity", "a", b"content")
    assert folder.drop("identity", "a") is True
    assert folder.drop("identity", "a") is False
    assert (folder.get("identity", "a"), files(cache_path)) == (None, [])


def with_last_bit_flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "truncated header": lambda data: data[:20],
    "missing body": lambda data: data[:40],
    "truncated body": lambda data: data[:-1],
    "trailing byte": lambda data: data + b"\0",
    "flipped bit in the body": with_last_bit_flipped,
    "flipped bit in the checksum": lambda data: data[:10] + with_last_bit_flipped(data[10:11]) + data[11:],
    "unknown format": lambda data: b"X" + data[1:],
    "foreign content": lambda data: b"something else altogether" * 9,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_copies_are_dropped(
    meter: MeteredStorage, folder: CacheFolder, cache_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    meter.create("a", b"content")
    CacheStorage(meter, _any_path, FileCache(0), "identity", folder).read("a")
    (file,) = files(cache_path)
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    cached = CacheStorage(meter, _any_path, FileCache(0), "identity", folder)
    with meter.measure() as measured:
        assert [cached.read("a"), cached.read("a")] == [b"content"] * 2
    assert measured.counts.requests == {"read": 1}
    assert [record.getMessage() for record in caplog.records] == [
        f"deleted the damaged cache file {file}; the original is read from the storage"
    ]


def test_cached_copy_of_another_file_is_rejected(folder: CacheFolder, cache_path: Path) -> None:
    folder.put("identity", "a", b"content of a")
    (file_a,) = files(cache_path)
    folder.put("identity", "b", b"content of b")
    (file_b,) = set(files(cache_path)) - {file_a}
    file_a.write_bytes(file_b.read_bytes())
    assert (folder.get("identity", "a"), folder.get("identity", "b")) == (None, b"content of b")


def test_folder_at_the_path_of_a_cached_file_is_ignored(folder: CacheFolder, cache_path: Path) -> None:
    folder.put("identity", "a", b"content")
    (file,) = files(cache_path)
    file.unlink()
    file.mkdir()
    assert folder.get("identity", "a") is None
    folder.put("identity", "a", b"content")
    assert folder.get("identity", "a") is None


def test_removed_cache_folder_is_created_again(folder: CacheFolder, cache_path: Path) -> None:
    folder.put("identity", "a", b"content")
    for file in files(cache_path):
        file.unlink()
    (cache_path / "trinitylake-cache").rmdir()
    assert folder.get("identity", "a") is None
    folder.put("identity", "a", b"content")  # detects that the file was deleted
    folder.put("identity", "a", b"content")
    assert folder.get("identity", "a") == b"content"


# Limit


def test_least_recently_used_files_are_evicted_at_the_limit(folder: CacheFolder, cache_path: Path) -> None:
    (cache_path / "trinitylake-cache").mkdir(parents=True, mode=0o700)
    (cache_path / "trinitylake-cache" / "notes.txt").write_text("a file of another program")
    folder.put("identity", "often used", body(0))
    used_ns: dict[Path, int] = {}
    for number in range(1, 200):
        for file in files(cache_path):
            os.utime(file, ns=(0, used_ns.setdefault(file, 10**9 * number)))
        assert folder.get("identity", "often used") == body(0)  # recorded, because the last recorded use is old
        folder.put("identity", str(number), body(number))
        assert disk_bytes(cache_path) <= MIB
    cached_numbers = [number for number in range(1, 200) if folder.get("identity", str(number)) is not None]
    assert len(cached_numbers) > 40
    assert cached_numbers == list(range(cached_numbers[0], 200))
    assert (cache_path / "trinitylake-cache" / "notes.txt").exists()


def test_use_of_a_cached_file_is_recorded_once_a_minute(folder: CacheFolder, cache_path: Path) -> None:
    folder.put("identity", "a", b"content")
    (file,) = files(cache_path)
    for age_s, is_recorded in [(30, False), (90, True)]:
        used_s = time.time() - age_s
        os.utime(file, (used_s, used_s))
        folder.get("identity", "a")
        assert (file.stat().st_mtime > used_s + 1) is is_recorded


def test_large_files_are_not_cached(folder: CacheFolder, cache_path: Path) -> None:
    folder.put("identity", "a", b"x" * (MIB // 16))
    assert files(cache_path) == []


def test_small_writes_of_short_processes_stay_within_the_limit(cache_path: Path) -> None:
    for number in range(600):
        CacheFolder(str(cache_path), MIB).put("identity", str(number), body(number))
    assert MIB / 2 < disk_bytes(cache_path) < MIB * 5 / 4


def test_files_of_killed_writers_are_removed(folder: CacheFolder, cache_path: Path) -> None:
    folder.put("identity", "a", b"content")
    (file,) = files(cache_path)
    old, recent = (Path(f"{file}.{digit * 32}.tmp") for digit in "ab")
    for path in (old, recent):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 7200, time.time() - 7200))
    for number in range(10):
        folder.put("identity", str(number), body(number))
    assert (old.exists(), recent.exists()) == (False, True)


# Errors


def test_full_disk_disables_the_cache_folder(
    tmp_path: Path, meter: MeteredStorage, caplog: pytest.LogCaptureFixture
) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, size_bytes=256 * KIB):
        cached = CacheStorage(meter, _any_path, FileCache(0), "identity", CacheFolder(str(disk), 100 * MIB))
        paths = [f"{number}" for number in range(20)]
        for number, path in enumerate(paths):
            meter.create(path, body(number, 300 * KIB if number == 7 else 30 * KIB))
        for _ in range(2):
            assert [cached.read(path) for path in paths] == [meter.read(path) for path in paths]
        assert not [file for file in files(disk) if file.suffix == ".tmp"]
        with meter.measure() as measured:
            cached.read("0")
        assert measured.counts.total == 0  # earlier files are still cached
    assert len(caplog.records) == 1
    assert "cannot write to the cache folder" in caplog.text and "continuing without it" in caplog.text


def test_writes_to_the_cache_folder_resume_after_a_pause(
    folder: CacheFolder, cache_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_path.mkdir(parents=True)
    with read_only_modes(cache_path):
        folder.put("identity", "a", b"content")
    folder.put("identity", "a", b"content")
    assert folder.get("identity", "a") is None
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 301)
    folder.put("identity", "a", b"content")
    assert folder.get("identity", "a") == b"content"


@pytest.mark.parametrize("make_read_only", [mounted_read_only, read_only_modes])
def test_read_only_cache_folder_is_used(
    folder: CacheFolder,
    cache_path: Path,
    make_read_only: Callable[[Path], object],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    if make_read_only is read_only_modes and os.geteuid() == 0:
        _change_owner(tmp_path)
        os.seteuid(NOBODY_UID)
    try:
        folder.put("identity", "a", b"content")
        folder.put("identity", "b", b"damaged in transit")
        os.utime(files(cache_path)[0], (0, 0))
        os.utime(files(cache_path)[1], (0, 0))
    finally:
        os.seteuid(os.getuid())
    with make_read_only(cache_path):  # type: ignore[attr-defined]
        for _ in range(3):
            folder.put("identity", "c", b"content")
            assert folder.get("identity", "a") == b"content"
        assert folder.drop("identity", "b") is True  # not returned again, although it cannot be deleted
        assert folder.get("identity", "b") is None
        assert folder.drop("identity", "b") is False
    assert len(caplog.records) == 1


def _change_owner(tmp_path: Path) -> None:
    """Make the unprivileged user the owner of the folder, and make the folder reachable."""
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.getuid() and parent.stat().st_mode & 0o011 != 0o011:
            parent.chmod(parent.stat().st_mode | 0o011)
    os.chown(tmp_path, NOBODY_UID, NOBODY_UID)


@pytest.mark.parametrize("problem", ["file", "not writable", "open to other users", "symbolic link"])
def test_unusable_cache_folders_are_rejected(
    tmp_path: Path, cache_path: Path, problem: str, meter: MeteredStorage, caplog: pytest.LogCaptureFixture
) -> None:
    cache_path.parent.mkdir()
    if problem == "file":
        cache_path.write_text("not a folder")
    elif problem == "open to other users":
        cache_path.mkdir()
        (cache_path / "trinitylake-cache").mkdir()
        (cache_path / "trinitylake-cache").chmod(0o770)
    elif problem == "symbolic link":
        cache_path.mkdir()
        (tmp_path / "private").mkdir(mode=0o700)
        (cache_path / "trinitylake-cache").symlink_to(tmp_path / "private")
    else:
        cache_path = Path("/proc/missing")
    meter.create("a", b"content")
    cached = CacheStorage(meter, _any_path, FileCache(0), "identity", CacheFolder(str(cache_path), MIB))
    assert [cached.read("a"), cached.read("a")] == [b"content"] * 2
    cached.delete("a")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


# Processes


def _any_path(path: str) -> bool:
    return True


def test_concurrent_processes_stay_within_the_limit(cache_path: Path) -> None:
    """Eight processes read and write 60 files in a folder with room for about half of them."""

    def work(report: Callable[[str], None]) -> None:
        folder = CacheFolder(str(cache_path), MIB // 2)
        hits = 0
        for step in range(500):
            number = step * 7919 * (os.getpid() % 97 + 1) % 60
            cached_body = folder.get("identity", str(number))
            if cached_body is None:
                folder.put("identity", str(number), body(number))
            elif cached_body != body(number):
                raise AssertionError(number)
            else:
                hits += 1
        assert not folder.has_failed
        report(str(hits))

    children = [fork(work) for _ in range(8)]
    results = [child.finish() for child in children]
    assert [status for status, _ in results] == [0] * 8
    assert sum(int(lines[0]) for _, lines in results) > 300
    assert disk_bytes(cache_path) <= MIB // 2 * 5 / 4


@pytest.mark.parametrize("kill_point", ["half written", "before the rename"])
def test_kill_during_writes_loses_no_acknowledged_file(cache_path: Path, kill_point: str) -> None:
    def work(report: Callable[[str], None]) -> None:
        original_write = os.write

        def write_half(descriptor: int, data: bytes) -> int:
            original_write(descriptor, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError

        def kill_before_rename(source: str, target: str) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        if kill_point == "half written":
            posix_files.os.write = write_half  # type: ignore[attr-defined]
        else:
            cache_folder.os.replace = kill_before_rename  # type: ignore[attr-defined]
        CacheFolder(str(cache_path), MIB).put("identity", "a", body(1))

    status, _ = fork(work).finish()
    assert status == -signal.SIGKILL
    (leftover,) = files(cache_path)
    assert leftover.suffix == ".tmp"
    folder = CacheFolder(str(cache_path), MIB)
    assert folder.get("identity", "a") is None
    folder.put("identity", "a", body(1))
    assert folder.get("identity", "a") == body(1)


def test_killed_processes_leave_a_valid_cache_folder(cache_path: Path) -> None:
    """After a process was killed, the next process reads correct bytes or no bytes."""

    def work(report: Callable[[str], None]) -> None:
        folder = CacheFolder(str(cache_path), 100 * MIB)
        report("ready")
        for step in range(10**6):
            folder.put("identity", str(step % 20), body(step % 20, 60 * KIB))

    for round_number in range(8):
        child = fork(work)
        assert os.read(child.reports, 6) == b"ready\n"
        time.sleep(0.002 * round_number)
        os.kill(child.pid, signal.SIGKILL)
        assert child.finish()[0] == -signal.SIGKILL
        folder = CacheFolder(str(cache_path), 100 * MIB)
        assert all(folder.get("identity", str(number)) in (None, body(number, 60 * KIB)) for number in range(20))
    assert CacheFolder(str(cache_path), 100 * MIB).get("identity", "0") == body(0, 60 * KIB)


def test_second_process_reads_from_the_cache_folder(meter: MeteredStorage, cache_path: Path) -> None:
    options = {"cache_folder": str(cache_path), "access_key_id": "AKIAEXAMPLE", "secret_access_key": "very-secret"}
    meter.create("a", b"content")

    def work(report: Callable[[str], None]) -> None:
        cached = shared_cache_view(meter, _any_path, options)
        with meter.measure() as measured:
            assert cached.read("a") == b"content"
        report(str(measured.counts.total))

    assert [fork(work).finish() for _ in range(2)] == [(0, ["1"]), (0, ["0"])]
    written_bytes = b"".join(str(file).encode() + file.read_bytes() for file in files(cache_path))
    assert b"AKIAEXAMPLE" not in written_bytes and b"very-secret" not in written_bytes


def test_warning_is_logged_once_per_process(
    meter: MeteredStorage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    meter.create("a", b"content")
    for _ in range(3):
        options = {"cache_folder": f"{tmp_path}/file", "cache_bytes": "0"}
        assert shared_cache_view(meter, _any_path, options).read("a") == b"content"
    assert len(caplog.records) == 1
    clear_process_caches()
