"""Sessions of Spark Connect, the process that keeps one alive, and the active session of a thread.

The client is an extra of this package and is imported when a remote is asked for. The server's machines have this
package, for the same version of Python.

A server goes on with its client's work, as the client might come back. This takes minutes, or until the work is done.
So a client of ours has a small process beside it that waits for the client's end of a pipe to close. It then releases
the session, which interrupts all that runs in it. The process imports nothing until then.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from pyspark import SparkContext
from pyspark.errors import PySparkException, PySparkImportError
from pyspark.sql import SparkSession

from trinitylake_ops.errors import InvalidInputError, JobFailedError
from trinitylake_ops.extras import needs
from trinitylake_ops.spark.runtime.addresses import RESPONSE_SECONDS, check_remote

if TYPE_CHECKING:
    from pyspark.sql.connect.session import SparkSession as ConnectSession

_DONE = b"released"
_PROGRAM = f"""
import sys
if sys.stdin.buffer.read() != {_DONE!r}:
    from {__name__} import release
    release(*sys.argv[1:])
"""
_LEAVE_QUEUE_SECONDS = 10


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
        keeper.communicate(_DONE, timeout=_LEAVE_QUEUE_SECONDS)
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


#: A call is repeated for about 17 s. The client's own 15 repetitions would take ten minutes.
_MAX_RETRIES = 5

_PARALLELISM_SQL = "SELECT max(number) + 1 FROM (SELECT spark_partition_id() AS number FROM range(65536))"

#: Lets functions of ``pyspark.sql.functions`` make columns for a session of this kind.
_MODE_VARIABLE = "SPARK_CONNECT_MODE_ENABLED"

#: Sessions that this process opened. Each has a process that ends it if this one is killed.
_keepers: dict[int, subprocess.Popen[bytes]] = {}


def is_remote(spark: SparkSession) -> bool:
    """Whether a session is a client of Spark Connect."""
    return not isinstance(spark, SparkSession)


def open_remote(url: str, app_name: str, settings: Mapping[str, str], asked: Mapping[str, str]) -> SparkSession:
    """Return a new session at a server, to be closed by :func:`close_remote`.

    ``settings`` are applied as far as the server lets sessions choose them, ``asked`` all. Raises InvalidInputError for
    a wrong address, and for a setting that only the server can have. Raises it also in a process that has a Spark of
    its own. Raises MissingExtraError without the client, JobFailedError if no server answers.
    """
    address = check_remote(url)
    if SparkContext._active_spark_context is not None:
        raise InvalidInputError("this process runs a Spark of its own already: a remote one needs a process of its own")
    os.environ[_MODE_VARIABLE] = "1"
    try:
        connected = _connected(url, address, app_name)
    except BaseException:
        os.environ.pop(_MODE_VARIABLE, None)
        raise
    session = cast("SparkSession", connected)
    _keepers[id(session)] = start_keeper(url, connected.session_id, connected.client._user_id)
    try:
        for key in asked:
            if not session.conf.isModifiable(key):
                raise InvalidInputError(f"{key} cannot be set for a session at {address}: it is set where that starts")
        for key, value in {**settings, **asked}.items():
            if session.conf.isModifiable(key):
                session.conf.set(key, value)
    except PySparkException as error:
        close_remote(session)
        raise JobFailedError(f"cannot set up a session at {address}: {str(error).partition(chr(10))[0]}") from error
    except BaseException:
        close_remote(session)
        raise
    return session


def _connected(url: str, address: str, app_name: str) -> ConnectSession:
    try:
        with needs("connect"):
            import grpc
            from pyspark.sql.connect.client import DefaultChannelBuilder
            from pyspark.sql.connect.client.retries import DefaultPolicy
            from pyspark.sql.connect.session import SparkSession as ConnectSession
    except PySparkImportError as error:  # by Spark's own look at versions
        raise InvalidInputError(f"the client of Spark Connect cannot be used: {_first_line(error)}") from error
    # The channel must be ready first, as a session would go on trying a missing server.
    with DefaultChannelBuilder(url).toChannel() as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=RESPONSE_SECONDS)
        except grpc.FutureTimeoutError:
            raise JobFailedError(
                f"no Spark Connect server answers at {address} within {RESPONSE_SECONDS:.0f} s"
            ) from None
    try:
        session = ConnectSession.builder.remote(url).appName(app_name).create()
    except PySparkException as error:
        raise JobFailedError(f"cannot open a session at {address}: {_first_line(error)}") from error
    session.client.set_retry_policies([DefaultPolicy(max_retries=_MAX_RETRIES)])
    return session


def close_remote(session: SparkSession) -> None:
    """Release a session with all that still runs in it. The server stays."""
    try:
        session.stop()
        if (keeper := _keepers.pop(id(session), None)) is not None:
            dismiss(keeper)
    finally:
        os.environ.pop(_MODE_VARIABLE, None)


def running_remote() -> SparkSession | None:
    """Return the session of Spark Connect that this process has already, if any."""
    if _MODE_VARIABLE not in os.environ:
        return None
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    found: Any = ConnectSession.getActiveSession() or ConnectSession._get_default_session()
    return None if found is None or found.is_stopped else cast("SparkSession", found)


def default_parallelism(spark: SparkSession) -> int:
    """Return how many tasks Spark makes by default: as many as run at a time."""
    if not is_remote(spark):
        return max(1, int(spark.sparkContext.defaultParallelism))
    found = spark.sql(_PARALLELISM_SQL).toArrow()
    return max(1, int(found.column(0)[0].as_py()))


class Slots:
    """The number of tasks at a time, by :func:`default_parallelism`. A server is asked again after a minute."""

    _KEPT_SECONDS = 60.0

    def __init__(self, spark: SparkSession):
        self._spark = spark
        self._asked_s = -self._KEPT_SECONDS
        self._count = 1

    def count(self) -> int:
        """Return the number. Raises Spark's errors if the server is gone."""
        now_s = time.monotonic()
        if not is_remote(self._spark) or now_s - self._asked_s >= self._KEPT_SECONDS:
            self._count, self._asked_s = default_parallelism(self._spark), now_s
        return self._count


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def activate(spark: SparkSession) -> None:
    """Make a session the active one of this thread, as it is for the thread that built it.

    A session of Spark Connect needs none.
    """
    if not is_remote(spark):
        jvm = spark.sparkContext._jvm
        assert jvm is not None
        jvm.SparkSession.setActiveSession(spark._jsparkSession)
