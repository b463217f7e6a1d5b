"""The metrics, traces and logs of a server. None of them contains a secret."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from tests.environments import run_without
from tests.faults import FaultyStorage, fail
from tests.request_budgets import budget
from tests.server.live_server import LiveServer, command, serving, settings_for
from tests.server.request_bodies import TABLE, TABLES, commit_of, create_body, properties
from tests.server.test_access_control import FORBIDDEN, MIXED, READER, entry
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import StorageError
from trinitylake_ops.server import telemetry
from trinitylake_ops.server.settings import ONLY
from trinitylake_ops.server.warehouses import Warehouses
from trinitylake_ops.storage import MeteredStorage

pytestmark = pytest.mark.usefixtures("fixed_requests")

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def read_metrics(server: LiveServer, **headers: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return all samples by name and labels."""
    response = server.request("GET", "/metrics", headers=headers)
    assert (response.status, response.headers["content-type"].partition(";")[0]) == (200, "text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(response.body.decode())
        for sample in family.samples
    }


def value_of(samples: dict[Any, float], name: str, **labels: str) -> float:
    return samples.get((name, tuple(sorted(labels.items()))), 0.0)


@pytest.fixture
def table_server(server: LiveServer) -> LiveServer:
    assert server.request("POST", "/v1/main/namespaces", {"namespace": ["ns"]}).status == 200
    assert server.request("POST", TABLES, create_body()).status == 200
    return server


def test_requests_commits_groups_and_storage_are_counted(table_server: LiveServer) -> None:
    before = read_metrics(table_server)
    assert table_server.request("POST", TABLE, commit_of(properties(a="1"))).status == 200
    assert table_server.request("POST", TABLE, commit_of(requirements=({"type": "assert-create"},))).status == 409
    assert table_server.request("GET", "/v1/main/secret-path").status == 404
    after = read_metrics(table_server)

    def increase(name: str, **labels: str) -> float:
        return value_of(after, name, **labels) - value_of(before, name, **labels)

    commit = "POST /v1/{prefix}/namespaces/{namespace}/tables/{table}"
    assert increase("trinitylake_requests_total", operation=commit, status="200") == 1
    assert increase("trinitylake_requests_total", operation=commit, status="409") == 1
    assert increase("trinitylake_requests_total", operation="other", status="404") == 1
    assert increase("trinitylake_request_seconds_count", operation=commit) == 2
    assert increase("trinitylake_commits_total", lakehouse="main", outcome="committed") == 1
    assert increase("trinitylake_commits_total", lakehouse="main", outcome="conflict") == 1
    assert increase("trinitylake_commit_group_size_count") == increase("trinitylake_commit_group_size_sum") == 1
    assert increase("trinitylake_storage_requests_total", lakehouse="main", storage="file", kind="create") >= 3
    assert increase("trinitylake_storage_rounds_total", lakehouse="main") >= 2
    assert increase("trinitylake_storage_bytes_total", lakehouse="main", storage="file", way="written") > 1_000
    assert increase("trinitylake_transactions_total", outcome="committed") == 1
    assert value_of(after, "trinitylake_requests_in_progress") == 1  # the request for the metrics
    assert value_of(after, "trinitylake_lakehouse_version", lakehouse="main") == 2
    assert value_of(after, "trinitylake_age_seconds", lakehouse="main", of="verify") == float("inf")
    assert value_of(after, "trinitylake_due_seconds", lakehouse="main", what="purge") == 0
    names = {text for labels in (key[1] for key in after) for _, text in labels}
    assert not any(text == "ns" or "secret" in text for text in names)


def test_unchanged_table_takes_one_round_trip(table_server: LiveServer) -> None:
    """A read only checks whether there is a newer version, for every client and warehouse."""
    assert table_server.application is not None
    meter = table_server.application.warehouses.served[0].lake.storage
    assert isinstance(meter, MeteredStorage)
    earlier = TABLE.replace("/main/", "/v2/")
    tags = {path: table_server.request("GET", path).headers["etag"] for path in (TABLE, earlier)}
    for path, tag in tags.items():
        for headers, status in (({}, 200), ({"If-None-Match": tag}, 304)):
            before = meter.snapshot()
            assert table_server.request("GET", path, headers=headers).status == status
            measured = meter.snapshot() - before
            assert (measured.rounds, set(measured.requests)) == (budget("begin, warm").rounds, {"read"}), path


def test_metrics_require_read_access(lake: Lakehouse, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    entries = [entry(READER, "reader", scope="read"), entry(MIXED, "mixed", scope="none", namespaces={"ns": "read"})]
    tokens.write_text(yaml.safe_dump({"tokens": entries}))
    with serving(settings_for(lake, tokens=tokens)) as server:
        assert server.request("GET", "/metrics").status == 401
        assert server.request("GET", "/metrics", headers={"Authorization": f"Bearer {MIXED}"}).error == FORBIDDEN
        samples = read_metrics(server, Authorization=f"Bearer {READER}")
        assert not any(token in str(samples) for token in (READER, MIXED, "reader", "mixed"))


def test_storage_failures_are_counted_by_kind(lake: Lakehouse) -> None:
    storage = FaultyStorage(lake.storage, [fail(1, StorageError, kind="create", times=100)])
    with serving(settings_for(lake), Warehouses({ONLY: Lakehouse(storage, lake.storage_options)})) as server:
        assert server.request("POST", "/v1/main/namespaces", {"namespace": ["ns"]}).status == 503
        assert value_of(read_metrics(server), "trinitylake_commits_total", lakehouse="main", outcome="unavailable") == 1


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry.trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


def test_each_request_and_change_has_a_span(table_server: LiveServer, spans: InMemorySpanExporter) -> None:
    caller = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    assert table_server.request("POST", TABLE, commit_of(properties(note="s3cret")), caller).status == 200
    assert table_server.request("GET", f"{TABLES}/none", headers={"traceparent": "nonsense"}).status == 404
    by_name = {span.name: span for span in spans.get_finished_spans()}
    request = by_name["POST /v1/{prefix}/namespaces/{namespace}/tables/{table}"]
    change, other = by_name["change"], by_name["GET /v1/{prefix}/namespaces/{namespace}/tables/{table}"]
    assert f"{request.context.trace_id:032x}" == TRACE
    assert change.parent is not None and change.parent.span_id == request.context.span_id
    assert request.attributes is not None and request.attributes["http.response.status_code"] == 200
    assert other.attributes is not None and other.attributes["error.type"] == "NoSuchTableException"
    assert other.parent is None
    assert "s3cret" not in " ".join(span.to_json() for span in spans.get_finished_spans())


def test_serve_command_sends_traces(lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sends traces with OTLP over HTTP to a real receiver before it exits."""
    received: list[bytes] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    try:
        with command(lake.root, "--traces") as (process, url, _):
            assert LiveServer(url).request("GET", "/v1/config").status == 200
            process.terminate()
            process.communicate(timeout=60)
        assert process.returncode == 0
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    messages = [ExportTraceServiceRequest.FromString(body) for body in received]
    names = [
        span.name
        for message in messages
        for resource in message.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert "GET /v1/config" in names


def test_no_traces_are_sent_without_extra(table_server: LiveServer, lake: Lakehouse) -> None:
    assert not isinstance(trace.get_tracer_provider(), TracerProvider)
    assert table_server.request("GET", TABLES).status == 200
    program = "from trinitylake_ops.cli import main\nmain()"
    completed = run_without({"opentelemetry.exporter", "opentelemetry.sdk"}, program, "serve", lake.root, "--traces")
    assert (completed.returncode, completed.stderr.splitlines()[-1]) == (
        2,
        "Error: opentelemetry.exporter is not installed: it is part of the extra 'otel'; run"
        " pip install '.[otel]' in a clone of trinitylake-ops",
    )


def test_access_log_has_request_details_without_secrets(
    table_server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        table_server.request("POST", TABLE, commit_of(properties(note="s3cret")), {"Authorization": "Bearer t0ken"})
    (fields,) = [record.fields for record in caplog.records if hasattr(record, "fields")]
    assert {"request", "method", "path", "principal", "status", "milliseconds"} == set(fields)
    assert not {"s3cret", "t0ken"} & set(json.dumps(fields).split('"'))
    assert "s3cret" not in caplog.text
