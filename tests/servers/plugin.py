"""Fixtures for each kind of server and for lakehouses on servers, and the option ``--lakes``.

One server of a kind serves all workers of a test run. The first worker that needs it starts a keeper
(``tests/servers/keeper.py``), which the main pytest process stops. If that process is killed, the keeper stops the
server and exits.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.servers.azurite import AzureServer
from tests.servers.daemons import START_TIMEOUT_SECONDS, log_tail
from tests.servers.dynalite import DynamoDBServer
from tests.servers.gcs import GcsServer
from tests.servers.hdfs import HdfsServer
from tests.servers.keeper import ENDPOINT, FAILURE, PID
from tests.servers.kinds import KINDS, Server
from tests.servers.redis import RedisServer
from tests.servers.s3_server import S3Server

REPOSITORY = Path(__file__).resolve().parents[2]
STOP_TIMEOUT_SECONDS = 20
#: Fixtures that use or start a server from Debian packages.
_DEBIAN_FIXTURES = frozenset({"redis_folder", *(name for name, kind in KINDS.items() if kind.needs_debian_packages)})


@dataclass(frozen=True)
class ServerRun:
    """The servers of one test run: their folder, and the main process of the run."""

    folder: Path
    leader_pid: int
    _servers: dict[str, Any] = field(default_factory=dict)

    def ensure_started(self, kind: str) -> None:
        """Start the server of a kind unless another worker already started it."""
        with self._lock(kind):
            if not (self.folder / kind).exists():
                self._start_keeper(kind)

    def server(self, kind: str) -> Any:
        """Return the server of a kind and start it if necessary. Fails the test if it does not start."""
        folder = self.folder / kind
        if kind not in self._servers:
            self.ensure_started(kind)
            endpoint, data = self._wait_for_endpoint(kind).split("\n")
            self._servers[kind] = KINDS[kind].server(kind, endpoint, Path(data))
        if (folder / FAILURE).exists():
            pytest.fail(f"{kind} failed: {(folder / FAILURE).read_text()}", pytrace=False)
        return self._servers[kind]

    def stop(self) -> None:
        """Stop all servers and remove the folder."""
        for pid_file in self.folder.glob(f"*.{PID}"):
            _stop_process(int(pid_file.read_text()))
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start_keeper(self, kind: str) -> None:
        folder, log = self.folder / kind, self.folder / f"{kind}.log"
        folder.mkdir()
        command = [sys.executable, "-m", "tests.servers.keeper", kind, str(folder), str(self.leader_pid)]
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        pid = os.posix_spawn(
            sys.executable,
            command,
            {**os.environ, "PYTHONPATH": str(REPOSITORY)},
            # A separate session, so that Ctrl-C interrupts only the main process, which then stops the keeper.
            setsid=True,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, descriptor, 1),
                (os.POSIX_SPAWN_DUP2, descriptor, 2),
            ],
        )
        os.close(descriptor)
        (self.folder / f"{kind}.{PID}").write_text(str(pid))

    def _wait_for_endpoint(self, kind: str) -> str:
        folder = self.folder / kind
        deadline = time.monotonic() + 2 * START_TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            if (folder / ENDPOINT).exists():
                return (folder / ENDPOINT).read_text()
            if (folder / FAILURE).exists():
                pytest.fail(f"{kind} does not start: {(folder / FAILURE).read_text()}", pytrace=False)
            if not folder.exists():
                break
            time.sleep(0.05)
        pytest.fail(f"{kind} does not start; its log:\n{log_tail(self.folder / f'{kind}.log')}", pytrace=False)

    @contextmanager
    def _lock(self, kind: str) -> Iterator[None]:
        with (self.folder / f"{kind}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


SERVER_RUN = pytest.StashKey[ServerRun]()


def _stop_process(pid: int) -> None:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return  # it has exited and was reaped
    try:
        signal.pidfd_send_signal(process, signal.SIGTERM)
        if not select.select([process], [], [], STOP_TIMEOUT_SECONDS)[0]:
            signal.pidfd_send_signal(process, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        os.close(process)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option ``--lakes``."""
    parser.addoption(
        "--lakes",
        choices=["default", *KINDS],
        default="default",
        help="run only the tests that use the fixture 'lakes', with all their lakehouses on that server",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Create the folder for the servers of this run."""
    config.stash[SERVER_RUN] = ServerRun(Path(tempfile.mkdtemp(prefix="trinitylake-servers-")), os.getpid())


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop the servers, including after Ctrl-C."""
    if SERVER_RUN in config.stash:
        config.stash[SERVER_RUN].stop()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that need Debian packages. With ``--lakes``, select tests whose lakehouses can be on the server."""
    kind = config.getoption("lakes")
    for item in items:
        if not _DEBIAN_FIXTURES.isdisjoint({kind, *_fixtures(item)}):
            item.add_marker(pytest.mark.debian_packages)
    if kind != "default":
        excluding_marks = ["local_only", *([] if KINDS[kind].survives_forks else ["forks"])]
        selected = [
            item
            for item in items
            if "lakes" in _fixtures(item) and not any(map(item.get_closest_marker, excluding_marks))
        ]
        config.hook.pytest_deselected(items=[item for item in items if item not in selected])
        items[:] = selected


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the servers of the selected tests early, because radosgw takes 15 seconds to start."""
    config = session.config
    if config.option.collectonly:
        return
    kinds = {name for item in session.items for name in _fixtures(item)} & set(KINDS)
    if session.items and config.getoption("lakes") != "default":
        kinds.add(config.getoption("lakes"))
    for kind in sorted(kinds):
        config.stash[SERVER_RUN].ensure_started(kind)


def _fixtures(item: pytest.Item) -> list[str]:
    return item.fixturenames if isinstance(item, pytest.Function) else []


@pytest.fixture
def lakes_server(request: pytest.FixtureRequest) -> Server | None:
    """The server selected with ``--lakes``, or None for lakehouses in memory and in local folders."""
    kind = request.config.getoption("lakes")
    return None if kind == "default" else request.config.stash[SERVER_RUN].server(kind)


@pytest.fixture
def radosgw(request: pytest.FixtureRequest) -> S3Server:
    """A real S3 server (Ceph); tests that use it are marked ``debian_packages``."""
    server: S3Server = request.config.stash[SERVER_RUN].server("radosgw")
    return server


@pytest.fixture
def moto(request: pytest.FixtureRequest) -> S3Server:
    """The S3 server of moto, with a log of all requests."""
    server: S3Server = request.config.stash[SERVER_RUN].server("moto")
    return server


@pytest.fixture
def azurite(request: pytest.FixtureRequest) -> AzureServer:
    """Microsoft's emulator of Azure Blob Storage; tests that use it are marked ``debian_packages``."""
    server: AzureServer = request.config.stash[SERVER_RUN].server("azurite")
    return server


@pytest.fixture
def fake_gcs(request: pytest.FixtureRequest) -> GcsServer:
    """An emulator of Google Cloud Storage."""
    server: GcsServer = request.config.stash[SERVER_RUN].server("fake_gcs")
    return server


@pytest.fixture
def dynalite(request: pytest.FixtureRequest) -> DynamoDBServer:
    """dynalite, a server with DynamoDB's protocol; tests that use it are marked ``debian_packages``."""
    server: DynamoDBServer = request.config.stash[SERVER_RUN].server("dynalite")
    return server


@pytest.fixture
def moto_dynamodb(moto: S3Server) -> DynamoDBServer:
    """The DynamoDB server of moto."""
    return DynamoDBServer("moto", moto.endpoint, moto.folder)


@pytest.fixture
def redis_server(request: pytest.FixtureRequest) -> RedisServer:
    """Redis from Debian, which syncs each write; tests that use it are marked ``debian_packages``."""
    server: RedisServer = request.config.stash[SERVER_RUN].server("redis_server")
    return server


@pytest.fixture
def valkey_server(request: pytest.FixtureRequest) -> RedisServer:
    """Valkey, which syncs each write."""
    server: RedisServer = request.config.stash[SERVER_RUN].server("valkey_server")
    return server


@pytest.fixture
def redis_folder(tmp_path: Path) -> Path:
    """A folder for Redis servers that a test starts itself."""
    return tmp_path / "redis"


@pytest.fixture
def hdfs(request: pytest.FixtureRequest) -> HdfsServer:
    """A real HDFS server; tests that use it are marked ``debian_packages``."""
    server: HdfsServer = request.config.stash[SERVER_RUN].server("hdfs")
    return server
