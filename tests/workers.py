"""Run tests in worker processes that are forked after the tests were collected: ``pytest --workers 4``.

Collecting the tests takes as long as running hundreds of them, so workers share the modules and tests of their parent.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn

import pytest

#: Folders and files whose tests share a Spark session, because starting one takes longer than most tests.
_SPARK_PREFIXES = (
    "tests/spark/",
    "tests/dagster_plugin/test_compaction_jobs.py",
    "tests/dagster_plugin/test_spark_engine.py",
    "tests/dagster_plugin/test_flights_pipeline.py",
    "tests/dagster_plugin/test_io_manager.py",
    "tests/dagster_plugin/test_pipeline_on_s3.py",
    "tests/e2e/test_demo.py",
)
#: A file with one of these prefixes whose session is in a separate process.
_SEPARATE_SPARK_FILE = "tests/spark/test_java.py"
#: Folders of slow tests without shared fixtures. Each of these tests is a group.
_UNGROUPED_FOLDERS = ("tests/simulator/", "tests/crash/")
#: Files whose tests share a deployment, because starting it takes longer than most tests.
_DEPLOYMENT_PREFIX = "tests/e2e/test_deployed_"

_WORKER = "worker"
_INDEX_BYTES = 4


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--workers",
        type=int,
        default=0,
        metavar="N",
        help="run the tests in N worker processes, each file in one of them; 0 (the default) runs them in this process",
    )


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run all groups of tests in workers. Without the option, pytest runs them itself."""
    config = session.config
    groups = _groups(session.items)
    n_workers = min(config.getoption("workers"), len(groups))
    if n_workers < 1 or session.testsfailed or config.option.collectonly:
        return None
    queue = _queue(len(groups))
    base = config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    workers: list[_Worker] = []
    # The garbage collector would visit and so copy millions of objects that the workers share. Most objects of a test
    # live as long as the test, so frequent collections find little.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)
    try:
        for number in range(n_workers):
            folder = base / f"{_WORKER}{number}"
            folder.mkdir(mode=0o700)
            reader, writer = Pipe(duplex=False)
            pid = os.fork()
            if pid == 0:
                for pipe in (reader, *(worker.pipe for worker in workers)):
                    pipe.close()
                config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
                _work(session, groups, queue, writer)
            writer.close()
            workers.append(_Worker(folder.name, pid, reader))
        _receive(session, workers)
    finally:
        for worker in workers:
            worker.stop()
    return True


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The temporary folder that all workers of a run share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if base.name.startswith(_WORKER) else base


def _group_of(nodeid: str) -> str:
    if nodeid.startswith(_SPARK_PREFIXES) and not nodeid.startswith(_SEPARATE_SPARK_FILE):
        return "spark"
    if nodeid.startswith(_DEPLOYMENT_PREFIX):
        return "deployment"
    return nodeid if nodeid.startswith(_UNGROUPED_FOLDERS) else nodeid.split("::", 1)[0]


def _groups(items: Sequence[pytest.Item]) -> list[list[pytest.Item]]:
    """Return groups of tests that each run in one worker: a file, files with a shared fixture, or a long test."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(_group_of(item.nodeid), []).append(item)
    return list(groups.values())


def _queue(n_groups: int) -> int:
    """Return a pipe from which workers read the indexes of groups.

    It contains all indexes from the start, so reads never block.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    os.write(writer, b"".join(index.to_bytes(_INDEX_BYTES, "big") for index in range(n_groups)))
    os.close(writer)
    return reader


# The worker


def _work(session: pytest.Session, groups: Sequence[Sequence[pytest.Item]], queue: int, pipe: Connection) -> NoReturn:
    """Run groups until none is left, and exit."""
    status = 1
    try:
        manager = session.config.pluginmanager
        manager.unregister(name="terminalreporter")
        capture: Any = manager.getplugin("capturemanager")
        if capture.is_globally_capturing():
            capture.stop_global_capturing()  # its files belong to the parent
            capture.start_global_capturing()
            capture.suspend_global_capture()
        manager.register(_Sender(session.config, pipe))
        _run(session, groups, queue)
        status = 0
    except KeyboardInterrupt:
        pass
    finally:
        os._exit(status)


def _run(session: pytest.Session, groups: Sequence[Sequence[pytest.Item]], queue: int) -> None:
    """Run tests. pytest needs the next test of each test, because that determines which fixtures are torn down."""
    items = _dequeued(groups, queue)
    item = next(items, None)
    while item is not None:
        following = next(items, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail or session.shouldstop:
            break
        item = following
    session._setupstate.teardown_exact(None)


def _dequeued(groups: Sequence[Sequence[pytest.Item]], queue: int) -> Iterator[pytest.Item]:
    """Yield the tests of groups from the queue until it is empty."""
    while index := os.read(queue, _INDEX_BYTES):
        yield from groups[int.from_bytes(index, "big")]


@dataclass(frozen=True)
class _Sender:
    """The plugin of a worker that sends test reports to the parent."""

    config: pytest.Config
    pipe: Connection

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._send("start", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._send("report", self.config.hook.pytest_report_to_serializable(config=self.config, report=report))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._send("finish", nodeid, location)

    def _send(self, *message: object) -> None:
        self.pipe.send(message)


# The parent


@dataclass
class _Worker:
    name: str
    pid: int
    pipe: Connection
    running: str = ""
    exit_code: int | None = None

    def end(self) -> int:
        """Wait for the process, and return its exit code."""
        if self.exit_code is None:
            self.pipe.close()
            self.exit_code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.exit_code

    def stop(self) -> None:
        """Terminate the process if it still runs."""
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            self.end()


def _receive(session: pytest.Session, workers: Sequence[_Worker]) -> None:
    """Report the results of workers until all workers have ended.

    Raises:
        Failed: If a worker dies or some tests were not run.
    """
    running = {worker.pipe: worker for worker in workers}
    n_finished = 0
    while running:
        for pipe in wait(list(running)):
            assert isinstance(pipe, Connection)
            worker = running[pipe]
            try:
                kind, *content = pipe.recv()
            except EOFError:
                del running[pipe]
                if exit_code := worker.end():
                    _fail(session, f"{worker.name} exited with code {exit_code} in {worker.running}")
                continue
            n_finished += kind == "finish"
            _report(session, worker, kind, content)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
    if n_finished < len(session.items):
        _fail(session, f"{len(session.items) - n_finished} tests were not run")


def _fail(session: pytest.Session, message: str) -> NoReturn:
    session.shouldfail = message
    raise session.Failed(message)


def _report(session: pytest.Session, worker: _Worker, kind: str, content: list[Any]) -> None:
    hook = session.config.hook
    if kind == "start":
        (worker.running,) = content
    elif kind == "report":
        report = hook.pytest_report_from_serializable(config=session.config, data=content[0])
        hook.pytest_runtest_logreport(report=report)
    else:
        hook.pytest_runtest_logfinish(nodeid=content[0], location=content[1])
