"""Test spans, metrics and logs of the engine. A failing listener does not fail an operation."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import Histogram, InMemoryMetricReader
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from prometheus_client.parser import text_string_to_metric_families

from tests.clock import ClockStorage
from tests.environments import extra_modules_of, run_without
from tests.faults import FaultyStorage, fail
from tests.operations.changes import create
from tests.processes import fork
from tests.telemetry.listener import parents, recorded_metrics, recorded_spans
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import CommitConflictError, InvalidInputError, StorageError, ThrottledError
from trinitylake_ops.operations.gc.delete import delete_files
from trinitylake_ops.storage import MemoryStorage, RetryStorage, open_storage
from trinitylake_ops.storage.meter import ObservedStorage
from trinitylake_ops.telemetry import hub, settings, spans
from trinitylake_ops.telemetry.hub import INSTRUMENTS, VERSION_SECONDS
from trinitylake_ops.telemetry.otel import OtelListener
from trinitylake_ops.telemetry.prometheus import PrometheusListener
from trinitylake_ops.telemetry.settings import JsonFormatter, TelemetrySettings, about

pytestmark = pytest.mark.usefixtures("fixed_requests")


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "lake")


def test_commit_has_spans_of_transaction_attempts_and_rounds(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded_spans(monkeypatch) as exporter:
        lake = Lakehouse.create(root, {"fsync": "false"})
        exporter.clear()
        create(lake, "ns", "t")
        names = parents(exporter)
    assert ("transaction", "") in names
    assert ("commit", "transaction") in names
    assert ("attempt", "commit") in names
    assert ("storage round", "attempt") in names
    commit = next(span for span in exporter.get_finished_spans() if span.name == "commit")
    assert dict(commit.attributes or {}) == {
        "trinitylake.base_version": 0,
        "trinitylake.version": 1,
        "trinitylake.lost_attempts": 0,
    }
    rounds = [span.attributes for span in exporter.get_finished_spans() if span.name == "storage round"]
    assert all(attributes is not None and attributes["trinitylake.kinds"] for attributes in rounds)


def test_operation_spans_contain_their_commits(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = Lakehouse.create(root, {"fsync": "false"})
    create(lake, "ns")
    with recorded_spans(monkeypatch) as exporter, recorded_metrics() as metrics:
        operations.rollback(lake, 0)
        operations.verify(lake)
        names = parents(exporter)
    assert ("operation rollback", "") in names
    assert ("commit", "operation rollback") in names
    assert ("operation verify", "") in names
    assert metrics.added["operations", "rollback", "done"] == metrics.added["operations", "verify", "done"] == 1
    assert len(metrics.observed["operation_seconds", "verify"]) == 1


def test_failed_span_has_error_type_only(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = Lakehouse.create(root, {"fsync": "false"})
    other = Lakehouse.open(root)
    with (
        recorded_spans(monkeypatch) as exporter,
        recorded_metrics() as metrics,
        pytest.raises(CommitConflictError),
        lake.transaction() as txn,
    ):
        txn.create_namespace("secret")
        create(other, "secret")
    failed = [span for span in exporter.get_finished_spans() if span.name == "transaction"][-1]
    assert failed.attributes is not None and failed.attributes["error.type"] == "CommitConflictError"
    assert not failed.status.is_ok
    assert not any("secret" in span.to_json() for span in exporter.get_finished_spans())
    assert metrics.added["transactions", "conflict"] == 1
    assert metrics.added["engine_lost_attempts",] == 1


def test_commits_and_requests_are_measured(root: str) -> None:
    with recorded_metrics() as metrics:
        lake = Lakehouse.create(root, {"fsync": "false"})
        create(lake, "ns", "t")
        create(Lakehouse.open(root), "other")
        lake.snapshot(1).table("ns", "t")
    assert metrics.added["transactions", "committed"] == 2
    assert metrics.observed["commit_group_size",] == [1, 1]
    assert metrics.observed["version_attempts",] == [1, 1]
    assert len(metrics.observed["version_seconds",]) == 2
    assert metrics.added["storage_requests", "file", "create"] >= 6
    assert metrics.added["storage_bytes", "file", "written"] > 1_000
    assert metrics.added["storage_bytes", "file", "read"] > 0
    assert metrics.added["cache_reads", "memory"] > 0
    instruments = {key[0] for key in (*metrics.added, *metrics.observed)}
    assert instruments <= set(INSTRUMENTS)
    n_labels = {key[0]: len(key) - 1 for key in (*metrics.added, *metrics.observed)}
    assert n_labels == {name: len(INSTRUMENTS[name].labels) for name in n_labels}


def test_deleted_files_and_retries_are_counted(root: str) -> None:
    faulty = FaultyStorage(MemoryStorage("memory://retries/"), [fail(1, ThrottledError, kind="read")])
    with recorded_metrics() as metrics:
        storage = RetryStorage(faulty, base_delay_seconds=0)
        storage.create("a", b"1")
        assert storage.read("a") == b"1"
        lake = Lakehouse.create("memory://freed/", storage=ClockStorage(MemoryStorage("memory://freed/"), 10**12))
        lake.storage.create("0000/0000/0000/00000000-orphan", b"x")
        outcome = delete_files(lake.storage, {"a": 5, "b": 7})
    assert metrics.added["storage_retries", "memory", "ThrottledError"] == 1
    assert (metrics.added["freed_files",], metrics.added["freed_bytes",]) == (outcome.files, 12)


def test_storage_is_not_instrumented_without_listener() -> None:
    opened = open_storage("memory://quiet/")
    assert isinstance(opened, RetryStorage)
    assert not isinstance(opened.inner, ObservedStorage)
    assert not hub.is_heard()
    assert spans.tracer() is None
    with spans.span("nothing") as span:
        span.set({"a": 1})
        span.fail("E")
    with recorded_metrics():
        observed = open_storage("memory://quiet/")
        assert isinstance(observed, RetryStorage)
        assert isinstance(observed.inner, ObservedStorage)


def test_failing_listener_does_not_fail_commit(root: str, caplog: pytest.LogCaptureFixture) -> None:
    lake = Lakehouse.create(root, {"fsync": "false"})
    with recorded_metrics() as metrics:
        metrics.observe = None  # type: ignore[assignment]
        create(lake, "ns")
    assert lake.snapshot().has_namespace("ns")
    assert "the work continues" in caplog.text


def test_engine_works_without_telemetry_libraries(root: str) -> None:
    program = (
        "import sys\nfrom trinitylake_ops import Lakehouse\nlake = Lakehouse.create(sys.argv[1], {'fsync': 'false'})\n"
        "with lake.transaction() as txn:\n    txn.create_namespace('ns')\n"
        "print(lake.latest_version(), [name for name in sys.modules if name.startswith(('opentel', 'prometheus'))])\n"
        "import os\nfrom datetime import datetime, UTC\n"
        "from trinitylake_ops.telemetry.lineage import Origin, send_publication\n"
        "os.environ['OPENLINEAGE_URL'] = 'http://127.0.0.1:1'\nnow = datetime.now(UTC)\n"
        "send_publication('r', 1, Origin('SPARK', 'j', 'r', now, now), [], [])"
    )
    process = run_without(extra_modules_of([]), program, root)
    assert (process.returncode, process.stdout) == (0, "1 []\n")
    assert (
        "it is part of the extra 'lineage'; run pip install '.[lineage]' in a clone of trinitylake-ops"
        in process.stderr
    )


def test_spans_of_other_libraries_nest_with_engine_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded_spans(monkeypatch) as exporter:
        tracer = trace.get_tracer_provider().get_tracer("storage client")
        with tracer.start_as_current_span("request"), spans.span("commit", {"a": 1}) as span:
            with spans.span("attempt"), tracer.start_as_current_span("GET"):
                spans.note("storage read", time.time_ns(), {"b": 2})
            trace.get_current_span().set_attribute("c", 3)
            span.set({"d": 4})
        assert set(parents(exporter)) == {
            ("request", ""),
            ("commit", "request"),
            ("attempt", "commit"),
            ("GET", "attempt"),
            ("storage read", "GET"),
        }
        (commit,) = (span for span in exporter.get_finished_spans() if span.name == "commit")
        assert dict(commit.attributes or {}) == {"a": 1, "c": 3, "d": 4}


def test_sampler_disables_spans(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded_spans(monkeypatch, ParentBased(ALWAYS_OFF)) as exporter:
        create(Lakehouse.create(root, {"fsync": "false"}), "ns")
        with spans.span("commit"):
            assert not spans.is_recorded()
    assert exporter.get_finished_spans() == ()


def test_failing_span_processor_does_not_fail_commit(
    root: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lake = Lakehouse.create(root, {"fsync": "false"})
    for method in ("on_start", "on_end"):
        caplog.clear()
        with monkeypatch.context() as patch, recorded_spans(patch):
            patch.setattr(SimpleSpanProcessor, method, lambda *_, **__: 1 / 0)
            create(Lakehouse.open(root), method)
        assert "a span could not be recorded" in caplog.text
    assert lake.snapshot().has_namespace("on_start") and lake.snapshot().has_namespace("on_end")


def test_forked_child_nests_spans_in_parent_span(monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded_spans(monkeypatch) as exporter:
        with spans.span("operation"):
            child = os.fork()
            if not child:
                spans.note("child", time.time_ns(), {})
                (span,) = exporter.get_finished_spans()
                is_nested = span.parent == trace.get_current_span().get_span_context()
                os._exit(0 if is_nested else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert parents(exporter) == [("operation", "")]


# Export of metrics


def test_prometheus_has_all_instruments(tmp_path: Path) -> None:
    listener = PrometheusListener()
    for name, instrument in INSTRUMENTS.items():
        labels = dict.fromkeys(instrument.labels, "x")
        {"counter": listener.add, "histogram": listener.observe, "gauge": listener.put}[instrument.kind](
            name, 2, labels
        )
    path = tmp_path / "metrics.prom"
    listener.write(path)
    families = {family.name for family in text_string_to_metric_families(path.read_text())}
    assert {f"trinitylake_{name}" for name in INSTRUMENTS} <= families
    assert path.read_bytes() == listener.text()
    with pytest.raises(StorageError):
        listener.write(tmp_path / "none" / "metrics.prom")
    with pytest.raises(InvalidInputError):
        listener.push("file:///etc/passwd", "job")
    with pytest.raises(StorageError):
        listener.push("http://127.0.0.1:1", "job")
    filtered = PrometheusListener(without=["transactions"])
    filtered.add("transactions", 1, {"outcome": "committed"})
    assert b"trinitylake_transactions" not in filtered.text()


def test_opentelemetry_has_all_instruments() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    listener = OtelListener(provider)
    for name, instrument in INSTRUMENTS.items():
        labels = dict.fromkeys(instrument.labels, "x")
        {"counter": listener.add, "histogram": listener.observe, "gauge": listener.put}[instrument.kind](
            name, 2, labels
        )
    data = reader.get_metrics_data()
    assert data is not None
    scopes = data.resource_metrics[0].scope_metrics
    assert {metric.name for scope in scopes for metric in scope.metrics} == {
        f"trinitylake.{name}" for name in INSTRUMENTS
    }
    provider.shutdown()


def test_histograms_have_values_and_exemplars(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    listener = OtelListener(provider)
    with recorded_spans(monkeypatch) as exporter:
        with spans.span("transaction"):
            for _ in range(300):
                listener.observe(VERSION_SECONDS, 0.002, {})
        data = reader.get_metrics_data()
        assert data is not None
        metrics = {metric.name: metric.data for metric in data.resource_metrics[0].scope_metrics[0].metrics}
        histogram = metrics[f"trinitylake.{VERSION_SECONDS}"]
        assert isinstance(histogram, Histogram)
        (point,) = histogram.data_points
        assert (point.count, point.sum) == (300, pytest.approx(0.6))
        (transaction,) = exporter.get_finished_spans()
        assert transaction.context is not None
        assert {exemplar.trace_id for exemplar in point.exemplars} == {transaction.context.trace_id}
    provider.shutdown()


def test_settings_are_read_from_environment(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "m.prom"
    environment_settings = TelemetrySettings.of_environment(
        {"TRINITYLAKE_METRICS_FILE": str(file), "TRINITYLAKE_OTEL": "0"}
    )
    assert environment_settings == TelemetrySettings(metrics_file=file)
    with pytest.raises(InvalidInputError):
        TelemetrySettings.of_environment({"TRINITYLAKE_OTEL": "perhaps"})
    stop = TelemetrySettings(metrics_file=file, push_url="http://127.0.0.1:1").start()
    hub.add("freed_files", 3)
    stop()
    assert "trinitylake_freed_files_total 3.0" in file.read_text()
    assert "metrics cannot be pushed" in caplog.text
    assert not hub.is_heard()


def test_environment_configures_metrics_once_per_process(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, exit_functions = tmp_path / "m.prom", list[Callable[[], None]]()
    monkeypatch.setenv("TRINITYLAKE_METRICS_FILE", str(file))
    monkeypatch.setattr(settings.atexit, "register", exit_functions.append)

    def work(_report: Callable[[str], None]) -> None:
        for _ in range(2):
            settings.start_once()
        Lakehouse.create(root, {"fsync": "false"})
        (stop,) = exit_functions
        stop()
        assert not hub.is_heard()

    assert fork(work).finish() == (0, [])
    assert 'trinitylake_storage_requests_total{kind="create",storage="file"}' in file.read_text()


# Logs


def test_log_lines_contain_version_run_and_operation(root: str, caplog: pytest.LogCaptureFixture) -> None:
    lake = Lakehouse.create(root, {"fsync": "false"})
    create(lake, "ns")
    formatter = JsonFormatter(lambda text: text.replace("s3cret", "***"))
    with caplog.at_level(logging.INFO), about(run_id="run-7", nothing=None):
        operations.rollback(lake, 0)
        logging.getLogger("trinitylake_ops.x").warning("s3cret\nline")
        lines = [json.loads(formatter.format(record)) for record in caplog.records]
    (rollback,) = [line for line in lines if line.get("operation") == "rollback"]
    assert (rollback["outcome"], rollback["run_id"], rollback["level"]) == ("done", "run-7", "info")
    assert rollback["version"].count(".") == 2
    (other,) = [line for line in lines if "operation" not in line]
    assert (other["message"], "nothing" in other) == ("***\nline", False)
