"""Client side of the worker processes: one for each peer and location, controlled over a pipe."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.peers.peer import PeerInfo

_ROOT = Path(__file__).resolve().parent.parent.parent
_TIMEOUT_S = 1_800


class AbsentPeerError(Exception):
    """A library that the peer needs is not installed."""


class WorkerError(Exception):
    """The call failed in the worker; its traceback is in the worker's log."""


class Worker:
    """A process with one peer, as a context manager.

    Raises:
        AbsentPeerError: A library that the peer needs is not installed.
    """

    def __init__(self, peer_class: str, log: Path, environment: Mapping[str, str] | None = None):
        self._pipe, worker_pipe = multiprocessing.Pipe()
        command = [sys.executable, "-m", "benchmarks.peers.serve", peer_class, str(worker_pipe.fileno())]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                cwd=_ROOT,
                env={**os.environ, **(environment or {})},
                pass_fds=[worker_pipe.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        worker_pipe.close()
        try:
            self.info: PeerInfo = self.result()
        except BaseException:
            self.close()
            raise

    def begin(self, call: str, *arguments: object) -> None:
        """Send a call. ``result`` waits for its result."""
        self._pipe.send((call, arguments))

    def result(self) -> Any:
        """Wait for the result of the last call and return it.

        Raises:
            WorkerError: The call failed, the process ended, or the call timed out.
        """
        try:
            if not self._pipe.poll(_TIMEOUT_S):
                raise WorkerError(f"no result within {_TIMEOUT_S} s")
            status, result = self._pipe.recv()
        except EOFError as error:
            raise WorkerError(f"the process ended with {self._process.wait()}") from error
        if status == "absent":
            raise AbsentPeerError(result)
        if status == "failed":
            raise WorkerError(result)
        return result

    def call(self, call: str, *arguments: object) -> Any:
        """Send a call and return its result.

        Raises:
            WorkerError: The call failed, the process ended, or the call timed out.
        """
        try:
            self.begin(call, *arguments)
        except OSError as error:
            raise WorkerError(f"the process ended with {self._process.wait()}") from error
        return self.result()

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
