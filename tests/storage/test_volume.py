"""Many files: listings with constant memory, batches of deletes, and failures by file."""

from __future__ import annotations

import functools
import gc
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.servers.daemons import Daemons
from tests.servers.moto import LARGE_BUCKET, large_bucket_key, start_moto
from tests.servers.s3_server import S3Server
from tests.storage.scripted_server import RecordedRequest, ScriptedResponse, ScriptedServer
from trinitylake_ops.errors import FileMissingError, StoragePermissionError
from trinitylake_ops.storage import FileInfo, open_storage

N_LISTED = 100_000
N_LISTED_SHORT = 20_000  # in a normal test run
N_DELETED = 10_000
N_PER_REQUEST = 1_000
CLIENTS = ["s3fs", "obstore"]
MIB = 1 << 20
#: Maximum growth of memory during a listing: one or two pages, instead of 100,000 files with four objects each.
MAX_GROWTH_OBJECTS = 60_000
MAX_GROWTH_BYTES = 10 * MIB
MAX_LISTINGS = 3


def resident_bytes() -> int:
    """Return the memory of this process, including that of native clients."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def check_flat_listing(listing: Callable[[], Iterator[FileInfo]], n_listed: int = N_LISTED) -> None:
    """Iterate over a listing and check the memory growth of the process.

    Memory of other threads is included, so it is measured repeatedly: a listing that keeps its files grows each time.
    """
    grown_bytes = [_growth_bytes(listing(), n_listed)]
    while grown_bytes[-1] >= MAX_GROWTH_BYTES and len(grown_bytes) < MAX_LISTINGS:
        grown_bytes.append(_growth_bytes(listing(), n_listed))
    assert grown_bytes[-1] < MAX_GROWTH_BYTES, grown_bytes


def _growth_bytes(files: Iterator[FileInfo], n_listed: int) -> int:
    before_bytes = n_objects_before = n_files = grown_bytes = 0
    for n_files, _ in enumerate(files, start=1):
        if n_files % (n_listed // 10) == 0:
            gc.collect()
        if n_files == n_listed // 10:
            before_bytes, n_objects_before = resident_bytes(), sys.getallocatedblocks()
        elif n_files % (n_listed // 10) == 0:
            grown_bytes = max(grown_bytes, resident_bytes() - before_bytes)
            assert sys.getallocatedblocks() - n_objects_before < MAX_GROWTH_OBJECTS
    assert n_files == n_listed
    return grown_bytes


@pytest.mark.parametrize("n_listed", [N_LISTED_SHORT, pytest.param(N_LISTED, marks=pytest.mark.soak)])
def test_listing_many_local_files_uses_constant_memory(tmp_path: Path, n_listed: int) -> None:
    for folder in (tmp_path / "flat" / str(number) for number in range(n_listed // 1000)):
        folder.mkdir(parents=True)
        for number in range(1000):
            (folder / str(number)).touch()
    storage = open_storage(f"file://{tmp_path}/")
    check_flat_listing(lambda: storage.list("flat/"), n_listed)


def listing_page(request: RecordedRequest, n_listed: int) -> ScriptedResponse:
    """Return one page of a listing; the token is the index of the first object."""
    query = parse_qs(urlsplit(request.path).query)
    first = int(query.get("continuation-token", ["0"])[0])
    last = min(first + N_PER_REQUEST, n_listed)
    contents = "".join(
        f"<Contents><Key>lake/flat/{index:06}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        '<ETag>"d41d8cd98f00b204e9800998ecf8427e"</ETag><Size>7</Size><StorageClass>STANDARD</StorageClass></Contents>'
        for index in range(first, last)
    )
    token_element = f"<NextContinuationToken>{last}</NextContinuationToken>" if last < n_listed else ""
    body = (
        '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>bucket</Name>'
        f"<Prefix>lake/flat/</Prefix><KeyCount>{last - first}</KeyCount><MaxKeys>1000</MaxKeys>"
        f"<IsTruncated>{str(bool(token_element)).lower()}</IsTruncated>{token_element}{contents}</ListBucketResult>"
    )
    return ScriptedResponse(200, body.encode(), {"Content-Type": "application/xml"})


@pytest.mark.parametrize(
    ("client", "n_listed"),
    [
        ("obstore", N_LISTED),
        ("s3fs", N_LISTED_SHORT),
        pytest.param("s3fs", N_LISTED, marks=pytest.mark.soak),
    ],
)
def test_listing_many_objects_uses_constant_memory(client: str, n_listed: int) -> None:
    """A scripted server generates the pages, because filling a real server takes minutes (see ``make soak``)."""
    with ScriptedServer(lambda number, request: listing_page(request, n_listed)).running() as server:
        options = {
            "endpoint": server.endpoint, "client": client, "region": "us-east-1",
            "access_key_id": "key", "secret_access_key": "secret",
        }  # fmt: skip
        storage = open_storage("s3://bucket/lake/", options)
        files = storage.list("flat/")
        next(files)
        assert len(server.requests) <= 2, "the first file is returned after the first page"
        del files
        check_flat_listing(lambda: storage.list("flat/"), n_listed)


@pytest.mark.soak
@pytest.mark.debian_packages
@pytest.mark.timeout(3600)
def test_listing_a_real_server_uses_constant_memory(radosgw: S3Server) -> None:
    root = radosgw.fresh_root()
    writer_storage = open_storage(root, {**radosgw.storage_options, "client": "obstore"})
    for start in range(0, N_LISTED, N_DELETED):
        writer_storage.create_many({f"flat/{number:06}": b"" for number in range(start, start + N_DELETED)})
    for client in CLIENTS:
        storage = open_storage(root, {**radosgw.storage_options, "client": client})
        check_flat_listing(functools.partial(storage.list, "flat/"))
    assert writer_storage.delete_many([file.path for file in writer_storage.list()]) == {}
    assert list(writer_storage.list()) == []


@pytest.fixture(scope="module")
def server_with_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A moto server with 20,000 files in its bucket, half of them for each client, and its request log."""
    folder = tmp_path_factory.mktemp("moto")
    daemons = Daemons(folder / "log")
    try:
        yield S3Server("moto", start_moto(folder, daemons, 2 * N_DELETED), folder, bucket=LARGE_BUCKET)
    finally:
        daemons.stop()


@pytest.mark.parametrize("client", CLIENTS)
def test_deleting_10_000_files_takes_10_requests(server_with_files: S3Server, client: str) -> None:
    storage = open_storage(f"s3://{LARGE_BUCKET}/", {**server_with_files.storage_options, "client": client})
    start = CLIENTS.index(client) * N_DELETED
    names = [large_bucket_key(number) for number in range(start, start + N_DELETED)]
    assert storage.exists(names[0])
    assert storage.exists(names[-1])
    n_requests_before = len(server_with_files.requests())
    assert storage.delete_many(names) == {}
    requests = [line.split()[:2] for line in server_with_files.requests()[n_requests_before:]]
    assert [method for method, _ in requests] == ["POST"] * 10
    assert all("delete" in target for _, target in requests)
    for name in (names[0], names[5_000], names[-1]):
        with pytest.raises(FileMissingError):
            storage.read(name)


@pytest.mark.parametrize("client", CLIENTS)
def test_undeletable_files_are_reported_separately(radosgw: S3Server, client: str) -> None:
    bucket = radosgw.make_bucket()
    storage = open_storage(f"s3://{bucket}/lake/", {**radosgw.storage_options, "client": client})
    names = [f"deletable/{number}" for number in range(20)] + [f"protected/{number}" for number in range(5)]
    storage.create_many(dict.fromkeys(names, b"x"))
    statement = {
        "Effect": "Deny",
        "Principal": "*",
        "Action": "s3:DeleteObject",
        "Resource": f"arn:aws:s3:::{bucket}/lake/protected/*",
    }
    policy = {"Version": "2012-10-17", "Statement": [statement]}
    radosgw.client.put_bucket_policy(Bucket=bucket, Policy=json.dumps(policy))
    failures = storage.delete_many(names)
    assert sorted(failures) == names[20:]
    for name, error in failures.items():
        assert isinstance(error, StoragePermissionError)
        assert error.path == name
        assert "\n" not in str(error)
    assert sorted(file.path for file in storage.list()) == names[20:]
    radosgw.client.delete_bucket_policy(Bucket=bucket)
    radosgw.drop_bucket(bucket)
