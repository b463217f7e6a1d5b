"""Every page with snippets has a test that runs them; here are those of pages without a test of their own."""

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

#: Which test runs the snippets of a page. Outputs, which have no language, are those of a run.
RUN_BY = {
    "comparison.md": "tests/test_snippets.py",
    "dagster/README.md": "tests/test_snippets.py",
    "dagster/automation.md": "tests/test_snippets.py",
    "dagster/publishing.md": "tests/test_snippets.py",
    "dagster/resource.md": "tests/test_snippets.py",
    "deploy/airflow.md": "tests/airflow/test_operations.py",
    "deploy/dagster.md": "tests/e2e/test_on_pods.py",
    "deploy/kubernetes.md": "tests/test_charts.py",
    "deploy/monitoring.md": "tests/docs/test_other_snippets.py",
    "internals/commit.md": "tests/docs/test_internals.py",
    "internals/purge.md": "tests/docs/test_internals.py",
    "internals/rollback.md": "tests/docs/test_internals.py",
    "operations/clones.md": "tests/docs/test_other_snippets.py",
    "python.md": "tests/test_readme.py",
    "quickstart.md": "tests/docs/test_start.py",
    "release.md": "tests/test_project.py",
    "rest-catalog/connect.md": "tests/clients/test_clients.py",
    "rest-catalog/run.md": "tests/server/test_page.py",
    "spark/cluster.md": "tests/spark/test_spark_pages.py",
    "spark/data-source.md": "tests/spark/test_spark_pages.py",
    "spark/sql-catalog.md": "tests/spark/test_catalog.py",
    "storages/README.md": "tests/docs/test_other_snippets.py",
}


def test_every_page_with_snippets_has_its_test() -> None:
    with_snippets = {
        path.relative_to(DOCS).as_posix()
        for path in DOCS.rglob("*.md")
        if any(one.language not in ("", "text") for one in snippets(path))
    }
    of_operations = {f"operations/{page.name}" for page in test_operation_pages.PAGES} | {"operations/README.md"}
    assert with_snippets - of_operations == set(RUN_BY)
    for page, test in RUN_BY.items():
        assert (PROJECT / test).is_file(), (page, test)


def test_no_file_of_a_page_hides_a_module_of_python() -> None:
    """``python -m dagster`` looks into the current folder first, and Dagster itself imports the module ``code``."""
    for path in [*DOCS.rglob("*.md"), *(PROJECT / "examples").rglob("*.md"), PROJECT / "README.md"]:
        for name in re.findall(r"(?:`|-f |python |title=\")([a-z_]+)\.py\b", path.read_text()):
            assert name not in sys.stdlib_module_names, f"{path}: {name}.py"


def only(page: str, language: str, part: str) -> str:
    (text,) = (one.text for one in snippets(DOCS / page) if one.language == language and part in one.text)
    return text


def test_the_resource_of_branches_is_made_as_the_page_says() -> None:
    names = {"TrinityLakeResource": TrinityLakeResource, "timedelta": timedelta}
    exec(only("operations/clones.md", "python", "for_branch_deployment"), names)
    made = names["lakehouse"]
    assert isinstance(made, TrinityLakeResource)
    assert made.root == "s3://bucket/lake"


def test_the_scheme_of_another_package_is_one() -> None:
    names = {"Scheme": Scheme, "Option": Option, "Kind": Kind, "open_shelf": open_storage}
    exec(only("storages/README.md", "python", "Scheme("), names)
    made = names["SCHEME"]
    assert isinstance(made, Scheme) and made.name == "shelf"


def test_a_lakehouse_on_two_storages_is_made_as_the_page_says(tmp_path: Path) -> None:
    """With a storage in memory in place of Redis, and a folder in place of S3."""
    export, init = only("storages/README.md", "bash", "TRINITYLAKE_STORAGE_OPTIONS").splitlines()
    assert re.fullmatch(r"export TRINITYLAKE_STORAGE_OPTIONS=s3\.endpoint=\S+,s3\.region=\S+", export)
    program, *arguments = shlex.split(init)
    assert program == "trinitylake"
    there = f"file://{tmp_path}/tables"
    placed = [
        "memory://two" if one.startswith("redis:") else there if one.startswith("s3:") else one for one in arguments
    ]
    options = {"TRINITYLAKE_STORAGE_OPTIONS": export.partition("OPTIONS=")[2]}
    ran = CliRunner().invoke(trinitylake, placed, env=options, catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    assert Lakehouse.open("memory://two").snapshot().definition.table_root == there
    drop_memory_root("memory://two/")


def test_a_command_leaves_its_metrics_as_the_page_says(tmp_path: Path) -> None:
    """With a lakehouse in memory in place of S3."""
    root, metrics = "memory://told/", tmp_path / "trinitylake.prom"
    Lakehouse.create(root)
    program, *arguments = shlex.split(only("deploy/monitoring.md", "sh", "--metrics-file"))
    assert program == "trinitylake"
    placed = [root if one.startswith("s3:") else str(metrics) if one.endswith(".prom") else one for one in arguments]
    ran = CliRunner().invoke(trinitylake, placed, catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    assert "trinitylake_transactions_total" in metrics.read_text()
    drop_memory_root(root)


def test_a_program_sends_spans_as_the_page_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exporter in memory replaces the one that sends."""
    exporter = InMemorySpanExporter()
    providers: list[TracerProvider] = []
    monkeypatch.setattr(trace_exporter, "OTLPSpanExporter", lambda: exporter)
    monkeypatch.setattr(trace, "set_tracer_provider", providers.append)
    exec(only("deploy/monitoring.md", "python", "BatchSpanProcessor"), {})
    (provider,) = providers
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    with spans.span("commit"):
        pass
    provider.force_flush()
    assert [one.name for one in exporter.get_finished_spans()] == ["commit"]
    provider.shutdown()


@pytest.mark.parametrize(
    ("page", "language", "part"),
    [("python.md", "sh", "make demo"), ("storages/README.md", "bash", "storage.contract")],
)
def test_commands_for_other_servers_are_well_formed(page: str, language: str, part: str) -> None:
    """They are run on emulators, by other words: here each command, module and target is there, with its options."""
    for line in only(page, language, part).splitlines():
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
