"""Run Spark programs as processes that are stopped at the end of a test."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyspark

from trinitylake_ops.spark.runtime.java import find_java, java_home_for_spark

REPOSITORY = Path(__file__).parents[2]
SPARK_HOME = Path(pyspark.__file__).parent
_START_SECONDS = 90


def environment(**values: str) -> dict[str, str]:
    """Return the environment variables for a program that uses this package and Spark."""
    spark_variables = {
        "JAVA_HOME": str(java_home_for_spark(find_java())),
        "PYTHONPATH": str(REPOSITORY),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    return {**os.environ, **spark_variables, **values}


@contextlib.contextmanager
def connect_server(folder: Path, master: str = "local[2]") -> Iterator[str]:
    """Run a Spark Connect server with its log and events in a folder, and yield its address."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    (folder / "events").mkdir()
    conf = {
        "spark.ui.enabled": "false",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": f"file://{folder}/events",
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    command = [str(SPARK_HOME / "bin/spark-submit"), "--master", master, "--driver-memory", "700m"]
    command += [argument for key, value in conf.items() for argument in ("--conf", f"{key}={value}")]
    command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]
    log = folder / "server.log"
    with open(log, "wb") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment(), cwd=folder, start_new_session=True
        )
    try:
        for _ in range(_START_SECONDS * 10):
            if re.search("Spark Connect server started at", log.read_text(errors="replace")):
                break
            assert server.poll() is None, log.read_text(errors="replace")[-2000:]
            time.sleep(0.1)
        else:
            raise AssertionError(f"the server did not start: {log.read_text(errors='replace')[-2000:]}")
        yield f"sc://127.0.0.1:{port}"
        assert server.poll() is None, "the server keeps running, no matter what its clients do"
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has already ended
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def grows(path: Path, seconds: float) -> bool:
    """Return whether a file grows within a number of seconds."""
    before = path.stat().st_size
    time.sleep(seconds)
    return path.stat().st_size > before


def wait_for(path: Path, seconds: float = 60) -> None:
    for _ in range(int(seconds * 20)):
        if path.exists() and path.stat().st_size:
            return
        time.sleep(0.05)
    raise AssertionError(f"{path.name} was not written within {seconds} s")
