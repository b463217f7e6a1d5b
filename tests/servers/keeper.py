"""Run a server for a test run: ``python -m tests.servers.keeper KIND FOLDER PID``.

The keeper outlives the pytest worker that requested the server. On SIGTERM, or when the main process PID of the test
run exits, it stops the server, removes its folder and exits. It writes the file ``endpoint`` into ``FOLDER`` or, if
the server does not start, the file ``failure``.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
from pathlib import Path

from tests.servers.daemons import Daemons, ServerStartError
from tests.servers.kinds import KINDS

ENDPOINT, FAILURE, PID, LOG = "endpoint", "failure", "pid", "log"
#: The start is retried because another process may take the chosen port before the server does.
N_ATTEMPTS = 2


def publish(folder: Path, name: str, text: str) -> None:
    """Write a small file atomically."""
    temporary = folder / f"{name}.part"
    temporary.write_text(text)
    temporary.replace(folder / name)


def start(kind: str, folder: Path) -> Daemons:
    """Start a server and publish its endpoint. Raises ServerStartError."""
    for attempt in range(1, N_ATTEMPTS + 1):
        data, daemons = folder / f"data-{attempt}", Daemons(folder / LOG)
        data.mkdir()
        try:
            endpoint = KINDS[kind].start(data, daemons)
        except ServerStartError:
            daemons.stop()
            if attempt == N_ATTEMPTS:
                raise
        except BaseException:
            daemons.stop()
            raise
        else:
            publish(folder, ENDPOINT, f"{endpoint}\n{data}")
            return daemons
    raise AssertionError("no attempt was made")


def exit_on_signal(signal_number: int, frame: object) -> None:
    """Exit on a signal so that all ``finally`` blocks run."""
    sys.exit(0)


def main(kind: str, folder: Path, leader_pid: int) -> None:
    """Start the server, wait for the end of the test run, and clean up."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, exit_on_signal)
    leader = os.pidfd_open(leader_pid)
    daemons = None
    try:
        daemons = start(kind, folder)
        while not select.select([leader], [], [], 1)[0]:
            daemons.check()
    except ServerStartError as error:
        publish(folder, FAILURE, str(error))
        select.select([leader], [], [])
    finally:
        if daemons is not None:
            daemons.stop()
        shutil.rmtree(folder, ignore_errors=True)
        if select.select([leader], [], [], 0)[0]:
            shutil.rmtree(folder.parent, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
