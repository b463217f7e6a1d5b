"""Code shared by commands: opening the lakehouse, parsing options, and printing results."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click

from trinitylake_ops.declarations.texts import duration_of, parse_properties, time_of
from trinitylake_ops.errors import InvalidInputError, OutputError
from trinitylake_ops.operations.rendering import Table, jsonable, table_text, visible
from trinitylake_ops.storage.options import ALLOWED_ROOTS, OPTIONS_VARIABLE, StorageOptions

if TYPE_CHECKING:
    from rich.progress import TaskID

    from trinitylake_ops import Lakehouse
    from trinitylake_ops.operations.base import Plan

C = TypeVar("C", bound=Callable[..., Any])

_WIDEST_CHARS = 10_000
#: The accepted forms of a time, for help texts.
TIME_FORMS = "ISO 8601, in UTC unless it has an offset, or milliseconds since 1970"
_NOTHING = "Nothing to do."


class Session:
    """The global options of one invocation."""

    def __init__(self, root: str | None, storage_options: StorageOptions):
        self._root = root
        self.storage_options = storage_options

    @property
    def root(self) -> str:
        """The root URI as passed by the user. Raises UsageError if there is none."""
        if not self._root:
            raise click.UsageError("no lakehouse selected; pass --root URI, or set TRINITYLAKE_ROOT")
        return self._root

    def lake(self) -> Lakehouse:
        """Open the lakehouse."""
        from trinitylake_ops import Lakehouse  # imports Arrow, which help and usage errors do not need

        return Lakehouse.open(self.root, self.storage_options)


pass_session = click.make_pass_decorator(Session)


def properties_of(texts: tuple[str, ...], option: str) -> dict[str, str]:
    """Parse the ``NAME=VALUE`` strings of an option.

    Args:
        texts: The strings.
        option: The flag of the option.

    Raises:
        click.UsageError: A string is not ``NAME=VALUE``, or a name occurs twice.
    """
    try:
        return parse_properties(texts, option)
    except InvalidInputError as error:
        raise click.UsageError(str(error)) from None


def storage_options_of(context: click.Context, option: click.Parameter, texts: tuple[str, ...]) -> StorageOptions:
    """Merge the storage options of the environment and the command line; the latter take precedence.

    Runs before the command is resolved. Raises UsageError, whose message repeats no value, because any value may be a
    credential.
    """
    try:
        from_environment = StorageOptions.parse(os.environ.get(OPTIONS_VARIABLE, ""))
    except InvalidInputError as error:
        raise click.UsageError(f"{OPTIONS_VARIABLE}: {error}") from None
    return StorageOptions({**from_environment, **properties_of(texts, option.opts[0])})


def with_allowed_roots(options: StorageOptions, roots: tuple[str, ...]) -> StorageOptions:
    """Return storage options with additional allowed roots."""
    if not roots:
        return options
    return StorageOptions({**options, ALLOWED_ROOTS: " ".join((*roots, options.get(ALLOWED_ROOTS, ""))).strip()})


def target_options_of(context: click.Context, option: click.Parameter, texts: tuple[str, ...]) -> StorageOptions | None:
    """Return the options of the target's storage, or None if none was passed.

    Raises UsageError, whose message repeats no value.
    """
    return StorageOptions(properties_of(texts, option.opts[0])) if texts else None


def with_flags(message: str, flags: Mapping[str, str]) -> str:
    """Replace option names at the start of a message with the flags that the user types.

    Args:
        message: A message such as ``version, export and timestamp exclude each other``.
        flags: The flag or argument of each option, by the option's name.
    """
    words = re.split(r"(\W+)", message)
    for index in range(0, len(words), 2):
        is_other_name = words[index + 2 : index + 3] == ["name"]  # as in "export name 'x' is too long"
        if words[index] in flags and not is_other_name:
            words[index] = flags[words[index]]
        elif words[index] != "and":
            break
    return "".join(words)


def json_option(command: C) -> C:
    """Add ``--json`` to a command, as the argument ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(command)


def html_option(command: C) -> C:
    """Add ``--html`` to a command, as the argument ``html``, and check early that the file can be written."""
    help_text = "Also write a self-contained HTML report to FILE."
    file = click.Path(path_type=Path)
    return click.option("--html", metavar="FILE", type=file, callback=_page_path, help=help_text)(command)


def _page_path(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    if path is not None and not context.resilient_parsing:
        from trinitylake_ops.reports import check_page_path

        check_page_path(path)  # before a long read of the lakehouse
    return path


def write_html_page(path: Path, page: str) -> None:
    """Write an HTML report, and print its path on standard error."""
    from trinitylake_ops.reports import write_page

    write_page(path, page)
    click.echo(f"Page: {visible(str(path))}", err=True)


def target_option(command: C) -> C:
    """Add ``--target-option`` to a command that opens another lakehouse."""
    return click.option(
        "--target-option",
        "target_options",
        multiple=True,
        metavar="NAME=VALUE",
        callback=target_options_of,
        help="A storage option of the target. Repeatable. Default: those of the lakehouse, if the scheme is the same.",
    )(command)


def at_options(command: C) -> C:
    """Add ``--version`` and ``--timestamp`` to a command that reads."""
    command = click.option("--timestamp", type=Timestamp(), help=f"The newest version at this time: {TIME_FORMS}.")(
        command
    )
    return click.option("--version", metavar="N|NAME", help="A version, or the name of an export.")(command)


def approval_options(command: C) -> C:
    """Add ``--apply`` and ``--yes`` to a command that has a plan."""
    command = click.option("--yes", is_flag=True, help="Apply without showing the plan.")(command)
    return click.option("--apply", "digest", metavar="DIGEST", help="Apply the plan if it has this digest.")(command)


class WholeNumber(click.IntRange):
    """A whole number within a range."""

    name = "whole number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        _check_digits(self, value, param, ctx)
        return super().convert(value, param, ctx)


class Number(click.FloatRange):
    """A finite number within a range."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        _check_digits(self, value, param, ctx)
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):  # nan passes any range check
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


def _check_digits(
    kind: click.ParamType[Any], value: Any, param: click.Parameter | None, ctx: click.Context | None
) -> None:
    """Reject underscores and digits other than 0 to 9, which Python accepts."""
    if isinstance(value, str) and ("_" in value or not value.isascii()):
        kind.fail(f"{value!r} is not a number; use the digits 0 to 9", param, ctx)


class Timestamp(click.ParamType[datetime | int]):
    """A time in ISO 8601, in UTC unless it has an offset, or in milliseconds since the epoch."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime | int:
        if isinstance(value, datetime | int):
            return value
        try:
            return time_of(value)
        except InvalidInputError as error:
            self.fail(str(error), param, ctx)


class Duration(click.ParamType[timedelta]):
    """A duration such as 30d, 12h, 90m or 45s."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        if isinstance(value, timedelta):
            return value
        try:
            return duration_of(value)
        except InvalidInputError as error:
            self.fail(str(error), param, ctx)


class Shown(Protocol):
    """A plan or report."""

    def to_dict(self) -> dict[str, Any]: ...

    def table(self) -> Table: ...


def write_output(text: str) -> None:
    """Write a line of a result to standard output.

    Raises:
        OutputError: The line cannot be written, for example because the disk is full.
        BrokenPipeError: The reader closed the pipe.
    """
    try:
        click.echo(text)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(
            f"cannot write the result to standard output: {error.strerror}; the command itself has finished, so check"
            " its effects with 'trinitylake log' before you repeat it"
        ) from error


def print_json(value: Any, *, is_line: bool = False) -> None:
    """Print one JSON document in ASCII, so that names cannot contain terminal control sequences.

    Args:
        value: The content.
        is_line: Whether to print the document on one line, as one of several.
    """
    write_output(json.dumps(jsonable(value), indent=None if is_line else 1))


def print_notice(text: str) -> None:
    """Print a human-readable line on standard error, with control characters escaped."""
    click.echo(visible(text), err=True)


def print_line(text: str) -> None:
    """Print a human-readable line, with control characters escaped."""
    write_output(visible(text))


def print_table(table: Table) -> None:
    """Print a table that fits the width of the terminal. Without a terminal, nothing is truncated."""
    from rich.console import Console

    console = Console()
    write_output(table_text(table, console.width if console.is_terminal else _WIDEST_CHARS))


def print_shown(shown: Shown, as_json: bool) -> None:
    """Print a plan or report, as JSON or as a table."""
    if as_json:
        print_json(shown.to_dict())
    else:
        print_table(shown.table())


def print_plan(plan: Plan, as_json: bool) -> None:
    """Print a plan that was not applied, and how to apply it unless it is empty."""
    print_shown(plan, as_json)
    if plan.is_empty:
        print_nothing()
    else:
        click.echo(f"Nothing was done. To apply the plan, repeat the command with: --apply {plan.digest}", err=True)


def print_nothing() -> None:
    """Print that there is nothing to do, with the same text for all plans."""
    click.echo(_NOTHING, err=True)


def print_outcome(plan: Plan, report: Shown, as_json: bool, *, is_complete: bool = True) -> None:
    """Print the report of an executed plan, or an empty plan itself, because it contains the reason.

    Args:
        plan: The plan.
        report: The execution report.
        as_json: Whether to print JSON.
        is_complete: Whether nothing is left to do after the execution.
    """
    if plan.is_empty and is_complete and not as_json:
        print_plan(plan, as_json)
        return
    print_shown(report, as_json)
    if plan.is_empty and is_complete:
        print_nothing()


@contextmanager
def shown_progress(text: str | None = None) -> Iterator[Callable[[str, int, int], None]]:
    """Show progress on standard error if it is a terminal, with one bar for each kind of counted items.

    Args:
        text: The text to show from the start, for operations that count nothing.
    """
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bars:
        tasks: dict[str, TaskID] = {}

        def show(counted: str, done: int | None, total: int | None) -> None:
            if counted not in tasks:
                tasks[counted] = bars.add_task(counted, total=None)
            bars.update(tasks[counted], completed=done, total=total)

        if text is not None:
            show(text, None, None)
        yield show


def print_committed(version: int, as_json: bool, text: str, *, has_changed: bool = True, **details: Any) -> None:
    """Print the version that an operation committed, or that there was nothing to do.

    Args:
        version: The committed version.
        as_json: Whether to print JSON.
        text: A description of what was done.
        has_changed: Whether a version was committed.
        **details: Additional fields of the JSON document.
    """
    if as_json:
        print_json({"version": version, **details})
    elif has_changed:
        print_line(f"{text}: version {version}")
    if not has_changed:
        print_nothing()
