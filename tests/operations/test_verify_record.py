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
from tests.operations.generated_lakes import generated, memory_lake
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

KINDS = (".arrow", ".binpb", ".json", ".avro")


def verified(storage: Storage, **options: Any) -> VerifyReport:
    return operations.verify(Lakehouse(storage), **options)


def records(storage: Storage) -> list[str]:
    return [info.path for info in storage.list(VERIFIED_PREFIX)]


def immutable(storage: Storage, *suffixes: str) -> list[str]:
    """Return the immutable files: nodes, definitions and table files."""
    stored = sorted(info.path for info in storage.list())
    results = [path for path in stored if is_immutable_path(path) or path.startswith("tables/")]
    return [path for path in results if path.endswith(suffixes or KINDS) and not path.endswith("_owner.json")]


class SameTimes(StorageWrapper):
    """Show the first known time of each file, because a bit that flips on a disk does not change the time."""

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self._times_ms = {info.path: info.last_modified_ms for info in inner.list()}

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        for info in self.inner.list(prefix):
            first_ms = self._times_ms.setdefault(info.path, info.last_modified_ms)
            yield FileInfo(info.path, info.size_bytes, first_ms)


def reads(storage: Storage, **options: Any) -> tuple[VerifyReport, set[str]]:
    counted = FaultyStorage(storage)
    report = verified(counted, **options)
    return report, {request.path for request in counted.log if request.kind == "read"}


@pytest.mark.parametrize("seed", range(3))
def test_verified_files_are_not_read_again(seed: int) -> None:
    with memory_lake(generated(seed)) as storage:
        first, read_first = reads(storage, incremental=True)
        assert first.findings == ()
        assert first.known_files == 0
        assert records(storage) == [first.record_path]
        known = set(immutable(storage))
        assert known <= read_first
        second, read_second = reads(storage, incremental=True)
        assert read_second & known == set()
        assert second.findings == ()
        assert second.known_files
        counts = ("versions", "nodes", "definitions", "table_files", "exports", "latest_version")
        assert [getattr(second, name) for name in counts] == [getattr(first, name) for name in counts]
        assert records(storage) == [second.record_path]
        append_rows(Lakehouse(storage), "managed.t")
        create(Lakehouse(storage), "fresh", "t")
        third, read_third = reads(storage, incremental=True)
        assert third.findings == ()
        assert read_third & known == set()
        assert set(immutable(storage)) - known <= read_third
        assert verified(storage).known_files == 0, "without the option all files are read"


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_existence_and_size_are_always_checked(seed: int) -> None:
    needed = reached(seed)
    with memory_lake(generated(seed)) as storage:
        verified(storage, incremental=True)
        rng = random.Random(seed)
        for path in rng.sample(needed, 25):
            data = storage.read(path)
            storage.delete(path)
            assert path in {f.path for f in verified(storage, incremental=True).findings}, path
            storage.write(path, data + b"x")
            assert path in {f.path for f in verified(storage, incremental=True).findings}, path
            storage.write(path, data)
        assert verified(storage, incremental=True).findings == ()


@functools.cache
def reached(seed: int) -> list[str]:
    """Return the immutable files that a deep verify reads; it skips old metadata without references."""
    with memory_lake(generated(seed)) as storage:
        _, read = reads(storage, deep=True)
        return [path for path in immutable(storage, *KINDS, ".parquet") if path in read]


@pytest.mark.filterwarnings("ignore:Encountered invalid snapshot summary")  # caused by flipped bits
@settings(max_examples=20)
@given(st.integers(0, 3), st.data())
def test_any_bit_flipped_after_verification_is_found(seed: int, data: st.DataObject) -> None:
    """This covers nodes, definitions, metadata, manifests and data files with unchanged size and time."""
    needed = reached(seed)
    with memory_lake(generated(seed)) as memory:
        storage = SameTimes(memory)
        assert verified(storage, incremental=True, deep=True).findings == ()
        path = data.draw(st.sampled_from(needed))
        bit = data.draw(st.integers(0, 8 * len(memory.read(path)) - 1))
        flip_bit(memory, path, bit)
        report = verified(storage, deep=True)
        assert ("file-changed", path) in {(finding.code, finding.path) for finding in report.findings}
        assert not report.is_clean
        repeated = verified(storage, deep=True, incremental=True)
        assert ("file-changed", path) in {(f.code, f.path) for f in repeated.findings}
        assert not verified(storage, deep=True).is_clean, "the record still has the old checksum"
        flip_bit(memory, path, bit)
        assert verified(storage, deep=True).findings == ()


def flip_bit(storage: Storage, path: str, bit: int) -> None:
    data = bytearray(storage.read(path))
    data[bit // 8] ^= 1 << bit % 8
    storage.write(path, bytes(data))


@settings(max_examples=40)
@given(SEEDS, st.data())
def test_undetectable_catalog_flips_without_a_record(seed: int, data: st.DataObject) -> None:
    """In nodes, these only change text of keys and system rows, or nothing; never a pointer or a row.

    In definitions, these leave a valid definition, which can have other values.
    """
    with memory_lake(generated(seed)) as storage:
        path = data.draw(st.sampled_from(immutable(storage, ".arrow", ".binpb")))
        before = storage.read(path)
        flip_bit(storage, path, data.draw(st.integers(0, 8 * len(before) - 1)))
        if not verified(storage).is_clean:
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
def test_undetectable_table_flips_without_a_record(seed: int, data: st.DataObject) -> None:
    """After these, a metadata or manifest file is still readable and refers to no new file."""
    needed = [path for path in reached(seed) if path.endswith((".json", ".avro"))]
    with memory_lake(generated(seed)) as storage:
        path = data.draw(st.sampled_from(needed))
        before = named_files(storage)
        flip_bit(storage, path, data.draw(st.integers(0, 8 * len(storage.read(path)) - 1)))
        if verified(storage).is_clean:
            assert named_files(storage) <= before


def named_files(storage: Storage) -> set[tuple[str, int | None]]:
    """Return the files that the managed table of the latest version needs, with their recorded sizes."""
    io = WholeFileIO.on(storage, read_only=True)
    files = files_of(Lakehouse(storage).snapshot().table("managed", "t"), io)
    return {(file.location, file.size_bytes) for file in files if file.live}


def is_definition(path: str, data: bytes) -> bool:
    kind = LakehouseDef if "_lakehouse_def_" in path else TableDef if "-table-" in path else NamespaceDef
    try:
        return bool(kind.from_bytes(data, path))
    except CorruptFileError:
        return False


def test_data_files_are_only_read_by_deep_run() -> None:
    with memory_lake(generated(0)) as storage:
        path = immutable(storage, ".parquet")[0]
        flip(storage, path, -1)  # in the magic number at its end
        assert verified(storage).findings == ()
        (finding,) = verified(storage, deep=True).findings
        assert (finding.severity, finding.code, finding.path) == ("error", "table-file-corrupt", path)
        storage.write(path, storage.read(path)[:-1] + b"1")
        assert verified(storage, deep=True).findings == ()


def test_large_data_file_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (verify_storage, verify_tables):
        monkeypatch.setattr(module, "PIECE_BYTES", 100)
    with memory_lake(generated(0)) as memory:
        storage = SameTimes(memory)
        assert verified(storage, deep=True, incremental=True).findings == ()
        path = immutable(storage, ".parquet")[0]
        for bit in (0, 8 * 150, 8 * len(memory.read(path)) - 1):
            flip_bit(memory, path, bit)
            assert ("file-changed", path) in {(f.code, f.path) for f in verified(storage, deep=True).findings}
            flip_bit(memory, path, bit)
        counted = FaultyStorage(storage)
        assert verified(counted, deep=True).findings == ()
        assert sum(request.path == path for request in counted.log) >= len(memory.read(path)) // 100


def test_sealed_root_is_not_reported_as_changed(aging: Aging) -> None:
    verified(aging.clock, incremental=True)
    aging.clean_up()
    report, read = reads(aging.clock, incremental=True)
    assert report.findings == ()
    assert root_path(0) in read
    _, read = reads(aging.clock, incremental=True)
    assert root_path(0) not in read


def test_root_sealed_after_recorded_run_is_not_reported() -> None:
    with memory_lake(generated(1)) as storage:
        verified(storage, incremental=True)
        seal(Lakehouse(storage), 1)
        assert verified(storage, deep=True).findings == ()
        assert verified(storage, incremental=True).findings == ()


# Limits


def test_limits_end_verify_early_and_report_unchecked_parts() -> None:
    with memory_lake(generated(2)) as storage:
        full_report = verified(storage)
        assert full_report.is_complete
        assert full_report.unchecked == ()
        for max_requests in (1, 5, 20, 40):
            counted = FaultyStorage(storage)
            report = verified(counted, budget=Budget(max_requests=max_requests))
            assert not report.is_complete
            assert report.is_clean
            assert report.stopped == f"the budget of {max_requests} requests is spent"
            assert "orphans" in report.unchecked
            assert any(part.startswith("versions ") for part in report.unchecked)
            assert str(report).startswith("Incomplete")
            assert report.cost.total_requests <= max_requests + 5, "the first requests locate the latest version"
        report = verified(storage, budget=Budget(max_seconds=1e-9))
        assert report.versions == 0
        assert f"versions 0-{full_report.latest_version}" in report.unchecked
        assert verified(storage, budget=Budget(max_requests=10_000, max_seconds=1_000)).is_complete
        with pytest.raises(InvalidInputError):
            verified(storage, budget=Budget(requests_per_second=1))


@pytest.mark.parametrize("max_requests", [14, 40])
def test_limited_incremental_runs_finish(max_requests: int) -> None:
    """Each run continues where the last one ended, and only files that locate the latest version are read twice."""
    with memory_lake(generated(3)) as storage:
        total = verified(storage).cost.total_requests
        read_before: set[str] = set()
        n_runs = 0
        while True:
            n_runs += 1
            report, read = reads(storage, incremental=True, budget=Budget(max_requests=max_requests))
            assert report.is_clean
            read = {path for path in read if path in immutable(storage, ".arrow", ".binpb", ".avro")}
            assert read_before & read == set()
            read_before |= {path for path in read if not path.startswith("tables/")}
            if report.is_complete:
                break
            assert n_runs < 3 * total
        assert n_runs > 1
        assert report.versions == verified(storage).versions


# Records


def test_records_of_concurrent_runs_are_combined() -> None:
    with memory_lake(generated(4)) as storage:
        verified(storage, incremental=True)

        class Overlapping(StorageWrapper):
            """Finish another run just before this one reads the record."""

            has_begun = False

            def read(
                self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None
            ) -> bytes:
                if path.startswith(VERIFIED_PREFIX) and not self.has_begun:
                    self.has_begun = True
                    verified(storage, incremental=True)
                return super().read(path, offset=offset, length=length, limit_bytes=limit_bytes)

        assert verified(Overlapping(storage), incremental=True).findings == ()
        assert len(records(storage)) == 1
        create(Lakehouse(storage), "one")
        mine = verified(storage, incremental=True).record_path
        assert mine is not None
        other = new_verified_path()
        storage.create(other, storage.read(mine))
        report, read = reads(storage, incremental=True)
        assert report.findings == ()
        assert read & set(immutable(storage)) == set()
        assert records(storage) == [report.record_path]


def test_run_killed_at_any_request_can_be_repeated() -> None:
    with memory_lake(generated(7)) as storage:
        verified(storage, incremental=True)
        create(Lakehouse(storage), "one")
        files = {info.path: storage.read(info.path) for info in storage.list()}
        counted = FaultyStorage(storage, concurrency=1)
        verified(counted, incremental=True)
        assert {"create", "delete"} <= {request.kind for request in counted.log}
        for request in counted.log:
            with memory_lake(files) as repeated:
                death = fail(request.number, DeathError, "after")  # type: ignore[arg-type]
                with pytest.raises(DeathError):
                    verified(FaultyStorage(repeated, [death], concurrency=1), incremental=True)
                assert records(repeated), request
                assert verified(repeated, incremental=True).findings == (), request
                assert len(records(repeated)) == 1


def test_record_follows_the_format() -> None:
    with memory_lake(generated(7)) as storage:
        verified(storage, incremental=True, deep=True)
        (path,) = records(storage)
        data = storage.read(path)
        assert hashlib.sha256(data[:-32]).digest() == data[-32:]
        with pa.ipc.open_stream(data[:-32]) as reader:
            assert reader.schema.metadata == {b"version": b"1"}
            rows = reader.read_all().to_pylist()
        listed = {info.path: info for info in storage.list()}
        assert len({row["path"] for row in rows}) == len(rows)
        for row in rows:
            info, content = listed[row["path"]], storage.read(row["path"])
            assert (row["size_bytes"], row["modified_millis"]) == (info.size_bytes, info.last_modified_ms)
            assert row["sha256"] == hashlib.sha256(content).digest()
            if row["kind"] == "file":
                assert row["content"] == content
            elif row["kind"] == "names":
                assert all(len(name) == 3 for name in json.loads(row["content"]))
            else:
                assert (row["kind"], row["content"]) == ("checksum", None)
        kinds = {row["path"].rpartition(".")[2]: row["kind"] for row in rows if not row["path"].startswith("_ops/")}
        assert kinds == {"arrow": "file", "binpb": "file", "json": "names", "avro": "names", "parquet": "checksum"}


def test_older_of_two_different_records_is_used() -> None:
    with memory_lake(generated(4)) as memory:
        storage = SameTimes(memory)
        verified(storage, incremental=True)
        (older,) = records(storage)
        data = storage.read(older)
        path = next(  # metadata and owner files contain the id of a table with files
            path
            for path in immutable(storage, ".binpb")
            if "-table-" in path
            and not list(storage.list(f"tables/{TableDef.from_bytes(memory.read(path), path).id}/"))
        )
        storage.delete(older)
        other = replace(TableDef.from_bytes(memory.read(path), path), id="other")
        memory.write(path, other.to_bytes())  # without a checksum, like another program
        assert verified(storage, incremental=True).is_clean, "the change cannot be detected"
        storage.create(older, data)
        times = {info.path: info.last_modified_ms for info in storage.list(VERIFIED_PREFIX)}
        assert len(times) == 2
        assert times[older] == min(times.values())
        assert ("file-changed", path) in {(f.code, f.path) for f in verified(storage, deep=True).findings}


def test_run_without_write_permission_warns() -> None:
    with memory_lake(generated(5)) as storage:
        fault = fail(1, StoragePermissionError, kind="create", times=99)
        report = verified(FaultyStorage(storage, [fault]), incremental=True)
        (finding,) = report.findings
        assert (finding.severity, finding.code) == ("warning", "record-not-written")
        assert "injected" in finding.message
        assert report.is_clean
        assert report.record_path is None
        assert records(storage) == []


def test_undeletable_record_is_read_again() -> None:
    with memory_lake(generated(5)) as storage:
        verified(storage, incremental=True)
        fault = fail(1, StoragePermissionError, kind="delete", times=99)
        assert verified(FaultyStorage(storage, [fault]), incremental=True).findings == ()
        assert len(records(storage)) == 2
        assert verified(storage, incremental=True).findings == ()
        assert len(records(storage)) == 1


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "of another release"])
def test_damaged_record_is_ignored(damage: str) -> None:
    with memory_lake(generated(6)) as storage:
        verified(storage, incremental=True)
        (path,) = records(storage)
        data = storage.read(path)
        if damage == "flipped":
            flip(storage, path, len(data) // 2)
        else:
            storage.write(path, {"cut": data[: len(data) // 2], "empty": b""}.get(damage, b"x" * 40))
        (finding,) = verified(storage).findings
        assert (finding.severity, finding.code, finding.path) == ("warning", "record-damaged", path)
        report, read = reads(storage, incremental=True)
        assert [finding.code for finding in report.findings] == ["record-damaged"]
        assert set(immutable(storage, ".binpb")) <= read
        assert records(storage) == [report.record_path]
        assert verified(storage, incremental=True).findings == ()


def test_only_superseded_record_is_an_orphan(aging: Aging) -> None:
    verified(aging.clock, incremental=True)
    (first,) = records(aging.clock)
    data = aging.clock.read(first)
    aging.later()
    record_path = verified(aging.clock, incremental=True).record_path
    aging.clock.create(first, data)
    aging.clock.written_ms[first] -= 1
    aging.later()
    assert operations.plan_orphan_removal(aging.lake).paths == [first]
    aging.remove_orphans()
    assert records(aging.clock) == [record_path]
    assert verified(aging.clock, incremental=True).findings == ()


def test_deleted_files_are_removed_from_record(aging: Aging) -> None:
    verified(aging.clock, incremental=True)
    size_bytes = len(aging.clock.read(records(aging.clock)[0]))
    aging.clean_up()
    with aging.lake.transaction() as txn:
        txn.create_table("n0", "new", table())
    verified(aging.clock, incremental=True)
    assert len(aging.clock.read(records(aging.clock)[0])) < size_bytes
