"""Every snippet of docs/operations runs: commands, configurations of jobs, and calls, on the lakehouse of the pages."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from click.testing import CliRunner

from tests.docs.pages import DOCS, Snippet, snippets
from tests.own_time import give_own_time
from trinitylake_ops import Lakehouse
from trinitylake_ops.cli.app import trinitylake
from trinitylake_ops.dagster_plugin import ApplyLimits, TrinityLakeResource, build_jobs
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.storage import drop_memory_root, memory

FOLDER = DOCS / "operations"
#: Pages with their own form; other tests run their snippets.
GUIDES = {"README.md", "clones.md", "runbooks.md"}
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.name not in GUIDES)
SECTIONS = ["Command line", "Dagster", "Python", "Errors"]
#: Sections that only one page has.
MORE_SECTIONS = {"verify.md": ("Findings",)}
ROOT = "memory://data/lake"
THEIRS = "memory://theirs/"
DAY_NS = 24 * 3_600 * 1_000_000_000
#: Commands that other pages describe.
ELSEWHERE = {"completion", "serve"}


def here(text: str) -> str:
    """Return a snippet with the places of the pages in memory."""
    return text.replace("/data/lake", ROOT).replace("s3://", "memory://")


@pytest.fixture
def calendar(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Let storages in memory have days of their own. Returns what lets ten of them pass."""
    now_ns, ticks = [1_800_000_000_000_000_000], count()
    give_own_time(monkeypatch, memory, time_ns=lambda: now_ns[0] + next(ticks) * 1_000_000)

    def pass_days() -> int:
        now_ns[0] += 10 * DAY_NS
        return now_ns[0]

    return pass_days


def _made() -> dict[str, Any]:
    """Do what the first page says, and make a table of others. Returns the names that a reader then has."""
    names: dict[str, Any] = {}
    (first,) = (one for one in snippets(FOLDER / "README.md") if one.language == "python")
    exec(compile(here(first.text), "README.md", "exec"), names)
    theirs = Lakehouse.create(THEIRS)
    with theirs.transaction() as txn:
        txn.create_namespace("shop")
    table = catalog_at(theirs).create_table("shop.returns", names["orders"].schema)
    names["THEIR_METADATA"] = table.metadata_location
    names["COMMIT_ID"] = next(info.commit_id for info in names["lake"].history() if info.version == 4)
    return names


@pytest.fixture(scope="module")
def kept() -> tuple[dict[str, Any], dict[str, dict[str, tuple[bytes, int]]]]:
    """Names and files as they are after the first page; filled by the first test."""
    return {}, {}


@pytest.fixture
def scope(calendar: Callable[[], int], kept: tuple[dict[str, Any], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The names that a reader has after the first page: the lakehouse, and what it imports."""
    names, files = kept
    if not names:
        names.update(_made())
        files.update({name: dict(memory._files_by_name[name].by_key) for name in ("data", "theirs")})
    for name, by_key in files.items():
        memory._files_by_name[name].by_key = dict(by_key)
    calendar()
    yield {**names, "lake": Lakehouse.open(ROOT)}
    for root in ("memory://data/", THEIRS, "memory://bucket/", "memory://backup/", "memory://dev/"):
        drop_memory_root(root)


def shown(page: Path, section: str) -> list[Snippet]:
    return [one for one in snippets(page) if one.section == section]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_its_sections_and_nothing_but_what_is_run(page: Path) -> None:
    text = page.read_text()
    assert re.findall(r"^## (.*)$", text, flags=re.MULTILINE) == [*SECTIONS, *MORE_SECTIONS.get(page.name, ())]
    languages = {"Command line": {"sh", ""}, "Dagster": {"yaml"}, "Python": {"python"}}
    for one in snippets(page):
        assert one.language in languages[one.section]
        assert bool(one.title) == (one.language == "yaml"), "a configuration names its job"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_its_commands_run(page: Path, scope: dict[str, Any], calendar: Callable[[], int]) -> None:
    digest = ""
    for snippet in shown(page, "Command line"):
        for line in snippet.text.splitlines() if snippet.language == "sh" else ():
            assert digest or "DIGEST" not in line
            placed = here(line)
            for name in ("THEIR_METADATA", "COMMIT_ID"):
                placed = placed.replace(name, str(scope[name]))
            program, *arguments = shlex.split(placed.replace("DIGEST", digest or "DIGEST"))
            assert program == "trinitylake"
            ran = CliRunner().invoke(trinitylake, arguments, env={"TRINITYLAKE_ROOT": ROOT}, catch_exceptions=False)
            assert ran.exit_code == 0, f"{line}\n{ran.output}"
            found = re.search(r"--apply (\S+)$", ran.output, flags=re.MULTILINE)
            digest = found[1] if found else ""
            calendar()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_its_python_runs(page: Path, scope: dict[str, Any], calendar: Callable[[], int]) -> None:
    (snippet,) = shown(page, "Python")
    exec(compile(here(snippet.text), page.name, "exec"), scope)


@pytest.fixture(scope="module")
def jobs() -> dict[str, dg.JobDefinition]:
    limits = ApplyLimits(max_files=0, max_bytes=0, min_age=timedelta(0))
    return {job.name: job for job in build_jobs(operations="all", limits=limits)}


def configurations(page: Path) -> list[tuple[str, dict[str, Any]]]:
    digest = f"1-{'0' * 64}"
    return [(one.title, yaml.safe_load(one.text.replace("DIGEST", digest))) for one in shown(page, "Dagster")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_its_jobs_take_their_configurations(page: Path, jobs: dict[str, dg.JobDefinition]) -> None:
    for name, config in configurations(page):
        assert dg.validate_run_config(jobs[name], config)


def test_every_command_and_every_job_has_its_page(jobs: dict[str, dg.JobDefinition]) -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    commands = [one for page in PAGES for one in shown(page, "Command line") if one.language == "sh"]
    lines = [line for one in commands for line in one.text.splitlines()]
    run = {word for line in lines for word in shlex.split(line) if word in trinitylake.commands}
    assert set(trinitylake.commands) - run == ELSEWHERE
    named = set(re.findall(r"`([a-z_]+)`|title=\"([a-z_]+)\"", text))
    assert jobs.keys() - {first or second for first, second in named} == set()


@pytest.mark.soak
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_its_jobs_run(
    page: Path, scope: dict[str, Any], calendar: Callable[[], int], jobs: dict[str, dg.JobDefinition]
) -> None:
    """Each in the order of the page, on one lakehouse; an approval takes the digest that the plan before it showed."""
    resource = TrinityLakeResource(root=ROOT, allowed_roots=["memory://dev/feature-x", "memory://backup/lake"])
    digest = ""
    with dg.instance_for_test() as instance:
        for one in shown(page, "Dagster"):
            text = here(one.text).replace("COMMIT_ID", str(scope["COMMIT_ID"]))
            config = yaml.safe_load(text.replace("DIGEST", digest or "DIGEST"))
            if "approval" in config and not digest:
                only = {name: value for name, value in config.items() if name != "approval"}
                plan = jobs[one.title].execute_in_process(only, instance=instance, resources={"lakehouse": resource})
                config["approval"]["digest"] = _digest(plan)
            result = jobs[one.title].execute_in_process(config, instance=instance, resources={"lakehouse": resource})
            assert result.success
            digest = _digest(result)
            calendar()


def _digest(result: dg.ExecuteInProcessResult) -> str:
    (step,) = (event for event in result.all_events if event.event_type_value == "STEP_OUTPUT")
    shown = step.step_output_data.metadata.get("digest")
    return "" if shown is None else str(shown.value)
