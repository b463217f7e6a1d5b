"""The command, the job and the task of each operation have the options of its declaration."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import click
import dagster as dg
import pytest

from scripts.docs_site.operations import operations as reference_page
from trinitylake_ops import Lakehouse
from trinitylake_ops.airflow_plugin.settings import LakehouseSettings
from trinitylake_ops.airflow_plugin.task_run import carry_out
from trinitylake_ops.cli.app import trinitylake
from trinitylake_ops.cli.generated import generated_command
from trinitylake_ops.dagster_plugin import ApplyLimits, build_jobs
from trinitylake_ops.declarations.index import INDEX
from trinitylake_ops.declarations.operation import Operation
from trinitylake_ops.declarations.options import JOBS_ONLY, DurationText, Options, TimeText
from trinitylake_ops.declarations.planned import MODES
from trinitylake_ops.declarations.registry import ALL, BY_NAME
from trinitylake_ops.declarations.specs import OptionSpec, option_specs
from trinitylake_ops.declarations.texts import MOST_DAYS, duration_of, duration_text, parse_properties, time_of
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.storage import drop_memory_root

ROOT = "memory://declared/"
#: Values of options that have no default.
REQUIRED: dict[str, Any] = {
    "after": {"version": 1},
    "before": {"version": 0},
    "commit_id": "6f1b1c1e-5f0a-4c53-8a6e-1f0e8a7f6b2d",
    "name": "branch-x",
    "namespace": "ns",
    "pattern": "nightly-*",
    "table": "ns.t",
    "target": "memory://elsewhere/",
    "to": {"version": 0},
    "version": 1,
    "versions": "1-2",
}
#: The same on the command line.
ARGUMENTS = {**REQUIRED, "to": "0"}
#: What commands have besides the options of their operations.
OF_COMMANDS = {
    "as_json", "digest", "engine", "html", "is_dry_run", "spark_master", "spark_remote", "spark_requests_per_second",
    "target_options", "yes",
}  # fmt: skip
COMMANDS = [operation for operation in ALL if INDEX[operation.job].command is not None]


def by_job(operation: Operation[Any]) -> str:
    return operation.job


def specs_of(operation: Operation[Any]) -> list[OptionSpec]:
    return list(option_specs(operation.options))


def required(operation: Operation[Any]) -> dict[str, Any]:
    return {spec.name: REQUIRED[spec.name] for spec in specs_of(operation) if spec.is_required}


def declared_defaults(operation: Operation[Any]) -> dict[str, Any]:
    """Return all options of an operation of which only those are set that have no default."""
    return {} if operation.options is None else operation.options(**required(operation)).model_dump()


@pytest.fixture
def lake() -> Iterator[Lakehouse]:
    yield Lakehouse.create(ROOT)
    drop_memory_root(ROOT)


def test_every_operation_has_texts() -> None:
    assert INDEX.keys() == BY_NAME.keys()
    for operation in COMMANDS:
        entry = INDEX[operation.job]
        assert trinitylake.commands[str(entry.command)].name == entry.command
        assert entry.summary
        assert "Example: trinitylake " in entry.help


@pytest.mark.parametrize("operation", COMMANDS, ids=by_job)
def test_command_has_the_declared_options(operation: Operation[Any]) -> None:
    command = trinitylake.commands[str(INDEX[operation.job].command)]
    expected: dict[str, Any] = {}
    for spec in specs_of(operation):
        if JOBS_ONLY in spec.marks or (spec.name in MODES and operation.plan_declaration is not None):
            continue
        expected[spec.name] = spec.default
        if spec.is_one_of:  # the argument says the number or the name, and there are flags for the rest
            others = [one.name for one in spec.members if one.name not in ("version", "export")]
            expected |= dict.fromkeys(others) if "last_passed" not in others else {"timestamp": None}
    own = {one.name: one for one in command.params if one.name not in OF_COMMANDS}
    assert own.keys() == expected.keys()
    for name, default in expected.items():
        parameter = own[name]
        known = parameter.get_default(click.Context(command, **trinitylake.context_settings))
        given = known if isinstance(known, bool | int | float | str | list | tuple) else None
        if isinstance(parameter, click.Option) and parameter.is_flag:
            assert (given or False) == default, name
        elif isinstance(default, list):
            assert list(given or ()) == default, name
            assert parameter.multiple or parameter.nargs == -1, name
        else:
            assert given == default, name


@pytest.mark.parametrize("operation", COMMANDS, ids=by_job)
def test_command_without_options_uses_defaults(
    operation: Operation[Any], lake: Lakehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Options | None] = []

    def execute(run: Any, *_: Any) -> Any:
        ran.append(run.options)
        raise InvalidInputError("ran")

    planned = operation.plan_declaration
    if planned is not None:
        replaced = replace(planned, plan=execute, direct=None if planned.direct is None else execute).operation()
    else:
        replaced = replace(operation, execute=execute)
    monkeypatch.setattr("trinitylake_ops.cli.generated.load_operation", lambda _job: replaced)
    command = generated_command.__wrapped__(operation.job)
    monkeypatch.setitem(trinitylake.__dict__, "commands", {command.name: command})
    values = [str(ARGUMENTS[one.name or ""]) for one in command.params if one.name in required(operation)]
    with pytest.raises(InvalidInputError, match="ran"):
        trinitylake.main(["--root", lake.root, str(command.name), *values], standalone_mode=False)
    (options,) = ran
    assert ({} if options is None else options.model_dump()) == declared_defaults(operation)


@pytest.fixture(scope="module")
def jobs() -> dict[str, dg.JobDefinition]:
    limits = ApplyLimits(max_files=0, max_bytes=0, min_age=timedelta(0))
    return {job.name: job for job in build_jobs(operations="all", limits=limits)}


@pytest.mark.parametrize("operation", ALL, ids=by_job)
def test_job_has_the_declared_options(operation: Operation[Any], jobs: dict[str, dg.JobDefinition]) -> None:
    (op,) = jobs[operation.job].graph.node_defs
    assert isinstance(op, dg.OpDefinition)
    fields = getattr(op.config_schema.config_type, "fields", {})
    specs = specs_of(operation)
    assert list(fields) == [spec.name for spec in specs]
    for spec in specs:
        field = fields[spec.name]
        assert (field.is_required, field.description) == (spec.is_required, spec.description)
        if not spec.is_required:
            assert field.default_value == spec.default, spec.name
        if spec.members:
            inner = getattr(field.config_type, "inner_type", field.config_type)
            assert list(inner.fields) == [one.name for one in spec.members]


@pytest.mark.parametrize("operation", ALL, ids=by_job)
def test_task_has_the_declared_options(operation: Operation[Any], lake: Lakehouse) -> None:
    ran: list[Options | None] = []
    settings = LakehouseSettings(root=lake.root)
    watched = replace(operation, step=lambda run: ran.append(run.options))
    carry_out(watched, required(operation), settings, "run", logging.getLogger())
    (options,) = ran
    assert ({} if options is None else options.model_dump()) == declared_defaults(operation)
    if operation.options is not None:
        with pytest.raises(InvalidInputError):
            carry_out(watched, {**required(operation), "no_option": 1}, settings, "run", logging.getLogger())


def test_reference_lists_every_option_with_its_default() -> None:
    page = reference_page()
    for operation in ALL:
        section = page.partition(f"\n## {operation.job}\n")[2].partition("\n## ")[0]
        rows = {line.split("|")[1].strip(" `"): line.split("|") for line in section.splitlines() if "| `" in line[:3]}
        for spec in specs_of(operation):
            assert spec.description.replace("|", "\\|") in "|".join(rows[spec.name]), (operation.job, spec.name)
            assert ("required" in rows[spec.name][4]) == spec.is_required
            assert {f"{spec.name}.{one.name}" for one in spec.members} <= rows.keys()


@pytest.mark.parametrize("text", ["30d", "12h", "90m", "45s", "0d", "36h", "1000000d"])
def test_duration_text_round_trips(text: str) -> None:
    assert duration_of(text) == duration_of(duration_text(duration_of(text)))


def test_durations_use_the_largest_unit() -> None:
    days = {timedelta(days=35): "35d", timedelta(hours=36): "36h", timedelta(minutes=90): "90m", timedelta(0): "0d"}
    assert {duration: duration_text(duration) for duration in days} == days


class _Timed(Options):
    age: DurationText | None = None
    at: TimeText | None = None


@pytest.mark.parametrize(
    "text", ["", "30", "d", "-1d", "1.5h", "1 d", "1D", "\u0663d", f"{MOST_DAYS + 1}d", "9" * 9 + "d"]
)
def test_invalid_durations_are_rejected_with_the_option_name(text: str) -> None:
    with pytest.raises(InvalidInputError) as rejected:
        _Timed(age=text)
    assert str(rejected.value).startswith("age: ")


def test_properties_are_parsed_by_name() -> None:
    assert parse_properties(["a=1", "b=", "c=x=y"], "properties") == {"a": "1", "b": "", "c": "x=y"}


@pytest.mark.parametrize("texts", [["secret"], ["=secret"], [""], ["secret=1", "secret=2"]], ids=str)
def test_invalid_property_is_rejected_without_its_text(texts: list[str]) -> None:
    with pytest.raises(InvalidInputError) as rejected:
        parse_properties(texts, "--option")
    assert str(rejected.value).startswith("--option ")
    assert "secret" not in str(rejected.value)


def test_times_without_an_offset_are_utc() -> None:
    assert time_of("2026-01-31T12:00") == datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert time_of("2026-01-31T12:00+02:00") == datetime(2026, 1, 31, 10, tzinfo=UTC)
    assert time_of("1769860800000") == 1_769_860_800_000
    for wrong in ("", "soon", "-5", "9" * 16, "2026-13-01"):
        with pytest.raises(InvalidInputError) as rejected:
            _Timed(at=wrong)
        assert str(rejected.value).startswith("at: ")
