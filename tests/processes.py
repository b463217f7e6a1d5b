"""Processes that are forked from the test process, so that they import nothing, run concurrently and can be killed."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass

#: Only one thread forks at a time, because filelock rejects concurrent forks.
_FORKING = threading.Lock()


@dataclass(frozen=True)
class Child:
    """A forked process and the pipe from which its reports are read."""

    pid: int
    reports: int

    def next_report(self) -> str:
        """Wait for the next reported line. Return "" if the process ended without reporting one."""
        line = b""
        while (byte := os.read(self.reports, 1)) not in (b"", b"\n"):
            line += byte
        return line.decode()

    def finish(self) -> tuple[int, list[str]]:
        """Wait for the process to end. Return its exit status (negative for a signal) and the remaining reports."""
        with os.fdopen(self.reports, "rb") as pipe:
            lines = pipe.read().decode().splitlines()
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status), lines


def fork(work: Callable[[Callable[[str], None]], None], *, time_limit_seconds: int = 60) -> Child:
    """Run ``work(report)`` in a child process. Each reported line is in the pipe before ``report`` returns."""
    reports, pipe = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with _FORKING:
        pid = os.fork()
    if pid:
        os.close(pipe)
        return Child(pid, reports)
    status = 1
    try:
        os.close(reports)
        # Limit how long a child can outlive its test, and print where it hangs before it is ended.
        faulthandler.dump_traceback_later(max(1, time_limit_seconds - 5), file=sys.__stderr__)
        signal.alarm(time_limit_seconds)
        work(lambda line: _write_line(pipe, line))
        status = 0
    except BaseException:  # noqa: BLE001 - a child must never run on into pytest
        traceback.print_exc()
    finally:
        os._exit(status)


def _write_line(pipe: int, line: str) -> None:
    os.write(pipe, f"{line}\n".encode())
