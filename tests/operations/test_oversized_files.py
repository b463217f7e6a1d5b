"""Test that huge files that replace small files are rejected by their size, before they are read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from tests.iceberg.hostile import manifest_list_path, metadata_path
from tests.lakes import Lakes
from tests.operations.test_verify_flips import PATTERNS, files_of_all_kinds, is_reported, paths_of_kind
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import CorruptFileError, InvalidDefinitionError, InvalidInputError, MaintenanceBlockedError
from trinitylake_ops.format import checksums, definitions, sealed_files
from trinitylake_ops.format.checksums import MAX_DEFINITION_BYTES, MAX_FILE_LIST_BYTES, MAX_NOTE_BYTES
from trinitylake_ops.format.definitions import NamespaceDef
from trinitylake_ops.format.file_names import ORPHAN_BARRIER_PATH, VERIFIED_PREFIX, lease_path, new_plan_path, root_path
from trinitylake_ops.format.sealed_files import decode_sealed_json, encode_sealed_json
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.validation.checksums import PieceCheck
from trinitylake_ops.operations.lease import lease
from trinitylake_ops.storage import LocalStorage, drop_memory_root
from trinitylake_ops.storage.interface import WHOLE_FILE_LIMIT_BYTES
from trinitylake_ops.transaction.time_to_live import raise_barrier
from trinitylake_ops.versions.history import history

HUGE_BYTES = 2 << 30
#: Maximum number of bytes that a run may read from the small lakehouse.
MAX_READ_BYTES = 64 << 20


class ReadCounter:
    """Counts the bytes that are read from local files."""

    def __init__(self) -> None:
        self.count = 0


@pytest.fixture
def read_counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReadCounter]:
    counter, pread = ReadCounter(), os.pread

    def counting_pread(descriptor: int, n_bytes: int, offset: int) -> bytes:
        assert n_bytes <= MAX_READ_BYTES, "the read exceeds the size of any valid file"
        data = pread(descriptor, n_bytes, offset)
        counter.count += len(data)
        return data

    monkeypatch.setattr(os, "pread", counting_pread)
    yield counter
    assert counter.count <= MAX_READ_BYTES


def make_huge(storage: LocalStorage, path: str) -> None:
    """Create a huge sparse file, or replace a file with one."""
    file_path = Path(storage.root.removeprefix("file://"), path)
    file_path.parent.mkdir(parents=True, exist_ok=True)
    with file_path.open("wb") as file:
        file.truncate(HUGE_BYTES)


def local_lake(folder: Path) -> LocalStorage:
    storage = LocalStorage(f"file://{folder}/lake/", fsync=False)
    for path, data in files_of_all_kinds().items():
        storage.create(path, data)
    return storage


@pytest.mark.parametrize("kind", sorted(PATTERNS.keys() - {"hint"}))
def test_verify_reports_a_huge_catalog_file_and_continues(kind: str, tmp_path: Path, read_counter: ReadCounter) -> None:
    storage = local_lake(tmp_path)
    path = paths_of_kind(kind, files_of_all_kinds())[0]
    make_huge(storage, path)
    for deep in (False, True):
        report = operations.verify(Lakehouse(storage), deep=deep)
        assert report.versions > 1
    assert any(str(HUGE_BYTES) in finding.message for finding in report.findings if path == finding.path), (
        report.findings
    )
    assert read_counter.count


@pytest.mark.local_only("creates sparse local files")
def test_verify_reports_huge_table_files_and_continues(lakes: Lakes, read_counter: ReadCounter) -> None:
    lake = lakes.local(is_watched=False)
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    for name in ("t", "u", "v", "w"):
        catalog.create_table(f"ns.{name}", pa.schema([("id", pa.int64())])).append(pa.table({"id": [1]}))
    metadata, manifest_list = metadata_path(lake), manifest_list_path(lake, "u")
    tables = {name: lake.snapshot().table("ns", name).id for name in ("v", "w")}
    metadata_paths = [info.path for info in lake.storage.list(f"tables/{tables['v']}/metadata/")]
    manifest = next(path for path in metadata_paths if re.search(r"-m\d+\.avro$", path))
    owner = f"tables/{tables['w']}/_owner.json"
    storage = LocalStorage(lake.root)
    for path in (metadata, manifest_list, manifest, owner):
        make_huge(storage, path)
    for deep in (False, True):
        report = operations.verify(Lakehouse(storage), deep=deep)
        assert {metadata, manifest_list, manifest} <= {finding.path for finding in report.findings}
    assert is_reported(owner, report)
    for name in ("t", "u", "v"):
        with pytest.raises(CorruptFileError):
            catalog_at(Lakehouse(storage)).load_table(f"ns.{name}").scan().to_arrow()
    assert read_counter.count


def test_oversized_footer_is_not_read() -> None:
    check = PieceCheck("a.parquet")
    piece = b"\0" * (24 << 20)
    end = (200 << 20).to_bytes(4, "little") + b"PAR1"
    for _ in range(10):
        check.add(piece)
    check.add(end)
    with pytest.raises(CorruptFileError):
        check.finish(lambda n_bytes: pytest.fail(f"{n_bytes} bytes were requested"))


@pytest.mark.usefixtures("fixed_requests_of_test")
def test_log_and_snapshot_reject_a_huge_root(tmp_path: Path, read_counter: ReadCounter) -> None:
    storage = local_lake(tmp_path)
    lake = Lakehouse(storage)
    latest = lake.latest_version()
    for version in (latest - 1, latest):
        original = storage.read(root_path(version))
        make_huge(storage, root_path(version))
        with pytest.raises(CorruptFileError, match=str(HUGE_BYTES)) as raised:
            list(history(Lakehouse(storage).files))
        assert raised.value.path == root_path(version)
        storage.delete(root_path(version))
        storage.create(root_path(version), original)
    assert read_counter.count


@pytest.mark.local_only("creates sparse local files")
def test_huge_lease_expires_by_its_age(lakes: Lakes, read_counter: ReadCounter) -> None:
    lake = lakes.local(is_watched=False)
    storage = LocalStorage(lake.root)
    make_huge(storage, lease_path(1))
    with pytest.raises(MaintenanceBlockedError), lease(storage, "purge"):
        pass
    os.utime(Path(lake.root.removeprefix("file://"), lease_path(1)), (1, 1))
    make_huge(storage, ORPHAN_BARRIER_PATH)
    with lease(storage, "purge"):
        raise_barrier(storage, 1)
    assert storage.stat(ORPHAN_BARRIER_PATH).size_bytes < MAX_NOTE_BYTES
    assert not read_counter.count


@pytest.mark.local_only("creates sparse local files")
def test_huge_record_is_reported_and_rewritten(lakes: Lakes, read_counter: ReadCounter) -> None:
    lake = lakes.local(is_watched=False)
    storage = LocalStorage(lake.root)
    operations.verify(Lakehouse(storage), incremental=True)
    (record,) = [info.path for info in storage.list(VERIFIED_PREFIX)]
    make_huge(storage, record)
    report = operations.verify(Lakehouse(storage), incremental=True)
    assert is_reported(record, report)
    assert not is_reported(record, operations.verify(Lakehouse(storage), incremental=True))
    assert read_counter.count


def test_written_files_do_not_exceed_read_limits(lakes: Lakes, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_NOTE_BYTES < MAX_DEFINITION_BYTES < WHOLE_FILE_LIMIT_BYTES < MAX_FILE_LIST_BYTES < HUGE_BYTES
    monkeypatch.setattr(definitions, "MAX_DEFINITION_BYTES", 8192)
    monkeypatch.setattr(checksums, "MAX_DEFINITION_BYTES", 8192)
    small = NamespaceDef(id="ns", properties={"a": "b" * 4000})
    assert NamespaceDef.from_bytes(small.to_bytes("a.binpb"), "a.binpb") == small
    with pytest.raises(InvalidDefinitionError, match="8192"):
        NamespaceDef(id="ns", properties={"a": "b" * 5000}).to_bytes("a.binpb")
    with pytest.raises(CorruptFileError, match="8192"):
        NamespaceDef.from_bytes(b"\0" * 8193, "a.binpb")
    monkeypatch.setattr(sealed_files, "MAX_FILE_LIST_BYTES", 1000)
    path = new_plan_path()
    with pytest.raises(InvalidInputError):
        encode_sealed_json({"files": ["x" * 1000]}, path)


@pytest.mark.parametrize("data", [b"{" + b'"a":[[],' * 2_000_000, b"\0" * 100, b" \n[1]", b""], ids=range(4))
def test_json_file_with_too_many_values_is_rejected_before_parsing(data: bytes) -> None:
    with pytest.raises(CorruptFileError):
        decode_sealed_json(data, "_ops/a.json")


def test_creation_rejects_unreadable_node_sizes() -> None:
    fields = {"node_file_max_size_bytes": WHOLE_FILE_LIMIT_BYTES + 1}
    with pytest.raises(InvalidDefinitionError, match="whole_file_limit_bytes"):
        Lakehouse.create("memory://large-nodes/", **fields)
    try:
        options = {"whole_file_limit_bytes": str(1 << 30)}
        assert Lakehouse.create("memory://large-nodes/", storage_options=options, **fields).latest_version() == 0
    finally:
        drop_memory_root("memory://large-nodes/")


def test_huge_delete_file_is_read_partially(tmp_path: Path, read_counter: ReadCounter) -> None:
    storage = LocalStorage(f"file://{tmp_path}/")
    make_huge(storage, "a.puffin")
    with StorageFileIO.on(storage).new_input(f"{storage.root}a.puffin").open() as stream:
        with pytest.raises(CorruptFileError, match=str(HUGE_BYTES)):
            stream.read()
        assert len(stream.read(10)) == 10
    assert read_counter.count
