"""Test that operations have the same plans, deletions, copies and reports with local threads and with Spark tasks."""

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
class LakeRoot:
    """A root whose files a test reads and changes directly."""

    root: str
    options: dict[str, str]
    server: S3Server | None

    def content(self) -> dict[str, bytes]:
        """Wait for background work and return the contents of all files by path."""
        background.drain()
        if self.server is None:
            folder = Path(self.root.removeprefix("file://"))
            paths = [path for path in folder.rglob("*") if path.is_file()]
            return {str(path.relative_to(folder)): path.read_bytes() for path in paths}
        bucket, prefix = self._bucket_and_prefix()
        pages = self.server.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        keys = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
        return {key.removeprefix(prefix): self._object(bucket, key) for key in keys}

    def restore(self, content: dict[str, bytes]) -> None:
        """Restore these files and delete all others."""
        current = self.content()
        for path in current.keys() - content.keys():
            if self.server is None:
                Path(self.root.removeprefix("file://"), path).unlink()
            else:
                bucket, prefix = self._bucket_and_prefix()
                self.server.client.delete_object(Bucket=bucket, Key=prefix + path)
        for path, data in content.items():
            if current.get(path) == data:
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
def lake_root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LakeRoot]:
    if request.param == "local":
        yield LakeRoot(f"file://{tmp_path}/lake/", {"fsync": "false"}, None)
        return
    server: S3Server = request.getfixturevalue("radosgw")
    s3_root = LakeRoot(server.fresh_root(), server.storage_options, server)
    yield s3_root
    server.delete_all(s3_root.root)


@pytest.fixture
def spark_tasks(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> SparkExecutor:
    """A Spark executor that runs all work in tasks, even if there are only a few elements."""
    monkeypatch.setattr(spark_executor_module, "FEW", 0)
    return SparkExecutor(spark)


@pytest.fixture
def aging(lake_root: LakeRoot) -> Aging:
    """A lakehouse with tables of several ages and overwritten files."""
    aging = Aging.on(open_storage(lake_root.root, lake_root.options))
    grow(aging, 7)
    append_rows(aging.lake, "n0.rows")
    overwrite_rows(aging.lake, "n0.rows", "n1.rows")
    aging.lake.storage.create(new_node_path(), b"left behind")
    return aging


class Engines:
    """Runs an operation on a lakehouse with each engine, with the same files and the same time."""

    def __init__(self, aging: Aging, lake_root: LakeRoot, spark: SparkExecutor):
        self._aging = aging
        self._lake_root = lake_root
        self._spark = spark

    def outcomes(self, run_operation: Callable[[Executor], Any]) -> tuple[Outcome, Outcome]:
        """Return the outcomes with local threads and with Spark. The changes made with Spark remain."""
        before, clock = self._lake_root.content(), self._aging.clock
        written_ms, time_ms = dict(clock.written_ms), clock.time_ms
        local = Outcome.of(run_operation(LOCAL), before, self._lake_root.content())
        self._lake_root.restore(before)
        clock.written_ms, clock.time_ms = written_ms, time_ms
        return local, Outcome.of(run_operation(self._spark), before, self._lake_root.content())


@dataclass(frozen=True)
class Outcome:
    """The result of an operation, the deleted files, and the number of created files of each kind."""

    result: Any
    deleted: frozenset[str]
    created: Counter[str]

    @classmethod
    def of(cls, result: Any, before: dict[str, bytes], after: dict[str, bytes]) -> Outcome:
        created_paths = after.keys() - before.keys()
        created = Counter("immutable" if is_immutable_path(path) else path[:8] for path in created_paths)
        return cls(result, frozenset(before.keys() - after.keys()), created)


def without_cost(report: Any) -> dict[str, Any]:
    """Return a report without the values that depend on time and random names."""
    fields: dict[str, Any] = report.to_dict()
    # Tasks prefetch the nodes below a damaged node, so they check more files.
    for name in ("cost", "batch", "plan_path", "record_path", "manifest_path", "location"):
        fields.pop(name, None)
    if "findings" in fields:  # the order of the findings of threads is not defined
        fields["findings"].sort(key=str)
    return fields


def test_verify_expiry_purge_and_orphans(aging: Aging, lake_root: LakeRoot, spark_tasks: SparkExecutor) -> None:
    engines = Engines(aging, lake_root, spark_tasks)
    aging.later()
    reports = [operations.verify(aging.lake, deep=True, executor=executor) for executor in (LOCAL, spark_tasks)]
    assert without_cost(reports[1]) == without_cost(reports[0])
    assert reports[1].orphan_files == 1
    n_reads = [report.cost.requests["read"] for report in reports]
    assert n_reads[0] < n_reads[1] < 2 * n_reads[0], "reads of tasks count, and Spark walks the tree again for orphans"
    plans = {
        "expire": lambda executor: operations.plan_expiration(aging.lake, keeping(2), executor=executor),
        "purge": lambda executor: operations.plan_purge(aging.lake, executor=executor),
        "orphans": lambda executor: operations.plan_orphan_removal(aging.lake, executor=executor),
    }
    deleted: dict[str, int] = {}
    for name, plan in plans.items():

        def run_operation(
            executor: Executor, plan: Callable[[Executor], Any] = plan
        ) -> tuple[str, str, dict[str, Any], int]:
            operation_plan = plan(executor)
            assert not operation_plan.is_empty
            report = operation_plan.execute(operation_plan.digest)
            n_deletes = report.cost.requests.get("delete", 0)
            return operation_plan.digest, operation_plan.to_json(), without_cost(report), n_deletes

        local, spark = engines.outcomes(run_operation)
        assert spark == local, name
        deleted[name] = len(spark.deleted)
        aging.later()
    assert deleted["expire"] == 0
    assert deleted["purge"] > 20
    assert deleted["orphans"] >= 1
    assert operations.verify(aging.lake).findings == ()


def test_orphans_by_inventory(aging: Aging, lake_root: LakeRoot, spark_tasks: SparkExecutor, tmp_path: Path) -> None:
    engines = Engines(aging, lake_root, spark_tasks)
    aging.later()
    location = write_inventory(tmp_path / "inventory", aging.lake.root, sorted(lake_root.content()), files=20)

    def run_operation(executor: Executor) -> tuple[str, dict[str, Any]]:
        plan = operations.plan_orphan_removal(aging.lake, inventory=location, executor=executor)
        return plan.digest, without_cost(plan.execute(plan.digest))

    expected = operations.plan_orphan_removal(aging.lake).digest
    local, spark = engines.outcomes(run_operation)
    assert spark == local
    assert spark.result[0] == expected
    assert len(spark.deleted) == 1


class CountingExecutor(SparkExecutor):
    """A Spark executor that counts the files that it deletes from each storage."""

    def __init__(self, spark: SparkSession):
        super().__init__(spark)
        self.deleted: Counter[str] = Counter()

    def delete(self, storage: Storage, paths: Sequence[str], fence: DeletionFence | None) -> DeleteOutcome:
        self.deleted[storage.root] += len(paths)
        return super().delete(storage, paths, fence)


@pytest.mark.parametrize("lake_root", ["local"], indirect=True)
def test_files_under_table_root_are_deleted_by_tasks(
    lake_root: LakeRoot, table_roots: TableRoots, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_executor_module, "FEW", 0)
    table_root = f"file://{tmp_path}/tables/"
    aging = table_roots.aging(open_storage(lake_root.root, lake_root.options), lake_root.options, table_root=table_root)
    append_rows(aging.lake)
    overwrite_rows(aging.lake, "ns.t")
    orphans = put_orphans(aging, table_root)
    aging.later()
    operations.plan_trim_tables(aging.lake, keeping(1)).execute()
    aging.later()
    aging.expire()
    aging.later()
    tasks = CountingExecutor(spark)
    purge = operations.plan_purge(aging.lake, executor=tasks)
    expected_deletions = {path for path in purge.sizes_bytes if path.startswith(table_root)}
    assert expected_deletions
    assert purge.digest == operations.plan_purge(aging.lake).digest
    assert purge.execute(purge.digest).is_complete
    assert tasks.deleted[table_root] == len(expected_deletions)
    location = write_inventory(tmp_path / "inventory", table_root, sorted(paths_under(table_root)), files=20)
    plan = operations.plan_orphan_removal(aging.lake, inventory=location, executor=tasks)
    assert plan.paths == sorted(f"{table_root}{path}" for path in orphans)
    assert plan.digest == operations.plan_orphan_removal(aging.lake).digest
    report = plan.execute(plan.digest)
    assert (report.files, report.failures) == (len(orphans), {})
    assert tasks.deleted[table_root] == len(expected_deletions) + len(orphans)
    assert paths_under(table_root) == needed_paths(aging.lake, table_root)


def test_full_export(aging: Aging, lake_root: LakeRoot, spark_tasks: SparkExecutor) -> None:
    copies = {}
    for name, executor in (("local", LOCAL), ("spark", spark_tasks)):
        target = replace(lake_root, root=f"{lake_root.root.removesuffix('lake/')}{name}/")
        plan = operations.plan_export(
            aging.lake, name, "full", target=target.root, target_options=lake_root.options, executor=executor
        )
        progress: list[int] = []
        report = plan.execute(progress=lambda _step, done, _total, progress=progress: progress.append(done))  # type: ignore[misc]
        assert progress == list(range(1, report.files))
        content = target.content()
        assert operations.verify(Lakehouse.open(target.root, lake_root.options)).findings == ()
        copies[name] = (
            {path: data for path, data in content.items() if re.search(r"-namespace-|-table-|\.parquet$", path)},
            {
                path: re.sub(rb'"[0-9a-f]{8} ', b'"', data.replace(target.root.encode(), b""))  # remove checksums
                for path, data in content.items()
                if path.endswith("data.json")
            },
            sorted(path for path in content if path.startswith("tables/")),
            (len(content), plan.files, plan.bytes, report.copied_files, report.files),
        )
    assert copies["spark"] == copies["local"]
    assert len(copies["spark"][2]) > 10


def damage(aging: Aging) -> None:
    """Damage the lakehouse so that verify reports findings of each kind."""
    snapshot, storage = aging.lake.snapshot(), aging.clock.inner
    latest = {node.location for node in walk(snapshot.files.nodes, snapshot.root, snapshot.location)}
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


def test_verify_of_damaged_lakehouse_with_foreign_file(
    aging: Aging, lake_root: LakeRoot, spark_tasks: SparkExecutor
) -> None:
    """No file is reported as an orphan while nodes are unreadable, and foreign files never are."""
    damage(aging)
    aging.lake.storage.create("other.txt", b"theirs")
    aging.clock.written_ms["other.txt"] = 1
    reports = [operations.verify(aging.lake, executor=executor) for executor in (LOCAL, spark_tasks)]
    assert without_cost(reports[1]) == without_cost(reports[0])
    assert (reports[0].orphan_files, reports[0].unchecked) == (0, ())
    assert {"node-missing", "node-corrupt"} & {finding.code for finding in reports[0].findings}


def test_verify_of_damaged_lakehouse(aging: Aging, lake_root: LakeRoot, spark_tasks: SparkExecutor) -> None:
    damage(aging)
    aging.later()

    def run_operation(executor: Executor) -> list[dict[str, Any]]:
        first = operations.verify(aging.lake, deep=True, incremental=True, executor=executor)
        second = operations.verify(aging.lake, incremental=True, executor=executor)
        return [without_cost(report) for report in (first, second)]

    local, spark = Engines(aging, lake_root, spark_tasks).outcomes(run_operation)
    assert spark == local
    first, second = spark.result
    assert second["known_files"] > 50
    codes = {finding["code"] for finding in first["findings"]}
    assert "definition-unreadable" in codes
    assert codes & {"node-missing", "node-corrupt"}, "there is only one of them if one damaged node is below the other"
    assert any(code.startswith("table-") for code in codes)


def test_command_output_is_equal_for_engines(
    aging: Aging, lake_root: LakeRoot, spark_tasks: SparkExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run all commands with an engine option in the existing session, with the real time."""
    if lake_root.server is not None:
        return
    now_ns = time.time_ns()
    replace_time_functions(monkeypatch, local_storage_module, time_ns=lambda: now_ns)
    options = ["--root", lake_root.root, "--storage-option", "fsync=false"]

    def run(*arguments: str, code: int = 0) -> Any:
        result = CliRunner().invoke(trinitylake, [*options, *arguments])
        assert result.exit_code == code, (result.output, result.exception)
        return json.loads(result.stdout) if "--json" in arguments else result.output

    for command in ("expire", "purge", "orphans", "verify"):
        reports = [run(command, "--engine", engine, "--json") for engine in ("local", "spark")]
        for report in reports:
            report.pop("cost", None)
        assert reports[1] == reports[0], command
    exported = [
        run("export", engine, "--level", "full", "--engine", engine, "--json")["copied_files"]
        for engine in ("local", "spark")
    ]
    assert exported[0] == exported[1] > 10
    output = run("verify", "--spark-master", "local[2]", code=2)
    assert "--engine spark" in output


def test_empty_input_starts_no_job(spark: SparkSession) -> None:
    storage = open_storage("memory://nothing/")
    for rate in (None, 5.0):
        assert list(SparkExecutor(spark, requests_per_second=rate).map(NodeReader(storage), [])) == []
