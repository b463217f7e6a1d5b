"""The reference of operations, generated from their declarations: command, job, task and options."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

import click

from scripts.docs_site.tables import code, table
from trinitylake_ops.cli.app import trinitylake
from trinitylake_ops.cli.generated import NAMED_BY_ARGUMENT, shown_in_command
from trinitylake_ops.declarations.index import INDEX
from trinitylake_ops.declarations.operation import Operation
from trinitylake_ops.declarations.planned import MODES
from trinitylake_ops.declarations.registry import ALL
from trinitylake_ops.declarations.specs import OptionSpec, option_specs

_HEAD = """# Operations

This page is generated from the code. A command, a Dagster job and an Airflow task of an operation have the same
options, with the same names, values and defaults. Job names have the name of their lakehouse as prefix, such as
`lake_rollback`.

- A **duration** is a text such as `30d`, `12h`, `90m` or `45s`.
- A **time** is ISO 8601, in UTC unless it has an offset, or milliseconds since 1970.
- Options that end in `_bytes` and `_seconds` are numbers of bytes and seconds.
- **Versions** are numbers and ranges such as `3-90,95`.
- A list is a list in a configuration, and a repeated flag in a command.
- A job or a task applies a plan with `approval`, and a command with `--apply DIGEST`, or immediately with `--yes`.

"""


def operations() -> str:
    """Return the page with all operations."""
    return _HEAD + "".join(map(_section, sorted(ALL, key=lambda operation: operation.job)))


def blocks_of(text: str) -> str:
    """Return the help of a command as Markdown. Blocks that click does not wrap become code."""
    markdown = ""
    for block in inspect.cleandoc(text).split("\n\n"):
        content = block.replace("\b", "").strip("\n")
        if "\b" in block:
            markdown += f"```text\n{content}\n```\n\n"
        elif content.startswith("Example: "):
            markdown += f"```text\n$ {content.removeprefix('Example: ')}\n```\n\n"
        elif content:
            markdown += f"{content}\n\n"
    return markdown


def _section(operation: Operation[Any]) -> str:
    entry = INDEX[operation.job]
    rows = [("job", code(operation.job)), ("task", code(f'TrinityLakeOperator(operation="{operation.job}")'))]
    if entry.command is not None:
        rows.insert(0, ("command", code(f"trinitylake {entry.command} {_usage(entry.command)}")))
    text = f"## {operation.job}\n\n{operation.description}\n\n" + table(("Interface", "Name"), rows)
    if operation.is_pooled:
        text += "It is in the pool of jobs that reclaim space, which run one at a time.\n\n"
    text += blocks_of(entry.help)
    specs = sorted(option_specs(operation.options), key=lambda spec: spec.name in MODES)
    options = [row for spec in specs for row in _rows(operation, spec)]
    if not options:
        return text + "It has no options.\n\n"
    return text + table(("Option", "On the command line", "Value", "Default", "Description"), options)


def _usage(name: str) -> str:
    command = trinitylake.commands[name]
    context = click.Context(command, info_name=name, **trinitylake.context_settings)
    return " ".join(command.collect_usage_pieces(context))


def _rows(operation: Operation[Any], spec: OptionSpec, within: str = "") -> Iterator[tuple[str, ...]]:
    """Yield the rows of an option and of its members."""
    name = f"{within}{spec.name}"
    is_part_of_flag = within == "approval." or (within != "" and spec.name in NAMED_BY_ARGUMENT)
    flag = "" if is_part_of_flag else shown_in_command(operation, spec)
    yield code(name), code(flag) if flag else "", spec.kind_text(), _default(spec, within), spec.description
    for member in spec.members:
        yield from _rows(operation, member, f"{name}.")


def _default(spec: OptionSpec, within: str) -> str:
    if spec.is_required:
        return "required"
    if spec.default is None:
        return "" if within else "null"
    return code(json.dumps(spec.default))
