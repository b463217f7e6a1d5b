"""Test that each page with snippets has a test that runs them, and run the snippets of pages without a test module."""

from __future__ import annotations

import re
import shlex
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.docs import test_operation_pages
from tests.docs.pages import DOCS, PROJECT, snippets
from trinitylake_ops import Lakehouse
from trinitylake_ops.cli.app import trinitylake
from trinitylake_ops.dagster_plugin import TrinityLakeResource
from trinitylake_ops.storage import drop_memory_root, open_storage
from trinitylake_ops.storage.options import Kind, Option
from trinitylake_ops.storage.registry import Scheme
from trinitylake_ops.telemetry import spans

#: The test module that runs the snippets of each page. Blocks without a language are output.
TEST_MODULES = {
    "comparison.md": "tests/test_snippets.py",
    "dagster/README.md": "tests/test_snippets.py",
    "dagster/automation.md": "tests/test_snippets.py",
    "dagster/publishing.md": "tests/test_snippets.py",
    "dagster/resource.md": "tests/test_snippets.py",
    "deploy/airflow.md": "tests/airflow/test_operations.py",
    "deploy/dagster.md": "tests/e2e/test_dagster_on_kubernetes.py",
    "deploy/kubernetes.md": "tests/test_charts.py",
    "deploy/monitoring.md": "tests/docs/test_other_snippets.py",
    "internals/commit.md": "tests/docs/test_internals.py",
    "internals/purge.md": "tests/docs/test_internals.py",
    "internals/rollback.md": "tests/docs/test_internals.py",
    "operations/clones.md": "tests/docs/test_other_snippets.py",
    "python.md": "tests/test_readme.py",
    "quickstart.md": "tests/docs/test_quickstart.py",
    "release.md": "tests/test_project.py",
    "rest-catalog/connect.md": "tests/clients/test_clients.py",
    "rest-catalog/run.md": "tests/server/test_serve_snippets.py",
    "spark/cluster.md": "tests/spark/test_docs.py",
    "spark/data-source.md": "tests/spark/test_docs.py",
    "spark/sql-catalog.md": "tests/spark/test_catalog.py",
    "storages/README.md": "tests/docs/test_other_snippets.py",
}


def test_each_page_with_snippets_has_test() -> None:
    pages_with_snippets = {
        path.relative_to(DOCS).as_posix()
        for path in DOCS.rglob("*.md")
        if any(snippet.language not in ("", "text") for snippet in snippets(path))
    }
    operation_pages = {f"operations/{page.name}" for page in test_operation_pages.PAGES} | {"operations/README.md"}
    assert pages_with_snippets - operation_pages == set(TEST_MODULES)
    for page, test in TEST_MODULES.items():
        assert (PROJECT / test).is_file(), (page, test)


def test_file_names_on_pages_do_not_shadow_standard_modules() -> None:
    """``python -m dagster`` imports from the current folder first, and Dagster imports the standard module ``code``."""
    for path in [*DOCS.rglob("*.md"), *(PROJECT / "examples").rglob("*.md"), PROJECT / "README.md"]:
        for name in re.findall(r"(?:`|-f |python |title=\")([a-z_]+)\.py\b", path.read_text()):
            assert name not in sys.stdlib_module_names, f"{path}: {name}.py"


def snippet_with(page: str, language: str, substring: str) -> str:
    """Return the text of the only snippet in a language on a page that contains ``substring``."""
    (text,) = (
        snippet.text for snippet in snippets(DOCS / page) if snippet.language == language and substring in snippet.text
    )
    return text


def test_branch_deployment_snippet_runs() -> None:
    names = {"TrinityLakeResource": TrinityLakeResource, "timedelta": timedelta}
    exec(snippet_with("operations/clones.md", "python", "for_branch_deployment"), names)
    resource = names["lakehouse"]
    assert isinstance(resource, TrinityLakeResource)
    assert resource.root == "s3://bucket/lake"


def test_storage_scheme_snippet_runs() -> None:
    names = {"Scheme": Scheme, "Option": Option, "Kind": Kind, "open_shelf": open_storage}
    exec(snippet_with("storages/README.md", "python", "Scheme("), names)
    scheme = names["SCHEME"]
    assert isinstance(scheme, Scheme) and scheme.name == "shelf"


def test_two_storages_snippet_runs(tmp_path: Path) -> None:
    """An in-memory storage replaces Redis, and a folder replaces S3."""
    export, init = snippet_with("storages/README.md", "bash", "TRINITYLAKE_STORAGE_OPTIONS").splitlines()
    assert re.fullmatch(r"export TRINITYLAKE_STORAGE_OPTIONS=s3\.endpoint=\S+,s3\.region=\S+", export)
    program, *arguments = shlex.split(init)
    assert program == "trinitylake"
    table_root = f"file://{tmp_path}/tables"
    roots = {"redis:": "memory://two", "s3:": table_root}
    command = [next((root for scheme, root in roots.items() if word.startswith(scheme)), word) for word in arguments]
    options = {"TRINITYLAKE_STORAGE_OPTIONS": export.partition("OPTIONS=")[2]}
    result = CliRunner().invoke(trinitylake, command, env=options, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert Lakehouse.open("memory://two").snapshot().definition.table_root == table_root
    drop_memory_root("memory://two/")


def test_metrics_file_snippet_runs(tmp_path: Path) -> None:
    """An in-memory lakehouse replaces the one on S3."""
    root, metrics = "memory://metrics/", tmp_path / "trinitylake.prom"
    Lakehouse.create(root)
    program, *arguments = shlex.split(snippet_with("deploy/monitoring.md", "sh", "--metrics-file"))
    assert program == "trinitylake"
    command = [
        root if word.startswith("s3:") else str(metrics) if word.endswith(".prom") else word for word in arguments
    ]
    result = CliRunner().invoke(trinitylake, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "trinitylake_transactions_total" in metrics.read_text()
    drop_memory_root(root)


def test_span_exporter_snippet_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An in-memory exporter replaces the OTLP exporter."""
    exporter = InMemorySpanExporter()
    providers: list[TracerProvider] = []
    monkeypatch.setattr(trace_exporter, "OTLPSpanExporter", lambda: exporter)
    monkeypatch.setattr(trace, "set_tracer_provider", providers.append)
    exec(snippet_with("deploy/monitoring.md", "python", "BatchSpanProcessor"), {})
    (provider,) = providers
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    with spans.span("commit"):
        pass
    provider.force_flush()
    assert [span.name for span in exporter.get_finished_spans()] == ["commit"]
    provider.shutdown()


@pytest.mark.parametrize(
    ("page", "language", "substring"),
    [("python.md", "sh", "make demo"), ("storages/README.md", "bash", "storage.contract")],
)
def test_commands_for_other_servers_are_valid(page: str, language: str, substring: str) -> None:
    """Other tests run similar commands on emulators. This test checks that commands, modules and targets exist."""
    for line in snippet_with(page, language, substring).splitlines():
        program, *arguments = shlex.split(line, comments=True)
        if program == "trinitylake":
            assert CliRunner().invoke(trinitylake, [*arguments, "--help"]).exit_code == 0
        elif program == "make":
            assert f"\n{arguments[0]}: " in (PROJECT / "Makefile").read_text()
        elif program == "python":
            assert arguments[0] == "-m"
            assert (PROJECT / arguments[1].replace(".", "/") / "__main__.py").is_file()
        else:
            assert program == "export"
