"""Run each snippet of docs/operations on the lakehouse of the pages: commands, job configurations and Python."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from click.testing import CliRunner

from tests.docs.pages import DOCS, Snippet, snippets
from tests.module_time import replace_time_functions
from trinitylake_ops import Lakehouse
from trinitylake_ops.cli.app import trinitylake
from trinitylake_ops.dagster_plugin import ApplyLimits, TrinityLakeResource, build_jobs
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.storage import MemoryStorage, background, drop_memory_root, memory

FOLDER = DOCS / "operations"
#: Pages without the structure of a reference page. Other tests run their snippets.
GUIDES = {"README.md", "clones.md", "runbooks.md"}
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.name not in GUIDES)
SECTIONS = ["Command line", "Dagster", "Python", "Errors"]
#: Sections that only some pages have.
ADDITIONAL_SECTIONS = {"verify.md": ("Findings",)}
#: An optional first section of a page, whose snippets are files that its commands read.
FILES_SECTION = "Document"
DATA_ROOT = "memory://data/"
ROOT = f"{DATA_ROOT}lake"
OTHER_ROOT = "memory://theirs/"
#: The path, content and modification time of a file.
StoredFile = tuple[str, bytes, int]
DAY_NS = 24 * 3_600 * 1_000_000_000
#: Commands that are described outside of docs/operations.
DESCRIBED_ON_OTHER_PAGES = {"completion", "serve"}


def in_memory(text: str) -> str:
    """Replace the roots in a snippet with roots in memory."""
    return text.replace("/data/lake", ROOT).replace("s3://", "memory://")


class MemoryClock:
    """The clock of in-memory storages. Each reading advances it by one millisecond."""

    def __init__(self) -> None:
        self.time_ns = 1_800_000_000_000_000_000

    def read_ns(self) -> int:
        self.time_ns += 1_000_000
        return self.time_ns

    def advance(self) -> None:
        """Advance the clock by ten days."""
        self.time_ns += 10 * DAY_NS

    def restore(self, root: str, files: Iterable[StoredFile]) -> None:
        """Replace the files under a root with files that were written at earlier times."""
        drop_memory_root(root)
        storage, now_ns = MemoryStorage(root), self.time_ns
        for path, data, last_modified_ms in files:
            self.time_ns = (last_modified_ms - 1) * 1_000_000
            storage.write(path, data)
        self.time_ns = now_ns


@pytest.fixture
def memory_clock(monkeypatch: pytest.MonkeyPatch) -> MemoryClock:
    clock = MemoryClock()
    replace_time_functions(monkeypatch, memory, time_ns=clock.read_ns)
    return clock


def _run_index_page() -> dict[str, Any]:
    """Run the example of the index page, and create a table in another lakehouse. Return the resulting names."""
    names: dict[str, Any] = {}
    (example,) = (snippet for snippet in snippets(FOLDER / "README.md") if snippet.language == "python")
    exec(compile(in_memory(example.text), "README.md", "exec"), names)
    other_lake = Lakehouse.create(OTHER_ROOT)
    with other_lake.transaction() as txn:
        txn.create_namespace("shop")
    table = catalog_at(other_lake).create_table("shop.returns", names["orders"].schema)
    names["THEIR_METADATA"] = table.metadata_location
    names["COMMIT_ID"] = next(info.commit_id for info in names["lake"].history() if info.version == 4)
    return names


def _stored_files(root: str) -> list[StoredFile]:
    background.drain()
    storage = MemoryStorage(root)
    return [(info.path, storage.read(info.path), info.last_modified_ms) for info in storage.list()]


@pytest.fixture(scope="module")
def saved_state() -> tuple[dict[str, Any], dict[str, list[StoredFile]]]:
    """The names and files that the example of the index page creates. The first test fills them."""
    return {}, {}


@pytest.fixture
def scope(
    memory_clock: MemoryClock, saved_state: tuple[dict[str, Any], dict[str, list[StoredFile]]]
) -> Iterator[dict[str, Any]]:
    """The names that the example of the index page defines: the lakehouse and the imports."""
    names, files_by_root = saved_state
    if not names:
        names.update(_run_index_page())
        files_by_root.update({root: _stored_files(root) for root in (DATA_ROOT, OTHER_ROOT)})
    for root, files in files_by_root.items():
        memory_clock.restore(root, files)
    memory_clock.advance()
    yield {**names, "lake": Lakehouse.open(ROOT)}
    for root in (DATA_ROOT, OTHER_ROOT, "memory://bucket/", "memory://backup/", "memory://dev/"):
        drop_memory_root(root)


def section_snippets(page: Path, section: str) -> list[Snippet]:
    return [snippet for snippet in snippets(page) if snippet.section == section]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_has_expected_sections_and_snippets(page: Path) -> None:
    text = page.read_text()
    titles = re.findall(r"^## (.*)$", text, flags=re.MULTILINE)
    assert titles[titles[0] == FILES_SECTION :] == [*SECTIONS, *ADDITIONAL_SECTIONS.get(page.name, ())]
    languages = {FILES_SECTION: {"yaml"}, "Command line": {"sh", ""}, "Dagster": {"yaml"}, "Python": {"python"}}
    for snippet in snippets(page):
        assert snippet.language in languages[snippet.section]
        assert bool(snippet.title) == (snippet.language == "yaml"), "the title is the job or the file"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_run(
    page: Path, scope: dict[str, Any], memory_clock: MemoryClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for document in section_snippets(page, FILES_SECTION):
        (tmp_path / document.title).write_text(document.text)
    digest = ""
    for snippet in section_snippets(page, "Command line"):
        for line in snippet.text.splitlines() if snippet.language == "sh" else ():
            assert digest or "DIGEST" not in line
            command = in_memory(line)
            for name in ("THEIR_METADATA", "COMMIT_ID"):
                command = command.replace(name, str(scope[name]))
            program, *arguments = shlex.split(command.replace("DIGEST", digest or "DIGEST"))
            assert program == "trinitylake"
            result = CliRunner().invoke(trinitylake, arguments, env={"TRINITYLAKE_ROOT": ROOT}, catch_exceptions=False)
            assert result.exit_code == 0, f"{line}\n{result.output}"
            match = re.search(r"--apply (\S+)$", result.output, flags=re.MULTILINE)
            digest = match[1] if match else ""
            memory_clock.advance()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_runs(page: Path, scope: dict[str, Any], memory_clock: MemoryClock) -> None:
    (snippet,) = section_snippets(page, "Python")
    exec(compile(in_memory(snippet.text), page.name, "exec"), scope)


@pytest.fixture(scope="module")
def jobs() -> dict[str, dg.JobDefinition]:
    limits = ApplyLimits(max_files=0, max_bytes=0, min_age=timedelta(0))
    return {job.name: job for job in build_jobs(operations="all", limits=limits)}


def configurations(page: Path) -> list[tuple[str, dict[str, Any]]]:
    digest = f"1-{'0' * 64}"
    dagster_snippets = section_snippets(page, "Dagster")
    return [(snippet.title, yaml.safe_load(snippet.text.replace("DIGEST", digest))) for snippet in dagster_snippets]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_job_configurations_are_valid(page: Path, jobs: dict[str, dg.JobDefinition]) -> None:
    for name, config in configurations(page):
        assert dg.validate_run_config(jobs[name], config)


def test_each_command_and_job_has_page(jobs: dict[str, dg.JobDefinition]) -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    command_snippets = [snippet for page in PAGES for snippet in section_snippets(page, "Command line")]
    lines = [line for snippet in command_snippets if snippet.language == "sh" for line in snippet.text.splitlines()]
    documented_commands = {word for line in lines for word in shlex.split(line) if word in trinitylake.commands}
    assert set(trinitylake.commands) - documented_commands == DESCRIBED_ON_OTHER_PAGES
    documented_names = set(re.findall(r"`([a-z_]+)`|title=\"([a-z_]+)\"", text))
    assert jobs.keys() - {first or second for first, second in documented_names} == set()


@pytest.mark.soak
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_jobs_run(
    page: Path, scope: dict[str, Any], memory_clock: MemoryClock, jobs: dict[str, dg.JobDefinition]
) -> None:
    """Run the jobs in the order of the page. An approval contains the digest of the preceding plan."""
    resource = TrinityLakeResource(root=ROOT, allowed_roots=["memory://dev/feature-x", "memory://backup/lake"])
    digest = ""
    with dg.instance_for_test() as instance:
        for snippet in section_snippets(page, "Dagster"):
            job = jobs[snippet.title]
            text = in_memory(snippet.text).replace("COMMIT_ID", str(scope["COMMIT_ID"]))
            config = yaml.safe_load(text.replace("DIGEST", digest or "DIGEST"))
            if "approval" in config and not digest:
                options = {name: value for name, value in config.items() if name != "approval"}
                plan = job.execute_in_process(options, instance=instance, resources={"lakehouse": resource})
                config["approval"]["digest"] = _digest(plan)
            result = job.execute_in_process(config, instance=instance, resources={"lakehouse": resource})
            assert result.success
            digest = _digest(result)
            memory_clock.advance()


def _digest(result: dg.ExecuteInProcessResult) -> str:
    (step,) = (event for event in result.all_events if event.event_type_value == "STEP_OUTPUT")
    digest = step.step_output_data.metadata.get("digest")
    return "" if digest is None else str(digest.value)
