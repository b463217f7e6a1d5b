"""Commands generated from the declarations of operations: arguments, options, plans and results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trinitylake_ops.cli.context import (
    Number,
    Session,
    WholeNumber,
    approval_options,
    html_option,
    json_option,
    pass_session,
    print_committed,
    print_json,
    print_nothing,
    print_notice,
    print_outcome,
    print_plan,
    print_shown,
    print_table,
    shown_progress,
    target_option,
    with_flags,
    write_html_page,
)
from trinitylake_ops.cli.engine import Engine, engine_options
from trinitylake_ops.declarations.index import INDEX, RECLAIMING, load_operation
from trinitylake_ops.declarations.operation import CommandResult, Committed, Operation, OperationContext, OptionsT
from trinitylake_ops.declarations.options import JOBS_ONLY, Options
from trinitylake_ops.declarations.planned import MODES, BudgetOptions, PlanDeclaration
from trinitylake_ops.declarations.specs import OptionSpec, option_specs
from trinitylake_ops.declarations.version_rows import VersionRows
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.operations.budget import Spending
from trinitylake_ops.operations.executor import LOCAL
from trinitylake_ops.storage.options import StorageOptions

if TYPE_CHECKING:
    from trinitylake_ops.iceberg.write.rewrite import GroupWriter

_LOCAL = Engine("local", None, None, None)
#: The members of a one-of option that an argument can select: a version number, or the name of an export.
NAMED_BY_ARGUMENT = ("version", "export")


@dataclass(frozen=True, kw_only=True)
class RunningCommand(OperationContext[OptionsT]):
    """The context of an operation that runs as a command."""

    #: Shows progress on the terminal.
    show: Callable[[str, int, int], None]
    engine: Engine

    @property
    def run_id(self) -> None:
        """None, because a command is not a run of an orchestrator."""
        return

    def progress(self) -> Callable[[str, int, int], None]:
        """Return the callback that shows progress on the terminal."""
        return self.show

    def group_writer(self) -> AbstractContextManager[GroupWriter]:
        """Return a context manager that provides the engine's writer of data file groups."""
        return self.engine.group_writer()


@cache
def generated_command(job: str) -> click.Command:
    """Build the command of an operation, by the operation's name."""
    operation, entry = load_operation(job), INDEX[job]
    callback: Any = pass_session(_callback(operation))
    for decorator in reversed(list(_decorators(operation))):
        callback = decorator(callback)
    return click.command(
        entry.command,
        help=entry.help,
        short_help=entry.summary,
        epilog=RECLAIMING if entry.is_reclaiming else None,
    )(callback)


def command_specs(operation: Operation[Any]) -> Iterator[OptionSpec]:
    """Yield the options that a command has: all except the approval and the options that only jobs have."""
    for spec in option_specs(operation.options):
        if not (operation.plan_declaration is not None and spec.name in MODES) and JOBS_ONLY not in spec.marks:
            yield spec


def _decorators(operation: Operation[Any]) -> Iterator[Callable[[Any], Any]]:
    """Yield the decorators that add arguments and options to a command, in the order of its help."""
    for spec in command_specs(operation):
        yield from _parameters(spec)
    declaration, command = operation.plan_declaration, operation.command
    if command.has_target:
        yield target_option
    if command.uses_engine:
        yield engine_options
    if declaration is not None and declaration.steps is not None:
        yield click.option("--dry-run", "is_dry_run", is_flag=True, help="Print the steps of the plan.")
    if declaration is not None and declaration.direct is None:
        yield approval_options
    if command.page is not None:
        yield html_option
    yield json_option


def _parameters(spec: OptionSpec) -> Iterator[Callable[[Any], Any]]:
    shown = spec.command_line
    if spec.is_one_of:
        yield click.argument(spec.name, required=False)
        yield from (_option(member) for member in _flags_of(spec))
    elif shown.is_argument and spec.is_list:
        yield click.argument(spec.name, nargs=-1, metavar=f"[{shown.metavar}]...")
    elif shown.is_argument:
        yield click.argument(spec.name, metavar=shown.metavar or spec.name.upper())
    else:
        yield _option(spec)


def _flags_of(spec: OptionSpec) -> list[OptionSpec]:
    """Return the members of a one-of option that have flags."""
    return [member for member in spec.members if member.name not in NAMED_BY_ARGUMENT and JOBS_ONLY not in member.marks]


def _flag(spec: OptionSpec) -> str:
    return spec.command_line.flag or "--" + spec.name.replace("_", "-")


def shown_in_command(operation: Operation[Any], spec: OptionSpec) -> str:
    """Return the form of an option on the command line, or an empty string if the command does not have it.

    Args:
        operation: An operation with a command.
        spec: The option, or a member of an option.
    """
    if JOBS_ONLY in spec.marks or INDEX[operation.job].command is None:
        return ""
    if spec.name in MODES and operation.plan_declaration is not None:
        return "--apply, --yes" if spec.name == "approval" and operation.plan_declaration.direct is None else ""
    return _argument(spec) if spec.command_line.is_argument else _flag(spec)


def _option(spec: OptionSpec) -> Callable[[Any], Any]:
    help_text = spec.description + (" Repeatable." if spec.is_list else "")
    if spec.kind is bool:
        return click.option(_flag(spec), spec.name, is_flag=True, help=help_text)
    return click.option(
        _flag(spec),
        spec.name,
        type=_type(spec),
        metavar=None if spec.choices else spec.command_line.metavar or ("TEXT" if spec.kind is str else "N"),
        multiple=spec.is_list,
        default=None if spec.is_list else spec.default,
        show_default=not spec.is_list and spec.default is not None,
        help=help_text,
    )


def _type(spec: OptionSpec) -> click.ParamType[Any]:
    if spec.choices:
        return click.Choice(spec.choices)
    low, is_open, high = spec.bounds()
    if spec.kind is int:
        least = None if low is None else int(low) + is_open
        return WholeNumber(least, None if high is None else int(high))
    return Number(low, high, min_open=is_open) if spec.kind is float else click.STRING


def _callback(operation: Operation[Any]) -> Callable[..., None]:
    declaration: PlanDeclaration[Any, Any, Any] | None = operation.plan_declaration
    command = operation.command

    def run(
        session: Session,
        /,
        as_json: bool,
        digest: str | None = None,
        yes: bool = False,
        is_dry_run: bool = False,
        html: Path | None = None,
        engine: Engine = _LOCAL,
        target_options: StorageOptions | None = None,
        **values: Any,
    ) -> None:
        engine.check()
        if is_dry_run and (digest is not None or yes):
            raise click.UsageError("--dry-run cannot be combined with --apply and --yes")
        options = _checked(operation, values)
        if target_options is not None and getattr(options, "target", "") is None:
            raise click.UsageError("--target-option needs --target")
        plan, report = None, None
        with ExitStack() as scope:
            context = RunningCommand(
                lake=session.lake(),
                options=options,
                page=VersionRows(),
                executor=cache(lambda: LOCAL if engine.name == "local" else scope.enter_context(engine.executor())),
                spending=Spending(options.budget()) if isinstance(options, BudgetOptions) else Spending(),
                target_options=target_options,
                show=scope.enter_context(shown_progress(command.working)),
                engine=engine,
            )
            if declaration is None:
                assert operation.execute is not None
                report = operation.execute(context)
            elif declaration.direct is not None:
                report = declaration.direct(context)
            else:
                plan = declaration.plan(context)
                if digest is not None or yes:
                    report = declaration.execute(context, plan, digest)
        try:
            if report is not None:
                _print_result(command.result(context, plan, report), plan, as_json)
            elif is_dry_run and declaration is not None:
                _print_steps(declaration, plan, as_json)
            elif declaration is not None:
                _print_plan(declaration, plan, as_json)
        finally:
            if html is not None and command.page is not None:
                write_html_page(html, command.page(context, plan, report))

    return run


def _checked(operation: Operation[Any], values: Mapping[str, Any]) -> Any:
    """Validate a command's options. Raises UsageError, which names the flag or argument."""
    if operation.options is None:
        return None
    fields: dict[str, Any] = dict(values)
    names: dict[str, str] = {}
    for spec in command_specs(operation):
        names[spec.name] = _argument(spec) if spec.command_line.is_argument else _flag(spec)
        if spec.is_one_of:
            fields[spec.name] = _selected_member(spec, fields)
        elif spec.is_list:
            fields[spec.name] = list(fields[spec.name])
    try:
        options: Options = operation.options.model_validate(fields)
    except InvalidInputError as error:
        raise click.UsageError(with_flags(str(error), names), click.get_current_context()) from None
    return options


def _argument(spec: OptionSpec) -> str:
    return spec.command_line.metavar or spec.name.upper()


def _selected_member(spec: OptionSpec, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the selected member of a one-of option. A numeric argument is a version, any other an export."""
    argument = fields.pop(spec.name)
    members = _flags_of(spec)
    selected = {member.name: value for member in members if (value := fields.pop(member.name)) is not None}
    if (argument is not None) + len(selected) != 1:
        raise click.UsageError(f"pass either {_argument(spec)} or {' or '.join(map(_flag, members))}")
    if argument is None:
        return selected
    return {"version": int(argument)} if argument.isascii() and argument.isdecimal() else {"export": argument}


def _print_result(result: CommandResult, plan: Any, as_json: bool) -> None:
    """Print the result of an execution. Exits with 1 if something is left to do."""
    shown = result.shown
    if isinstance(shown, Committed):
        print_committed(shown.version, as_json, shown.line, has_changed=shown.has_changed, **shown.details)
    elif plan is not None:
        print_outcome(plan, shown, as_json, is_complete=result.is_complete)
    else:
        print_shown(shown, as_json)
    for notice in result.notices:
        print_notice(notice)
    if not result.is_complete:
        raise click.exceptions.Exit(1)


def _print_plan(declaration: PlanDeclaration[Any, Any, Any], plan: Any, as_json: bool) -> None:
    """Print a plan that was not applied. Exits with 1 if there are errors that it does not repair."""
    if blocked := declaration.blocked(plan):
        print_shown(plan, as_json)
        print_notice(f"Nothing was done: {blocked}")
    elif plan.is_empty and (errors := declaration.remaining_errors(plan)):
        print_shown(plan, as_json)
        print_notice(errors)
        raise click.exceptions.Exit(1)
    else:
        print_plan(plan, as_json)


def _print_steps(declaration: PlanDeclaration[Any, Any, Any], plan: Any, as_json: bool) -> None:
    """Print the steps of a plan, and what blocks it."""
    assert declaration.steps is not None
    steps = declaration.steps(plan)
    if as_json:
        print_json([dict(zip(steps.columns, row, strict=True)) for row in steps.rows])
    else:
        print_table(steps)
    if blocked := declaration.blocked(plan):
        print_notice(f"Nothing was done: {blocked}")
    elif plan.is_empty:
        print_nothing()
