"""Spans that a thread makes are those that the engine would have made at once, and no commit makes them."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import Histogram, InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler

from tests.operations.changes import create
from tests.telemetry.listener import parents, recording
from trinitylake_ops import Lakehouse
from trinitylake_ops.telemetry import deferred_spans, spans
from trinitylake_ops.telemetry.deferred_spans import DeferredSpans
from trinitylake_ops.telemetry.hub import VERSION_SECONDS
from trinitylake_ops.telemetry.otel import OtelListener, stop_listening


@contextmanager
def batcher(
    patch: pytest.MonkeyPatch, sampler: Sampler = ALWAYS_ON
) -> Iterator[tuple[TracerProvider, InMemorySpanExporter]]:
    """Let the process have a tracer provider whose spans of the engine a thread makes."""
    provider, exporter = TracerProvider(ParentBased(sampler)), InMemorySpanExporter()
    provider.add_span_processor(DeferredSpans())
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with patch.context() as context:
        context.setattr(trace, "get_tracer_provider", lambda: provider)
        yield provider, exporter
    stop_listening()
    provider.shutdown()


def told(exporter: InMemorySpanExporter) -> list[tuple[str, dict[str, object], bool]]:
    """Return names, attributes and whether all went well, without ids of transactions."""
    return [
        (one.name, {**(one.attributes or {}), "trinitylake.transaction": ""}, one.status.is_ok)
        for one in exporter.get_finished_spans()
    ]


def test_they_are_the_same_spans_within_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with recording(monkeypatch) as exporter:
        create(Lakehouse.create(str(tmp_path / "at once"), {"fsync": "false"}), "ns", "t")
        at_once, within = told(exporter), Counter(parents(exporter))
    with batcher(monkeypatch) as (provider, exporter):
        create(Lakehouse.create(str(tmp_path / "later"), {"fsync": "false"}), "ns", "t")
        provider.force_flush()
        assert sorted(map(repr, told(exporter))) == sorted(map(repr, at_once))
        assert Counter(parents(exporter)) == within
        by_id = {one.context.span_id: one for one in exporter.get_finished_spans() if one.context is not None}
        assert sum(_is_within(one, by_id) for one in by_id.values()) == len(by_id)


def _is_within(one: ReadableSpan, by_id: dict[int, ReadableSpan]) -> bool:
    """Whether a span lies within the time of its parent."""
    assert one.start_time is not None
    assert one.end_time is not None
    if one.parent is None:
        return one.start_time <= one.end_time
    above = by_id[one.parent.span_id]
    assert above.start_time is not None
    assert above.end_time is not None
    return above.start_time <= one.start_time <= one.end_time <= above.end_time


def test_no_commit_makes_them_but_the_thread_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_spans, "_SECONDS", 0.01)
    makers = set[str]()
    with batcher(monkeypatch) as (_, exporter):
        monkeypatch.setattr(
            SimpleSpanProcessor, "on_start", lambda *_, **__: makers.add(threading.current_thread().name)
        )
        with spans.span("commit"):
            spans.note("storage round", time.time_ns(), {})
        until = time.monotonic() + 10
        while len(exporter.get_finished_spans()) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        assert parents(exporter) == [("storage round", "commit"), ("commit", "")]
    assert makers == {"trinitylake-spans"}


def test_spans_of_others_are_within_ours_and_find_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with batcher(monkeypatch) as (provider, exporter):
        tracer = provider.get_tracer("a client of a storage")
        with tracer.start_as_current_span("request"), spans.span("commit", {"a": 1}) as span:
            with spans.span("attempt"), tracer.start_as_current_span("GET"):
                spans.note("storage read", time.time_ns(), {"b": 2})
            present = trace.get_current_span()
            assert present.is_recording()
            present.set_attribute("c", 3)
            present.set_attributes({"d": 4})
            present.add_event("met")
            present.update_name("commit of another name")
            span.set({"e": 5})
            span.set({"f": 6})
        provider.force_flush()
        assert set(parents(exporter)) == {
            ("request", ""),
            ("commit of another name", "request"),
            ("attempt", "commit of another name"),
            ("GET", "attempt"),
            ("storage read", "GET"),
        }
        (commit,) = (one for one in exporter.get_finished_spans() if one.name.startswith("commit"))
        assert dict(commit.attributes or {}) == {"a": 1, "c": 3, "d": 4, "e": 5, "f": 6}
        assert [event.name for event in commit.events] == ["met"]


def test_a_failure_is_its_type_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with batcher(monkeypatch) as (provider, exporter):
        with pytest.raises(ValueError, match="secret"), spans.span("commit"):
            raise ValueError("secret")
        provider.force_flush()
        (failed,) = exporter.get_finished_spans()
        assert dict(failed.attributes or {}) == {"error.type": "ValueError"}
        assert not failed.status.is_ok
        assert failed.events == ()


def test_the_sampler_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    with batcher(monkeypatch, ALWAYS_OFF) as (provider, exporter):
        with spans.span("commit"):
            assert spans.is_recorded()  # as far as anybody knows
            spans.note("storage round", time.time_ns(), {})
            assert not trace.get_current_span().get_span_context().trace_flags.sampled
            assert not spans.is_recorded()
        provider.force_flush()
        assert exporter.get_finished_spans() == ()


def test_too_many_wait_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_spans, "_MOST", 3)
    with batcher(monkeypatch) as (provider, exporter):
        for _ in range(4):
            spans.note("storage round", time.time_ns(), {})
        assert len(exporter.get_finished_spans()) == 4
        with spans.span("open"):
            spans.note("storage round", time.time_ns(), {})
            provider.shutdown()
        assert spans._batcher is None
        assert len(exporter.get_finished_spans()) == 5  # the exporter is shut, and takes no more


def test_a_span_that_cannot_be_made_is_told_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with batcher(monkeypatch) as (provider, exporter):
        monkeypatch.setattr(SimpleSpanProcessor, "on_start", lambda *_, **__: 1 / 0)
        spans.note("storage round", time.time_ns(), {})
        provider.force_flush()
        monkeypatch.undo()
        assert "a span could not be made; the work goes on" in caplog.text
        assert exporter.get_finished_spans() == ()


def test_a_forked_child_makes_its_own_within_the_span_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    with batcher(monkeypatch) as (provider, exporter):
        spans.note("of the parent", time.time_ns(), {})
        with spans.span("operation"):
            child = os.fork()
            if not child:
                spans.note("of the child", time.time_ns(), {})
                provider.force_flush()
                ended = {one.name: one.parent for one in exporter.get_finished_spans()}
                above = ended.get("of the child")
                is_present = above == trace.get_current_span().get_span_context()
                os._exit(0 if set(ended) == {"of the child"} and is_present else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        provider.force_flush()
        assert {one.name for one in exporter.get_finished_spans()} == {"of the parent", "operation"}


def test_histograms_have_their_values_and_examples_from_traces_when_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = InMemoryMetricReader()
    meters = MeterProvider([reader])
    listener = OtelListener(meters)
    with batcher(monkeypatch) as (provider, exporter):
        with spans.span("transaction"):
            for _ in range(300):
                listener.observe(VERSION_SECONDS, 0.002, {})
        data = reader.get_metrics_data()
        assert data is not None
        metrics = {one.name: one.data for one in data.resource_metrics[0].scope_metrics[0].metrics}
        found = metrics[f"trinitylake.{VERSION_SECONDS}"]
        assert isinstance(found, Histogram)
        (point,) = found.data_points
        assert (point.count, point.sum) == (300, pytest.approx(0.6))
        provider.force_flush()
        (transaction,) = exporter.get_finished_spans()
        assert transaction.context is not None
        assert {one.trace_id for one in point.exemplars} == {transaction.context.trace_id}
    meters.shutdown()
