"""Sessions of Spark Connect, processes that release them, and the active session of a thread.

The client is an extra of this package, and is imported only if a remote session is requested. The server's machines
need this package and the same version of Python.

A server continues the work of a client that disappeared, for minutes or until the work is done, because the client may
reconnect. Each client of this package therefore starts a small keeper process, which waits until the client's end of a
pipe closes. It then releases the session, which interrupts all work in it. The keeper imports nothing before that.
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
    """Start the keeper process of a session. Signals from a terminal do not reach it.

    Args:
        url: The server URL.
        session_id: The session id.
        user_id: The user of the session, or None for the default.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _PROGRAM, url, session_id, user_id or ""],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def stop_keeper(keeper: subprocess.Popen[bytes]) -> None:
    """End a keeper process after its session was released."""
    try:
        keeper.communicate(_DONE, timeout=_LEAVE_QUEUE_SECONDS)
    except subprocess.TimeoutExpired:  # the machine is too busy; the keeper has no work left
        keeper.kill()
        keeper.wait()


def release(url: str, session_id: str, user_id: str) -> None:
    """Release a session that another process opened.

    Args:
        url: The server URL.
        session_id: The session id.
        user_id: The user of the session, empty for the default.
    """
    from pyspark.sql.connect.client import DefaultChannelBuilder
    from pyspark.sql.connect.client.core import SparkConnectClient

    connection = f"{url.rstrip('/;')}/;session_id={session_id}" if "/;" not in url else f"{url};session_id={session_id}"
    client = SparkConnectClient(DefaultChannelBuilder(connection), user_id=user_id or None)
    client.release_session()
    client.close()


#: Retries of a call, which take about 17 s in total. The client's default of 15 retries would take ten minutes.
_MAX_RETRIES = 5

_PARALLELISM_SQL = "SELECT max(number) + 1 FROM (SELECT spark_partition_id() AS number FROM range(65536))"

#: Makes ``pyspark.sql.functions`` create columns for Spark Connect.
_MODE_VARIABLE = "SPARK_CONNECT_MODE_ENABLED"

#: The keeper processes of sessions that this process opened.
_keepers: dict[int, subprocess.Popen[bytes]] = {}


def is_remote(spark: SparkSession) -> bool:
    """Whether a session is a client of Spark Connect."""
    return not isinstance(spark, SparkSession)


def open_remote(url: str, app_name: str, settings: Mapping[str, str], requested: Mapping[str, str]) -> SparkSession:
    """Open a session at a server, to be closed by :func:`close_remote`.

    Args:
        url: The URL of the server, ``sc://host:port``.
        app_name: The application name.
        settings: Settings to apply where sessions are allowed to choose them.
        requested: Settings that must be applied.

    Raises:
        InvalidInputError: If the URL is invalid, a setting in ``requested`` can only be set at the server, or this
            process already runs a local Spark.
        MissingExtraError: If the client is not installed.
        JobFailedError: If no server responds.
    """
    address = check_remote(url)
    if SparkContext._active_spark_context is not None:
        raise InvalidInputError("this process already runs a local Spark; open a remote session in another process")
    os.environ[_MODE_VARIABLE] = "1"
    try:
        connected = _connect(url, address, app_name)
    except BaseException:
        os.environ.pop(_MODE_VARIABLE, None)
        raise
    session = cast("SparkSession", connected)
    _keepers[id(session)] = start_keeper(url, connected.session_id, connected.client._user_id)
    try:
        for key in requested:
            if not session.conf.isModifiable(key):
                raise InvalidInputError(
                    f"{key} cannot be set for a session at {address}; set it where the server is started"
                )
        for key, value in {**settings, **requested}.items():
            if session.conf.isModifiable(key):
                session.conf.set(key, value)
    except PySparkException as error:
        close_remote(session)
        raise JobFailedError(f"cannot set up a session at {address}: {str(error).partition(chr(10))[0]}") from error
    except BaseException:
        close_remote(session)
        raise
    return session


def _connect(url: str, address: str, app_name: str) -> ConnectSession:
    try:
        with needs("connect"):
            import grpc
            from pyspark.sql.connect.client import DefaultChannelBuilder
            from pyspark.sql.connect.client.retries import DefaultPolicy
            from pyspark.sql.connect.session import SparkSession as ConnectSession
    except PySparkImportError as error:  # Spark's own check of package versions
        raise InvalidInputError(f"the Spark Connect client is not usable: {_first_line(error)}") from error
    # Wait for the channel first, because a session would retry for a long time if there is no server.
    with DefaultChannelBuilder(url).toChannel() as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=RESPONSE_SECONDS)
        except grpc.FutureTimeoutError:
            raise JobFailedError(
                f"cannot connect to {address}: no Spark Connect server responded within {RESPONSE_SECONDS:.0f} s"
            ) from None
    try:
        session = ConnectSession.builder.remote(url).appName(app_name).create()
    except PySparkException as error:
        raise JobFailedError(f"cannot open a session at {address}: {_first_line(error)}") from error
    session.client.set_retry_policies([DefaultPolicy(max_retries=_MAX_RETRIES)])
    return session


def close_remote(session: SparkSession) -> None:
    """Release a session and interrupt all work in it. The server keeps running."""
    try:
        session.stop()
        if (keeper := _keepers.pop(id(session), None)) is not None:
            stop_keeper(keeper)
    finally:
        os.environ.pop(_MODE_VARIABLE, None)


def running_remote() -> SparkSession | None:
    """Return the open Spark Connect session of this process, or None if there is none."""
    if _MODE_VARIABLE not in os.environ:
        return None
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    session: Any = ConnectSession.getActiveSession() or ConnectSession._get_default_session()
    return None if session is None or session.is_stopped else cast("SparkSession", session)


def default_parallelism(spark: SparkSession) -> int:
    """Return the default number of tasks, which is the number that can run at a time."""
    if not is_remote(spark):
        return max(1, int(spark.sparkContext.defaultParallelism))
    result = spark.sql(_PARALLELISM_SQL).toArrow()
    return max(1, int(result.column(0)[0].as_py()))


class Slots:
    """The number of tasks that can run at a time. The value of a server is refreshed after a minute."""

    _KEPT_SECONDS = 60.0

    def __init__(self, spark: SparkSession):
        self._spark = spark
        self._asked_s = -self._KEPT_SECONDS
        self._count = 1

    def count(self) -> int:
        """Return the number of tasks. Raises Spark's errors if the server has disappeared."""
        now_s = time.monotonic()
        if not is_remote(self._spark) or now_s - self._asked_s >= self._KEPT_SECONDS:
            self._count, self._asked_s = default_parallelism(self._spark), now_s
        return self._count


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def activate(spark: SparkSession) -> None:
    """Make a session the active one of this thread, as Spark does for the thread that built it.

    Does nothing for Spark Connect, which does not need it.
    """
    if not is_remote(spark):
        jvm = spark.sparkContext._jvm
        assert jvm is not None
        jvm.SparkSession.setActiveSession(spark._jsparkSession)
