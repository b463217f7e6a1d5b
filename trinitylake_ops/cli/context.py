"""The common parts of commands: the lakehouse that they work on, options, and how results are printed."""

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
#: How a time is given, for the help of options.
TIME_FORMS = "ISO 8601, in UTC unless it has an offset, or milliseconds since 1970"
_NOTHING = "Nothing to do."


class Session:
    """The global options of one call."""

    def __init__(self, root: str | None, storage_options: StorageOptions):
        self._root = root
        self.storage_options = storage_options

    @property
    def root(self) -> str:
        """The root URI as it was given. Raises UsageError without one."""
        if not self._root:
            raise click.UsageError("no lakehouse: give --root URI, or set TRINITYLAKE_ROOT")
        return self._root

    def lake(self) -> Lakehouse:
        """Open the lakehouse."""
        from trinitylake_ops import Lakehouse  # help and wrong options need no Arrow

        return Lakehouse.open(self.root, self.storage_options)


pass_session = click.make_pass_decorator(Session)


def properties_of(texts: tuple[str, ...], option: str) -> dict[str, str]:
    """Parse the ``NAME=VALUE`` texts of an option.

    Args:
        texts: The texts.
        option: The flag of the option.

    Raises:
        click.UsageError: A text is not ``NAME=VALUE``, or a name occurs twice.
    """
    try:
        return parse_properties(texts, option)
    except InvalidInputError as error:
        raise click.UsageError(str(error)) from None


def storage_options_of(context: click.Context, option: click.Parameter, texts: tuple[str, ...]) -> StorageOptions:
    """Return the storage options of the environment with those of the command line on top of them.

    Runs before the command is looked up. Raises UsageError, which repeats no value: any may be a credential.
    """
    try:
        from_environment = StorageOptions.parse(os.environ.get(OPTIONS_VARIABLE, ""))
    except InvalidInputError as error:
        raise click.UsageError(f"{OPTIONS_VARIABLE}: {error}") from None
    return StorageOptions({**from_environment, **properties_of(texts, option.opts[0])})


def with_allowed_roots(options: StorageOptions, roots: tuple[str, ...]) -> StorageOptions:
    """Return storage options that allow more roots."""
    if not roots:
        return options
    return StorageOptions({**options, ALLOWED_ROOTS: " ".join((*roots, options.get(ALLOWED_ROOTS, ""))).strip()})


def target_options_of(context: click.Context, option: click.Parameter, texts: tuple[str, ...]) -> StorageOptions | None:
    """Return the options of another storage, None if none was given.

    Raises UsageError without values, as for the lakehouse's own storage.
    """
    return StorageOptions(properties_of(texts, option.opts[0])) if texts else None


def with_flags(message: str, flags: Mapping[str, str]) -> str:
    """Replace the names of options that begin a message by the flags that the user types.

    Args:
        message: A message such as ``version, export and timestamp exclude each other``.
        flags: The flag or argument of each option, by the option's name.
    """
    words = re.split(r"(\W+)", message)
    for index in range(0, len(words), 2):
        is_other_name = words[index + 2 : index + 3] == ["name"]  # "export name 'x' ..." is about a name
        if words[index] in flags and not is_other_name:
            words[index] = flags[words[index]]
        elif words[index] != "and":
            break
    return "".join(words)


def json_option(command: C) -> C:
    """Add ``--json`` to a command, as the argument ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(command)


def html_option(command: C) -> C:
    """Add ``--html`` to a command, as the argument ``html``. It is a file that looks writable at the start."""
    what = "Also write a self-contained HTML report to FILE."
    option = click.option("--html", metavar="FILE", type=click.Path(path_type=Path), callback=_page_path, help=what)
    return option(command)


def _page_path(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    if path is not None and not context.resilient_parsing:
        from trinitylake_ops.reports import check_page_path

        check_page_path(path)  # checked before a long read of the lakehouse
    return path


def page_written(path: Path, page: str) -> None:
    """Write a page and say so on standard error."""
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
        help="An option of the target's storage. Repeatable. Default: those of the lakehouse where the scheme is the"
        " same.",
    )(command)


def at_options(command: C) -> C:
    """Add ``--version`` and ``--timestamp`` to a command that reads."""
    command = click.option("--timestamp", type=Timestamp(), help=f"The newest version at that time: {TIME_FORMS}.")(
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
    """Fail for a number with underscores or with other digits than 0 to 9, which Python accepts."""
    if isinstance(value, str) and ("_" in value or not value.isascii()):
        kind.fail(f"{value!r} is not a number in the digits 0 to 9", param, ctx)


class Timestamp(click.ParamType[datetime | int]):
    """A time as ISO 8601, in UTC unless it says otherwise, or as milliseconds since the epoch."""

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
        OutputError: It cannot be written, such as on a full disk.
        BrokenPipeError: The reader is gone.
    """
    try:
        click.echo(text)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(
            f"the result cannot be written to standard output: {error.strerror}; the command has finished, do not"
            " repeat a change before you check it by: trinitylake log"
        ) from error


def print_json(value: Any, *, is_line: bool = False) -> None:
    """Print one JSON document, in ASCII, so that any terminal shows it and no name can control the terminal.

    Args:
        value: The content.
        is_line: Whether the document is printed on one line, for one of several.
    """
    write_output(json.dumps(jsonable(value), indent=None if is_line else 1))


def print_notice(text: str) -> None:
    """Print a line for people on standard error, control characters as escapes."""
    click.echo(visible(text), err=True)


def print_line(text: str) -> None:
    """Print a line for people, control characters as escapes."""
    write_output(visible(text))


def print_table(table: Table) -> None:
    """Print a table, as wide as the terminal. Without a terminal nothing is cut."""
    from rich.console import Console

    console = Console()
    write_output(table_text(table, console.width if console.is_terminal else _WIDEST_CHARS))


def print_shown(shown: Shown, as_json: bool) -> None:
    """Print a plan or report in the form asked for."""
    if as_json:
        print_json(shown.to_dict())
    else:
        print_table(shown.table())


def print_plan(plan: Plan, as_json: bool) -> None:
    """Print a plan that was not approved, and how to approve it, unless there is nothing to do."""
    print_shown(plan, as_json)
    if plan.is_empty:
        print_nothing()
    else:
        click.echo(f"Nothing was done. To do it, with the same options: --apply {plan.digest}", err=True)


def print_nothing() -> None:
    """Print that there is nothing to do, in the same words for all plans."""
    click.echo(_NOTHING, err=True)


def print_outcome(plan: Plan, report: Shown, as_json: bool, *, is_complete: bool = True) -> None:
    """Print the report of an executed plan.

    Of an empty plan the plan itself is printed, because it has the reason why there is nothing to do.
    """
    if plan.is_empty and is_complete and not as_json:
        print_plan(plan, as_json)
        return
    print_shown(report, as_json)
    if plan.is_empty and is_complete:
        print_nothing()


@contextmanager
def shown_progress(what: str | None = None) -> Iterator[Callable[[str, int, int], None]]:
    """Show progress on a terminal's standard error, with a bar for each count.

    ``what`` is shown from the start, for operations that count nothing.
    """
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bars:
        tasks: dict[str, TaskID] = {}

        def show(counted: str, done: int | None, total: int | None) -> None:
            if counted not in tasks:
                tasks[counted] = bars.add_task(counted, total=None)
            bars.update(tasks[counted], completed=done, total=total)

        if what is not None:
            show(what, None, None)
        yield show


def print_committed(version: int, as_json: bool, what: str, *, has_changed: bool = True, **details: Any) -> None:
    """Print which version an operation committed, or that there was nothing to do."""
    if as_json:
        print_json({"version": version, **details})
    elif has_changed:
        print_line(f"{what}: version {version}")
    if not has_changed:
        print_nothing()
