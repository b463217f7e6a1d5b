"""Run the flights pipeline on a small sample of the real data: tables are published together or not at all."""

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql.classic.dataframe import DataFrame

from tests.dagster_plugin.maintenance_jobs import approved_rollback
from tests.dagster_plugin.pipeline import MONTHLY_TABLES, Pipeline
from tests.lakes import check_lake, entries
from trinitylake_ops import operations
from trinitylake_ops.dagster_plugin.names import ONLY
from trinitylake_ops.dagster_plugin.resources import StorageSettings, TrinityLakeResource
from trinitylake_ops.demo.assets import INITIAL_JOB, MONTHLY_JOB, NAMESPACES

#: The jobs of the demo. `tests/e2e/test_demo.py` runs them like a user.
pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def pipeline(spark: SparkSession, sample_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    """A lakehouse with the reference tables and the data of January."""
    with dg.DagsterInstance.ephemeral() as instance:  # test_pipeline_on_s3.py covers instances on disk
        root = str(tmp_path_factory.mktemp("pipeline") / "lake")
        lakehouse = TrinityLakeResource(root=root, storage_options=StorageSettings(fsync="false"))
        loaded_pipeline = Pipeline(lakehouse, sample_folder, instance)
        loaded_pipeline.initial_load()
        loaded_pipeline.monthly_load("2013-01-01")
        yield loaded_pipeline
        check_lake(loaded_pipeline.lake())
        assert operations.verify(loaded_pipeline.lake()).is_clean


def test_run_commits_one_version_with_its_run_id(pipeline: Pipeline) -> None:
    history = list(pipeline.lake().history())
    assert [(info.version, info.operation) for info in history[-3:]] == [(2, "publish"), (1, "publish"), (0, "init")]
    runs = {run.run_id: run.job_name for run in pipeline.instance.get_runs()}
    assert [runs[info.run_id] for info in history[-3:-1] if info.run_id] == [MONTHLY_JOB, INITIAL_JOB]
    changes = {(change.kind, change.namespace, change.table) for change in pipeline.lake().diff(1, 2)}
    assert {("added", NAMESPACES[name], name) for name in MONTHLY_TABLES} <= changes


@pytest.fixture
def collected_row_counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the row count of each call of ``DataFrame.collect``, and make other methods that collect rows fail."""
    counts: list[int] = []
    collect = DataFrame.collect

    def counting_collect(frame: DataFrame) -> list[Row]:
        rows = collect(frame)
        counts.append(len(rows))
        return rows

    def reject(*_: object, **__: object) -> None:
        raise AssertionError("rows were collected on the driver")

    monkeypatch.setattr(DataFrame, "collect", counting_collect)
    for name in ("toPandas", "toArrow", "toLocalIterator", "foreach", "foreachPartition"):
        monkeypatch.setattr(DataFrame, name, reject)
    return counts


def test_monthly_run_writes_only_its_partitions_without_collecting_rows(
    pipeline: Pipeline, collected_row_counts: list[int]
) -> None:
    before = {name: pipeline.data_files(name) for name in MONTHLY_TABLES}
    version = pipeline.lake().latest_version()
    result = pipeline.monthly_load("2013-02-01")
    assert collected_row_counts, "the checks collect one row of aggregates"
    assert max(collected_row_counts) <= 1
    assert pipeline.lake().latest_version() == version + 1
    for name in MONTHLY_TABLES:
        after = pipeline.data_files(name)
        assert before[name].items() < after.items(), name
        assert pipeline.query(name, "SELECT DISTINCT year, month FROM t ORDER BY 2") == [(2013, 1), (2013, 2)]
    assert pipeline.query("flights", "SELECT count(*) FROM t") == [(2000,)]
    (event,) = [
        event
        for event in result.get_asset_materialization_events()
        if event.asset_key == dg.AssetKey(["facts", "flights"])
    ]
    metadata = event.materialization.metadata
    new = pipeline.data_files("flights").keys() - before["flights"].keys()
    written = sum(Path(path.removeprefix("file://")).stat().st_size for path in new)
    assert (metadata["rows_added"].value, metadata["bytes_added"].value) == (1000, written)


def test_republished_month_replaces_its_rows(pipeline: Pipeline) -> None:
    rows = pipeline.query("flights", "SELECT count(*), sum(distance) FROM t")
    pipeline.monthly_load("2013-01-01")
    assert pipeline.query("flights", "SELECT count(*), sum(distance) FROM t") == rows


def test_failed_check_publishes_nothing(pipeline: Pipeline) -> None:
    before = pipeline.lake().snapshot()
    result = pipeline.monthly_load("2013-01-01", fault="blocked")
    assert not result.success
    failed = {evaluation.check_name for evaluation in result.get_asset_check_evaluations() if not evaluation.passed}
    assert failed == {"known_carriers", "positive_distance"}
    steps = {event.step_key for event in result.all_events if event.is_step_success}
    assert "publish__month" not in steps
    assert pipeline.lake().latest_version() == before.version


def test_bad_month_is_rolled_back(pipeline: Pipeline) -> None:
    good_version = pipeline.lake().latest_version()
    delays = "SELECT carrier, avg(dep_delay) FROM t GROUP BY 1 ORDER BY 1"
    before = pipeline.query("flights", delays)
    pipeline.monthly_load("2013-01-01", fault="subtle")
    assert pipeline.query("flights", delays) != before
    result = pipeline.must_run("rollback", **approved_rollback(pipeline.lake(), good_version))
    assert pipeline.query("flights", delays) == before
    head = next(iter(pipeline.lake().history(1)))
    assert (head.operation, head.rollback_from, head.run_id) == ("rollback", good_version + 1, result.run_id)
    assert pipeline.lake().diff(good_version, head.version) == []


def test_operations_report_events_of_lakehouse_asset(pipeline: Pipeline) -> None:
    result = pipeline.must_run("export", name="kept", level="minimal")
    exported = pipeline.lake().snapshot("kept").version
    (record,) = operations.list_exports(pipeline.lake())
    assert (record.name, record.version) == ("kept", exported)
    assert {info.run_id for info in pipeline.lake().history(2)} == {result.run_id}
    event = pipeline.instance.get_latest_materialization_event(ONLY.lakehouse_key)
    assert event is not None and event.asset_materialization is not None
    assert event.asset_materialization.metadata["lakehouse_version"].value == pipeline.lake().latest_version()


def test_repair_hint_and_verify_jobs(pipeline: Pipeline) -> None:
    pipeline.lake().close()
    pipeline.lake().storage.write("_latest_hint.txt", b"garbage")
    pipeline.must_run("repair_hint")
    assert pipeline.lake().storage.read("_latest_hint.txt") == str(pipeline.lake().latest_version()).encode()
    pipeline.must_run("verify")


def test_compact_job(pipeline: Pipeline) -> None:
    before = entries(pipeline.lake())
    result = pipeline.must_run("compact", unattended=True)
    assert entries(pipeline.lake()) == before
    latest = next(iter(pipeline.lake().history(1)))
    event = pipeline.instance.get_latest_materialization_event(ONLY.lakehouse_key)
    assert event is not None and event.asset_materialization is not None
    metadata = event.asset_materialization.metadata
    if latest.run_id == result.run_id:
        assert latest.operation == "compact"
        (observation_record, *_) = pipeline.instance.fetch_observations(ONLY.lakehouse_key, limit=1).records
        assert observation_record.asset_observation is not None
        assert observation_record.asset_observation.metadata["compact_messages_after"].value == 0
        assert metadata["lakehouse_version"].value == latest.version
    version = pipeline.lake().latest_version()
    pipeline.must_run("compact", unattended=True)
    assert pipeline.lake().latest_version() == version, "a compact tree must not change"
    pipeline.must_run("verify")


def test_missing_rollback_target_fails_with_clear_message(pipeline: Pipeline) -> None:
    before = pipeline.lake().latest_version()
    result = pipeline.run("rollback", to={"version": 999})
    assert not result.success
    (failure,) = [event for event in result.all_events if event.is_step_failure]
    assert "version 999 does not exist" in str(failure.step_failure_data.user_failure_data.description)
    assert pipeline.lake().latest_version() == before
