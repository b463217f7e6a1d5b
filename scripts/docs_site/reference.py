"""The reference: every command, job, setting, error and exit code, as the code itself declares them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from datetime import timedelta
from typing import Any

import click
import dagster as dg
from dagster import Array, Noneable, Selector, Shape
from dagster import Enum as ConfigEnum
from dagster._config import ConfigType
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from scripts.docs_site.operations import blocks_of, operations
from scripts.docs_site.tables import code, prose, table
from trinitylake_ops import errors
from trinitylake_ops.cli.app import trinitylake
from trinitylake_ops.dagster_plugin import (
    ApplyLimits,
    BlackoutWindow,
    CheckLimits,
    LakehouseSettings,
    SparkResource,
    TrinityLakeIOManager,
    TrinityLakeResource,
    build_jobs,
)
from trinitylake_ops.dagster_plugin.schedules import CRONS
from trinitylake_ops.declarations.index import INDEX
from trinitylake_ops.declarations.registry import BY_NAME
from trinitylake_ops.declarations.specs import option_specs
from trinitylake_ops.extras import EXTRAS
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.operations import Budget
from trinitylake_ops.server.settings import Limits, ServerSettings
from trinitylake_ops.spark.source.options import OPTIONS, STREAM_OPTIONS, WRITE_OPTIONS
from trinitylake_ops.storage.delegation import DelegationSettings
from trinitylake_ops.storage.options import COMMON_OPTIONS, is_secret
from trinitylake_ops.storage.registry import OWN_SCHEMES

#: What a variable of the environment is for; those of a storage stand on its page.
ENVIRONMENT: Mapping[str, str] = {
    "TRINITYLAKE_ROOT": "the root of the lakehouse, for the command line",
    "TRINITYLAKE_STORAGE_OPTIONS": "options of the storage for the command line and for Spark: `NAME=VALUE,NAME=VALUE`",
    "TRINITYLAKE_ALLOWED_ROOTS": "further roots that may be read, with spaces between them, for the command line",
    "TRINITYLAKE_METRICS_FILE": "the file that [metrics](../deploy/monitoring.md) of a process are written to",
    "TRINITYLAKE_METRICS_PUSH": "the address of the gateway that they are pushed to",
    "TRINITYLAKE_METRICS_JOB": "the name of the job that they are pushed under",
    "TRINITYLAKE_OTEL": "1 to tell spans and metrics by OpenTelemetry",
    "TRINITYLAKE_BRANCH": "the [branch](../operations/clones.md#branch-deployments) of a Dagster process",
}
#: Types of Dagster's configuration.
_KINDS: Mapping[str, str] = {
    "Bool": "true or false", "Float": "number", "Int": "whole number", "String": "text",
}  # fmt: skip
#: The page about the storages of a scheme.
_STORAGE_PAGES: Mapping[str, str] = {
    "abfss": "azure", "az": "azure", "dynamodb": "dynamodb", "file": "local", "gs": "gcs", "hdfs": "hdfs",
    "memory": "local", "redis": "redis", "rediss": "redis", "s3": "s3",
}  # fmt: skip
_MADE = "This page is made of the code when the site is built.\n\n"


def pages() -> dict[str, str]:
    """Return the pages of the reference by their places on the site."""
    made = {
        "operations": operations, "commands": commands, "jobs": jobs, "settings": settings, "errors": error_classes,
    }  # fmt: skip
    return {f"reference/{name}.md": make() for name, make in made.items()}


def pointers(text: str) -> str:
    """Return the section of a page that leads to all options of the commands and jobs that the page runs."""
    called = re.findall(r"^trinitylake (?:--\S+ \S+ )*([a-z-]+)", text, flags=re.MULTILINE)
    configured = re.findall(r"^```yaml title=\"(\w+)\"", text, flags=re.MULTILINE)
    jobs_of = {entry.command: job for job, entry in INDEX.items()}
    declared = dict.fromkeys([*(jobs_of[name] for name in called if name in jobs_of), *configured])
    found = [f"[`{job}`](../reference/operations.md#{job})" for job in declared]
    found += [f"[`{name}`](../reference/commands.md#{name})" for name in dict.fromkeys(called) if name not in jobs_of]
    return f"\n## All options\n\nOf operations and commands: {', '.join(found)}.\n" if found else ""


def commands() -> str:
    """Return the page of the command line: each command, with its arguments and options unless it is an operation."""
    context = trinitylake.context_class(trinitylake, info_name="trinitylake", **trinitylake.context_settings)
    generated = {entry.command: job for job, entry in INDEX.items()}
    text = "# Commands\n\n" + _MADE + _help(trinitylake) + _options(trinitylake.params, context)
    for name in trinitylake.list_commands(context):
        command = trinitylake.get_command(context, name)
        assert command is not None
        inner = click.Context(command, info_name=name, parent=context)
        usage = " ".join(command.collect_usage_pieces(inner))
        text += f"## {name}\n\n```text\ntrinitylake {name} {usage}\n```\n\n"
        if name in generated:
            job = generated[name]
            text += f"{INDEX[job].summary} [Its options](operations.md#{job}) are those of the job `{job}`, and:\n\n"
            declared = {one.name for spec in option_specs(BY_NAME[job].options) for one in (spec, *spec.members)}
            text += _options([one for one in command.params if one.name not in declared], inner)
        else:
            text += _help(command) + _options(command.params, inner)
    return text


def _help(command: click.Command) -> str:
    return blocks_of(command.help or "") + blocks_of(command.epilog or "")


def _options(params: Iterable[click.Parameter], context: click.Context) -> str:
    rows = [
        (code(", ".join(param.opts)), code(_kind(param, context)), _default(param, context), param.help)
        for param in params
        if isinstance(param, click.Option)
    ]
    return table(("option", "value", "default", "what it does"), rows) if rows else ""


def _kind(param: click.Option, context: click.Context) -> str:
    return "" if param.is_flag else param.make_metavar(context)


def _default(param: click.Option, context: click.Context) -> str:
    given = param.get_default(context)
    is_enabled = isinstance(given, str | int | float) and not isinstance(given, bool) and given != ""
    return code(given) if is_enabled else ""


def jobs() -> str:
    """Return the page of Dagster: jobs with their configuration, schedules, and settings of a code location."""
    text = (
        "# Dagster\n\n" + _MADE + "Names of jobs begin with that of their lakehouse, as in `lake_rollback`. The"
        " configuration of a run is its options, and nothing around them"
        " ([jobs and approvals](../dagster/jobs.md#operations)).\n\n## Schedules\n\n"
    )
    text += table(("schedule", "cron"), ((code(f"{name}_schedule"), code(cron)) for name, cron in CRONS.items()))
    for kind in (LakehouseSettings, ApplyLimits, BlackoutWindow, CheckLimits, TrinityLakeResource, TrinityLakeIOManager,
                 SparkResource):  # fmt: skip
        text += _settings_of(kind)
    no_limits = ApplyLimits(max_files=0, max_bytes=0, min_age=timedelta(0))
    for job in sorted(build_jobs(operations="all", limits=no_limits), key=lambda one: one.name):
        text += f"## {job.name}\n\n{job.description}\n\n"
        if any(isinstance(node, dg.OpDefinition) and node.pool for node in job.graph.node_defs):
            text += "It is in the pool of what frees something: one at a time.\n\n"
        if job.name in BY_NAME:
            text += f"Its options: [{job.name}](operations.md#{job.name}).\n\n"
            continue
        rows = [
            (code(name), _kind_of(field.config_type), _default_of_field(field), field.description)
            for name, field in job_options(job).items()
        ]
        text += table(("option", "value", "default", "what it does"), rows) if rows else "It has no options.\n\n"
    return text


def job_options(job: dg.JobDefinition) -> Mapping[str, dg.Field]:
    """Return the options of a job's one op, as Dagster's launchpad has them."""
    (op,) = job.graph.node_defs
    assert isinstance(op, dg.OpDefinition)
    options: Mapping[str, dg.Field] = getattr(op.config_schema.config_type, "fields", {})
    return options


def _kind_of(kind: ConfigType) -> str:
    """Return a type of Dagster's configuration in words."""
    if isinstance(kind, (Array, Noneable)):
        return f"{'list of' if isinstance(kind, Array) else 'null or'} {_kind_of(kind.inner_type)}"
    if isinstance(kind, ConfigEnum):
        return " or ".join(code(value) for value in kind.config_values)
    if isinstance(kind, (Selector, Shape)):
        return ("one of " if isinstance(kind, Selector) else "") + ", ".join(map(code, kind.fields))
    return _KINDS[kind.given_name or ""]


def _default_of_field(field: dg.Field) -> str:
    if field.is_required:
        return "required"
    return "null" if field.default_value is None else _said(field.default_value)


def _settings_of(kind: type[Any]) -> str:
    """Return the section of a class that holds settings: its docstring, and its fields."""
    text = f"## {kind.__name__}\n\n{prose(inspect.getdoc(kind))}\n\n"
    if issubclass(kind, BaseModel):
        return text + _fields_of_model(kind)
    rows = []
    for one in fields(kind):
        default = one.default_factory() if one.default_factory is not MISSING else one.default
        rows.append((code(one.name), code(_type(one.type)), "required" if default is MISSING else _said(default)))
    return text + table(("setting", "type", "default"), rows)


def _fields_of_model(model: type[BaseModel]) -> str:
    rows = [
        (code(name), code(_type(one.annotation)), _default_of(one), one.description or "")
        for name, one in model.model_fields.items()
    ]
    return table(("option", "type", "default", "what it does"), rows)


def _type(annotation: object) -> str:
    """Return how a type is written, without the modules of its names."""
    is_plain = isinstance(annotation, type) and not getattr(annotation, "__args__", ())
    return re.sub(r"\b(?:\w+\.)+", "", annotation.__name__ if is_plain else str(annotation))


def _default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return _said(field.get_default(call_default_factory=True, validated_data={}))


def _said(value: object) -> str:
    """Return a default in a few words, empty for nothing, and for an object that its own class describes."""
    if isinstance(value, str | int | float | bool):
        return code(value)
    if isinstance(value, timedelta):
        days = value.total_seconds() / 86_400
        return f"{days:g} day{'' if days == 1 else 's'}"
    if isinstance(value, tuple):
        return ", ".join(map(code, value))
    return code(repr(value)) if isinstance(value, Budget) else ""


def settings() -> str:
    """Return the page of settings: of a lakehouse, of storages, of the environment, of the server, of Spark."""
    text = "# Settings\n\n" + _MADE + "## Of a lakehouse\n\n"
    text += (
        "`trinitylake init` and `Lakehouse.create` set them, `Lakehouse.alter_definition` changes those that can be"
        " changed. Sizes are in bytes, ages in milliseconds.\n\n"
    )
    text += table(("setting", "default", "what it is"), _lakehouse_settings())
    text += (
        "`retention_rules`, set by `alter_definition`, keeps more: `last`, `hourly`, `daily`, `weekly`, `monthly`.\n\n"
        "## Of storages\n\nWhat they mean stands on the page of each storage. Credentials belong into the"
        " environment.\n\n"
    )
    text += table(("option", "of roots", "credential"), _storage_options())
    text += "## Of the environment\n\n" + table(("variable", "what it is"), _coded(ENVIRONMENT))
    deciding = {f"{name}://": scheme.environment for name, scheme in OWN_SCHEMES.items() if scheme.environment}
    text += table(("roots", "variables that decide where a root is, and who asks"), _listed(deciding))
    text += "## Of the server\n\n[REST catalog](../rest-catalog/run.md) shows how to set each.\n\n"
    text += "".join(
        _settings_of(kind).replace("## ", "### ", 1) for kind in (ServerSettings, DelegationSettings, Limits)
    )
    options = {"Reads by Spark": OPTIONS, "Streams of Spark": STREAM_OPTIONS, "Writes by Spark": WRITE_OPTIONS}
    for title, of in options.items():
        text += f"## {title}\n\n" + table(("option", "what it is"), _coded(of))
    text += "## Extras\n\nThe [Python guide](../python.md#extras) says what each is for.\n\n"
    return text + table(("extra", "modules that it brings"), _listed(EXTRAS))


def _coded(texts: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    return ((code(name), what) for name, what in texts.items())


def _listed(names: Mapping[str, Iterable[str]]) -> Iterator[tuple[str, str]]:
    return ((code(name), ", ".join(map(code, sorted(of)))) for name, of in names.items())


def _lakehouse_settings() -> Iterator[tuple[str, str, str]]:
    context = trinitylake.context_class(trinitylake, **trinitylake.context_settings)
    init = trinitylake.get_command(context, "init")
    assert init is not None
    known = {one.name for one in fields(LakehouseDef)}
    for param in init.params:
        if isinstance(param, click.Option) and param.name in known:
            yield code(param.name), _default(param, context), param.help or ""


def _storage_options() -> Iterator[tuple[str, str, str]]:
    schemes: dict[str, list[str]] = {}
    for name, scheme in OWN_SCHEMES.items():
        for option in scheme.options:
            schemes.setdefault(option.name, []).append(name)
    for common in COMMON_OPTIONS:
        yield code(common.name), "[all](../storages/index.md)", ""
    for option, of in sorted(schemes.items()):
        where = ", ".join(f"[`{name}://`](../storages/{_STORAGE_PAGES[name]}.md)" for name in of)
        yield code(option), where, "yes" if is_secret(option) else ""


def error_classes() -> str:
    """Return the page of errors: exit codes, and each class with what it means."""
    text = "# Errors and exit codes\n\n" + _MADE
    text += (
        "Every error of this package is a `TrinityLakeError`, with the `path` and `version` where it happened, if"
        " they are known. Programs should match its code, because messages may change. The command line prints one"
        " line, which is JSON with `--json`, and exits with the exit code of the class.\n\n"
    )
    text += table(("exit code", "what it means"), _exit_codes())
    rows = [
        (code(kind.code), code(kind.__name__), code(above), kind.exit_code, _first_lines(kind))
        for kind, above in _tree()
    ]
    return text + table(("code", "class", "base", "exit code", "meaning"), rows)


def _exit_codes() -> Iterator[tuple[str, str]]:
    """Yield what the help of the command line says about them: a code before each text, which may have more lines."""
    block = (trinitylake.epilog or "").partition("Exit codes:\n")[2]
    for numbers, what in re.findall(r"^  ([\d, ]+?)  (.*(?:\n {5,}.*)*)", block, flags=re.MULTILINE):
        yield code(numbers), what


def _tree(
    kind: type[errors.TrinityLakeError] = errors.TrinityLakeError, above: str = ""
) -> Iterator[tuple[type[errors.TrinityLakeError], str]]:
    """Yield each class with the name of the one above it, from the root down."""
    yield kind, above
    for below in kind.__subclasses__():
        yield from _tree(below, kind.__name__)


def _first_lines(kind: Callable[..., Any]) -> str:
    return prose(inspect.getdoc(kind)).partition("\n\n")[0]
