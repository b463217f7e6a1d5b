"""Objects, errors and logs do not show credentials, on a server that checks them."""

from __future__ import annotations

import logging
import pickle
import pprint
import traceback
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from tests.credentials.canaries import SECRET_ACCESS_KEY, leaks
from tests.credentials.server import CanaryServer
from tests.operations.changes import append_rows, create
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import StorageError, TrinityLakeError
from trinitylake_ops.iceberg.catalog import TrinityLakeCatalog, catalog_at, catalog_for
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.write.plan import plan_write
from trinitylake_ops.iceberg.write.staging import stage_data_files
from trinitylake_ops.spark.tables.tasks import ReadJob, WriteJob
from trinitylake_ops.storage import MeteredStorage, RetryStorage, Storage, open_storage
from trinitylake_ops.storage.options import StorageOptions

pytestmark = pytest.mark.debian_packages

CLIENTS = ("s3fs", "obstore")
CREDENTIAL_SOURCES = ("options", "environment")
SCHEMA = pa.schema([("id", pa.int64())])


@pytest.fixture(autouse=True)
def search_logs(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Search all log records: every level of this package, and INFO and above of the clients."""
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.DEBUG, "trinitylake_ops")
    yield
    assert leaks(caplog.text) == []


@pytest.fixture(params=[(client, source) for client in CLIENTS for source in CREDENTIAL_SOURCES], ids="-".join)
def access(
    request: pytest.FixtureRequest, canaries: CanaryServer, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, dict[str, str]]:
    """Root and storage options, with credentials in the options or in the environment."""
    client, source = request.param
    if source == "environment":
        for name, value in canaries.environment.items():
            monkeypatch.setenv(name, value)
    options = canaries.options_with_credentials if source == "options" else canaries.options
    return canaries.root, {**options, "client": client}


def create_filled_lake(root: str, options: dict[str, str]) -> Lakehouse:
    lake = Lakehouse.create(f"{root}{uuid.uuid4().hex}/", options)
    create(lake, "ns")
    append_rows(lake)
    return lake


def wrapped_storages(storage: Storage) -> Iterator[Storage]:
    """Yield a storage and all storages that it wraps."""
    yield storage
    while (inner := getattr(storage, "inner", None)) is not None:
        storage = inner
        yield storage


def public_objects(lake: Lakehouse) -> Iterator[Any]:
    """Yield an object of each kind that a user, a log or a debugger may show."""
    yield lake
    yield lake.storage_options
    yield from wrapped_storages(lake.storage)
    yield from wrapped_storages(pickle.loads(pickle.dumps(lake.storage)))
    yield from wrapped_storages(RetryStorage(MeteredStorage(lake.storage)))
    snapshot = lake.snapshot()
    yield from (snapshot, snapshot.files, snapshot.root, snapshot.definition, *lake.history(), *lake.diff(0, 1))
    with lake.transaction(message="open") as transaction:
        yield from (transaction, catalog_for(transaction, lake.storage_options))
        transaction.rollback()
    catalogs = (catalog_at(lake), catalog_at(lake, 1), TrinityLakeCatalog("catalog", **properties(lake)))
    for catalog in catalogs:
        yield from (catalog, catalog.properties, catalog.target, catalog.io, catalog.io.properties)
    table = catalogs[2].load_table("ns.t")
    io = pickle.loads(pickle.dumps(table.io))
    yield from (table, table.io.properties, table.config, table.metadata, table.scan(), io, io.properties, vars(io))
    yield from (table.io.new_input(table.metadata_location), table.io.new_output(f"{table.location()}/data/x"))
    plan = plan_write(lake, "ns", "staged", SCHEMA)
    data_files = plan.write(iter([pa.record_batch({"id": pa.array([1], pa.int64())})]))
    yield from (plan, data_files, WriteJob(plan, 1), ReadJob(io, table.metadata, table.schema(), None))  # type: ignore[arg-type]
    staged = stage_data_files(lake, plan, data_files)
    yield from (staged, pickle.dumps(staged))
    yield from (operations.plan_rollback(lake, 0), operations.plan_export(lake, "x"))
    yield operations.plan_drop_namespace(lake, "ns", cascade=True)
    yield from (operations.verify(lake), operations.inspect_hint(lake), operations.list_exports(lake))


def properties(lake: Lakehouse) -> dict[str, str]:
    return {"root": lake.root, **{f"storage.{name}": value for name, value in lake.storage_options.items()}}


def text_forms(value: Any) -> Iterator[str | bytes]:
    """Yield the text forms of an object and of its attributes."""
    yield value if isinstance(value, bytes) else str(value)
    yield repr(value)
    yield f"{value}"
    if hasattr(value, "to_dict"):
        yield repr(value.to_dict())
    if hasattr(value, "__dict__"):
        yield pprint.pformat(vars(value), width=1000)


def test_no_object_shows_credentials(access: tuple[str, dict[str, str]]) -> None:
    lake = create_filled_lake(*access)
    n_objects = 0
    for value in public_objects(lake):
        n_objects += 1
        for text in text_forms(value):
            assert leaks(text) == [], type(value)
    assert n_objects > 50


def test_search_detects_credentials_in_objects() -> None:
    class Careless:
        def __init__(self) -> None:
            self.options = {"secret_access_key": SECRET_ACCESS_KEY}

    assert all(not leaks(text) for text in text_forms(StorageOptions(Careless().options)))
    assert any(leaks(text) for text in text_forms(Careless()))


def test_pickled_file_io_reads(access: tuple[str, dict[str, str]]) -> None:
    """Pickles for Spark's tasks contain the credentials, but not as plain text."""
    lake = create_filled_lake(*access)
    table = catalog_at(lake).load_table("ns.t")
    io = pickle.loads(pickle.dumps(table.io))
    assert io.new_input(table.metadata_location).open().read().startswith(b"{")
    bucket = f"s3://{lake.root.split('/')[2]}"
    external_uri, options = f"{bucket}/external", {**lake.storage_options, "allowed_roots": bucket}
    io = pickle.loads(pickle.dumps(StorageFileIO.on(lake.storage, options)))
    with io.new_output(external_uri).create() as stream:
        stream.write(b"outside the root")
    assert StorageFileIO.on(lake.storage, options).new_input(external_uri).open().read() == b"outside the root"
    io.delete(external_uri)


OPERATIONS: dict[str, Callable[[Storage], object]] = {
    "read": lambda storage: storage.read("a"),
    "stat": lambda storage: storage.stat("a"),
    "create": lambda storage: storage.create("a", b"x"),
    "write": lambda storage: storage.write("a", b"x"),
    "delete": lambda storage: storage.delete("a"),
    "delete_many": lambda storage: _raise_first(storage.delete_many(["a", "b"])),
    "list": lambda storage: list(storage.list()),
}


def _raise_first(failures: dict[str, StorageError]) -> None:
    for failure in failures.values():
        raise failure


def error_texts(error: TrinityLakeError, *, with_locals: bool = True) -> Iterator[str | bytes]:
    """Yield all texts of an error that a terminal, log, error tracker or other process may show."""
    yield from (str(error), repr(error), repr(vars(error)), pickle.dumps(error))
    yield from traceback.format_exception(error)
    summary = traceback.TracebackException.from_exception(error, capture_locals=True)
    yield from (repr(frame.locals) for frame in summary.stack if with_locals and "trinitylake_ops/" in frame.filename)
    cause: BaseException | None = error
    while cause is not None:
        yield from (str(cause), repr(cause))
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    "failure", ["wrong secret", "wrong key", "wrong bucket", "bucket of another user", "unreachable"]
)
def test_no_error_shows_credentials(canaries: CanaryServer, client: str, failure: str) -> None:
    root, options = canaries.failing_configurations()[failure]
    options = StorageOptions({**options, "client": client, "connect_timeout_seconds": "1"})
    storage = open_storage(root, options)
    while isinstance(storage, RetryStorage):
        storage = storage.inner  # one attempt is enough
    attempts: dict[str, Callable[[], object]] = {
        name: lambda operation=operation: operation(storage) for name, operation in OPERATIONS.items()
    }
    if failure != "unreachable":
        attempts["Lakehouse.open"] = lambda: Lakehouse.open(root, options)
        attempts["Lakehouse.create"] = lambda: Lakehouse.create(root, options)
        attempts["catalog"] = lambda: TrinityLakeCatalog(
            "x", root=root, **{f"storage.{k}": options[k] for k in options}
        )
    for name, attempt in attempts.items():
        with pytest.raises(StorageError) as caught:
            attempt()
        # Pyiceberg keeps its properties as plain text, so local variables are not checked if these contain credentials.
        for text in error_texts(caught.value, with_locals=name != "catalog"):
            assert leaks(text) == [], name


@pytest.mark.parametrize("client", CLIENTS)
def test_errors_after_revocation_show_no_credentials(canaries: CanaryServer, client: str) -> None:
    """These operations fail deeper in the call stack: in versions, tables, verify and plans."""
    lake = create_filled_lake(canaries.root, {**canaries.options_with_credentials, "client": client})
    root = lake.root
    _, wrong_options = canaries.failing_configurations()["wrong secret"]
    failing_lake = Lakehouse(open_storage(root, {**wrong_options, "client": client}), wrong_options)
    transaction = lake.transaction()
    transaction.create_namespace("more")
    attempts: list[Callable[[], object]] = [
        failing_lake.latest_version,
        failing_lake.snapshot,
        lambda: list(failing_lake.history()),
        lambda: catalog_at(failing_lake).load_table("ns.t"),
        lambda: StorageFileIO.on(failing_lake.storage).new_input(f"{root}tables/x").open(),
        lambda: len(StorageFileIO.on(failing_lake.storage).new_input(f"{root}tables/x")),
        lambda: operations.verify(failing_lake),
        lambda: operations.plan_rollback(failing_lake, 0),
        lambda: operations.plan_export(failing_lake, "x"),
        lambda: operations.repair_hint(failing_lake),
        lambda: plan_write(failing_lake, "ns", "t"),
    ]
    for attempt in attempts:
        with pytest.raises(StorageError) as caught:
            attempt()
        for text in error_texts(caught.value):
            assert leaks(text) == []
    transaction.commit()
