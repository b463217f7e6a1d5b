"""Features of DynamoDB storages: parts, sweeps, tables, capacity, forks and billed requests."""

from __future__ import annotations

import functools
import math
import pickle
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests import proxy as wire
from tests.clock import ManualClock
from tests.processes import fork
from tests.proxy import FaultyProxy
from tests.servers.dynalite import DynamoDBServer, error_response_body
from trinitylake_ops.errors import CorruptFileError, FileMissingError, StorageError, StoragePermissionError
from trinitylake_ops.storage import RetryStorage, open_storage, process_clock, retry
from trinitylake_ops.storage.contract.suite import run_together
from trinitylake_ops.storage.dynamodb.client import DynamoDBClient
from trinitylake_ops.storage.dynamodb.items import MAX_UPLOAD_MS, ORPHAN_AGE_MS, PART_BYTES
from trinitylake_ops.storage.dynamodb.storage import SWEEP_SECONDS, DynamoDBStorage

pytestmark = pytest.mark.usefixtures("fixed_requests")

LARGE = bytes(range(256)) * (5 * PART_BYTES // 256) + b"end"
N_PARTS = 6
HOUR_MS = 3_600_000


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits between retries of the storage."""
    monkeypatch.setattr(retry, "FIRST_WAIT_SECONDS", 0.001)


@pytest.fixture
def root(dynalite: DynamoDBServer) -> Iterator[str]:
    new_root = dynalite.fresh_root()
    yield new_root
    dynalite.delete_all(new_root)


@pytest.fixture
def storage(dynalite: DynamoDBServer, root: str) -> DynamoDBStorage:
    return DynamoDBStorage(root, dynalite.storage_options)


def partition(root: str) -> str:
    return "/" + root.removeprefix("dynamodb://").partition("/")[2]


def part_keys(server: DynamoDBServer, root: str) -> list[str]:
    start = f"{partition(root)}parts/"
    return [key for key, _ in server.item_keys(root) if key.startswith(start)]


def upload_ids(server: DynamoDBServer, root: str) -> list[str]:
    return [path for key, path in server.item_keys(root) if key == f"{partition(root)}uploads"]


def backdate_uploads(server: DynamoDBServer, root: str, age_ms: int) -> None:
    """Backdate all uploads of a root."""
    for upload in upload_ids(server, root):
        server.client.update_item(
            TableName=server.table,
            Key={"root": {"S": f"{partition(root)}uploads"}, "path": {"S": upload}},
            UpdateExpression="SET modified_ms = :at",
            ExpressionAttributeValues={":at": {"N": str(time.time_ns() // 1_000_000 - age_ms)}},
        )


def request_types(proxy: FaultyProxy) -> list[str]:
    return [exchange.headers["x-amz-target"].rpartition(".")[2] for exchange in proxy.log]


# --- parts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "length", "n_parts_read"),
    [
        (0, None, N_PARTS), (0, 10, 1), (PART_BYTES - 1, 1, 1), (PART_BYTES - 1, 2, 2), (PART_BYTES, PART_BYTES, 1),
        (5 * PART_BYTES - 10, 1000, 2), (5 * PART_BYTES, None, 1), (len(LARGE), None, 0), (7, 0, 0),
    ],
)  # fmt: skip
def test_range_reads_only_overlapping_parts(
    dynalite: DynamoDBServer, root: str, offset: int, length: int | None, n_parts_read: int
) -> None:
    with FaultyProxy(dynalite.endpoint) as proxy:
        storage = DynamoDBStorage(root, {**dynalite.storage_options, "endpoint": proxy.url})
        storage.create("large", LARGE)
        proxy.begin()
        end = None if length is None else offset + length
        assert storage.read("large", offset=offset, length=length) == LARGE[offset:end]
        assert request_types(proxy) == ["GetItem"] * (1 + n_parts_read)


def test_overwrites_and_deletes_remove_old_parts(dynalite: DynamoDBServer, root: str, storage: DynamoDBStorage) -> None:
    storage.create("a", LARGE)
    assert (len(part_keys(dynalite, root)), len(upload_ids(dynalite, root))) == (N_PARTS, 1)
    first_parts = set(part_keys(dynalite, root))
    storage.write("a", LARGE[::-1])
    assert len(part_keys(dynalite, root)) == N_PARTS
    assert first_parts.isdisjoint(part_keys(dynalite, root))
    assert storage.read("a") == LARGE[::-1]
    storage.write("a", b"small")
    assert part_keys(dynalite, root) == upload_ids(dynalite, root) == []
    for name in ("b", "c", "d"):
        storage.write(name, LARGE)
    storage.delete("b")
    assert len(upload_ids(dynalite, root)) == 2
    assert storage.delete_batch(["a", "c", "d", "missing"]) == {}
    assert dynalite.item_keys(root) == []


def test_file_with_a_missing_part_is_corrupt(dynalite: DynamoDBServer, root: str, storage: DynamoDBStorage) -> None:
    storage.create("large", LARGE)
    dynalite.client.delete_item(
        TableName=dynalite.table, Key={"root": {"S": part_keys(dynalite, root)[0]}, "path": {"S": "part"}}
    )
    with pytest.raises(CorruptFileError, match="'large'"):
        storage.read("large")


def test_item_of_another_program_is_rejected(dynalite: DynamoDBServer, root: str, storage: DynamoDBStorage) -> None:
    key = {"root": {"S": partition(root)}, "path": {"S": "theirs"}}
    dynalite.client.put_item(TableName=dynalite.table, Item={**key, "color": {"S": "red"}})
    for operation in (storage.read, storage.stat, lambda _: list(storage.list())):
        with pytest.raises(StorageError, match="'theirs'"):
            operation("theirs")


# --- sweep --------------------------------------------------------------------------------------


class SequentialStorage(DynamoDBStorage):
    concurrency = 1


def abandon_upload(dynalite: DynamoDBServer, root: str, fails_at: int) -> None:
    """Simulate a killed writer: from request ``fails_at`` on, no request reaches the server."""
    with FaultyProxy(dynalite.endpoint) as proxy:
        options = {**dynalite.storage_options, "endpoint": proxy.url, "read_timeout_seconds": "5"}
        killed_storage = SequentialStorage(root, options)
        killed_storage.now_ms()
        proxy.begin(wire.drop_request(fails_at, times=None))
        with pytest.raises(StorageError):
            killed_storage.create("abandoned", LARGE)


@pytest.mark.parametrize("fails_at", [2, 4, N_PARTS + 2])
def test_sweep_deletes_old_parts_of_killed_writers(
    dynalite: DynamoDBServer, root: str, storage: DynamoDBStorage, fails_at: int
) -> None:
    storage.create("complete", LARGE)
    abandon_upload(dynalite, root, fails_at)
    assert len(upload_ids(dynalite, root)) == 2
    assert len(part_keys(dynalite, root)) == N_PARTS + fails_at - 2
    assert not storage.exists("abandoned")
    backdate_uploads(dynalite, root, HOUR_MS)
    assert storage.sweep_orphans() == 0, "uploads that are about an hour old are kept"
    backdate_uploads(dynalite, root, ORPHAN_AGE_MS + HOUR_MS)
    assert storage.sweep_orphans() == 1
    assert storage.read("complete") == LARGE
    assert (len(upload_ids(dynalite, root)), len(part_keys(dynalite, root))) == (1, N_PARTS)


def test_writer_never_refers_to_parts_that_a_sweep_may_delete() -> None:
    signature_lifetime_ms = 15 * 60_000
    assert MAX_UPLOAD_MS + signature_lifetime_ms < HOUR_MS < ORPHAN_AGE_MS


def test_slow_writer_abandons_its_upload(
    dynalite: DynamoDBServer, root: str, storage: DynamoDBStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trinitylake_ops.storage.dynamodb.items.MAX_UPLOAD_MS", -1)
    with pytest.raises(StorageError):
        storage.create("slow", LARGE)
    assert dynalite.item_keys(root) == []


def test_batches_of_deletes_sweep_once_an_hour(dynalite: DynamoDBServer, root: str, storage: DynamoDBStorage) -> None:
    clock = ManualClock()
    with process_clock.using(clock):
        for n_orphans in (0, 1):
            abandon_upload(dynalite, root, 3)
            backdate_uploads(dynalite, root, ORPHAN_AGE_MS + HOUR_MS)
            storage.delete_batch(["missing"])
            assert len(upload_ids(dynalite, root)) == n_orphans
            clock.advance(SWEEP_SECONDS / 2)
        storage.delete_batch(["missing"])
    assert dynalite.item_keys(root) == []


def test_failed_sweep_does_not_fail_a_delete(
    dynalite: DynamoDBServer, root: str, caplog: pytest.LogCaptureFixture
) -> None:
    with FaultyProxy(dynalite.endpoint) as proxy:
        storage = DynamoDBStorage(root, {**dynalite.storage_options, "endpoint": proxy.url})
        storage.create("large", LARGE)
        proxy.begin(wire.respond(2, status=400, document=error_response_body("AccessDeniedException"), times=None))
        storage.delete("large")
    assert "cannot delete the parts of 'large'" in caplog.text
    assert not storage_of(dynalite, root).exists("large")
    backdate_uploads(dynalite, root, ORPHAN_AGE_MS + HOUR_MS)
    assert storage_of(dynalite, root).sweep_orphans() == 1
    assert dynalite.item_keys(root) == []


def storage_of(server: DynamoDBServer, root: str) -> DynamoDBStorage:
    return DynamoDBStorage(root, server.storage_options)


# --- requests -----------------------------------------------------------------------------------


def test_requests_of_each_operation(dynalite: DynamoDBServer, root: str) -> None:
    with FaultyProxy(dynalite.endpoint) as proxy:
        storage = DynamoDBStorage(root, {**dynalite.storage_options, "endpoint": proxy.url})
        storage.next_sweep_s = math.inf
        storage.exists("a")
        small, large = b"x" * 300_000, b"x" * (PART_BYTES + 50_000)
        for call, expected in (
            (lambda: storage.create("small", small), ["PutItem"]),
            (lambda: storage.create("large", large), ["PutItem"] * 4),
            (lambda: storage.read("small"), ["GetItem"]),
            (lambda: storage.read("large"), ["GetItem"] * 3),
            (lambda: storage.stat("large"), ["GetItem"]),
            (lambda: list(storage.list()), ["Query"]),
            (storage.now_ms, []),
            (lambda: storage.write("small", b"x"), ["PutItem"]),
            (lambda: storage.delete("small"), ["DeleteItem"]),
            (lambda: storage.delete("large"), ["DeleteItem", "BatchWriteItem", "DeleteItem"]),
            (
                lambda: storage.delete_many([str(number) for number in range(50)]),
                ["BatchGetItem", "BatchWriteItem"] * 2,
            ),
        ):
            proxy.begin()
            call()
            assert sorted(request_types(proxy)) == sorted(expected)


def test_reads_are_strongly_consistent(storage: DynamoDBStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.create("large", LARGE)
    storage.create("small", b"x")
    calls: list[tuple[str, object]] = []
    call = DynamoDBClient.call

    def recording_call(client: DynamoDBClient, method: str, arguments: dict[str, Any]) -> object:
        options = next(iter(arguments["RequestItems"].values())) if method == "batch_get_item" else arguments
        calls.append((method, options.get("ConsistentRead")))
        return call(client, method, arguments)

    monkeypatch.setattr(DynamoDBClient, "call", recording_call)
    storage.read("large")
    storage.stat("small")
    list(storage.list())
    storage.sweep_orphans()
    storage.delete_batch(["large", "small"])
    reads = [is_consistent for method, is_consistent in calls if method in ("get_item", "query", "batch_get_item")]
    assert len(reads) >= 10
    assert set(reads) == {True}


def test_roots_in_one_table_are_isolated(dynalite: DynamoDBServer, root: str) -> None:
    outer, inner = (open_storage(name, dynalite.storage_options) for name in (root, f"{root}inner/"))
    outer.create("inner/a", b"outer")
    inner.create("a", b"inner")
    assert [info.path for info in outer.list()] == ["inner/a"]
    assert [info.path for info in inner.list()] == ["a"]
    inner.delete("a")
    assert outer.read("inner/a") == b"outer"


def test_unprocessed_items_of_a_batch_are_retried(storage: DynamoDBStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test server leaves items of a batch unprocessed, so this test truncates the requests."""
    storage.next_sweep_s = math.inf
    names = [f"{number:02}" for number in range(25)]
    storage.create_many({**dict.fromkeys(names, b"x"), "00-large": LARGE})
    call, batches = DynamoDBClient.call, []

    def truncated_call(client: DynamoDBClient, method: str, arguments: dict[str, dict[str, object]]) -> object:
        if method not in ("batch_get_item", "batch_write_item"):
            return call(client, method, arguments)
        ((table, items),) = arguments["RequestItems"].items()
        keys: list[object] = items["Keys"] if isinstance(items, dict) else items  # type: ignore[assignment]
        batches.append((method, len(keys)))
        processed, unprocessed = keys[: (len(keys) + 1) // 2], keys[(len(keys) + 1) // 2 :]
        if isinstance(items, dict):
            response = dict(call(client, method, {"RequestItems": {table: {**items, "Keys": processed}}}))
            return {**response, "UnprocessedKeys": {table: {**items, "Keys": unprocessed}} if unprocessed else {}}
        response = dict(call(client, method, {"RequestItems": {table: processed}}))
        return {**response, "UnprocessedItems": {table: unprocessed} if unprocessed else {}}

    monkeypatch.setattr(DynamoDBClient, "call", truncated_call)
    retrying = RetryStorage(storage, attempts=12, base_delay_seconds=0.001)
    assert retrying.delete_many([*names[:24], "00-large"]) == {}
    assert [info.path for info in storage.list()] == [names[24]]
    assert batches[:4] == [
        ("batch_get_item", 25),
        ("batch_write_item", 13),
        ("batch_get_item", 18),
        ("batch_write_item", 9),
    ]


# --- tables -------------------------------------------------------------------------------------


def test_missing_table_is_reported(dynalite: DynamoDBServer) -> None:
    storage = DynamoDBStorage("dynamodb://no-such-table/lake/", dynalite.storage_options)
    for call in (
        lambda: storage.read("f"), lambda: storage.stat("f"), lambda: storage.create("f", b"x"),
        lambda: storage.write("f", b"x"), lambda: storage.delete("f"), lambda: storage.delete_batch(["f"]),
        lambda: list(storage.list()),
    ):  # fmt: skip
        with pytest.raises(StorageError, match="'no-such-table'") as caught:
            call()
        assert type(caught.value) is StorageError


def test_first_create_creates_the_table_if_configured(dynalite: DynamoDBServer) -> None:
    table = f"created-{uuid.uuid4().hex}"
    storage = DynamoDBStorage(f"dynamodb://{table}/lake/", {**dynalite.storage_options, "create_table": "true"})
    assert list(storage.list()) == []
    with pytest.raises(FileMissingError):
        storage.read("f")
    storage.delete("f")
    assert storage.delete_many(["f"]) == {}
    assert abs(storage.now_ms() - time.time() * 1000) < 5_000
    assert table not in dynalite.client.list_tables()["TableNames"], "reads and deletes do not create the table"
    copies = [pickle.loads(pickle.dumps(storage)) for _ in range(3)]
    calls: list[Callable[[], object]] = []
    for number, copy in enumerate([storage, *copies]):
        calls.append(functools.partial(copy.create, str(number), b"x"))
    assert run_together(calls) == [None] * 4
    description = dynalite.client.describe_table(TableName=table)["Table"]
    assert description["BillingModeSummary"]["BillingMode"] == "PAY_PER_REQUEST"
    assert [info.path for info in storage.list()] == ["0", "1", "2", "3"]
    dynalite.client.delete_table(TableName=table)


def test_table_with_other_keys_is_reported(dynalite: DynamoDBServer) -> None:
    table = f"other-{uuid.uuid4().hex}"
    dynalite.make_table(table, ("id", "version"))
    storage = DynamoDBStorage(f"dynamodb://{table}/lake/", dynalite.storage_options)
    for call in (lambda: storage.create("f", b"x"), lambda: storage.read("f"), lambda: list(storage.list())):
        with pytest.raises(StorageError, match="'root'"):
            call()
    dynalite.client.delete_table(TableName=table)


def test_provisioned_table_is_supported(dynalite: DynamoDBServer) -> None:
    table = f"provisioned-{uuid.uuid4().hex}"
    dynalite.make_table(table, ProvisionedThroughput={"ReadCapacityUnits": 5, "WriteCapacityUnits": 5})
    storage = DynamoDBStorage(f"dynamodb://{table}/lake/", dynalite.storage_options)
    storage.create("f", LARGE)
    assert storage.read("f") == LARGE
    dynalite.client.delete_table(TableName=table)


def test_missing_credentials_are_reported(root: str, dynalite: DynamoDBServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/missing")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/missing")
    storage = DynamoDBStorage(root, {"endpoint": dynalite.endpoint, "region": "us-east-1"})
    with pytest.raises(StoragePermissionError, match="'access_key_id'"):
        storage.create("f", b"x")
    with pytest.raises(StorageError):
        DynamoDBStorage(root, {"endpoint": dynalite.endpoint}).create("f", b"x")


# --- processes ----------------------------------------------------------------------------------


def test_forked_child_uses_the_storage(storage: DynamoDBStorage) -> None:
    storage.create("parent", b"x")

    def work(report: object) -> None:
        assert storage.read("parent") == b"x"
        storage.create("child", LARGE)

    child = fork(work)
    for _ in range(20):
        assert storage.read("parent") == b"x"
    assert child.finish()[0] == 0
    assert storage.read("child") == LARGE
