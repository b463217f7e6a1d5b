"""Run the quickstart in an empty folder, like a new user."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from click.testing import CliRunner

from tests.docs.pages import DOCS, snippets
from trinitylake_ops import Lakehouse
from trinitylake_ops.cli.app import trinitylake
from trinitylake_ops.iceberg import catalog_at

PAGE = DOCS / "quickstart.md"
SNIPPETS = list(snippets(PAGE))
SEPARATE, TOGETHER = (snippet.text for snippet in SNIPPETS if snippet.title == "definitions.py")
(READ_PROGRAM,) = (snippet.text for snippet in SNIPPETS if snippet.title == "read.py")
COMMANDS = [line for snippet in SNIPPETS if snippet.language == "sh" for line in snippet.text.splitlines()]


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as ephemeral:
        yield ephemeral


def run_command(folder: Path, line: str) -> str:
    """Run a command of the page in this process, and return its output."""
    program, *arguments = shlex.split(line.replace("$LAKE_ROOT", str(folder / "lake")))
    assert program == "trinitylake"
    result = CliRunner().invoke(trinitylake, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def load_definitions(folder: Path, text: str) -> dg.Definitions:
    """Save ``definitions.py`` of the page, and load it like Dagster."""
    path = folder / "definitions.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("start_definitions", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    defs: dg.Definitions = module.defs
    return defs


def execute(definitions: dg.Definitions, instance: dg.DagsterInstance) -> bool:
    """Run the job of the page like its command."""
    (name,) = re.findall(r"^dagster job execute -f definitions\.py -j (\w+)$", "\n".join(COMMANDS), flags=re.MULTILINE)
    return definitions.resolve_job_def(name).execute_in_process(instance=instance, raise_on_error=False).success


def materialize(definitions: dg.Definitions, instance: dg.DagsterInstance) -> bool:
    """Materialize the selection of the page like its command."""
    (selection,) = re.findall(r"^dagster asset materialize .* --select '(.*)'$", "\n".join(COMMANDS), re.MULTILINE)
    keys = dg.AssetSelection.from_string(selection).resolve(definitions.resolve_asset_graph())
    job = definitions.resolve_implicit_global_asset_job_def()
    return job.execute_in_process(instance=instance, asset_selection=[*keys], raise_on_error=False).success


def check_names(definitions: dg.Definitions) -> None:
    """Assert that the jobs and assets that the page mentions exist."""
    jobs = {job.name for job in definitions.resolve_all_job_defs()}
    keys = {key.to_user_string() for key in definitions.resolve_asset_graph().get_all_asset_keys()}
    quoted_names = re.findall(r"`(\w+(?:/\w+)?)`", PAGE.read_text())
    assert {name for name in quoted_names if name.startswith("lake_")} <= jobs
    assert {name for name in quoted_names if "/" in name} <= keys


def test_quickstart_runs(
    tmp_path: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAKE_ROOT", str(tmp_path / "lake"))
    init, log, head, plan, apply = (line for line in COMMANDS if line.startswith("trinitylake "))
    assert "Created a lakehouse at file://" in run_command(tmp_path, init)
    assert materialize(load_definitions(tmp_path, SEPARATE), instance)
    assert "publish" in run_command(tmp_path, log)
    assert re.search(r"^Ann +25\.5$", run_command(tmp_path, head), flags=re.MULTILINE)
    exec(compile(READ_PROGRAM, "read.py", "exec"), {})
    assert "{'customer': 'Ann', 'euros_sum': 25.5}" in capsys.readouterr().out
    lake = Lakehouse.open(str(tmp_path / "lake"))
    assert lake.latest_version() == 2, "each asset published its table"

    definitions = load_definitions(tmp_path, TOGETHER)
    check_names(definitions)
    assert execute(definitions, instance)
    assert lake.latest_version() == 3

    assert TOGETHER.count("12.0") == 1
    assert not execute(load_definitions(tmp_path, TOGETHER.replace("12.0", "-12.0")), instance)
    assert lake.latest_version() == 3, "a blocking check prevents the publication"
    assert execute(load_definitions(tmp_path, TOGETHER.replace("12.0", "1200.0")), instance)
    assert lake.latest_version() == 4

    (digest,) = re.findall(r"--apply (\S+)$", run_command(tmp_path, plan), flags=re.MULTILINE)
    run_command(tmp_path, apply.replace("DIGEST", digest))
    assert lake.latest_version() == 5
    assert max(catalog_at(lake).load_table("shop.orders").scan().to_arrow()["euros"].to_pylist()) == 20.0
    assert "`show shop.orders --version 4`" in PAGE.read_text()
    run_command(tmp_path, "trinitylake --root $LAKE_ROOT show shop.orders --version 4")


def test_each_snippet_is_tested() -> None:
    assert {(snippet.language, snippet.title) for snippet in SNIPPETS} == {
        ("sh", ""), ("python", "definitions.py"), ("python", "read.py"),
    }  # fmt: skip
    assert [line.split()[0].partition("=")[0] for line in COMMANDS] == [
        *("SOURCE", "python3", ".", "pip"), *("export", "mkdir", "trinitylake"),
        *("dagster", "trinitylake", "trinitylake"), "dagster", *("trinitylake", "trinitylake"),
    ]  # fmt: skip
