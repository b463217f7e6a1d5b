"""Measure the size of the package, and how much of its code each common operation runs.

Run ``make metrics`` from the project's root. It prints the number of files and lines of code by folder, and for each
journey the number of files and functions of the package that run. Code lines are lines with a token that is neither a
comment nor part of a docstring. Each journey runs twice in a separate process, and only the second run is traced, so
that imports and the filling of caches do not count.

``scripts/metrics.py --files JOURNEY...`` prints the files of each journey as JSON, in the order in which they first
run. A test compares the pages in docs/internals that walk through a commit, a rollback and a purge with this list.
"""

from __future__ import annotations

import ast
import functools
import io
import json
import socket
import sys
import tempfile
import threading
import time
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from http.client import HTTPConnection
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any

import dagster as dg
import pyarrow as pa
import uvicorn

import trinitylake_ops
from trinitylake_ops import operations
from trinitylake_ops.dagster_plugin import StorageSettings, TrinityLakeResource, build_jobs
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.server.app import Application
from trinitylake_ops.server.run import configuration_of
from trinitylake_ops.server.settings import ONLY, LakehouseSettings, ServerSettings
from trinitylake_ops.storage import background
from trinitylake_ops.storage.local.storage import LocalStorage

PACKAGE = Path(trinitylake_ops.__file__).parent
_SKIPPED = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}
)
#: Settings with which all versions except the latest can expire after an hour.
_SHORT_RETENTION = {"maximum_version_age_millis": 1, "minimum_versions_to_keep": 1, "txn_ttl_millis": 60_000}
_HOUR_MS = 3_600_000


class _Clock:
    """Replaces the clock of local storages, so that versions expire without waiting."""

    def __init__(self) -> None:
        self._ahead_ms = 0
        LocalStorage.now_ms = lambda _: time.time_ns() // 1_000_000 + self._ahead_ms  # type: ignore[method-assign]

    def advance(self) -> None:
        """Move the clock forward by an hour."""
        self._ahead_ms += _HOUR_MS


def code_lines(file: Path) -> int:
    """Return the number of lines with code in a module."""
    source = file.read_text()
    docstrings = set[int]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _SKIPPED and token.type != tokenize.ENDMARKER:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def modules() -> list[Path]:
    """Return the modules of the package that are not generated."""
    return sorted(file for file in PACKAGE.rglob("*.py") if "generated" not in file.parts)


class Trace:
    """Records the functions of the package that run in any thread while the trace is on."""

    def __init__(self) -> None:
        self.functions: dict[tuple[str, int, str], None] = {}
        self.is_on = False

    def install(self) -> None:
        """Trace this thread and all threads that start later."""
        threading.setprofile(self._record)
        sys.setprofile(self._record)

    def _record(self, frame: FrameType, event: str, _: object) -> None:
        if self.is_on and event == "call":
            code = frame.f_code
            if code.co_filename.startswith(str(PACKAGE)) and code.co_name != "<module>":
                self.functions.setdefault((code.co_filename, code.co_firstlineno, code.co_name))

    def files(self) -> list[str]:
        """Return the files that ran, relative to the package, in the order in which they first ran."""
        paths = dict.fromkeys(file for file, _, _ in self.functions)
        return [Path(path).relative_to(PACKAGE).as_posix() for path in paths]


def lakehouse(folder: Path, **fields: Any) -> trinitylake_ops.Lakehouse:
    """Return a lakehouse in a folder, with a namespace and a table of one row."""
    lake = trinitylake_ops.Lakehouse.create(f"file://{folder}/lake", {"fsync": "false"}, **fields)
    with lake.transaction() as txn:
        txn.create_namespace("ns")
    rows = pa.table({"id": pa.array([1], pa.int64())})
    catalog_at(lake).create_table("ns.t", rows.schema).append(rows)
    return lake


def commit_namespace(folder: Path) -> Iterator[Callable[[], object]]:
    """Commit a namespace."""
    lake = lakehouse(folder)
    for name in ("one", "two"):

        def commit(name: str = name) -> None:
            with lake.transaction() as txn:
                txn.create_namespace(name)

        yield commit


def append_rows(folder: Path) -> Iterator[Callable[[], object]]:
    """Append rows through the PyIceberg catalog."""
    catalog = catalog_at(lakehouse(folder))
    rows = pa.table({"id": pa.array([2], pa.int64())})
    for _ in range(2):
        yield lambda: catalog.load_table("ns.t").append(rows)


def roll_back(folder: Path) -> Iterator[Callable[[], object]]:
    """Roll back the whole lakehouse with an approved plan."""
    lake = lakehouse(folder)

    def rollback(version: str) -> None:
        plan = operations.plan_rollback(lake, version)
        plan.execute(plan.digest)

    for version in ("2", "1"):
        yield functools.partial(rollback, version)


def dagster_rollback(folder: Path) -> Iterator[Callable[[], object]]:
    """Roll back in Dagster with an approved plan."""
    lake = lakehouse(folder)
    resource = TrinityLakeResource(root=lake.root, storage_options=StorageSettings(fsync="false"))
    definitions = dg.Definitions(
        jobs=build_jobs(operations="all"), resources={"lakehouse": resource}, executor=dg.in_process_executor
    )
    job = definitions.resolve_job_def("rollback")
    for version in (2, 1):
        digest = operations.plan_rollback(lake, str(version)).digest
        config = {"to": {"version": version}, "approval": {"digest": digest, "approved_by": "metrics"}}
        yield functools.partial(_run_job, job, config)


def _run_job(job: Any, config: dict[str, Any]) -> None:
    assert job.execute_in_process(run_config=config).success


def expire_versions(folder: Path) -> Iterator[Callable[[], object]]:
    """Expire old versions."""
    clock = _Clock()
    lake = lakehouse(folder, **_SHORT_RETENTION)
    for number in range(2):
        _add_namespaces(lake, f"n{number}")
        clock.advance()
        yield lambda: _check_committed(operations.plan_expiration(lake).execute())


def purge_expired(folder: Path) -> Iterator[Callable[[], object]]:
    """Delete the files of expired versions."""
    clock = _Clock()
    lake = lakehouse(folder, **_SHORT_RETENTION)
    for number in range(2):
        _add_namespaces(lake, f"n{number}")
        clock.advance()
        _check_committed(operations.plan_expiration(lake).execute())
        clock.advance()
        yield lambda: _check_committed(operations.plan_purge(lake).execute())


def _check_committed(report: Any) -> None:
    assert report.version is not None, "the operation had nothing to do"


def _add_namespaces(lake: trinitylake_ops.Lakehouse, name: str) -> None:
    """Commit two versions, of which the first one can expire."""
    for suffix in ("a", "b"):
        with lake.transaction() as txn:
            txn.create_namespace(name + suffix)


def verify_lakehouse(folder: Path) -> Iterator[Callable[[], object]]:
    """Verify a lakehouse."""
    lake = lakehouse(folder)
    for _ in range(2):
        yield lambda: operations.verify(lake)


def rest_commit(folder: Path) -> Iterator[Callable[[], object]]:
    """Commit a table property through the REST server."""
    lake = lakehouse(folder)
    settings = ServerSettings({ONLY: LakehouseSettings(lake.root, lake.storage_options)}, port=0, anonymous_writes=True)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(configuration_of(Application(settings, None), settings))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        for value in ("1", "2"):
            update = {"action": "set-properties", "updates": {"owner": value}}
            yield functools.partial(_post, listener.getsockname()[1], {"requirements": [], "updates": [update]})
    finally:
        server.should_exit = True
        thread.join()


def _post(port: int, body: dict[str, Any]) -> None:
    connection = HTTPConnection("127.0.0.1", port)
    connection.request(
        "POST", "/v1/main/namespaces/ns/tables/t", json.dumps(body), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    assert response.status == 200, response.read()


#: Journeys by name. Each yields the same step twice: a warm-up, and the traced run.
JOURNEYS: dict[str, Callable[[Path], Iterator[Callable[[], object]]]] = {
    "commit of a namespace": commit_namespace,
    "append through the catalog": append_rows,
    "commit through the REST server": rest_commit,
    "rollback": roll_back,
    "approved rollback in Dagster": dagster_rollback,
    "expire": expire_versions,
    "purge": purge_expired,
    "verify": verify_lakehouse,
}


def trace(name: str) -> Trace:
    """Run a journey twice and return the trace of the second run, including its background work."""
    recorder = Trace()
    recorder.install()
    with tempfile.TemporaryDirectory() as folder:
        for number, step in enumerate(JOURNEYS[name](Path(folder))):
            background.drain()
            recorder.is_on = number > 0
            step()
            background.drain()
            recorder.is_on = False
    return recorder


def counts(name: str) -> tuple[int, int, dict[str, int]]:
    """Return how many files and functions of the package a journey runs, and the number of files by folder."""
    recorder = trace(name)
    by_folder = Counter(_folder(PACKAGE / file) for file in recorder.files())
    return len(recorder.files()), len(recorder.functions), dict(sorted(by_folder.items(), key=lambda item: -item[1]))


def sizes() -> Iterator[str]:
    """Yield the rows of the table of sizes."""
    lines_by_file = {file: code_lines(file) for file in modules()}
    for folder in sorted({_folder(file) for file in lines_by_file}):
        lines = [n for file, n in lines_by_file.items() if _folder(file) == folder]
        yield f"| {folder} | {len(lines)} | {sum(lines):,} | {sum(lines) // len(lines)} |"
    n_lines, n_files = sum(lines_by_file.values()), len(lines_by_file)
    depth = max(len(file.relative_to(PACKAGE).parts) for file in lines_by_file) - 1
    yield f"| all (up to {depth} nested folders) | {n_files} | {n_lines:,} | {n_lines // n_files} |"


def _folder(file: Path) -> str:
    parts = file.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else "."


def main() -> None:
    """Print both tables, or the files of the journeys that follow ``--files``."""
    if len(sys.argv) > 1:
        print(json.dumps({name: trace(name).files() for name in sys.argv[2:]}))
        return
    print("| folder | files | code lines | per file |\n| --- | ---: | ---: | ---: |", *sizes(), sep="\n")
    print("\n| journey | files | functions | files by folder |\n| --- | ---: | ---: | --- |")
    for name in JOURNEYS:
        with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
            n_files, n_functions, by_folder = pool.submit(counts, name).result()
        folders = ", ".join(f"{folder} {n}" for folder, n in by_folder.items())
        print(f"| {name} | {n_files} | {n_functions} | {folders} |", flush=True)


if __name__ == "__main__":
    main()
