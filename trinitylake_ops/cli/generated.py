"""Commands that are generated from the declarations of operations: arguments, options, plans and results."""

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
    page_written,
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
#: The members of an option with one value that the argument itself names: a number, or a name.
NAMED_BY_ARGUMENT = ("version", "export")


@dataclass(frozen=True, kw_only=True)
class RunningCommand(OperationContext[OptionsT]):
    """An operation while it runs as a command. ``show`` shows its progress."""

    show: Callable[[str, int, int], None]
    engine: Engine

    @property
    def run_id(self) -> None:
        """None: a command is no run."""
        return

    def progress(self) -> Callable[[str, int, int], None]:
        """Return the callback that shows progress on the terminal."""
        return self.show

    def group_writer(self) -> AbstractContextManager[GroupWriter]:
        """Provide the engine's writer of groups of data files for a block."""
        return self.engine.group_writer()


@cache
def generated_command(job: str) -> click.Command:
    """Return the command of an operation, by the name of its job."""
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
    """Yield the options that a command takes by their own names: all but how it is approved, and those of jobs."""
    for spec in option_specs(operation.options):
        if not (operation.plan_declaration is not None and spec.name in MODES) and JOBS_ONLY not in spec.marks:
            yield spec


def _decorators(operation: Operation[Any]) -> Iterator[Callable[[Any], Any]]:
    """Yield what adds the arguments and options of a command, in the order of its help."""
    for spec in command_specs(operation):
        yield from _parameters(spec)
    declaration, command = operation.plan_declaration, operation.command
    if command.has_target:
        yield target_option
    if command.uses_engine:
        yield engine_options
    if declaration is not None and declaration.steps is not None:
        yield click.option("--dry-run", "is_dry_run", is_flag=True, help="Print each step of the plan.")
    if declaration is not None and declaration.direct is None:
        yield approval_options
    if command.page is not None:
        yield html_option
    yield json_option


def _parameters(spec: OptionSpec) -> Iterator[Callable[[Any], Any]]:
    shown = spec.command_line
    if spec.is_one_of:
        yield click.argument(spec.name, required=False)
        yield from (_option(one) for one in _flags_of(spec))
    elif shown.is_argument and spec.is_list:
        yield click.argument(spec.name, nargs=-1, metavar=f"[{shown.metavar}]...")
    elif shown.is_argument:
        yield click.argument(spec.name, metavar=shown.metavar or spec.name.upper())
    else:
        yield _option(spec)


def _flags_of(spec: OptionSpec) -> list[OptionSpec]:
    """Return the members of an option with one value that have flags."""
    return [one for one in spec.members if one.name not in NAMED_BY_ARGUMENT and JOBS_ONLY not in one.marks]


def _flag(spec: OptionSpec) -> str:
    return spec.command_line.flag or "--" + spec.name.replace("_", "-")


def shown_in_command(operation: Operation[Any], spec: OptionSpec) -> str:
    """Return how a command takes an option, or a member of an option; an empty text where it does not.

    Args:
        operation: The operation, which has a command.
        spec: The option.
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
            raise click.UsageError("--dry-run does nothing: leave out --apply and --yes")
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
                page_written(html, command.page(context, plan, report))

    return run


def _checked(operation: Operation[Any], values: Mapping[str, Any]) -> Any:
    """Return the options of a command. Raises UsageError, with the flag or argument that is wrong."""
    if operation.options is None:
        return None
    fields: dict[str, Any] = dict(values)
    names: dict[str, str] = {}
    for spec in command_specs(operation):
        names[spec.name] = _argument(spec) if spec.command_line.is_argument else _flag(spec)
        if spec.is_one_of:
            fields[spec.name] = _chosen(spec, fields)
        elif spec.is_list:
            fields[spec.name] = list(fields[spec.name])
    try:
        options: Options = operation.options.model_validate(fields)
    except InvalidInputError as error:
        raise click.UsageError(with_flags(str(error), names), click.get_current_context()) from None
    return options


def _argument(spec: OptionSpec) -> str:
    return spec.command_line.metavar or spec.name.upper()


def _chosen(spec: OptionSpec, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the one member that is set: of an argument, a number is a version, and another text an export."""
    named = fields.pop(spec.name)
    flags = _flags_of(spec)
    chosen = {one.name: value for one in flags if (value := fields.pop(one.name)) is not None}
    if (named is not None) + len(chosen) != 1:
        raise click.UsageError(f"give {_argument(spec)}, or else {', '.join(map(_flag, flags))}")
    if named is None:
        return chosen
    return {"version": int(named)} if named.isascii() and named.isdecimal() else {"export": named}


def _print_result(result: CommandResult, plan: Any, as_json: bool) -> None:
    """Print what an execution did. Exit with 1 if something is left to do."""
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
    """Print a plan that was not approved. Exit with 1 if it repairs nothing of what is wrong."""
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
