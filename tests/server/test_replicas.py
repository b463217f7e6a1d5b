"""Test many clients of one server and of three replicas on one bucket: no row is lost or duplicated."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    CommitStateUnknownException,
    ServerError,
    ServiceUnavailableError,
)
from requests.exceptions import RequestException

from tests.processes import Child, fork
from tests.proxy import FaultyProxy, drop_request, drop_response
from tests.server.live_server import LiveServer, command, duckdb_with_iceberg
from tests.servers.s3_server import S3Server
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.storage.options import OPTIONS_VARIABLE

N_CLIENTS, N_OF_DUCKDB, N_EACH, N_REPLICAS = 16, 4, 4, 3
SCHEMA = pa.schema([("id", pa.int64())])
#: Errors of a client whose server ends during a request. The client then checks whether its rows exist.
_GONE = (CommitFailedException, CommitStateUnknownException, RequestException, ServerError, ServiceUnavailableError)


@pytest.fixture
def on_s3(radosgw: S3Server, monkeypatch: pytest.MonkeyPatch) -> Lakehouse:
    """A lakehouse on radosgw with an empty table for each client. All keys are in the environment."""
    for name, value in radosgw.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(OPTIONS_VARIABLE, "addressing_style=path")
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    lake = Lakehouse.create(radosgw.fresh_root(), {**radosgw.storage_options, "addressing_style": "path"})
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    for number in range(N_CLIENTS):
        catalog.create_table(f"ns.t{number}", SCHEMA)
    return lake


@contextlib.contextmanager
def servers(lake: Lakehouse, number: int) -> Iterator[list[tuple[subprocess.Popen[str], str]]]:
    with contextlib.ExitStack() as running:
        ids = []
        for _ in range(number):
            process, url, _begun = running.enter_context(command(lake.root, "--anonymous-writes"))
            assert process.stderr is not None
            threading.Thread(target=process.stderr.read, daemon=True).start()
            ids.append((process, url))
        yield ids


def append(urls: Sequence[str], number: int, access: dict[str, str]) -> None:
    """Append rows to the client's own table, one by one, at any server that responds, until each row exists once."""
    at = number
    for mark in range(N_EACH):
        while True:
            try:
                table = _catalog(urls[at % len(urls)], access).load_table(f"ns.t{number}")
                if mark in table.scan().to_arrow()["id"].to_pylist():
                    break
                table.append(pa.table({"id": pa.array([mark], pa.int64())}, schema=SCHEMA))
                break
            except _GONE:
                at += 1
                time.sleep(0.05)


def _catalog(url: str, access: dict[str, str]) -> RestCatalog:
    return LiveServer(url).catalog(**access)


def append_by_duckdb(urls: Sequence[str], number: int, radosgw: S3Server) -> None:
    """Append rows with DuckDB. It uses one server and fails when that ends, so that server must stay."""
    with duckdb_with_iceberg() as connection:
        connection.execute(
            f"CREATE SECRET (TYPE s3, KEY_ID '{radosgw.access_key_id}', SECRET '{radosgw.secret_access_key}',"
            f" ENDPOINT '{radosgw.endpoint.removeprefix('http://')}', URL_STYLE 'path', USE_SSL false)"
        )
        connection.execute(
            f"ATTACH 'main' AS lake (TYPE iceberg, ENDPOINT '{urls[0]}', AUTHORIZATION_TYPE 'none',"
            " ACCESS_DELEGATION_MODE 'none')"
        )
        for mark in range(N_EACH):
            connection.execute(f"INSERT INTO lake.ns.t{number} VALUES ({mark})")


def clients(urls: Sequence[str], radosgw: S3Server, url_of_duckdb: str | None = None) -> list[Child]:
    access = {
        "s3.endpoint": radosgw.endpoint,
        "s3.access-key-id": radosgw.access_key_id,
        "s3.secret-access-key": radosgw.secret_access_key,
    }

    def run_client(number: int) -> Any:
        if number < N_OF_DUCKDB:
            return lambda _: append_by_duckdb([url_of_duckdb or urls[0]], number, radosgw)
        return lambda _: append(urls, number, access)

    return [fork(run_client(number), time_limit_seconds=400) for number in range(N_CLIENTS)]


def check_rows_exist_once(lake: Lakehouse, before: int) -> None:
    catalog = catalog_at(lake)
    for number in range(N_CLIENTS):
        ids = catalog.load_table(f"ns.t{number}").scan().to_arrow()["id"].to_pylist()
        assert sorted(ids) == list(range(N_EACH)), number
    assert lake.latest_version() <= before + N_CLIENTS * N_EACH
    assert operations.verify(lake, deep=True).findings == ()


@pytest.mark.soak
@pytest.mark.parametrize("number", [1, N_REPLICAS])
def test_sixteen_clients_lose_no_rows(on_s3: Lakehouse, radosgw: S3Server, number: int) -> None:
    before = on_s3.latest_version()
    with servers(on_s3, number) as running:
        begun_s = time.monotonic()
        children = clients([url for _, url in running], radosgw)
        assert [child.finish()[0] for child in children] == [0] * N_CLIENTS
        seconds = time.monotonic() - begun_s
    check_rows_exist_once(on_s3, before)
    n_versions = on_s3.latest_version() - before
    print(f"{number} servers: {N_CLIENTS * N_EACH} appends as {n_versions} versions in {seconds:.1f} s")


@pytest.mark.soak
def test_replicas_end_during_commits(on_s3: Lakehouse, radosgw: S3Server) -> None:
    """One replica is killed and one is stopped by SIGTERM during commits. Clients continue at the remaining ones."""
    before = on_s3.latest_version()
    with servers(on_s3, N_REPLICAS) as running:
        children = clients([url for _, url in running], radosgw)
        for ended, after, how in ((1, 6, signal.SIGKILL), (2, 20, signal.SIGTERM)):
            while on_s3.latest_version() < before + after:
                time.sleep(0.02)
            os.kill(running[ended][0].pid, how)
        assert running[2][0].wait(120) == 0
        assert [child.finish()[0] for child in children] == [0] * N_CLIENTS
    check_rows_exist_once(on_s3, before)


def lossy_proxy(url: str) -> Child:
    """Fork a proxy that loses each fourth change or its response. It reports its address, and at SIGTERM its losses."""
    faults = [(drop_response if at % 8 < 4 else drop_request)(at, method="POST") for at in range(2, 400, 4)]

    def run(report: Any) -> None:
        is_over = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: is_over.set())
        with FaultyProxy(url, faults) as proxy:
            report(proxy.url)
            is_over.wait()
            report(str(sum(request.fault is not None for request in proxy.log)))

    return fork(run, time_limit_seconds=400)


@pytest.mark.soak
def test_responses_are_lost_during_commits(on_s3: Lakehouse, radosgw: S3Server) -> None:
    """Requests and responses are lost before each of three replicas. Clients check and continue. DuckDB would fail."""
    before = on_s3.latest_version()
    with servers(on_s3, N_REPLICAS) as running:
        proxies = [lossy_proxy(url) for _, url in running]
        children = clients([proxy.next_report() for proxy in proxies], radosgw, running[0][1])
        assert [child.finish()[0] for child in children] == [0] * N_CLIENTS
        for proxy in proxies:
            os.kill(proxy.pid, signal.SIGTERM)
        n_conflicts = [int(reports[0]) for status, reports in (proxy.finish() for proxy in proxies) if status == 0]
        assert len(n_conflicts) == N_REPLICAS and all(n_conflicts)
    check_rows_exist_once(on_s3, before)
    print(f"lost by each proxy: {n_conflicts}")
