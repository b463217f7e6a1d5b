"""Ends a session of Spark Connect whose client was killed.

A server goes on with its client's work, as the client might come back. This takes minutes, or until the work is done.
So a client of ours has a small process beside it that waits for the client's end of a pipe to close. It then releases
the session, which interrupts all that runs in it. The process imports nothing until then.
"""

from __future__ import annotations

import subprocess
import sys

_DONE = b"released"
_PROGRAM = f"""
import sys
if sys.stdin.buffer.read() != {_DONE!r}:
    from {__name__} import release
    release(*sys.argv[1:])
"""
_LEAVE_SECONDS = 10


def start_keeper(url: str, session_id: str, user_id: str | None) -> subprocess.Popen[bytes]:
    """Start the process for a session. Signals from a terminal do not reach it."""
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _PROGRAM, url, session_id, user_id or ""],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def dismiss(keeper: subprocess.Popen[bytes]) -> None:
    """Let the process go, as the session is released."""
    try:
        keeper.communicate(_DONE, timeout=_LEAVE_SECONDS)
    except subprocess.TimeoutExpired:  # the machine is too busy to end the process; it has nothing to do any more
        keeper.kill()
        keeper.wait()


def release(url: str, session_id: str, user_id: str) -> None:
    """End a session that another process opened."""
    from pyspark.sql.connect.client import DefaultChannelBuilder
    from pyspark.sql.connect.client.core import SparkConnectClient

    connection = f"{url.rstrip('/;')}/;session_id={session_id}" if "/;" not in url else f"{url};session_id={session_id}"
    client = SparkConnectClient(DefaultChannelBuilder(connection), user_id=user_id or None)
    client.release_session()
    client.close()
