"""Server processes: the command, replicas of one lakehouse, kills, lost responses and graceful stops."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.exceptions import CommitFailedException

from tests.faults import FaultyStorage, kill
from tests.processes import Child, fork
from tests.proxy import FaultyProxy, drop_request, drop_response
from tests.server.live_server import LiveServer, command, serving, settings_for
from tests.server.request_bodies import TABLE, commit_of, new_key, properties
from tests.server.test_commits import append_body
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.server.run import serve
from trinitylake_ops.server.settings import ONLY
from trinitylake_ops.server.warehouses import Warehouses
from trinitylake_ops.storage.options import redact_assignments
from trinitylake_ops.telemetry.settings import log_as_json

pytestmark = pytest.mark.usefixtures("fixed_requests")

#: Number of idle connections.
N_IDLE = 1_000
ROWS = pa.table({"id": pa.array([1, 2], pa.int64())})


@pytest.fixture
def table_lake(lake: Lakehouse) -> Lakehouse:
    """A lakehouse with an empty table ``ns.t``."""
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    catalog.create_table("ns.t", ROWS.schema)
    return lake


def test_serve_command_allows_additional_roots(table_lake: Lakehouse, tmp_path: Path) -> None:
    other = Lakehouse.create(f"file://{tmp_path}/other/", {"fsync": "false"})
    catalog_at(other).create_namespace("ns")
    location = catalog_at(other).create_table("ns.t", ROWS.schema).metadata_location
    body = {"name": "external", "metadata-location": location}
    for options, status in (((), 403), (("--allow-root", other.root), 200)):
        with command(table_lake.root, "--anonymous-writes", *options) as (_, url, _first_record):
            response = LiveServer(url).request("POST", "/v1/main/namespaces/ns/register", body)
            assert response.status == status, response.body


def test_serve_command_rejects_allow_root_with_lakehouse_file(tmp_path: Path) -> None:
    arguments = ["serve", "--lakehouses", str(tmp_path / "lakehouses.yaml"), "--allow-root", "/data"]
    completed = subprocess.run(
        [sys.executable, "-m", "trinitylake_ops.cli", *arguments], check=False, capture_output=True
    )
    assert completed.returncode == 2


def test_serve_command_runs_until_signal(table_lake: Lakehouse) -> None:
    with command(table_lake.root, "--anonymous-writes") as (process, url, first_record):
        assert first_record["message"] == "serving"
        assert first_record["lakehouses"] == {"main": table_lake.root}
        catalog = LiveServer(url).catalog()
        catalog.load_table("ns.t").append(ROWS)
        process.send_signal(signal.SIGTERM)
        _, output = process.communicate(timeout=60)
        lines = [json.loads(line) for line in output.splitlines()]
    assert process.returncode == 0
    assert [line["status"] for line in lines if line["message"].startswith("POST")] == [200]
    assert lines[-1]["message"] == "stopped"
    assert catalog_at(table_lake).load_table("ns.t").scan().to_arrow().num_rows == 2


def replica(lake: Lakehouse, *faults: Any) -> tuple[Child, LiveServer]:
    """Fork a server of the same lakehouse."""

    def run(report: Any) -> None:
        storage = FaultyStorage(lake.storage, list(faults)) if faults else lake.storage
        with serving(settings_for(lake), Warehouses({ONLY: Lakehouse(storage, lake.storage_options)})) as server:
            report(server.url)
            signal.pause()

    child = fork(run)
    return child, LiveServer(child.next_report())


def kill_and_wait(child: Child) -> None:
    os.kill(child.pid, signal.SIGKILL)
    child.finish()


def test_replica_killed_during_commit_loses_nothing(table_lake: Lakehouse) -> None:
    """The client's request gets no response. Repeated at another replica with the same key, it is applied once."""
    for timing, path in (("before", "tables/"), ("before", ".arrow"), ("after", "root")):
        before = table_lake.latest_version()
        root = table_lake.files.roots.path(before + 1)
        child, failing_server = replica(
            table_lake, kill(1, timing, kind="create", path_part=root if path == "root" else path)
        )
        other_child, other_server = replica(table_lake)
        try:
            key, body = {"Idempotency-Key": new_key()}, commit_of(properties(a=f"{timing} {path}"))
            with pytest.raises((ConnectionError, OSError)):
                failing_server.request("POST", TABLE, body, key)
            assert child.finish()[0] == -signal.SIGKILL
            assert other_server.request("POST", TABLE, body, key).status == 200
            assert table_lake.latest_version() == before + 1
        finally:
            kill_and_wait(other_child)
    assert catalog_at(table_lake).load_table("ns.t").properties["a"] == "after root"


def test_replicas_accept_commits_of_all_clients(table_lake: Lakehouse) -> None:
    """Two clients, each at its own replica, append to one table. No row is lost or duplicated."""
    children = [replica(table_lake) for _ in range(2)]
    n_each = 4

    def append(server: LiveServer, first: int) -> None:
        catalog = server.catalog()
        for row_id in range(first, first + n_each):
            while True:
                try:
                    catalog.load_table("ns.t").append(pa.table({"id": pa.array([row_id], pa.int64())}))
                    break
                except CommitFailedException:
                    continue

    clients = [fork(lambda _, index=index: append(children[index][1], 10 * index)) for index in range(2)]
    assert [client.finish()[0] for client in clients] == [0, 0]
    for child, _ in children:
        kill_and_wait(child)
    ids = catalog_at(table_lake).load_table("ns.t").scan().to_arrow()["id"].to_pylist()
    assert sorted(ids) == [0, 1, 2, 3, 10, 11, 12, 13]
    assert operations.verify(table_lake, deep=True).findings == ()


def test_request_with_lost_response_is_repeated(table_lake: Lakehouse) -> None:
    """A request or its response is lost on the network. A repeated append is applied once, with a key or without."""
    with serving(settings_for(table_lake)) as server:
        catalog = server.catalog()
        for fault in (drop_request(method="POST"), drop_response(method="POST")):
            for headers in ({}, {"Idempotency-Key": new_key()}):
                before = catalog.load_table("ns.t").scan().to_arrow().num_rows
                body = append_body(catalog, "ns.t")
                with FaultyProxy(server.url, [fault]) as proxy:
                    client = LiveServer(proxy.url)
                    with pytest.raises((ConnectionError, OSError)):
                        client.request("POST", TABLE, body, headers)
                    assert client.request("POST", TABLE, body, headers).status == 200
                assert catalog.load_table("ns.t").scan().to_arrow().num_rows == before + 2
    assert operations.verify(table_lake, deep=True).findings == ()


def test_running_commit_completes_after_sigterm(table_lake: Lakehouse) -> None:
    """SIGTERM arrives while the root is being written: the client gets its response, and the process exits normally."""

    def run(report: Any) -> None:
        local_lake = Lakehouse.open(table_lake.root, table_lake.storage_options)
        root = local_lake.files.roots.path(local_lake.latest_version() + 1)
        create = type(local_lake.storage).create

        def slow_create(storage: Any, path: str, data: bytes) -> None:
            if path == root:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.3)
            create(storage, path, data)

        type(local_lake.storage).create = slow_create  # type: ignore[method-assign]
        log_as_json(redact_assignments)
        report("ready")
        serve(settings_for(table_lake, port=port))
        report("stopped")

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    child = fork(run)
    assert child.next_report() == "ready"
    server = LiveServer(f"http://127.0.0.1:{port}")
    while True:
        with contextlib.suppress(ConnectionError):
            if server.request("GET", "/readyz").status == 200:
                break
        time.sleep(0.02)
    assert server.request("POST", TABLE, commit_of(properties(a="1"))).status == 200
    assert child.finish() == (0, ["stopped"])
    assert catalog_at(table_lake).load_table("ns.t").properties["a"] == "1"


def test_address_in_use_is_reported(table_lake: Lakehouse, tmp_path: Path) -> None:
    with serving(settings_for(table_lake)) as server:
        port = server.url.rpartition(":")[2]
        completed = subprocess.run(
            [sys.executable, "-m", "trinitylake_ops.cli", "serve", table_lake.root, "--port", port],
            capture_output=True,
            text=True,
            check=False,
        )
    assert (completed.returncode, completed.stderr.count("\n")) == (2, 1)
    assert completed.stderr.startswith(f"Error: cannot listen on 127.0.0.1 port {port}: ")


@pytest.mark.soak
def test_thousand_idle_clients_do_not_block_others(table_lake: Lakehouse) -> None:
    """Open more connections than the default limit of open files. Each connection still works."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard == resource.RLIM_INFINITY or hard >= 2 * N_IDLE, "raise the limit of open files (ulimit -Hn)"
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * N_IDLE, hard))
    with contextlib.ExitStack() as clients, command(table_lake.root, "--anonymous-writes") as (_, url, _first_record):
        clients.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        port = int(url.rpartition(":")[2])
        idle = [clients.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(N_IDLE)]
        assert LiveServer(url).request("POST", TABLE, commit_of(properties(a="1"))).status == 200
        for connection in (idle[0], idle[-1]):
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200")


@pytest.mark.soak
def test_stop_under_load_keeps_acknowledged_commits(table_lake: Lakehouse) -> None:
    """SIGTERM arrives while clients commit. Each acknowledged commit exists, and at most one other for each client."""
    with command(table_lake.root, "--anonymous-writes") as (process, url, _):
        acknowledged: list[str] = []
        start_barrier = threading.Barrier(5)

        def commit(client: int) -> None:
            start_barrier.wait()
            for number in itertools.count():
                name = f"c{client}-{number}"
                try:
                    response = LiveServer(url).request("POST", TABLE, commit_of(properties(**{name: "1"})))
                except OSError:
                    return
                if response.status != 200:
                    assert response.status in (409, 503), response
                    continue
                acknowledged.append(name)

        clients = [threading.Thread(target=commit, args=(client,)) for client in range(4)]
        for client in clients:
            client.start()
        start_barrier.wait()
        while len(acknowledged) < 10:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        for client in clients:
            client.join()
    assert process.returncode == 0
    applied = {name for name in catalog_at(table_lake).load_table("ns.t").properties if name[0] == "c" and "-" in name}
    assert applied >= set(acknowledged)
    assert len(applied) <= len(acknowledged) + 4  # commits whose response was not received
