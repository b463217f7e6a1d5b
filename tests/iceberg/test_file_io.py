"""The FileIO interface of PyIceberg on a Storage, and the number of requests that it sends."""

from __future__ import annotations

import gc
import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.io import load_file_io

from tests.faults import FaultyStorage, fail, lose_response
from tests.lakes import Lakes
from tests.request_budgets import budget
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import (
    AmbiguousWriteError,
    FileMissingError,
    InvalidInputError,
    InvalidLocationError,
    LocationNotAllowedError,
    StorageError,
    StorageFullError,
    StoragePermissionError,
)
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.io.input_file import READ_AHEAD_BYTES, WHOLE_FILE_BYTES
from trinitylake_ops.storage import MeteredStorage, StorageWrapper

pytestmark = pytest.mark.usefixtures("fixed_requests")


@pytest.fixture
def io(lake: Lakehouse) -> StorageFileIO:
    return StorageFileIO.on(lake.storage, lake.storage_options)


def write_file(io: StorageFileIO, name: str, data: bytes, *, overwrite: bool = False) -> str:
    uri = f"{io.root}tables/x/{name}"
    with io.new_output(uri).create(overwrite=overwrite) as stream:
        stream.write(data)
    return uri


def test_written_file_is_read_in_one_request(io: StorageFileIO, meter: MeteredStorage) -> None:
    with meter.measure() as measured:
        uri = write_file(io, "a b#%20", b"content")
    assert measured.counts.requests == budget("write a table file").requests
    with meter.measure() as measured:
        file = io.new_input(uri)
        assert file.open().read() == b"content"
        assert len(file) == 7
    assert measured.counts.requests == budget("read a table file").requests
    assert file.exists()
    assert len(io.new_output(uri).to_input_file()) == 7


def test_missing_file_raises_builtin_and_package_error(io: StorageFileIO) -> None:
    file = io.new_input(f"{io.root}tables/x/none")
    assert not file.exists()
    for operation in (file.open, file.__len__):
        with pytest.raises(FileNotFoundError) as caught:
            operation()
        assert isinstance(caught.value, FileMissingError)
        unpickled = pickle.loads(pickle.dumps(caught.value))
        assert str(unpickled) == str(caught.value)
        assert isinstance(unpickled, FileNotFoundError)
    io.delete(file)


def test_create_fails_for_existing_file_and_overwrite_replaces_it(io: StorageFileIO) -> None:
    uri = write_file(io, "f", b"first")
    with pytest.raises(FileExistsError):
        write_file(io, "f", b"second")
    assert io.new_input(uri).open().read() == b"first"
    write_file(io, "f", b"third", overwrite=True)
    assert io.new_input(uri).open().read() == b"third"
    io.delete(io.new_output(uri))
    assert not io.new_input(uri).exists()


def test_file_is_visible_only_after_close(io: StorageFileIO) -> None:
    output = io.new_output(f"{io.root}tables/x/f")
    stream = output.create()
    stream.write(b"half")
    assert not output.exists()
    del stream
    gc.collect()
    output.discard()
    with pytest.raises(RuntimeError, match="in the middle"), output.create() as stream:
        stream.write(b"half")
        raise RuntimeError("in the middle")
    assert not output.exists()
    assert list(io.storage.list("tables/")) == []


@pytest.mark.parametrize("size_bytes", [0, 1, WHOLE_FILE_BYTES - 1, WHOLE_FILE_BYTES, WHOLE_FILE_BYTES + 1, 3_000_000])
def test_reads_at_any_offset_return_correct_bytes(io: StorageFileIO, size_bytes: int) -> None:
    data = bytes(index * 31 % 251 for index in range(size_bytes % 997)) * (size_bytes // max(1, size_bytes % 997) + 1)
    data = data[:size_bytes]
    assert len(data) == size_bytes
    stream = io.new_input(write_file(io, f"f{size_bytes}", data)).open()
    for offset in (0, 1, size_bytes // 2, size_bytes - 10, size_bytes, size_bytes + 5):
        for length in (0, 1, 100, READ_AHEAD_BYTES + 1):
            stream.seek(max(0, offset))
            assert stream.read(length) == data[max(0, offset) : max(0, offset) + length]
    stream.seek(0)
    assert stream.read() == data
    assert stream.read(10) == b""
    stream.seek(-min(5, size_bytes), 2)
    assert stream.tell() == size_bytes - min(5, size_bytes)
    with pytest.raises(ValueError, match="cannot seek"):
        stream.seek(-1)
    stream.close()
    with pytest.raises(ValueError, match="closed"):
        stream.read(1)


def test_large_parquet_file_takes_few_requests(io: StorageFileIO, meter: MeteredStorage) -> None:
    n_rows = 200_000
    columns = {f"c{index}": pa.array(range(index, n_rows + index), pa.int64()) for index in range(4)}
    uri = f"{io.root}tables/x/big.parquet"
    with io.new_output(uri).create() as stream:
        pq.write_table(pa.table(columns), stream, compression="none", use_dictionary=False, row_group_size=50_000)
    size_bytes = len(io.new_input(uri))
    assert size_bytes > 6_000_000
    with meter.measure() as measured, io.new_input(uri).open() as stream:
        read = pq.read_table(stream, columns=["c3"], pre_buffer=True)
    assert read["c3"][-1].as_py() == n_rows + 2
    assert measured.counts.requests["read"] <= 7  # start and end of the file, and at most one for each row group
    assert measured.counts.requests["stat"] == 1
    assert measured.counts.bytes_read < size_bytes / 2


def test_uri_outside_root_uses_another_storage(
    io: StorageFileIO, meter: MeteredStorage, tmp_path_factory: pytest.TempPathFactory
) -> None:
    external = tmp_path_factory.mktemp("external") / "f"
    with meter.measure() as measured:
        for location in (f"file://{external}", str(external)):
            external_io = StorageFileIO.on(io.storage, {"allowed_roots": str(external.parent)})
            with external_io.new_output(location).create(overwrite=True) as stream:
                stream.write(b"foreign")
            assert external_io.new_input(location).open().read() == b"foreign"
            assert external_io.location(f"file://{external}") == f"file://{external}"
    assert external.read_bytes() == b"foreign"
    assert measured.counts.total == 0
    with pytest.raises(InvalidLocationError):
        io.new_input("relative/path")
    with pytest.raises(InvalidLocationError):
        io.new_input(f"{io.root}tables/../_latest_hint.txt").open()
    with pytest.raises(LocationNotAllowedError):
        io.new_input("gopher://host/f")
    with pytest.raises(InvalidLocationError):
        StorageFileIO.on(io.storage, {"allowed_roots": "gopher://host"}).new_input("gopher://host/f")


def test_pickled_file_io_reads_files(io: StorageFileIO) -> None:
    uri = write_file(io, "f", b"x")
    copy = pickle.loads(pickle.dumps(io))
    assert copy.new_input(uri).open().read() == b"x"
    assert copy.properties == io.properties


def test_pyiceberg_creates_file_io_from_properties(lakes: Lakes) -> None:
    lake = lakes.local()
    file_io = load_file_io(
        {
            "py-io-impl": "trinitylake_ops.iceberg.io.file_io.StorageFileIO",
            "root": lake.root.rstrip("/"),
            **{f"storage.{name}": value for name, value in lake.storage_options.items()},
        }
    )
    assert isinstance(file_io, StorageFileIO)
    assert file_io.new_input(f"{lake.root}_latest_hint.txt").open().read() == b"0"
    with pytest.raises(InvalidInputError, match="'root'"):
        StorageFileIO({})
    with pytest.raises(InvalidInputError):
        StorageFileIO({"root": lake.root, "storage.color": "red"})


def test_read_only_file_io_rejects_writes(lake: Lakehouse) -> None:
    io = StorageFileIO.on(lake.storage, read_only=True)
    for change in (io.new_output, io.delete):
        with pytest.raises(InvalidInputError):
            change(f"{io.root}tables/x/f")
    assert pickle.loads(pickle.dumps(io)).read_only


def faulty(lake: Lakehouse, *faults: object) -> StorageFileIO:
    return StorageFileIO.on(FaultyStorage(lake.storage, faults))  # type: ignore[arg-type]


def test_lost_create_response_is_resolved(lake: Lakehouse) -> None:
    io = faulty(lake, lose_response(1, kind="create"))
    uri = write_file(io, "f", b"mine")
    assert io.new_input(uri).open().read() == b"mine"
    io = faulty(lake, fail(1, AmbiguousWriteError, kind="create"))
    assert io.new_input(write_file(io, "g", b"retried")).open().read() == b"retried"
    io = faulty(lake, fail(1, AmbiguousWriteError, kind="create", times=10))
    with pytest.raises(AmbiguousWriteError):
        write_file(io, "h", b"mine")
    assert not io.new_input(f"{io.root}tables/x/h").exists()


class _DuplicatingStorage(StorageWrapper):
    """Sends each create request twice, as some proxies do, and returns the second response."""

    def create(self, path: str, data: bytes) -> None:
        self.inner.create(path, data)
        self.inner.create(path, data)


def test_duplicated_create_request_succeeds(lake: Lakehouse) -> None:
    io = StorageFileIO.on(_DuplicatingStorage(lake.storage))
    assert io.new_input(write_file(io, "f", b"mine")).open().read() == b"mine"
    with pytest.raises(FileExistsError):
        write_file(io, "f", b"another")


def test_storage_errors_keep_their_class(lake: Lakehouse) -> None:
    io = faulty(lake, fail(1, StorageFullError, kind="create"), fail(2, StoragePermissionError, kind="read"))
    with pytest.raises(StorageFullError):
        write_file(io, "f", b"x")
    assert list(lake.storage.list("tables/")) == []
    write_file(io, "f", b"x")
    with pytest.raises(PermissionError) as caught:
        io.new_input(f"{io.root}tables/x/f").open()
    assert isinstance(caught.value, StorageError)
    assert str(caught.value) == f"injected before the effect at '{io.root}tables/x/f'", (
        "the message contains the location once, as a URI"
    )


def test_properties_contain_no_credentials_but_pickles_do(io: StorageFileIO) -> None:
    options = {"secret_access_key": "the-secret", "region": "here"}
    file_io = StorageFileIO.on(io.storage, options, {"storage.session_token": "the-secret", "other": "kept"})
    unpickled = pickle.loads(pickle.dumps(file_io))
    for instance in (file_io, unpickled):
        assert instance.storage_options == options
        assert instance.properties == {"root": io.root, "storage.region": "here", "other": "kept"}
        assert "the-secret" not in f"{instance!r} {vars(instance)}"


@pytest.mark.local_only("tests the in-memory storage")
def test_options_are_passed_only_to_storages_of_same_kind(lakes: Lakes, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    in_memory = lakes.memory()
    options = {"region": "here", "allowed_roots": f"file://{tmp_path}/ memory://other"}
    assert StorageFileIO.on(in_memory.storage, options).new_input(f"file://{tmp_path}/a").open().read() == b"x"
    with pytest.raises(InvalidInputError, match="'region'"):
        StorageFileIO.on(in_memory.storage, options).new_input("memory://other/a")
