"""Test verify with a record of verified files."""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.faults import DeathError, FaultyStorage, fail
from tests.lakes import seal, table
from tests.operations.aging import Aging
from tests.operations.changes import append_rows, create, flip
from tests.operations.generated_lakes import generated_files, memory_lake
from tests.operations.test_verify_damage import SEEDS
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import CorruptFileError, InvalidInputError, StoragePermissionError
from trinitylake_ops.format.definitions import LakehouseDef, NamespaceDef, TableDef
from trinitylake_ops.format.file_names import VERIFIED_PREFIX, is_immutable_path, new_verified_path, root_path
from trinitylake_ops.format.node_file import decode_node
from trinitylake_ops.iceberg.reach import files_of
from trinitylake_ops.iceberg.whole_files import WholeFileIO
from trinitylake_ops.operations import Budget, VerifyReport
from trinitylake_ops.operations.verification import storage as verify_storage
from trinitylake_ops.operations.verification import tables as verify_tables
from trinitylake_ops.storage import FileInfo, Storage, StorageWrapper

pytestmark = pytest.mark.usefixtures("fixed_requests")

SUFFIXES = (".arrow", ".binpb", ".json", ".avro")


def verify(storage: Storage, **options: Any) -> VerifyReport:
    return operations.verify(Lakehouse(storage), **options)


def record_paths(storage: Storage) -> list[str]:
    return [info.path for info in storage.list(VERIFIED_PREFIX)]


def immutable_paths(storage: Storage, *suffixes: str) -> list[str]:
    """Return the immutable files: nodes, definitions and table files."""
    existing_paths = sorted(info.path for info in storage.list())
    candidates = [path for path in existing_paths if is_immutable_path(path) or path.startswith("tables/")]
    return [path for path in candidates if path.endswith(suffixes or SUFFIXES) and not path.endswith("_owner.json")]


class UnchangedTimesStorage(StorageWrapper):
    """A storage that keeps the first time of each file, because a bit flip on a disk does not change the time."""

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self._times_ms = {info.path: info.last_modified_ms for info in inner.list()}

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        for info in self.inner.list(prefix):
            first_ms = self._times_ms.setdefault(info.path, info.last_modified_ms)
            yield FileInfo(info.path, info.size_bytes, first_ms)


def verify_and_log_reads(storage: Storage, **options: Any) -> tuple[VerifyReport, set[str]]:
    storage_with_log = FaultyStorage(storage)
    report = verify(storage_with_log, **options)
    return report, {request.path for request in storage_with_log.log if request.kind == "read"}


@pytest.mark.parametrize("seed", range(3))
def test_verified_files_are_not_read_again(seed: int) -> None:
    with memory_lake(generated_files(seed)) as storage:
        first, first_reads = verify_and_log_reads(storage, incremental=True)
        assert first.findings == ()
        assert first.known_files == 0
        assert record_paths(storage) == [first.record_path]
        verified_paths = set(immutable_paths(storage))
        assert verified_paths <= first_reads
        second, second_reads = verify_and_log_reads(storage, incremental=True)
        assert second_reads & verified_paths == set()
        assert second.findings == ()
        assert second.known_files
        counts = ("versions", "nodes", "definitions", "table_files", "exports", "latest_version")
        assert [getattr(second, name) for name in counts] == [getattr(first, name) for name in counts]
        assert record_paths(storage) == [second.record_path]
        append_rows(Lakehouse(storage), "managed.t")
        create(Lakehouse(storage), "fresh", "t")
        third, third_reads = verify_and_log_reads(storage, incremental=True)
        assert third.findings == ()
        assert third_reads & verified_paths == set()
        assert set(immutable_paths(storage)) - verified_paths <= third_reads
        assert verify(storage).known_files == 0, "without the option all files are read"


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_existence_and_size_are_always_checked(seed: int) -> None:
    needed = paths_read_by_deep_verify(seed)
    with memory_lake(generated_files(seed)) as storage:
        verify(storage, incremental=True)
        rng = random.Random(seed)
        for path in rng.sample(needed, 25):
            data = storage.read(path)
            storage.delete(path)
            assert path in {finding.path for finding in verify(storage, incremental=True).findings}, path
            storage.write(path, data + b"x")
            assert path in {finding.path for finding in verify(storage, incremental=True).findings}, path
            storage.write(path, data)
        assert verify(storage, incremental=True).findings == ()


@functools.cache
def paths_read_by_deep_verify(seed: int) -> list[str]:
    """Return the immutable files that a deep verify reads. It skips old metadata that no version refers to."""
    with memory_lake(generated_files(seed)) as storage:
        _, read = verify_and_log_reads(storage, deep=True)
        return [path for path in immutable_paths(storage, *SUFFIXES, ".parquet") if path in read]


@pytest.mark.filterwarnings("ignore:Encountered invalid snapshot summary")  # caused by flipped bits
@settings(max_examples=20)
@given(st.integers(0, 3), st.data())
def test_any_bit_flipped_after_verification_is_reported(seed: int, data: st.DataObject) -> None:
    """This covers nodes, definitions, metadata, manifests and data files whose size and time are unchanged."""
    needed = paths_read_by_deep_verify(seed)
    with memory_lake(generated_files(seed)) as memory:
        storage = UnchangedTimesStorage(memory)
        assert verify(storage, incremental=True, deep=True).findings == ()
        path = data.draw(st.sampled_from(needed))
        bit = data.draw(st.integers(0, 8 * len(memory.read(path)) - 1))
        flip_bit(memory, path, bit)
        report = verify(storage, deep=True)
        assert ("file-changed", path) in {(finding.code, finding.path) for finding in report.findings}
        assert not report.is_clean
        repeated = verify(storage, deep=True, incremental=True)
        assert ("file-changed", path) in {(finding.code, finding.path) for finding in repeated.findings}
        assert not verify(storage, deep=True).is_clean, "the record still has the old checksum"
        flip_bit(memory, path, bit)
        assert verify(storage, deep=True).findings == ()


def flip_bit(storage: Storage, path: str, bit: int) -> None:
    data = bytearray(storage.read(path))
    data[bit // 8] ^= 1 << bit % 8
    storage.write(path, bytes(data))


@settings(max_examples=40)
@given(SEEDS, st.data())
def test_bit_flip_undetected_without_record_keeps_catalog_files_valid(seed: int, data: st.DataObject) -> None:
    """In nodes, undetected flips change only the text of keys and system rows, but no pointer and no row count.

    Definitions remain valid, but can have other values.
    """
    with memory_lake(generated_files(seed)) as storage:
        path = data.draw(st.sampled_from(immutable_paths(storage, ".arrow", ".binpb")))
        before = storage.read(path)
        flip_bit(storage, path, data.draw(st.integers(0, 8 * len(before) - 1)))
        if not verify(storage).is_clean:
            return
        after = storage.read(path)
        if path.endswith(".binpb"):
            assert is_definition(path, after)
            return
        old, new = decode_node(before, path), decode_node(after, path)
        assert list(new.values) == list(old.values)
        assert list(new.children) == list(old.children)
        assert list(new.buffer.values()) == list(old.buffer.values())
        assert len(new.keys) == len(old.keys)


@settings(max_examples=40)
@given(st.integers(0, 3), st.data())
def test_bit_flip_undetected_without_record_adds_no_table_file(seed: int, data: st.DataObject) -> None:
    """After an undetected flip, a metadata or manifest file is readable and refers to no other file."""
    needed = [path for path in paths_read_by_deep_verify(seed) if path.endswith((".json", ".avro"))]
    with memory_lake(generated_files(seed)) as storage:
        path = data.draw(st.sampled_from(needed))
        before = live_files(storage)
        flip_bit(storage, path, data.draw(st.integers(0, 8 * len(storage.read(path)) - 1)))
        if verify(storage).is_clean:
            assert live_files(storage) <= before


def live_files(storage: Storage) -> set[tuple[str, int | None]]:
    """Return the files that the managed table of the latest version needs, with their recorded sizes."""
    io = WholeFileIO.on(storage, read_only=True)
    files = files_of(Lakehouse(storage).snapshot().table("managed", "t"), io)
    return {(file.location, file.size_bytes) for file in files if file.live}


def is_definition(path: str, data: bytes) -> bool:
    definition_class = LakehouseDef if "_lakehouse_def_" in path else TableDef if "-table-" in path else NamespaceDef
    try:
        return bool(definition_class.from_bytes(data, path))
    except CorruptFileError:
        return False


def test_data_files_are_read_only_by_deep_run() -> None:
    with memory_lake(generated_files(0)) as storage:
        path = immutable_paths(storage, ".parquet")[0]
        flip(storage, path, -1)  # in the magic number at the end of the file
        assert verify(storage).findings == ()
        (finding,) = verify(storage, deep=True).findings
        assert (finding.severity, finding.code, finding.path) == ("error", "table-file-corrupt", path)
        storage.write(path, storage.read(path)[:-1] + b"1")
        assert verify(storage, deep=True).findings == ()


def test_large_data_file_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (verify_storage, verify_tables):
        monkeypatch.setattr(module, "PIECE_BYTES", 100)
    with memory_lake(generated_files(0)) as memory:
        storage = UnchangedTimesStorage(memory)
        assert verify(storage, deep=True, incremental=True).findings == ()
        path = immutable_paths(storage, ".parquet")[0]
        for bit in (0, 8 * 150, 8 * len(memory.read(path)) - 1):
            flip_bit(memory, path, bit)
            assert ("file-changed", path) in {
                (finding.code, finding.path) for finding in verify(storage, deep=True).findings
            }
            flip_bit(memory, path, bit)
        storage_with_log = FaultyStorage(storage)
        assert verify(storage_with_log, deep=True).findings == ()
        assert sum(request.path == path for request in storage_with_log.log) >= len(memory.read(path)) // 100


def test_sealed_root_is_not_reported_as_changed(aging: Aging) -> None:
    verify(aging.clock, incremental=True)
    aging.clean_up()
    report, read = verify_and_log_reads(aging.clock, incremental=True)
    assert report.findings == ()
    assert root_path(0) in read
    _, read = verify_and_log_reads(aging.clock, incremental=True)
    assert root_path(0) not in read


def test_root_sealed_after_recorded_run_is_not_reported() -> None:
    with memory_lake(generated_files(1)) as storage:
        verify(storage, incremental=True)
        seal(Lakehouse(storage), 1)
        assert verify(storage, deep=True).findings == ()
        assert verify(storage, incremental=True).findings == ()


# Limits


def test_limits_end_verify_early_and_report_unchecked_parts() -> None:
    with memory_lake(generated_files(2)) as storage:
        full_report = verify(storage)
        assert full_report.is_complete
        assert full_report.unchecked == ()
        for max_requests in (1, 5, 20, 40):
            storage_with_log = FaultyStorage(storage)
            report = verify(storage_with_log, budget=Budget(max_requests=max_requests))
            assert not report.is_complete
            assert report.is_clean
            assert report.stopped == f"the budget of {max_requests} requests is spent"
            assert "orphans" in report.unchecked
            assert any(item.startswith("versions ") for item in report.unchecked)
            assert str(report).startswith("Incomplete")
            assert report.cost.total_requests <= max_requests + 5, "the first requests locate the latest version"
        report = verify(storage, budget=Budget(max_seconds=1e-9))
        assert report.versions == 0
        assert f"versions 0-{full_report.latest_version}" in report.unchecked
        assert verify(storage, budget=Budget(max_requests=10_000, max_seconds=1_000)).is_complete
        with pytest.raises(InvalidInputError):
            verify(storage, budget=Budget(requests_per_second=1))


@pytest.mark.parametrize("max_requests", [14, 40])
def test_limited_incremental_runs_finish(max_requests: int) -> None:
    """Each run continues where the previous run ended. Only files that locate the latest version are read twice."""
    with memory_lake(generated_files(3)) as storage:
        n_requests = verify(storage).cost.total_requests
        read_before: set[str] = set()
        n_runs = 0
        while True:
            n_runs += 1
            report, read = verify_and_log_reads(storage, incremental=True, budget=Budget(max_requests=max_requests))
            assert report.is_clean
            read = {path for path in read if path in immutable_paths(storage, ".arrow", ".binpb", ".avro")}
            assert read_before & read == set()
            read_before |= {path for path in read if not path.startswith("tables/")}
            if report.is_complete:
                break
            assert n_runs < 3 * n_requests
        assert n_runs > 1
        assert report.versions == verify(storage).versions


# Records


def test_records_of_concurrent_runs_are_combined() -> None:
    with memory_lake(generated_files(4)) as storage:
        verify(storage, incremental=True)

        class ConcurrentRunStorage(StorageWrapper):
            """A storage that completes another run just before the record is read."""

            has_begun = False

            def read(
                self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None
            ) -> bytes:
                if path.startswith(VERIFIED_PREFIX) and not self.has_begun:
                    self.has_begun = True
                    verify(storage, incremental=True)
                return super().read(path, offset=offset, length=length, limit_bytes=limit_bytes)

        assert verify(ConcurrentRunStorage(storage), incremental=True).findings == ()
        assert len(record_paths(storage)) == 1
        create(Lakehouse(storage), "later")
        record_path = verify(storage, incremental=True).record_path
        assert record_path is not None
        second_path = new_verified_path()
        storage.create(second_path, storage.read(record_path))
        report, read = verify_and_log_reads(storage, incremental=True)
        assert report.findings == ()
        assert read & set(immutable_paths(storage)) == set()
        assert record_paths(storage) == [report.record_path]


def test_run_killed_at_any_request_can_be_repeated() -> None:
    with memory_lake(generated_files(7)) as storage:
        verify(storage, incremental=True)
        create(Lakehouse(storage), "later")
        files = {info.path: storage.read(info.path) for info in storage.list()}
        storage_with_log = FaultyStorage(storage, concurrency=1)
        verify(storage_with_log, incremental=True)
        assert {"create", "delete"} <= {request.kind for request in storage_with_log.log}
        for request in storage_with_log.log:
            with memory_lake(files) as repeated_storage:
                fault = fail(request.number, DeathError, "after")  # type: ignore[arg-type]
                with pytest.raises(DeathError):
                    verify(FaultyStorage(repeated_storage, [fault], concurrency=1), incremental=True)
                assert record_paths(repeated_storage), request
                assert verify(repeated_storage, incremental=True).findings == (), request
                assert len(record_paths(repeated_storage)) == 1


def test_record_conforms_to_the_format() -> None:
    with memory_lake(generated_files(7)) as storage:
        verify(storage, incremental=True, deep=True)
        (path,) = record_paths(storage)
        data = storage.read(path)
        assert hashlib.sha256(data[:-32]).digest() == data[-32:]
        with pa.ipc.open_stream(data[:-32]) as reader:
            assert reader.schema.metadata == {b"version": b"1"}
            rows = reader.read_all().to_pylist()
        infos = {info.path: info for info in storage.list()}
        assert len({row["path"] for row in rows}) == len(rows)
        for row in rows:
            info, content = infos[row["path"]], storage.read(row["path"])
            assert (row["size_bytes"], row["modified_millis"]) == (info.size_bytes, info.last_modified_ms)
            assert row["sha256"] == hashlib.sha256(content).digest()
            if row["kind"] == "file":
                assert row["content"] == content
            elif row["kind"] == "names":
                assert all(len(name) == 3 for name in json.loads(row["content"]))
            else:
                assert (row["kind"], row["content"]) == ("checksum", None)
        kinds_by_suffix = {
            row["path"].rpartition(".")[2]: row["kind"] for row in rows if not row["path"].startswith("_ops/")
        }
        assert kinds_by_suffix == {
            "arrow": "file",
            "binpb": "file",
            "json": "names",
            "avro": "names",
            "parquet": "checksum",
        }


def test_older_of_two_different_records_is_used() -> None:
    with memory_lake(generated_files(4)) as memory:
        storage = UnchangedTimesStorage(memory)
        verify(storage, incremental=True)
        (older,) = record_paths(storage)
        data = storage.read(older)
        path = next(  # a table without files, because metadata and owner files contain the table id
            path
            for path in immutable_paths(storage, ".binpb")
            if "-table-" in path
            and not list(storage.list(f"tables/{TableDef.from_bytes(memory.read(path), path).id}/"))
        )
        storage.delete(older)
        other = replace(TableDef.from_bytes(memory.read(path), path), id="other")
        memory.write(path, other.to_bytes())  # has no checksum, as if another program had written it
        assert verify(storage, incremental=True).is_clean, "a change without a record is not detected"
        storage.create(older, data)
        times_ms = {info.path: info.last_modified_ms for info in storage.list(VERIFIED_PREFIX)}
        assert len(times_ms) == 2
        assert times_ms[older] == min(times_ms.values())
        assert ("file-changed", path) in {
            (finding.code, finding.path) for finding in verify(storage, deep=True).findings
        }


def test_run_without_write_permission_reports_a_warning() -> None:
    with memory_lake(generated_files(5)) as storage:
        fault = fail(1, StoragePermissionError, kind="create", times=99)
        report = verify(FaultyStorage(storage, [fault]), incremental=True)
        (finding,) = report.findings
        assert (finding.severity, finding.code) == ("warning", "record-not-written")
        assert "injected" in finding.message
        assert report.is_clean
        assert report.record_path is None
        assert record_paths(storage) == []


def test_undeletable_record_is_read_again() -> None:
    with memory_lake(generated_files(5)) as storage:
        verify(storage, incremental=True)
        fault = fail(1, StoragePermissionError, kind="delete", times=99)
        assert verify(FaultyStorage(storage, [fault]), incremental=True).findings == ()
        assert len(record_paths(storage)) == 2
        assert verify(storage, incremental=True).findings == ()
        assert len(record_paths(storage)) == 1


@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty", "unknown-format"])
def test_damaged_record_is_ignored(damage: str) -> None:
    with memory_lake(generated_files(6)) as storage:
        verify(storage, incremental=True)
        (path,) = record_paths(storage)
        data = storage.read(path)
        if damage == "flipped":
            flip(storage, path, len(data) // 2)
        else:
            storage.write(path, {"truncated": data[: len(data) // 2], "empty": b""}.get(damage, b"x" * 40))
        (finding,) = verify(storage).findings
        assert (finding.severity, finding.code, finding.path) == ("warning", "record-damaged", path)
        report, read = verify_and_log_reads(storage, incremental=True)
        assert [finding.code for finding in report.findings] == ["record-damaged"]
        assert set(immutable_paths(storage, ".binpb")) <= read
        assert record_paths(storage) == [report.record_path]
        assert verify(storage, incremental=True).findings == ()


def test_only_superseded_record_is_an_orphan(aging: Aging) -> None:
    verify(aging.clock, incremental=True)
    (first,) = record_paths(aging.clock)
    data = aging.clock.read(first)
    aging.later()
    record_path = verify(aging.clock, incremental=True).record_path
    aging.clock.create(first, data)
    aging.clock.written_ms[first] -= 1
    aging.later()
    assert operations.plan_orphan_removal(aging.lake).paths == [first]
    aging.remove_orphans()
    assert record_paths(aging.clock) == [record_path]
    assert verify(aging.clock, incremental=True).findings == ()


def test_deleted_files_are_removed_from_record(aging: Aging) -> None:
    verify(aging.clock, incremental=True)
    size_bytes = len(aging.clock.read(record_paths(aging.clock)[0]))
    aging.clean_up()
    with aging.lake.transaction() as txn:
        txn.create_table("n0", "new", table())
    verify(aging.clock, incremental=True)
    assert len(aging.clock.read(record_paths(aging.clock)[0])) < size_bytes
