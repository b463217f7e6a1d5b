"""The same plans, deletions, copies and reports, whoever carries out the requests: threads here, or Spark's tasks."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from tests.inventories import write_inventory
from tests.module_time import replace_time_functions
from tests.operations.aging import Aging, grow, keeping
from tests.operations.changes import append_rows, overwrite_rows
from tests.operations.table_roots import TableRoots, needed_paths, paths_under, put_orphans, table_roots
from tests.servers.s3_server import S3Server
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.cli.app import trinitylake
from trinitylake_ops.format.file_names import is_immutable_path, new_node_path
from trinitylake_ops.operations.executor import LOCAL, DeleteOutcome, DeletionFence, Executor
from trinitylake_ops.operations.verification.read_ahead import NodeReader
from trinitylake_ops.spark import executor as spark_executor_module
from trinitylake_ops.spark.executor import SparkExecutor
from trinitylake_ops.storage import Storage, background, open_storage
from trinitylake_ops.storage.local import storage as local_storage_module
from trinitylake_ops.tree.shape import walk

__all__ = ["table_roots"]

pytestmark = pytest.mark.debian_packages


@dataclass(frozen=True)
class Place:
    """A root that is looked at, and changed, without the code under test."""

    root: str
    options: dict[str, str]
    server: S3Server | None

    def content(self) -> dict[str, bytes]:
        """Return all files by path, with those that are written in the background."""
        background.drain()
        if self.server is None:
            folder = Path(self.root.removeprefix("file://"))
            paths = [path for path in folder.rglob("*") if path.is_file()]
            return {str(path.relative_to(folder)): path.read_bytes() for path in paths}
        bucket, prefix = self._bucket_and_prefix()
        pages = self.server.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        keys = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
        return {key.removeprefix(prefix): self._object(bucket, key) for key in keys}

    def put_back(self, content: dict[str, bytes]) -> None:
        """Let exactly these files stand."""
        now = self.content()
        for path in now.keys() - content.keys():
            if self.server is None:
                Path(self.root.removeprefix("file://"), path).unlink()
            else:
                bucket, prefix = self._bucket_and_prefix()
                self.server.client.delete_object(Bucket=bucket, Key=prefix + path)
        for path, data in content.items():
            if now.get(path) == data:
                continue
            if self.server is None:
                Path(self.root.removeprefix("file://"), path).write_bytes(data)
            else:
                bucket, prefix = self._bucket_and_prefix()
                self.server.client.put_object(Bucket=bucket, Key=prefix + path, Body=data)

    def _bucket_and_prefix(self) -> tuple[str, str]:
        bucket, _, prefix = self.root.removeprefix("s3://").partition("/")
        return bucket, prefix

    def _object(self, bucket: str, key: str) -> bytes:
        assert self.server is not None
        data: bytes = self.server.client.get_object(Bucket=bucket, Key=key)["Body"].read()
        return data


@pytest.fixture(params=["local", pytest.param("radosgw", marks=pytest.mark.soak)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "local":
        yield Place(f"file://{tmp_path}/lake/", {"fsync": "false"}, None)
        return
    server: S3Server = request.getfixturevalue("radosgw")
    made = Place(server.fresh_root(), server.storage_options, server)
    yield made
    server.delete_all(made.root)


@pytest.fixture
def spark_tasks(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> SparkExecutor:
    """Spark for everything, however little it is."""
    monkeypatch.setattr(spark_executor_module, "FEW", 0)
    return SparkExecutor(spark)


@pytest.fixture
def aging(place: Place) -> Aging:
    """A lakehouse with tables of several ages, whose files change hands."""
    aging = Aging.on(open_storage(place.root, place.options))
    grow(aging, 7)
    append_rows(aging.lake, "n0.rows")
    overwrite_rows(aging.lake, "n0.rows", "n1.rows")
    aging.lake.storage.create(new_node_path(), b"left behind")
    return aging


class Engines:
    """Does something on one lakehouse by each engine, from the same files and at the same time."""

    def __init__(self, aging: Aging, place: Place, spark: SparkExecutor):
        self._aging = aging
        self._place = place
        self._spark = spark

    def outcomes(self, act: Callable[[Executor], Any]) -> tuple[Outcome, Outcome]:
        """Return what came of it by threads, and then by Spark, whose outcome stays."""
        before, clock = self._place.content(), self._aging.clock
        written_ms, time_ms = dict(clock.written_ms), clock.time_ms
        local = Outcome.of(act(LOCAL), before, self._place.content())
        self._place.put_back(before)
        clock.written_ms, clock.time_ms = written_ms, time_ms
        return local, Outcome.of(act(self._spark), before, self._place.content())


@dataclass(frozen=True)
class Outcome:
    """What an operation returned, which files it deleted, and how many of which kinds it created."""

    returned: Any
    deleted: frozenset[str]
    created: Counter[str]

    @classmethod
    def of(cls, returned: Any, before: dict[str, bytes], after: dict[str, bytes]) -> Outcome:
        fresh = after.keys() - before.keys()
        created = Counter("immutable" if is_immutable_path(path) else path[:8] for path in fresh)
        return cls(returned, frozenset(before.keys() - after.keys()), created)


def without_cost(report: Any) -> dict[str, Any]:
    """Return a report but for what depends on time and chance."""
    shown: dict[str, Any] = report.to_dict()
    # Tasks read ahead also what stands below something that is damaged, so they check more files.
    for name in ("cost", "batch", "plan_path", "record_path", "manifest_path", "location"):
        shown.pop(name, None)
    if "findings" in shown:  # threads find things in any order
        shown["findings"].sort(key=str)
    return shown


def test_verify_expiry_purge_and_orphans(aging: Aging, place: Place, spark_tasks: SparkExecutor) -> None:
    engines = Engines(aging, place, spark_tasks)
    aging.later()
    verified = [operations.verify(aging.lake, deep=True, executor=executor) for executor in (LOCAL, spark_tasks)]
    assert without_cost(verified[1]) == without_cost(verified[0])
    assert verified[1].orphan_files == 1
    n_read = [report.cost.requests["read"] for report in verified]
    assert n_read[0] < n_read[1] < 2 * n_read[0], "counted wherever it is read; Spark walks once more for orphans"
    plans = {
        "expire": lambda executor: operations.plan_expiration(aging.lake, keeping(2), executor=executor),
        "purge": lambda executor: operations.plan_purge(aging.lake, executor=executor),
        "orphans": lambda executor: operations.plan_orphan_removal(aging.lake, executor=executor),
    }
    deleted: dict[str, int] = {}
    for name, plan in plans.items():

        def act(executor: Executor, plan: Callable[[Executor], Any] = plan) -> tuple[str, str, dict[str, Any], int]:
            made = plan(executor)
            assert not made.is_empty
            report = made.execute(made.digest)
            return made.digest, made.to_json(), without_cost(report), report.cost.requests.get("delete", 0)

        local, spark = engines.outcomes(act)
        assert spark == local, name
        deleted[name] = len(spark.deleted)
        aging.later()
    assert deleted["expire"] == 0
    assert deleted["purge"] > 20
    assert deleted["orphans"] >= 1
    assert operations.verify(aging.lake).findings == ()


def test_orphans_by_an_inventory(aging: Aging, place: Place, spark_tasks: SparkExecutor, tmp_path: Path) -> None:
    engines = Engines(aging, place, spark_tasks)
    aging.later()
    location = write_inventory(tmp_path / "inventory", aging.lake.root, sorted(place.content()), files=20)

    def act(executor: Executor) -> tuple[str, dict[str, Any]]:
        plan = operations.plan_orphan_removal(aging.lake, inventory=location, executor=executor)
        return plan.digest, without_cost(plan.execute(plan.digest))

    expected = operations.plan_orphan_removal(aging.lake).digest
    local, spark = engines.outcomes(act)
    assert spark == local
    assert spark.returned[0] == expected
    assert len(spark.deleted) == 1


class Recording(SparkExecutor):
    """Spark's tasks, and where they deleted how many files."""

    def __init__(self, spark: SparkSession):
        super().__init__(spark)
        self.deleted: Counter[str] = Counter()

    def delete(self, storage: Storage, paths: Sequence[str], fence: DeletionFence | None) -> DeleteOutcome:
        self.deleted[storage.root] += len(paths)
        return super().delete(storage, paths, fence)


@pytest.mark.parametrize("place", ["local"], indirect=True)
def test_files_under_a_table_root(
    place: Place, table_roots: TableRoots, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_executor_module, "FEW", 0)
    table_root = f"file://{tmp_path}/tables/"
    aging = table_roots.aging(open_storage(place.root, place.options), place.options, table_root=table_root)
    append_rows(aging.lake)
    overwrite_rows(aging.lake, "ns.t")
    orphans = put_orphans(aging, table_root)
    aging.later()
    operations.plan_trim_tables(aging.lake, keeping(1)).execute()
    aging.later()
    aging.expire()
    aging.later()
    tasks = Recording(spark)
    purged = operations.plan_purge(aging.lake, executor=tasks)
    doomed = {path for path in purged.sizes_bytes if path.startswith(table_root)}
    assert doomed
    assert purged.digest == operations.plan_purge(aging.lake).digest
    assert purged.execute(purged.digest).is_complete
    assert tasks.deleted[table_root] == len(doomed)
    location = write_inventory(tmp_path / "inventory", table_root, sorted(paths_under(table_root)), files=20)
    plan = operations.plan_orphan_removal(aging.lake, inventory=location, executor=tasks)
    assert plan.paths == sorted(f"{table_root}{path}" for path in orphans)
    assert plan.digest == operations.plan_orphan_removal(aging.lake).digest
    report = plan.execute(plan.digest)
    assert (report.files, report.failures) == (len(orphans), {})
    assert tasks.deleted[table_root] == len(doomed) + len(orphans)
    assert paths_under(table_root) == needed_paths(aging.lake, table_root)


def test_a_full_export(aging: Aging, place: Place, spark_tasks: SparkExecutor) -> None:
    copies = {}
    for name, executor in (("local", LOCAL), ("spark", spark_tasks)):
        target = replace(place, root=f"{place.root.removesuffix('lake/')}{name}/")
        plan = operations.plan_export(
            aging.lake, name, "full", target=target.root, target_options=place.options, executor=executor
        )
        told: list[int] = []
        report = plan.execute(progress=lambda _what, done, _all, told=told: told.append(done))  # type: ignore[misc]
        assert told == list(range(1, report.files))
        content = target.content()
        assert operations.verify(Lakehouse.open(target.root, place.options)).findings == ()
        copies[name] = (
            {path: data for path, data in content.items() if re.search(r"-namespace-|-table-|\.parquet$", path)},
            {
                path: re.sub(rb'"[0-9a-f]{8} ', b'"', data.replace(target.root.encode(), b""))  # without checksums
                for path, data in content.items()
                if path.endswith("data.json")
            },
            sorted(path for path in content if path.startswith("tables/")),
            (len(content), plan.files, plan.bytes, report.copied_files, report.files),
        )
    assert copies["spark"] == copies["local"]
    assert len(copies["spark"][2]) > 10


def damage(aging: Aging) -> None:
    """Let there be something of each kind to find."""
    snapshot, storage = aging.lake.snapshot(), aging.clock.inner
    latest = {visited.location for visited in walk(snapshot.files.nodes, snapshot.root, snapshot.location)}
    files = [info.path for info in storage.list()]
    data = sorted(path for path in files if path.endswith(".parquet"))
    storage.write(data[0], b"no Parquet file")
    storage.delete(data[1])
    storage.write(min(path for path in files if path.endswith("-m0.avro")), b"no manifest")
    older = sorted(path for path in files if "-node-" in path and path not in latest)
    storage.delete(older[0])
    storage.write(older[-1], b"no node")
    namespaces = sorted(path for path in files if "-namespace-" in path)
    storage.write(namespaces[0], b"")
    storage.delete(namespaces[1])


def test_verify_of_a_damaged_lakehouse_without_an_old_file(
    aging: Aging, place: Place, spark_tasks: SparkExecutor
) -> None:
    """No orphan can be there, whatever cannot be read; a file of others is none however old it is."""
    damage(aging)
    aging.lake.storage.create("other.txt", b"theirs")
    aging.clock.written_ms["other.txt"] = 1
    reports = [operations.verify(aging.lake, executor=executor) for executor in (LOCAL, spark_tasks)]
    assert without_cost(reports[1]) == without_cost(reports[0])
    assert (reports[0].orphan_files, reports[0].unchecked) == (0, ())
    assert {"node-missing", "node-corrupt"} & {finding.code for finding in reports[0].findings}


def test_verify_of_a_damaged_lakehouse(aging: Aging, place: Place, spark_tasks: SparkExecutor) -> None:
    damage(aging)
    aging.later()

    def act(executor: Executor) -> list[dict[str, Any]]:
        recording = operations.verify(aging.lake, deep=True, incremental=True, executor=executor)
        again = operations.verify(aging.lake, incremental=True, executor=executor)
        return [without_cost(report) for report in (recording, again)]

    local, spark = Engines(aging, place, spark_tasks).outcomes(act)
    assert spark == local
    recorded, again = spark.returned
    assert again["known_files"] > 50
    codes = {finding["code"] for finding in recorded["findings"]}
    assert "definition-unreadable" in codes
    assert codes & {"node-missing", "node-corrupt"}, "where one is below the other there is only one of them"
    assert any(code.startswith("table-") for code in codes)


def test_commands(aging: Aging, place: Place, spark_tasks: SparkExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that take an engine, on a session that is there; nothing is old enough to be deleted by its real time."""
    if place.server is not None:
        return
    now_ns = time.time_ns()
    replace_time_functions(monkeypatch, local_storage_module, time_ns=lambda: now_ns)
    options = ["--root", place.root, "--storage-option", "fsync=false"]

    def run(*words: str, code: int = 0) -> Any:
        ran = CliRunner().invoke(trinitylake, [*options, *words])
        assert ran.exit_code == code, (ran.output, ran.exception)
        return json.loads(ran.stdout) if "--json" in words else ran.output

    for command in ("expire", "purge", "orphans", "verify"):
        shown = [run(command, "--engine", engine, "--json") for engine in ("local", "spark")]
        for one in shown:
            one.pop("cost", None)
        assert shown[1] == shown[0], command
    exported = [
        run("export", engine, "--level", "full", "--engine", engine, "--json")["copied_files"]
        for engine in ("local", "spark")
    ]
    assert exported[0] == exported[1] > 10
    refused = run("verify", "--spark-master", "local[2]", code=2)
    assert "--engine spark" in refused


def test_nothing_to_do_takes_no_job(spark: SparkSession) -> None:
    storage = open_storage("memory://nothing/")
    for rate in (None, 5.0):
        assert list(SparkExecutor(spark, requests_per_second=rate).map(NodeReader(storage), [])) == []
