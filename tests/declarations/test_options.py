"""Test that the command, job and task of each operation have the options of its declaration."""

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
from trinitylake_ops.declarations.texts import MAX_DAYS, duration_of, duration_text, parse_properties, time_of
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
    "target": "memory://target/",
    "to": {"version": 0},
    "version": 1,
    "versions": "1-2",
}
#: The same values as arguments of commands.
ARGUMENTS = {**REQUIRED, "to": "0"}
#: Parameters of commands that are not options of their operations.
COMMAND_ONLY = {
    "as_json", "digest", "engine", "html", "is_dry_run", "spark_master", "spark_remote", "spark_requests_per_second",
    "target_options", "yes",
}  # fmt: skip
COMMANDS = [operation for operation in ALL if INDEX[operation.job].command is not None]


def job_name(operation: Operation[Any]) -> str:
    return operation.job


def specs_of(operation: Operation[Any]) -> list[OptionSpec]:
    return list(option_specs(operation.options))


def required(operation: Operation[Any]) -> dict[str, Any]:
    return {spec.name: REQUIRED[spec.name] for spec in specs_of(operation) if spec.is_required}


def declared_defaults(operation: Operation[Any]) -> dict[str, Any]:
    """Return all options of an operation, with only the required options set."""
    return {} if operation.options is None else operation.options(**required(operation)).model_dump()


@pytest.fixture
def lake() -> Iterator[Lakehouse]:
    yield Lakehouse.create(ROOT)
    drop_memory_root(ROOT)


def test_each_operation_has_summary_and_example() -> None:
    assert INDEX.keys() == BY_NAME.keys()
    for operation in COMMANDS:
        entry = INDEX[operation.job]
        assert trinitylake.commands[str(entry.command)].name == entry.command
        assert entry.summary
        assert "Example: trinitylake " in entry.help


@pytest.mark.parametrize("operation", COMMANDS, ids=job_name)
def test_command_has_declared_options(operation: Operation[Any]) -> None:
    command = trinitylake.commands[str(INDEX[operation.job].command)]
    expected: dict[str, Any] = {}
    for spec in specs_of(operation):
        if JOBS_ONLY in spec.marks or (spec.name in MODES and operation.plan_declaration is not None):
            continue
        expected[spec.name] = spec.default
        if spec.is_one_of:  # the argument is a version or an export name, and the other members are flags
            flags = [member.name for member in spec.members if member.name not in ("version", "export")]
            expected |= dict.fromkeys(flags) if "last_passed" not in flags else {"timestamp": None}
    parameters = {parameter.name: parameter for parameter in command.params if parameter.name not in COMMAND_ONLY}
    assert parameters.keys() == expected.keys()
    for name, default in expected.items():
        parameter = parameters[name]
        click_default = parameter.get_default(click.Context(command, **trinitylake.context_settings))
        actual = click_default if isinstance(click_default, bool | int | float | str | list | tuple) else None
        if isinstance(parameter, click.Option) and parameter.is_flag:
            assert (actual or False) == default, name
        elif isinstance(default, list):
            assert list(actual or ()) == default, name
            assert parameter.multiple or parameter.nargs == -1, name
        else:
            assert actual == default, name


@pytest.mark.parametrize("operation", COMMANDS, ids=job_name)
def test_command_without_options_uses_defaults(
    operation: Operation[Any], lake: Lakehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    received_options: list[Options | None] = []

    def execute(run: Any, *_: Any) -> Any:
        received_options.append(run.options)
        raise InvalidInputError("executed")

    declaration = operation.plan_declaration
    if declaration is not None:
        direct = None if declaration.direct is None else execute
        fake_operation = replace(declaration, plan=execute, direct=direct).operation()
    else:
        fake_operation = replace(operation, execute=execute)
    monkeypatch.setattr("trinitylake_ops.cli.generated.load_operation", lambda _job: fake_operation)
    command = generated_command.__wrapped__(operation.job)
    monkeypatch.setitem(trinitylake.__dict__, "commands", {command.name: command})
    values = [
        str(ARGUMENTS[parameter.name or ""]) for parameter in command.params if parameter.name in required(operation)
    ]
    with pytest.raises(InvalidInputError, match="executed"):
        trinitylake.main(["--root", lake.root, str(command.name), *values], standalone_mode=False)
    (options,) = received_options
    assert ({} if options is None else options.model_dump()) == declared_defaults(operation)


@pytest.fixture(scope="module")
def jobs() -> dict[str, dg.JobDefinition]:
    limits = ApplyLimits(max_files=0, max_bytes=0, min_age=timedelta(0))
    return {job.name: job for job in build_jobs(operations="all", limits=limits)}


@pytest.mark.parametrize("operation", ALL, ids=job_name)
def test_job_has_declared_options(operation: Operation[Any], jobs: dict[str, dg.JobDefinition]) -> None:
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
            assert list(inner.fields) == [member.name for member in spec.members]


@pytest.mark.parametrize("operation", ALL, ids=job_name)
def test_task_has_declared_options(operation: Operation[Any], lake: Lakehouse) -> None:
    received_options: list[Options | None] = []
    settings = LakehouseSettings(root=lake.root)
    recording_operation = replace(operation, step=lambda run: received_options.append(run.options))
    carry_out(recording_operation, required(operation), settings, "run", logging.getLogger())
    (options,) = received_options
    assert ({} if options is None else options.model_dump()) == declared_defaults(operation)
    if operation.options is not None:
        with pytest.raises(InvalidInputError):
            carry_out(
                recording_operation, {**required(operation), "no_option": 1}, settings, "run", logging.getLogger()
            )


def test_reference_lists_each_option_with_its_default() -> None:
    page = reference_page()
    for operation in ALL:
        section = page.partition(f"\n## {operation.job}\n")[2].partition("\n## ")[0]
        rows = {line.split("|")[1].strip(" `"): line.split("|") for line in section.splitlines() if "| `" in line[:3]}
        for spec in specs_of(operation):
            assert spec.description.replace("|", "\\|") in "|".join(rows[spec.name]), (operation.job, spec.name)
            assert ("required" in rows[spec.name][4]) == spec.is_required
            assert {f"{spec.name}.{member.name}" for member in spec.members} <= rows.keys()


@pytest.mark.parametrize("text", ["30d", "12h", "90m", "45s", "0d", "36h", "1000000d"])
def test_duration_text_round_trips(text: str) -> None:
    assert duration_of(text) == duration_of(duration_text(duration_of(text)))


def test_durations_use_largest_exact_unit() -> None:
    days = {timedelta(days=35): "35d", timedelta(hours=36): "36h", timedelta(minutes=90): "90m", timedelta(0): "0d"}
    assert {duration: duration_text(duration) for duration in days} == days


class _TimeOptions(Options):
    age: DurationText | None = None
    at: TimeText | None = None


@pytest.mark.parametrize(
    "text", ["", "30", "d", "-1d", "1.5h", "1 d", "1D", "\u0663d", f"{MAX_DAYS + 1}d", "9" * 9 + "d"]
)
def test_invalid_durations_are_rejected_with_option_name(text: str) -> None:
    with pytest.raises(InvalidInputError) as raised:
        _TimeOptions(age=text)
    assert str(raised.value).startswith("age: ")


def test_properties_are_parsed_by_name() -> None:
    assert parse_properties(["a=1", "b=", "c=x=y"], "properties") == {"a": "1", "b": "", "c": "x=y"}


@pytest.mark.parametrize("texts", [["secret"], ["=secret"], [""], ["secret=1", "secret=2"]], ids=str)
def test_invalid_property_is_rejected_without_its_text(texts: list[str]) -> None:
    with pytest.raises(InvalidInputError) as raised:
        parse_properties(texts, "--option")
    assert str(raised.value).startswith("--option ")
    assert "secret" not in str(raised.value)


def test_times_without_offset_are_utc() -> None:
    assert time_of("2026-01-31T12:00") == datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert time_of("2026-01-31T12:00+02:00") == datetime(2026, 1, 31, 10, tzinfo=UTC)
    assert time_of("1769860800000") == 1_769_860_800_000
    for invalid in ("", "soon", "-5", "9" * 16, "2026-13-01"):
        with pytest.raises(InvalidInputError) as raised:
            _TimeOptions(at=invalid)
        assert str(raised.value).startswith("at: ")
