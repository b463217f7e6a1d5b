"""The reference of commands, jobs, settings, errors and exit codes, generated from the code."""

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

#: Environment variables and their meaning. The pages of the storages describe their own variables.
ENVIRONMENT: Mapping[str, str] = {
    "TRINITYLAKE_ROOT": "the root of the lakehouse, for the command line",
    "TRINITYLAKE_STORAGE_OPTIONS": "options of the storage for the command line and for Spark: `NAME=VALUE,NAME=VALUE`",
    "TRINITYLAKE_ALLOWED_ROOTS": "additional roots that may be read, separated by spaces, for the command line",
    "TRINITYLAKE_METRICS_FILE": "the file to which a process writes its [metrics](../deploy/monitoring.md)",
    "TRINITYLAKE_METRICS_PUSH": "the URL of the Pushgateway to which a process pushes its metrics",
    "TRINITYLAKE_METRICS_JOB": "the job name of pushed metrics",
    "TRINITYLAKE_OTEL": "1 to emit spans and metrics with OpenTelemetry",
    "TRINITYLAKE_BRANCH": "the [branch](../operations/clones.md#branch-deployments) of a Dagster process",
}
#: Types of Dagster's configuration.
_KINDS: Mapping[str, str] = {
    "Bool": "true or false", "Float": "number", "Int": "whole number", "String": "text",
}  # fmt: skip
#: The page of each scheme.
_STORAGE_PAGES: Mapping[str, str] = {
    "abfss": "azure", "az": "azure", "dynamodb": "dynamodb", "file": "local", "gs": "gcs", "hdfs": "hdfs",
    "memory": "local", "redis": "redis", "rediss": "redis", "s3": "s3",
}  # fmt: skip
_GENERATED = "This page is generated from the code.\n\n"


def pages() -> dict[str, str]:
    """Return the pages of the reference by their paths on the site."""
    builders = {
        "operations": operations, "commands": commands, "jobs": jobs, "settings": settings, "errors": error_classes,
    }  # fmt: skip
    return {f"reference/{name}.md": build() for name, build in builders.items()}


def option_links(text: str) -> str:
    """Return a section with links to the options of all commands and jobs on a page, or an empty string."""
    called_commands = re.findall(r"^trinitylake (?:--\S+ \S+ )*([a-z-]+)", text, flags=re.MULTILINE)
    configured_jobs = re.findall(r"^```yaml title=\"(\w+)\"", text, flags=re.MULTILINE)
    jobs_of = {entry.command: job for job, entry in INDEX.items()}
    used_jobs = dict.fromkeys([*(jobs_of[name] for name in called_commands if name in jobs_of), *configured_jobs])
    links = [f"[`{job}`](../reference/operations.md#{job})" for job in used_jobs]
    links += [
        f"[`{name}`](../reference/commands.md#{name})" for name in dict.fromkeys(called_commands) if name not in jobs_of
    ]
    return f"\n## All options\n\nOptions of {', '.join(links)}.\n" if links else ""


def commands() -> str:
    """Return the page of the command line. The options of operations are on a separate page."""
    context = trinitylake.context_class(trinitylake, info_name="trinitylake", **trinitylake.context_settings)
    generated = {entry.command: job for job, entry in INDEX.items()}
    text = "# Commands\n\n" + _GENERATED + _help(trinitylake) + _options(trinitylake.params, context)
    for name in trinitylake.list_commands(context):
        command = trinitylake.get_command(context, name)
        assert command is not None
        inner = click.Context(command, info_name=name, parent=context)
        usage = " ".join(command.collect_usage_pieces(inner))
        text += f"## {name}\n\n```text\ntrinitylake {name} {usage}\n```\n\n"
        if name in generated:
            job = generated[name]
            text += f"{INDEX[job].summary} It has the [options of the operation](operations.md#{job}), and:\n\n"
            declared = {option.name for spec in option_specs(BY_NAME[job].options) for option in (spec, *spec.members)}
            text += _options([param for param in command.params if param.name not in declared], inner)
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
    return table(("Option", "Value", "Default", "Description"), rows) if rows else ""


def _kind(param: click.Option, context: click.Context) -> str:
    return "" if param.is_flag else param.make_metavar(context)


def _default(param: click.Option, context: click.Context) -> str:
    default = param.get_default(context)
    is_shown = isinstance(default, str | int | float) and not isinstance(default, bool) and default != ""
    return code(default) if is_shown else ""


def jobs() -> str:
    """Return the page of Dagster with jobs, schedules, and the settings of a code location."""
    text = (
        "# Dagster\n\n" + _GENERATED + "Job names have the name of their lakehouse as prefix, such as `lake_rollback`."
        " The configuration of a run consists of the job's options"
        " ([jobs and approvals](../dagster/jobs.md)).\n\n## Schedules\n\n"
    )
    text += table(("Schedule", "Cron"), ((code(f"{name}_schedule"), code(cron)) for name, cron in CRONS.items()))
    for kind in (LakehouseSettings, ApplyLimits, BlackoutWindow, CheckLimits, TrinityLakeResource, TrinityLakeIOManager,
                 SparkResource):  # fmt: skip
        text += _settings_of(kind)
    no_limits = ApplyLimits(max_files=0, max_bytes=0, min_age=timedelta(0))
    for job in sorted(build_jobs(operations="all", limits=no_limits), key=lambda job: job.name):
        text += f"## {job.name}\n\n{job.description}\n\n"
        if any(isinstance(node, dg.OpDefinition) and node.pool for node in job.graph.node_defs):
            text += "It is in the pool of jobs that reclaim space, which run one at a time.\n\n"
        if job.name in BY_NAME:
            text += f"[Options of {job.name}](operations.md#{job.name}).\n\n"
            continue
        rows = [
            (code(name), _kind_of(field.config_type), _default_of_field(field), field.description)
            for name, field in job_options(job).items()
        ]
        text += table(("Option", "Value", "Default", "Description"), rows) if rows else "It has no options.\n\n"
    return text


def job_options(job: dg.JobDefinition) -> Mapping[str, dg.Field]:
    """Return the options of a job's single op, as in Dagster's launchpad."""
    (op,) = job.graph.node_defs
    assert isinstance(op, dg.OpDefinition)
    options: Mapping[str, dg.Field] = getattr(op.config_schema.config_type, "fields", {})
    return options


def _kind_of(kind: ConfigType) -> str:
    """Describe a type of Dagster's configuration."""
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
    return "null" if field.default_value is None else _default_text(field.default_value)


def _settings_of(kind: type[Any]) -> str:
    """Return the section of a settings class with its docstring and its fields."""
    text = f"## {kind.__name__}\n\n{prose(inspect.getdoc(kind))}\n\n"
    if issubclass(kind, BaseModel):
        return text + _fields_of_model(kind)
    comments = field_comments(kind)
    rows = []
    for field in fields(kind):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        default_text = "required" if default is MISSING else _default_text(default)
        rows.append((code(field.name), code(_type(field.type)), default_text, comments.get(field.name, "")))
    return text + table(("Setting", "Type", "Default", "Description"), rows)


def field_comments(kind: type[Any]) -> Mapping[str, str]:
    """Return the ``#:`` comments of the fields of a dataclass by field name."""
    comments: dict[str, str] = {}
    comment: list[str] = []
    for line in inspect.getsource(kind).splitlines():
        if match := re.match(r" +#: ?(.*)", line):
            comment.append(match[1])
            continue
        if comment and (match := re.match(r" +(\w+):", line)):
            comments[match[1]] = prose(" ".join(comment))
        comment = []
    return comments


def _fields_of_model(model: type[BaseModel]) -> str:
    rows = [
        (code(name), code(_type(field.annotation)), _default_of(field), field.description or "")
        for name, field in model.model_fields.items()
    ]
    return table(("Option", "Type", "Default", "Description"), rows)


def _type(annotation: object) -> str:
    """Return a type as in source code, without module names."""
    is_plain = isinstance(annotation, type) and not getattr(annotation, "__args__", ())
    return re.sub(r"\b(?:\w+\.)+", "", annotation.__name__ if is_plain else str(annotation))


def _default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return _default_text(field.get_default(call_default_factory=True, validated_data={}))


def _default_text(value: object) -> str:
    """Return the text of a default value, or an empty string if it has no short text."""
    if isinstance(value, str | int | float | bool):
        return code(value)
    if isinstance(value, timedelta):
        days = value.total_seconds() / 86_400
        return f"{days:g} day{'' if days == 1 else 's'}"
    if isinstance(value, tuple):
        return ", ".join(map(code, value))
    return code(repr(value)) if isinstance(value, Budget) else ""


def settings() -> str:
    """Return the page with the settings of a lakehouse, storages, the environment, the server and Spark."""
    text = "# Settings\n\n" + _GENERATED + "## Lakehouse\n\n"
    text += (
        "Set them with `trinitylake init` or `Lakehouse.create`, and change them with `Lakehouse.alter_definition` if"
        " they are not fixed. Sizes are in bytes, and ages in milliseconds.\n\n"
    )
    text += table(("Setting", "Default", "Description"), _lakehouse_settings())
    text += (
        "`retention_rules`, set with `alter_definition`, keeps additional versions: `last`, `hourly`, `daily`,"
        " `weekly`, `monthly`.\n\n## Storages\n\nThe page of each storage describes its options. Set credentials in the"
        " environment.\n\n"
    )
    text += table(("Option", "Roots", "Credential"), _storage_options())
    text += "## Environment variables\n\n" + table(("Variable", "Meaning"), _meanings(ENVIRONMENT))
    variables = {f"{name}://": scheme.environment for name, scheme in OWN_SCHEMES.items() if scheme.environment}
    text += table(("Roots", "Variables that select the server or the credentials"), _name_lists(variables))
    text += "## Server\n\n[Run the server](../rest-catalog/run.md) shows how to set each.\n\n"
    text += "".join(
        _settings_of(kind).replace("## ", "### ", 1) for kind in (ServerSettings, DelegationSettings, Limits)
    )
    spark_options = {"Spark reads": OPTIONS, "Spark streams": STREAM_OPTIONS, "Spark writes": WRITE_OPTIONS}
    for title, options in spark_options.items():
        text += f"## {title}\n\n" + table(("Option", "Meaning"), _meanings(options))
    text += "## Extras\n\nThe [Python guide](../python.md#extras) describes each.\n\n"
    return text + table(("Extra", "Modules"), _name_lists(EXTRAS))


def _meanings(texts: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    return ((code(name), text) for name, text in texts.items())


def _name_lists(lists: Mapping[str, Iterable[str]]) -> Iterator[tuple[str, str]]:
    return ((code(key), ", ".join(map(code, sorted(names)))) for key, names in lists.items())


def _lakehouse_settings() -> Iterator[tuple[str, str, str]]:
    context = trinitylake.context_class(trinitylake, **trinitylake.context_settings)
    init = trinitylake.get_command(context, "init")
    assert init is not None
    settings_names = {field.name for field in fields(LakehouseDef)}
    for param in init.params:
        if isinstance(param, click.Option) and param.name in settings_names:
            yield code(param.name), _default(param, context), param.help or ""


def _storage_options() -> Iterator[tuple[str, str, str]]:
    schemes: dict[str, list[str]] = {}
    for name, scheme in OWN_SCHEMES.items():
        for option in scheme.options:
            schemes.setdefault(option.name, []).append(name)
    for common in COMMON_OPTIONS:
        yield code(common.name), "[all](../storages/index.md)", ""
    for option, names in sorted(schemes.items()):
        roots = ", ".join(f"[`{name}://`](../storages/{_STORAGE_PAGES[name]}.md)" for name in names)
        yield code(option), roots, "yes" if is_secret(option) else ""


def error_classes() -> str:
    """Return the page of errors with the exit codes and the meaning of each class."""
    text = "# Errors and exit codes\n\n" + _GENERATED
    text += (
        "Every error of this package is a `TrinityLakeError`, with the affected `path` and `version` if they"
        " are known. Match errors by code, because messages may change. The command line prints one line, which is"
        " JSON with `--json`, and exits with the exit code of the class.\n\n"
    )
    text += table(("Exit code", "Meaning"), _exit_codes())
    rows = [
        (code(error_class.code), code(error_class.__name__), code(base), error_class.exit_code, _summary(error_class))
        for error_class, base in _class_tree()
    ]
    return text + table(("Code", "Class", "Base class", "Exit code", "Meaning"), rows)


def _exit_codes() -> Iterator[tuple[str, str]]:
    """Yield the exit codes and their meanings from the help of the command line."""
    block = (trinitylake.epilog or "").partition("Exit codes:\n")[2]
    for numbers, meaning in re.findall(r"^  ([\d, ]+?)  (.*(?:\n {5,}.*)*)", block, flags=re.MULTILINE):
        yield code(numbers), meaning


def _class_tree(
    error_class: type[errors.TrinityLakeError] = errors.TrinityLakeError, base: str = ""
) -> Iterator[tuple[type[errors.TrinityLakeError], str]]:
    """Yield an error class with the name of its base class, followed by its subclasses, recursively."""
    yield error_class, base
    for subclass in error_class.__subclasses__():
        yield from _class_tree(subclass, error_class.__name__)


def _summary(documented: Callable[..., Any]) -> str:
    """Return the first paragraph of a docstring."""
    return prose(inspect.getdoc(documented)).partition("\n\n")[0]
