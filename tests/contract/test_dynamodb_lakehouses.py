"""Concurrent creates and end-to-end tests of lakehouses on DynamoDB."""

from __future__ import annotations

import multiprocessing
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.cli.forked import run
from tests.cli.test_processes import assert_one_line
from tests.lakes import check_lake, objects
from tests.operations.changes import append_rows, create, drop
from tests.processes import fork
from tests.servers.dynalite import DynamoDBServer
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import FileExistsAlreadyError, StorageError
from trinitylake_ops.format.definitions import METADATA_LOCATION
from trinitylake_ops.format.file_names import new_node_path
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.io.file_io import reading_io
from trinitylake_ops.iceberg.table_change import registering_io, root_to_allow
from trinitylake_ops.storage import Storage, open_storage
from trinitylake_ops.storage.contract.suite import MIB, run_together
from trinitylake_ops.storage.dynamodb.client import DynamoDBClient, TableRequests

TIME_LIMIT_S = 3_000
SOAK_MARKS = [pytest.mark.soak, pytest.mark.timeout(TIME_LIMIT_S + 600)]


@pytest.fixture
def root(dynalite: DynamoDBServer) -> Iterator[str]:
    new_root = dynalite.fresh_root()
    yield new_root
    dynalite.delete_all(new_root)


@pytest.fixture
def storage(dynalite: DynamoDBServer, root: str) -> Storage:
    return open_storage(root, dynalite.storage_options)


def create_outcome(create_file: Callable[[], None]) -> str:
    try:
        create_file()
    except FileExistsAlreadyError as error:
        return type(error).__name__
    except StorageError as error:
        return f"{type(error).__name__}: {error.message}"
    return "won"


def check_round(server: DynamoDBServer, storage: Storage, name: str, outcomes: list[str], size_bytes: int) -> None:
    """Assert that one racer won, the file has its content, and no part of a loser remains."""
    assert sorted(outcomes) == [FileExistsAlreadyError.__name__] * (len(outcomes) - 1) + ["won"]
    assert storage.read(name) == bytes([outcomes.index("won")]) * size_bytes
    assert [(file.path, file.size_bytes) for file in storage.list("race/")] == [(name, size_bytes)]
    storage.delete(name)
    assert server.item_keys(storage.root) == []


def test_server_keeps_idle_connections_open(dynalite: DynamoDBServer) -> None:
    """With a timeout, the server could close a connection whose next request has arrived, depending on the load."""
    connection = HTTPConnection(dynalite.endpoint.removeprefix("http://"), timeout=TIME_LIMIT_S)
    with closing(connection):
        connection.request("GET", "/")
        headers = connection.getresponse().headers
    assert (headers["Connection"], headers["Keep-Alive"]) == ("keep-alive", None)


@pytest.mark.parametrize(
    ("size_bytes", "n_threads", "n_rounds"),
    [
        (0, 32, 5), (MIB, 32, 1), (9 * MIB, 4, 1),
        *(
            pytest.param(size_bytes, 32, 100, marks=SOAK_MARKS, id=f"{size_bytes}-full")
            for size_bytes in (0, MIB, 9 * MIB)
        ),
    ],
)  # fmt: skip
def test_concurrent_creates_of_threads_have_one_winner(
    dynalite: DynamoDBServer, storage: Storage, size_bytes: int, n_threads: int, n_rounds: int
) -> None:
    for _ in range(n_rounds):
        name = f"race/{uuid.uuid4().hex}"

        def create_one(racer: int, name: str = name) -> str:
            return create_outcome(lambda: storage.create(name, bytes([racer]) * size_bytes))

        outcomes = run_together([lambda racer=racer: create_one(racer) for racer in range(n_threads)])  # type: ignore[misc]
        check_round(dynalite, storage, name, [str(outcome) for outcome in outcomes], size_bytes)


@pytest.mark.parametrize(
    ("n_processes", "rounds"),
    [
        pytest.param(8, {0: 5, MIB: 1, 9 * MIB: 0}, id="short"),
        pytest.param(8, {0: 100, MIB: 100, 9 * MIB: 100}, marks=SOAK_MARKS, id="full"),
    ],
)
def test_concurrent_creates_of_processes_have_one_winner(
    dynalite: DynamoDBServer, storage: Storage, n_processes: int, rounds: dict[int, int]
) -> None:
    names = {f"race/{uuid.uuid4().hex}": size_bytes for size_bytes, n_rounds in rounds.items() for _ in range(n_rounds)}
    barrier = multiprocessing.get_context("fork").Barrier(n_processes + 1)

    def racer(number: int) -> Callable[[Callable[[str], None]], None]:
        def work(report: Callable[[str], None]) -> None:
            for name, size_bytes in names.items():
                data = bytes([number]) * size_bytes
                barrier.wait(TIME_LIMIT_S)
                report(create_outcome(lambda name=name, data=data: storage.create(name, data)))  # type: ignore[misc]
                barrier.wait(TIME_LIMIT_S)
                barrier.wait(TIME_LIMIT_S)  # the parent checks the round and deletes the file

        return work

    storage.exists("race/nothing")  # the children inherit a client that was used
    children = [fork(racer(number), time_limit_seconds=TIME_LIMIT_S) for number in range(n_processes)]
    try:
        for name, size_bytes in names.items():
            barrier.wait(TIME_LIMIT_S)
            barrier.wait(TIME_LIMIT_S)
            outcomes = [child.next_report() for child in children]
            check_round(dynalite, storage, name, outcomes, size_bytes)
            barrier.wait(TIME_LIMIT_S)
    except BaseException:
        barrier.abort()
        raise
    finally:
        results = [child.finish() for child in children]
    assert [exit_code for exit_code, _ in results] == [0] * n_processes


@pytest.mark.parametrize("n_commits", [20, pytest.param(200, marks=SOAK_MARKS)])
def test_two_processes_lose_no_commit(dynalite: DynamoDBServer, root: str, n_commits: int) -> None:
    lake = Lakehouse.create(root, dynalite.storage_options)

    def writer(name: str) -> Callable[[Callable[[str], None]], None]:
        def work(_report: Callable[[str], None]) -> None:
            writer_lake = Lakehouse.open(root, dynalite.storage_options)
            for number in range(n_commits):
                with writer_lake.transaction() as txn:
                    txn.create_namespace(f"{name}{number}")

        return work

    children = [fork(writer(name), time_limit_seconds=TIME_LIMIT_S) for name in ("a", "b")]
    assert [child.finish()[0] for child in children] == [0, 0]
    lake = Lakehouse.open(root, dynalite.storage_options)
    assert lake.latest_version() == 2 * n_commits
    expected = {f"{name}{number}" for name in ("a", "b") for number in range(n_commits)}
    assert set(lake.snapshot().namespaces()) == expected
    assert {finding.code for finding in operations.verify(lake).findings} <= {"hint-wrong"}


def content(lake: Lakehouse) -> tuple[object, list[int]]:
    with catalog_at(lake) as catalog:
        rows = catalog.load_table("ns.t").scan().to_arrow()["id"].to_pylist()
    return objects(lake.snapshot()), sorted(rows)


@pytest.fixture
def days_ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Days by which the server's clock is ahead; the last item is the current value."""
    offsets_days, now_ms = [0], TableRequests.now_ms
    monkeypatch.setattr(TableRequests, "now_ms", lambda self: now_ms(self) + offsets_days[-1] * 86_400_000)
    return offsets_days


def test_lakehouse_end_to_end(dynalite: DynamoDBServer, root: str, tmp_path: Path, days_ahead: list[int]) -> None:
    """Cover the operations of a lakehouse, including exports to and from this storage."""
    lake = Lakehouse.create(f"{root}source/", dynalite.storage_options, order=4)
    append_rows(lake)
    create(lake, "a", "t", "u")
    expected = content(lake)
    assert lake.snapshot().tables("a") == ["t", "u"]
    kept_version = lake.latest_version()
    append_rows(lake)
    drop(lake, "a")
    assert content(lake) != expected
    operations.plan_rollback(lake, kept_version).execute()
    assert content(lake) == expected

    plan = operations.plan_export(
        lake, "copy", "full", target=f"{root}target/", target_options=dynalite.storage_options
    )
    plan.execute()
    copy = Lakehouse.open(f"{root}target/", dynalite.storage_options)
    assert content(copy) == expected
    assert operations.verify_export(lake, "copy", deep=True, target_options=dynalite.storage_options).is_clean
    operations.plan_export(lake, "down", "full", target=str(tmp_path / "down")).execute()
    assert content(Lakehouse.open(str(tmp_path / "down"))) == expected
    operations.drop_export(lake, "copy")
    operations.drop_export(lake, "down")

    orphan = new_node_path()
    lake.storage.write(orphan, b"x" * MIB)
    days_ahead.append(2)
    policy = operations.RetentionPolicy(maximum_age_ms=0, minimum_versions=1, protected_ms=0)
    operations.plan_expiration(lake, policy).execute()
    days_ahead.append(4)
    n_files = len(list(lake.storage.list()))
    purged = operations.plan_purge(lake).execute()
    assert (purged.files > 0, purged.failures) == (True, {})
    assert len(list(lake.storage.list())) < n_files
    assert lake.storage.exists(orphan)
    operations.plan_orphan_removal(lake).execute()
    assert not lake.storage.exists(orphan)
    assert not [key for key, _ in dynalite.item_keys(lake.root) if "/parts/" in key or key.endswith("/uploads")]
    assert content(lake) == expected
    assert operations.verify(lake, deep=True).findings == ()
    check_lake(lake)


@pytest.mark.parametrize("is_allowed", [True, False])
def test_table_of_another_root_is_registered(dynalite: DynamoDBServer, root: str, is_allowed: bool) -> None:
    """The root to allow is that of the other lakehouse, because DynamoDB cannot list below a table's folder."""
    other = Lakehouse.create(f"{root}other/", dynalite.storage_options)
    append_rows(other)
    options_with_root = {**dynalite.storage_options, "allowed_roots": other.root}
    lake = Lakehouse.create(f"{root}lake/", options_with_root if is_allowed else dynalite.storage_options)
    with lake.transaction() as txn:
        txn.create_namespace("ns")
    metadata = other.root + other.snapshot().table("ns", "t").format_properties[METADATA_LOCATION]
    operations.register_table(lake, "ns", "t", metadata)
    definition = lake.snapshot().table("ns", "t")
    io = reading_io(lake)
    root_needed = root_to_allow(definition, registering_io(io, [metadata]))
    assert root_needed == (None if is_allowed else other.root)
    assert content(Lakehouse.open(lake.root, options_with_root))[1] == content(other)[1]


def test_create_table_option_creates_the_table(dynalite: DynamoDBServer) -> None:
    table = f"lakes-{uuid.uuid4().hex}"
    table_options = {**dynalite.storage_options, "create_table": "true"}
    lake = Lakehouse.create(f"dynamodb://{table}/lake", table_options)
    create(lake, "a", "t")
    assert Lakehouse.open(f"dynamodb://{table}/lake", dynalite.storage_options).snapshot().tables("a") == ["t"]
    dynalite.client.delete_table(TableName=table)


def test_command_line_creates_the_table_only_if_configured(dynalite: DynamoDBServer) -> None:
    """If the DynamoDB table does not exist, the error is one line with advice unless ``create_table`` is set."""
    table = f"lakes-{uuid.uuid4().hex}"
    flags = [part for item in dynalite.storage_options.items() for part in ("--storage-option", "=".join(item))]
    arguments = ["--root", f"dynamodb://{table}/lake", *flags]
    completed = run(*arguments, "init")
    assert_one_line(completed, 5, f"the table '{table}' does not exist")
    assert dynalite.secret_access_key not in completed.err
    assert run(*arguments, "--storage-option", "create_table=true", "init").code == 0
    assert run(*arguments, "create-namespace", "ns").code == 0
    assert "Clean: 2 versions" in run(*arguments, "verify").out
    dynalite.client.delete_table(TableName=table)


@pytest.mark.usefixtures("fixed_requests_of_test")
def test_commit_sends_few_requests(dynalite: DynamoDBServer, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = Lakehouse.create(root, dynalite.storage_options)
    create(lake, "a")
    methods: list[str] = []
    call = DynamoDBClient.call

    def recording_call(client: DynamoDBClient, method: str, arguments: dict[str, object]) -> object:
        methods.append(method)
        return call(client, method, arguments)

    monkeypatch.setattr(DynamoDBClient, "call", recording_call)
    with lake.transaction() as txn:
        txn.create_namespace("b")
    assert methods == ["get_item"] * 3 + ["put_item"] * 3, (
        "reads the hint and roots; writes a definition, the root and the hint"
    )
