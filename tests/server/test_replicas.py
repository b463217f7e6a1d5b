"""Many clients of one server, or of three replicas on one bucket, lose and duplicate no rows."""

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

N_CLIENTS, N_DUCKDB_CLIENTS, N_EACH, N_REPLICAS = 16, 4, 4, 3
SCHEMA = pa.schema([("id", pa.int64())])
#: Errors of a client whose server stops during a request. The client then checks whether its row exists.
_SERVER_ERRORS = (
    CommitFailedException,
    CommitStateUnknownException,
    RequestException,
    ServerError,
    ServiceUnavailableError,
)


@pytest.fixture
def s3_lake(radosgw: S3Server, monkeypatch: pytest.MonkeyPatch) -> Lakehouse:
    """A lakehouse on radosgw with an empty table for each client. The environment contains the keys."""
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
def servers(lake: Lakehouse, n_servers: int) -> Iterator[list[tuple[subprocess.Popen[str], str]]]:
    with contextlib.ExitStack() as running:
        processes = []
        for _ in range(n_servers):
            process, url, _first_record = running.enter_context(command(lake.root, "--anonymous-writes"))
            assert process.stderr is not None
            threading.Thread(target=process.stderr.read, daemon=True).start()
            processes.append((process, url))
        yield processes


def append(urls: Sequence[str], client_number: int, access: dict[str, str]) -> None:
    """Append rows to the client's own table, one by one and at whichever server responds, until all exist."""
    url_index = client_number
    for row_id in range(N_EACH):
        while True:
            try:
                table = _catalog(urls[url_index % len(urls)], access).load_table(f"ns.t{client_number}")
                if row_id in table.scan().to_arrow()["id"].to_pylist():
                    break
                table.append(pa.table({"id": pa.array([row_id], pa.int64())}, schema=SCHEMA))
                break
            except _SERVER_ERRORS:
                url_index += 1
                time.sleep(0.05)


def _catalog(url: str, access: dict[str, str]) -> RestCatalog:
    return LiveServer(url).catalog(**access)


def append_with_duckdb(urls: Sequence[str], client_number: int, radosgw: S3Server) -> None:
    """Append rows with DuckDB, which uses only the first server and fails if that server stops."""
    with duckdb_with_iceberg() as connection:
        connection.execute(
            f"CREATE SECRET (TYPE s3, KEY_ID '{radosgw.access_key_id}', SECRET '{radosgw.secret_access_key}',"
            f" ENDPOINT '{radosgw.endpoint.removeprefix('http://')}', URL_STYLE 'path', USE_SSL false)"
        )
        connection.execute(
            f"ATTACH 'main' AS lake (TYPE iceberg, ENDPOINT '{urls[0]}', AUTHORIZATION_TYPE 'none',"
            " ACCESS_DELEGATION_MODE 'none')"
        )
        for row_id in range(N_EACH):
            connection.execute(f"INSERT INTO lake.ns.t{client_number} VALUES ({row_id})")


def clients(urls: Sequence[str], radosgw: S3Server, duckdb_url: str | None = None) -> list[Child]:
    access = {
        "s3.endpoint": radosgw.endpoint,
        "s3.access-key-id": radosgw.access_key_id,
        "s3.secret-access-key": radosgw.secret_access_key,
    }

    def run_client(number: int) -> Any:
        if number < N_DUCKDB_CLIENTS:
            return lambda _: append_with_duckdb([duckdb_url or urls[0]], number, radosgw)
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
@pytest.mark.parametrize("n_servers", [1, N_REPLICAS])
def test_sixteen_clients_lose_no_rows(s3_lake: Lakehouse, radosgw: S3Server, n_servers: int) -> None:
    before = s3_lake.latest_version()
    with servers(s3_lake, n_servers) as running:
        started_s = time.monotonic()
        children = clients([url for _, url in running], radosgw)
        assert [child.finish()[0] for child in children] == [0] * N_CLIENTS
        seconds = time.monotonic() - started_s
    check_rows_exist_once(s3_lake, before)
    n_versions = s3_lake.latest_version() - before
    print(f"{n_servers} servers: {N_CLIENTS * N_EACH} appends as {n_versions} versions in {seconds:.1f} s")


@pytest.mark.soak
def test_stopped_replicas_lose_no_rows(s3_lake: Lakehouse, radosgw: S3Server) -> None:
    """One replica is killed and one is stopped by SIGTERM during commits. Clients continue at the remaining one."""
    before = s3_lake.latest_version()
    with servers(s3_lake, N_REPLICAS) as running:
        children = clients([url for _, url in running], radosgw)
        for index, n_versions, signal_number in ((1, 6, signal.SIGKILL), (2, 20, signal.SIGTERM)):
            while s3_lake.latest_version() < before + n_versions:
                time.sleep(0.02)
            os.kill(running[index][0].pid, signal_number)
        assert running[2][0].wait(120) == 0
        assert [child.finish()[0] for child in children] == [0] * N_CLIENTS
    check_rows_exist_once(s3_lake, before)


def lossy_proxy(url: str) -> Child:
    """Fork a proxy that drops every fourth change or its response. On SIGTERM it reports how many it dropped."""
    faults = [(drop_response if index % 8 < 4 else drop_request)(index, method="POST") for index in range(2, 400, 4)]

    def run(report: Any) -> None:
        should_stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: should_stop.set())
        with FaultyProxy(url, faults) as proxy:
            report(proxy.url)
            should_stop.wait()
            report(str(sum(request.fault is not None for request in proxy.log)))

    return fork(run, time_limit_seconds=400)


@pytest.mark.soak
def test_lost_responses_lose_no_rows(s3_lake: Lakehouse, radosgw: S3Server) -> None:
    """A proxy at each of three replicas drops requests and responses. DuckDB would fail, so it uses no proxy."""
    before = s3_lake.latest_version()
    with servers(s3_lake, N_REPLICAS) as running:
        proxies = [lossy_proxy(url) for _, url in running]
        children = clients([proxy.next_report() for proxy in proxies], radosgw, running[0][1])
        assert [child.finish()[0] for child in children] == [0] * N_CLIENTS
        for proxy in proxies:
            os.kill(proxy.pid, signal.SIGTERM)
        n_dropped = [int(reports[0]) for status, reports in (proxy.finish() for proxy in proxies) if status == 0]
        assert len(n_dropped) == N_REPLICAS and all(n_dropped)
    check_rows_exist_once(s3_lake, before)
    print(f"dropped by each proxy: {n_dropped}")
