"""Run servers in a thread of the test process, with plain HTTP, pyiceberg and DuckDB clients."""

from __future__ import annotations

import io
import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import duckdb
import duckdb_extension_avro
import duckdb_extension_httpfs
import duckdb_extension_iceberg
import uvicorn
from pyiceberg.catalog.rest import RestCatalog

from trinitylake_ops import Lakehouse
from trinitylake_ops.server.app import Application
from trinitylake_ops.server.run import configuration_of
from trinitylake_ops.server.settings import ONLY, LakehouseSettings, ServerSettings
from trinitylake_ops.server.warehouses import Warehouses
from trinitylake_ops.storage.options import redact_assignments
from trinitylake_ops.telemetry.settings import JsonFormatter


@dataclass(frozen=True)
class Response:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> tuple[int, str]:
        """The status and type of an error. Asserts that the body contains the same status."""
        error = self.document["error"]
        assert error["code"] == self.status
        assert set(error) - {"reason"} == {"message", "type", "code"}
        return self.status, error["type"]


@dataclass(frozen=True)
class LiveServer:
    """A running server."""

    url: str
    application: Application | None = None

    def request(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Response:
        """Send one request. A body that is not bytes is sent as JSON."""
        split = urlsplit(self.url)
        connection = HTTPConnection(split.hostname or "", split.port, timeout=60)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request(method, path, data, dict(headers or {}))
            response = connection.getresponse()
            return Response(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def catalog(self, warehouse: str = "main", **properties: str) -> RestCatalog:
        """Return pyiceberg's client of this server."""
        return RestCatalog("rest", uri=self.url, warehouse=warehouse, **properties)


def settings_for(lake: Lakehouse, **settings: Any) -> ServerSettings:
    """Return settings for a server of one lakehouse at a free port. Without tokens, anonymous writes are allowed."""
    lakehouses = {ONLY: LakehouseSettings(lake.root, lake.storage_options)}
    return replace(ServerSettings(lakehouses, port=0, anonymous_writes=settings.get("tokens") is None), **settings)


@contextmanager
def serving(settings: ServerSettings, warehouses: Warehouses | None = None) -> Iterator[LiveServer]:
    """Run a server in a thread, and stop it at the end as a signal does."""
    application = Application(settings, warehouses)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(configuration_of(application, settings))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.005)
        yield LiveServer(f"http://127.0.0.1:{listener.getsockname()[1]}", application)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@contextmanager
def captured_log(level: int) -> Iterator[io.StringIO]:
    """Capture the log from a level upward, in the format of the serve command, and yield the buffer."""
    buffer, root = io.StringIO(), logging.getLogger()
    handler, previous_level = logging.StreamHandler(buffer), root.level
    handler.setFormatter(JsonFormatter(redact_assignments))
    root.addHandler(handler)
    root.setLevel(level)
    try:
        yield buffer
    finally:
        root.removeHandler(handler)
        root.setLevel(previous_level)


@contextmanager
def command(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str, dict[str, Any]]]:
    """Run ``trinitylake serve``. Yield the process, its address and the first line of its log."""
    code = "from trinitylake_ops.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "serve", *arguments, "--port", "0"], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        first_record = json.loads(process.stderr.readline())
        yield process, first_record["address"], first_record
    finally:
        process.kill()
        process.communicate()


def duckdb_extensions() -> list[str]:
    """Return the files of the DuckDB extensions that a REST catalog needs, in loading order."""
    packages = (duckdb_extension_httpfs, duckdb_extension_avro, duckdb_extension_iceberg)
    return [str(file) for package in packages for file in Path(package.__path__[0]).rglob("*.duckdb_extension")]


@contextmanager
def duckdb_with_iceberg() -> Iterator[duckdb.DuckDBPyConnection]:
    """Open DuckDB with the extensions that a REST catalog needs."""
    with duckdb.connect(config={"allow_unsigned_extensions": "true"}) as connection:
        for extension in duckdb_extensions():
            connection.execute(f"LOAD '{extension}'")
        yield connection


def attach(connection: duckdb.DuckDBPyConnection, server: LiveServer, warehouse: str, name: str) -> None:
    """Attach a warehouse of a server under a name in DuckDB."""
    connection.execute(
        f"ATTACH '{warehouse}' AS {name} (TYPE iceberg, ENDPOINT '{server.url}', AUTHORIZATION_TYPE 'none')"
    )
