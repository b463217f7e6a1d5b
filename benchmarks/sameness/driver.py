"""Run the steps of a scenario with the package on `PYTHONPATH`, and record the results.

It is run by its path, so that it does not import modules from its own tree: ``python -P driver.py JOB``. ``JOB`` is a
JSON file with the tree, the steps, the folder of the lakehouses and the folder for results. Each step runs in a fork of
this process, so that it starts without caches. Clock, UUIDs and random numbers are functions of the step's number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import gc
import hashlib
import importlib
import importlib.util
import json
import os
import random
import shutil
import sys
import threading
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

#: The time of the first step, which is in the past on any machine, and the interval between steps.
_BEGIN_NS = 1_704_067_200_000_000_000
_STEP_NS = 60_000_000_000
_HOUR_NS = 3_600_000_000_000
_STARTED_MS = time.time_ns() // 1_000_000


class DeterministicEnvironment:
    """The deterministic clock, UUIDs and random numbers of a step."""

    def __init__(self) -> None:
        self.now_ns = _BEGIN_NS
        self.slept_s = 0.0
        self._step = 0
        self._n_drawn = 0
        self._lock = threading.Lock()

    def begin(self, step: int) -> None:
        """Start a step, one minute after the previous one."""
        self.now_ns += _STEP_NS
        self._step, self._n_drawn, self.slept_s = step, 0, 0.0
        random.seed(step)

    def uuid4(self) -> uuid.UUID:
        """Return the next UUID of the step."""
        with self._lock:
            self._n_drawn += 1
            number = self._n_drawn
        return uuid.UUID(bytes=self._bytes(f"uuid {number}", 16), version=4)

    def urandom(self, size: int) -> bytes:
        """Return the same bytes in every call of a step. Avro files take their sync markers from here."""
        return self._bytes("urandom", size)

    def sleep(self, seconds: float) -> None:
        """Advance the monotonic clock without waiting."""
        self.slept_s += seconds

    def _bytes(self, purpose: str, size: int) -> bytes:
        return hashlib.shake_256(f"{self._step} {purpose}".encode()).digest(size)

    def install(self) -> None:
        """Install the clock and UUIDs in this process, before modules that use them are imported."""
        uuid.uuid4 = self.uuid4
        time.time_ns = lambda: self.now_ns
        time.time = lambda: self.now_ns / 1e9
        time.monotonic = time.perf_counter = lambda: self.slept_s
        time.monotonic_ns = time.perf_counter_ns = lambda: int(self.slept_s * 1e9)
        time.sleep = self.sleep
        os.urandom = self.urandom
        os.fsync = lambda _descriptor: None  # files need not survive a crash of the machine

    def install_in_pyiceberg(self) -> None:
        """Install the clock in pyiceberg, which uses `datetime` directly."""
        import datetime as dt

        class Now(dt.datetime):
            @classmethod
            def now(cls, tz: dt.tzinfo | None = None) -> dt.datetime:
                return dt.datetime.fromtimestamp(self.now_ns / 1e9, tz)

        metadata = importlib.import_module("pyiceberg.table.metadata")
        update = importlib.import_module("pyiceberg.table.update")
        metadata.datetime = SimpleNamespace(**{**vars(dt), "datetime": Now})
        update.datetime = Now


class RequestLog:
    """The requests of a step to local storage: the number of each kind, round trips, and written files."""

    def __init__(self, blobs: Path):
        self.requests: Counter[str] = Counter()
        self.rounds = 0
        self.written: list[tuple[str, str, int]] = []
        self._round_trip_ids: set[int] = set()
        self._round_trips: list[object] = []  # referenced, so that their ids are not reused
        self._blobs = blobs
        self._lock = threading.Lock()

    def count(self, kind: str, round_trip: object | None) -> None:
        """Count a request. The parallel requests of one call are one round trip."""
        with self._lock:
            self.requests[kind] += 1
            if round_trip is None:
                self.rounds += 1
            elif id(round_trip) not in self._round_trip_ids:
                self._round_trips.append(round_trip)
                self._round_trip_ids.add(id(round_trip))
                self.rounds += 1

    def keep(self, verb: str, uri: str, data: bytes) -> None:
        """Store written content by its checksum.

        Args:
            verb: ``create`` or ``write``.
            uri: The URI of the file.
            data: The content.
        """
        digest = hashlib.sha256(data).hexdigest()
        (self._blobs / digest).write_bytes(data)
        with self._lock:
            self.written.append((f"{verb} {uri}", digest, len(data)))


#: The names of packages and modules in earlier revisions, by their current names.
_EARLIER_NAMES = {
    "trinitylake_ops.iceberg": "trinitylake_ops.tables",
    "trinitylake_ops.operations": "trinitylake_ops.maintenance",
    "trinitylake_ops.storage.background": "trinitylake_ops.storage.beside",
}


def name_in_tree(name: str) -> str:
    """Return the name of a module in the tree of this run, which may be an earlier revision."""
    earlier = _EARLIER_NAMES.get(name)
    return earlier if earlier is not None and importlib.util.find_spec(earlier) is not None else name


def watch(environment: DeterministicEnvironment, log: RequestLog) -> None:
    """Patch local storage to record its requests, send them sequentially, and use the step's clock for file times."""
    from trinitylake_ops.storage import LocalStorage

    parallel = importlib.import_module("trinitylake_ops.storage.parallel")
    # Earlier revisions have another name for it.
    current_round_trip = getattr(parallel, "current_round_trip", None) or parallel.current_round
    with contextlib.suppress(ImportError):  # an earlier revision has no background work
        background = importlib.import_module(name_in_tree("trinitylake_ops.storage.background"))
        if hasattr(background, "run_logged"):
            background.submit = background.run_logged
        else:  # an earlier revision
            background.put = background.do

    def counted(kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def method(storage: Any, *arguments: Any, **options: Any) -> Any:
            log.count(kind, current_round_trip())
            result = call(storage, *arguments, **options)
            if kind in ("create", "write"):
                log.keep(kind, storage.root + arguments[0], bytes(arguments[1]))
            return result

        return method

    def aged(info: Any) -> Any:
        return (
            dataclasses.replace(info, last_modified_ms=environment.now_ns // 1_000_000)
            if info.last_modified_ms >= _STARTED_MS
            else info
        )

    for kind in ("read", "stat", "create", "write", "delete", "list"):
        setattr(LocalStorage, kind, counted(kind, getattr(LocalStorage, kind)))
    stat, listing = LocalStorage.stat, LocalStorage.list
    LocalStorage.stat = lambda storage, path: aged(stat(storage, path))
    LocalStorage.list = lambda storage, prefix="": map(aged, listing(storage, prefix))
    LocalStorage.concurrency = 1
    local = importlib.import_module(LocalStorage.__module__)
    local.clock_difference_s = lambda _file: 0.0  # files have times of the real clock


def load() -> None:
    """Import what the steps need before forking: all public names, and pyiceberg."""
    for package in ("trinitylake_ops", "trinitylake_ops.operations", "trinitylake_ops.storage"):
        module = importlib.import_module(name_in_tree(package))
        for name in module.__all__:
            getattr(module, name)
    for name in ("pyiceberg.io.pyarrow", "pyarrow.parquet", "rich.console", "trinitylake_ops.iceberg"):
        importlib.import_module(name_in_tree(name))
    from trinitylake_ops.cli.app import trinitylake

    for command in list(trinitylake.commands):
        trinitylake.commands[command]


def run_command(arguments: list[str]) -> None:
    """Run a command to its exit, as in a separate process."""
    from trinitylake_ops.cli import main

    sys.argv = ["trinitylake", *_arguments_for_tree(arguments)]
    main()


#: Earlier names of options, for trees without the command ``repair-hint``.
_EARLIER_OPTIONS = {"--min-input-files": "--min-files", "--check-only": ""}


def _arguments_for_tree(arguments: list[str]) -> list[str]:
    from trinitylake_ops.cli.app import trinitylake

    if "repair-hint" in trinitylake.commands:
        return arguments
    hint = ["hint"] if "--check-only" in arguments else ["hint", "--repair"]
    translated = [
        hint if argument == "repair-hint" else [_EARLIER_OPTIONS.get(argument, argument)] for argument in arguments
    ]
    return [argument for parts in translated for argument in parts if argument]


def catalog(root: str) -> Any:
    """Return the PyIceberg catalog of a lakehouse, loaded by the class path that users configure."""
    from pyiceberg.catalog import load_catalog

    implementation = f"{name_in_tree('trinitylake_ops.iceberg')}.catalog.TrinityLakeCatalog"
    return load_catalog("lake", **{"py-catalog-impl": implementation, "root": root})


def rows(first: int, n_rows: int) -> Any:
    """Return rows of orders."""
    import pyarrow as pa

    numbers = range(first, first + n_rows)
    columns = {"id": list(numbers), "amount": [number / 4 for number in numbers], "name": [f"n{k}" for k in numbers]}
    return pa.table(columns)


def make_table(root: str, name: str) -> None:
    """Create a table of orders with PyIceberg."""
    catalog(root).create_table(name, rows(0, 1).schema)


def append(root: str, name: str, first: int, n_rows: int) -> None:
    """Append rows with PyIceberg."""
    catalog(root).load_table(name).append(rows(first, n_rows))


def delete_rows(root: str, name: str, condition: str) -> None:
    """Delete rows with PyIceberg."""
    catalog(root).load_table(name).delete(condition)


def outside_table(folder: str) -> None:
    """Create an Iceberg table outside of any lakehouse, in PyIceberg's SQL catalog."""
    from pyiceberg.catalog.sql import SqlCatalog

    Path(folder).mkdir(parents=True)
    outside = SqlCatalog("outside", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}")
    outside.create_namespace("far")
    outside.create_table("far.things", rows(0, 1).schema).append(rows(0, 5))
    shutil.copy(
        Path(outside.load_table("far.things").metadata_location.removeprefix("file://")), f"{folder}/m.metadata.json"
    )


def many_tables(root: str, namespace: str, n_tables: int) -> None:
    """Create tables without rows, in one commit."""
    from trinitylake_ops import Lakehouse, TableDef

    with Lakehouse.open(root).transaction(message="many tables", run_id="run-1") as txn:
        for number in range(n_tables):
            txn.create_table(namespace, f"t{number:04}", TableDef(properties={"number": str(number)}))


def alter_tables(root: str, namespace: str, first: int, n_tables: int) -> None:
    """Change tables, with one commit for each."""
    from trinitylake_ops import Lakehouse, TableDef

    lake = Lakehouse.open(root)
    for number in range(first, first + n_tables):
        with lake.transaction() as txn:
            txn.alter_table(namespace, f"t{number:04}", TableDef(properties={"changed": str(number)}))


def write_lost(root: str) -> None:
    """Save a transaction without committing it."""
    from trinitylake_ops import Lakehouse, TableDef

    txn = Lakehouse.open(root).transaction()
    txn.create_namespace("lost")
    txn.create_table("lost", "t", TableDef())
    txn.save()


def damage(pattern: str, at: int) -> None:
    """Change a byte of the first file whose path matches a pattern."""
    path = first_file(pattern)
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 0x40
    path.chmod(0o644)
    path.write_bytes(data)


def remove(pattern: str) -> None:
    """Delete the first file whose path matches a pattern."""
    first_file(pattern).unlink()


def write_text(path: str, text: str) -> None:
    """Write a file."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")


def copy_folder(source: str, target: str) -> None:
    """Copy the folder of a lakehouse, including file times."""
    shutil.copytree(source, target)


def first_file(pattern: str) -> Path:
    """Return the first file whose path matches a pattern. Raise LookupError if there is none."""
    folder = Path(pattern.split("*", maxsplit=1)[0]).parent
    files = sorted(path for path in folder.rglob("*") if path.is_file() and fnmatch.fnmatch(str(path), pattern))
    if not files:
        raise LookupError(f"no file matches {pattern}")
    return files[0]


#: The actions of steps, except commands.
ACTIONS: Mapping[str, Callable[..., None]] = {
    action.__name__: action
    for action in (
        *(make_table, append, delete_rows, outside_table, many_tables, alter_tables, write_lost),
        *(damage, remove, write_text, copy_folder),
    )
}


def run_step(step: Mapping[str, Any], placeholders: Mapping[str, str]) -> None:
    """Run a step. A command ends with SystemExit."""
    arguments = [placeholders.get(value, value) if isinstance(value, str) else value for value in step["arguments"]]
    if step["action"] == "command":
        run_command(arguments)
    else:
        ACTIONS[step["action"]](*arguments)


def in_fork(
    number: int,
    step: Mapping[str, Any],
    placeholders: Mapping[str, str],
    job: Mapping[str, Any],
    environment: DeterministicEnvironment,
) -> Any:
    """Run a step in a fork of this process.

    Args:
        number: The number of the step.
        step: The step.
        placeholders: The values of placeholders in arguments, from earlier steps.
        job: The job.
        environment: The clock and random numbers.

    Returns:
        The step with its output, exit code, requests and written files.

    Raises:
        RuntimeError: If the step did not finish.
    """
    out = Path(job["out"])
    streams = [out / f"{number}.{name}" for name in ("out", "err")]
    child = os.fork()
    if child == 0:
        code = 70
        try:
            log = RequestLog(out / "blobs")
            watch(environment, log)
            for descriptor, path in enumerate(streams, start=1):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
            try:
                run_step(step, placeholders)
                code = 0
            except SystemExit as exit_:
                code = int(exit_.code or 0)
            recorded = {"requests": log.requests, "rounds": log.rounds, "written": sorted(log.written)}
            (out / f"{number}.json").write_text(json.dumps(recorded))
        except BaseException:  # noqa: BLE001 - a fork must not continue the work of its parent
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    recorded_path = out / f"{number}.json"
    if not recorded_path.exists():
        raise RuntimeError(f"step {number}, {step}, did not finish:\n{streams[1].read_text()}")
    texts = [path.read_text(encoding="utf-8", errors="backslashreplace") for path in streams]
    recorded = json.loads(recorded_path.read_text())
    for path in (*streams, recorded_path):
        path.unlink()
    return {**step, "code": os.waitstatus_to_exitcode(status), "out": texts[0], "err": texts[1], **recorded}


def set_file_times(result: Mapping[str, Any], folder: Path, now_ns: int) -> None:
    """Set the times of the files that a step wrote to the clock of the step.

    Args:
        result: The result of the step. For steps that are not commands, all new files are set.
        folder: The folder of the lakehouses.
        now_ns: The time of the step.
    """
    if result["action"] == "command":
        paths = [Path(uri.partition(" file://")[2]) for uri, _, _ in result["written"]]
    else:
        paths = list(folder.rglob("*"))
    for path in paths:
        if path.exists() and path.stat().st_mtime_ns // 1_000_000 >= _STARTED_MS:
            os.utime(path, ns=(now_ns, now_ns))


def remember_digest(result: Mapping[str, Any], placeholders: dict[str, str]) -> None:
    """Store the digest of the plan that a command printed, for the step that approves the plan."""
    if result["action"] == "command" and "--json" in result["arguments"]:
        try:
            document = json.loads(result["out"])
        except ValueError:
            return
        if isinstance(document, dict) and isinstance(document.get("digest"), str):
            placeholders["@digest"] = document["digest"]


def scenario(job: Mapping[str, Any], environment: DeterministicEnvironment) -> Iterator[Any]:
    """Run all steps in order and yield their results."""
    environment.install_in_pyiceberg()
    placeholders: dict[str, str] = {}
    folder = Path(job["folder"])
    (Path(job["out"]) / "blobs").mkdir()
    for number, step in enumerate(job["steps"]):
        environment.begin(number)
        if step["action"] == "forward":
            environment.now_ns += step["arguments"][0] * _HOUR_NS
            continue
        result = in_fork(number, step, placeholders, job, environment)
        set_file_times(result, folder, environment.now_ns)
        remember_digest(result, placeholders)
        yield {"number": number, **result}


def counts(job: Mapping[str, Any], environment: DeterministicEnvironment) -> Any:
    """Return the results of `benchmarks/request_counts.py` of the tree, at sizes that take only some seconds."""
    environment.begin(0)
    requests = importlib.import_module("benchmarks.request_counts")
    for name, value in job["settings"].items():
        setattr(requests, name, value)
    results: dict[str, Any] = {"find the latest version": requests.find_latest_rounds()}
    for n_tables in job["settings"]["TABLE_COUNTS"]:
        random.seed(n_tables)
        results[f"{n_tables} tables"] = dataclasses.asdict(requests.at_size(n_tables))
    return results


def main() -> None:
    """Run the job."""
    job = json.loads(Path(sys.argv[1]).read_text())
    environment = DeterministicEnvironment()
    environment.install()
    package = importlib.import_module("trinitylake_ops")
    assert Path(str(package.__file__)).is_relative_to(job["tree"]), package.__file__
    if job["kind"] == "counts":
        result = counts(job, environment)
    else:
        load()
        gc.freeze()  # forks share loaded modules
        result = list(scenario(job, environment))
    Path(job["out"], "result.json").write_text(json.dumps(result, default=str))


if __name__ == "__main__":
    main()
