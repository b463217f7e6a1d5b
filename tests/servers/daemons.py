"""Start and stop the processes of a test server."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

#: Timeout for the start of one server. A busy machine may take minutes to start a JVM.
START_TIMEOUT_SECONDS = 240
N_LOG_LINES_SHOWN = 15

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
# Below the ports that systems assign to clients (from 32,768 on), so that no client takes a port before the server.
_PORTS = range(12_000, 32_000)


class ServerStartError(Exception):
    """A test server did not start. The message ends with the last lines of its log."""


def free_port() -> int:
    """Return an unused TCP port on loopback."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def log_tail(log: Path) -> str:
    """Return the last lines of a log."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(lines[-N_LOG_LINES_SHOWN:]) or "(the log is empty)"


def run(
    command: list[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float = START_TIMEOUT_SECONDS,
) -> str:
    """Run a command and return its output. Its standard error goes to the log. Raises ServerStartError."""
    with log.open("ab") as errors:
        try:
            completed = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, timeout=timeout_seconds,
                env={**os.environ, **(environment or {})},
            )  # fmt: skip
        except FileNotFoundError:
            raise ServerStartError(
                f"{command[0]} is not installed: it comes with the packages of deploy/debian-packages.txt"
            ) from None
        except subprocess.TimeoutExpired:
            raise ServerStartError(f"{' '.join(command)} did not finish; its log:\n{log_tail(log)}") from None
    if completed.returncode:
        raise ServerStartError(f"{' '.join(command)} exited with {completed.returncode}; its log:\n{log_tail(log)}")
    return completed.stdout.decode().strip()


class Daemons:
    """Processes that are killed when the process that started them ends for any reason."""

    def __init__(self, log: Path):
        self.log = log
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, command: list[str], environment: Mapping[str, str] | None = None) -> None:
        """Start a process in the foreground, with its output in the log."""
        with self.log.open("ab") as log:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    preexec_fn=die_with_parent,  # noqa: PLW1509 - one system call, which takes no lock
                    env={**os.environ, **(environment or {})},
                )
            except FileNotFoundError:
                raise ServerStartError(
                    f"{command[0]} is not installed: it comes with the packages of deploy/debian-packages.txt"
                ) from None
        self._processes[" ".join(command)] = process

    def check(self) -> None:
        """Raise ServerStartError if any process has exited."""
        for command, process in self._processes.items():
            if process.poll() is not None:
                raise ServerStartError(f"{command} exited with {process.returncode}; the log:\n{log_tail(self.log)}")

    def wait_until(self, is_ready: Callable[[], bool], name: str) -> None:
        """Wait until ``is_ready`` returns True. Raises ServerStartError on timeout or if a process exits."""
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while not is_ready():
            self.check()
            if time.monotonic() > deadline:
                raise ServerStartError(f"{name} does not respond; the log:\n{log_tail(self.log)}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Kill all processes and discard their data."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()


def listens(port: int) -> bool:
    """Whether a port on loopback is open."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def die_with_parent() -> None:
    """Make the kernel kill this process when the thread that started it ends. For use as ``preexec_fn``."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
