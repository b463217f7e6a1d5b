"""A standalone Spark cluster whose workers share no folder, because each worker writes to a separate mount."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyspark

from trinitylake_ops.spark.runtime.java import find_java, java_home_for_spark

REPOSITORY = Path(__file__).parents[2]
_SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
_MASTER_URL = re.compile(r"Starting Spark master at (spark://\S+)")
_REGISTERED = "Successfully registered with master"
_START_SECONDS = 60


@dataclass
class Cluster:
    """A master and its workers, each in a separate process group. Their logs are in ``folder``."""

    folder: Path
    #: A virtual environment without packages that the cluster uses instead of the current one.
    bare: Path | None = None
    url: str = ""
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, n_workers: int) -> None:
        master = "org.apache.spark.deploy.master.Master --host 127.0.0.1 --port 0 --webui-port 0"
        self._spawn("master", [str(_SPARK_CLASS), *master.split()])
        self.url = self._wait_for_log("master", _MASTER_URL)
        for _ in range(n_workers):
            self.add_worker()

    def add_worker(self) -> None:
        """Start a worker with one core, whose working folder is a mount that no other process can access."""
        name, private = f"worker-{len(self.workers)}", self.folder / "private"
        private.mkdir(exist_ok=True)
        options = ["--host", "127.0.0.1", "--cores", "1", "--memory", "700m", "--webui-port", "0"]
        worker = [str(_SPARK_CLASS), "org.apache.spark.deploy.worker.Worker", *options, "-d", str(private), self.url]
        script = f'mount -t tmpfs tmpfs "{private}" && exec "$@"'
        self.workers.append(self._spawn(name, ["unshare", "--mount", "sh", "-c", script, "sh", *worker]))
        self._wait_for_log(name, re.compile(f"({_REGISTERED})"))

    def kill_worker(self, number: int) -> None:
        """Kill a worker with its executors and their Python processes."""
        _kill(self.workers[number])

    def stop(self) -> None:
        for process in reversed(self._processes):
            _kill(process)

    def _spawn(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        private = str(self.folder / "private")
        environment = {
            **os.environ,
            "JAVA_HOME": str(java_home_for_spark(find_java())),
            "PYTHONPATH": str(REPOSITORY),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": private,
            "TMPDIR": private if name != "master" else str(self.folder),
            "SPARK_DAEMON_MEMORY": "256m",
        }
        if self.bare is not None:
            environment = bare_environment(self.bare, environment)
        with open(self.folder / f"{name}.log", "wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        self._processes.append(process)
        return process

    def _wait_for_log(self, name: str, pattern: re.Pattern[str]) -> str:
        log = self.folder / f"{name}.log"
        for _ in range(_START_SECONDS * 10):
            if match := pattern.search(log.read_text()):
                return match[1]
            time.sleep(0.1)
        raise AssertionError(f"{name} did not start: {log.read_text()[-2000:]}")


def bare_environment(bare: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables with which Python runs in a virtual environment without packages."""
    replaced = ("PYTHONPATH", "PYSPARK_PYTHON", "VIRTUAL_ENV", "PATH")
    inherited = {name: value for name, value in environment.items() if name not in replaced}
    return {**inherited, "PATH": f"{bare}/bin:/usr/bin:/bin"}


def _kill(process: subprocess.Popen[bytes]) -> None:
    for pid in [*_descendants(process.pid), *([process.pid] if process.poll() is None else [])]:
        with contextlib.suppress(ProcessLookupError):  # it ended together with another process
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _descendants(pid: int) -> list[int]:
    """Return the descendants of a process, deepest first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    descendants: list[int] = []
    for child in children.get(pid, []):
        descendants += [*_descendants_in(children, child), child]
    return descendants


def _descendants_in(children: dict[int, list[int]], pid: int) -> list[int]:
    return [pid for child in children.get(pid, []) for pid in [*_descendants_in(children, child), child]]
