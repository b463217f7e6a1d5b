"""The root command, its global options, and the exit handling of all commands."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import uuid
import warnings
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import replace
from importlib import import_module
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any, cast

import click
from click.shell_completion import CompletionItem

from trinitylake_ops.cli.completion import complete_if_requested
from trinitylake_ops.cli.context import Session, storage_options_of, with_allowed_roots
from trinitylake_ops.cli.terminal import OneLineFormatter, Terminated, log_warning, printable
from trinitylake_ops.declarations.index import INDEX
from trinitylake_ops.errors import OutputError, StorageError, TrinityLakeError
from trinitylake_ops.storage import background
from trinitylake_ops.storage.options import StorageOptions, redact_assignments
from trinitylake_ops.telemetry.settings import (
    FILE_VARIABLE,
    OTEL_VARIABLE,
    PUSH_VARIABLE,
    TelemetrySettings,
    about,
    log_as_json,
)

EXIT_USAGE = 2
EXIT_STORAGE = 5
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


#: The module and the short help of each handwritten command. A module is imported when its command is called.
_HANDWRITTEN: Mapping[str, tuple[str, str]] = {
    "completion": ("completion", "Print a shell completion script."),
    "count": ("rows", "Count the rows of a table."),
    "diff": ("read", "List the differences between two versions."),
    "head": ("rows", "Print the first rows of a table."),
    "init": ("read", "Create an empty lakehouse at the root."),
    "log": ("log", "List versions, or those that changed a table, newest first."),
    "ls": ("read", "List namespaces, or the tables of one."),
    "policy": ("policy", "Show, check or set the maintenance policy."),
    "register-table": ("register", "Register existing Iceberg tables."),
    "serve": ("serve", "Serve lakehouses over the Iceberg REST protocol."),
    "show": ("read", "Show the lakehouse, a namespace or a table."),
    "status": ("status", "Show the state of the lakehouse, and what to run next."),
    "tree": ("read", "Draw the tree: levels, fill, buffers, bytes."),
}

#: The operation of each generated command.
_GENERATED: Mapping[str, str] = {entry.command: job for job, entry in INDEX.items() if entry.command is not None}

#: The short help of each command.
_COMMANDS: Mapping[str, str] = dict(
    sorted(
        [
            *((name, summary) for name, (_, summary) in _HANDWRITTEN.items()),
            *((name, INDEX[job].summary) for name, job in _GENERATED.items()),
        ]
    )
)

#: The commands by section of the help, in the order in which they are used.
_GROUPS: Mapping[str, tuple[str, ...]] = {
    "Inspect": ("status", "space", "log", "ls", "show", "head", "count", "diff", "tree"),
    "Change": (
        *("init", "create-namespace", "drop-namespace", "register-table", "relocate", "rollback", "resolve-commit"),
        *("compact", "compact-tables"),
    ),
    "Maintain": ("maintain", "policy"),
    "Reclaim space": ("trim", "expire", "undelete", "purge", "orphans"),
    "Exports": ("export", "exports", "verify-export", "restore", "prune-exports", "drop-export"),
    "Branches": ("clone", "clones", "compare", "promote", "refresh", "drop-clone"),
    "Repair": ("verify", "repair", "repair-hint", "reconcile"),
    "Serve": ("serve", "completion"),
}


class _Commands(Mapping[str, click.Command]):
    """The commands by name, each imported on first access."""

    def __getitem__(self, name: str) -> click.Command:
        if name in _GENERATED:
            from trinitylake_ops.cli.generated import generated_command

            return generated_command(_GENERATED[name])
        module, _ = _HANDWRITTEN[name]
        command: click.Command = getattr(import_module(f"trinitylake_ops.cli.{module}"), name.replace("-", "_"))
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(_COMMANDS)

    def __len__(self) -> int:
        return len(_COMMANDS)


class _Group(click.Group):
    """A group whose help and completion import no command."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, _COMMANDS))
        for title, names in _GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), _COMMANDS[name]) for name in names])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        items = [CompletionItem(name, help=text) for name, text in _COMMANDS.items() if name.startswith(incomplete)]
        return [*items, *click.Command.shell_complete(self, ctx, incomplete)]


@click.group(
    cls=_Group,
    commands=cast("MutableMapping[str, click.Command]", _Commands()),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="""\b
Examples:
  trinitylake --root /data/lake init
  export TRINITYLAKE_ROOT=/data/lake
  trinitylake log --limit 5
  trinitylake show sales.orders --version 12
  trinitylake rollback 11                       prints the plan
  trinitylake rollback 11 --apply 12-1f3a...    applies the plan if its effects are unchanged

\b
Exit codes:
  0  done
  1  verify found errors or did not finish, the hint is wrong, a repair, purge or orphan removal left something,
     a step of maintain failed, a commit was not made, or the result cannot be written to standard output
  2  invalid command or arguments
  3  conflict: an object exists already, or another writer won the race
  4  not found: no such lakehouse, version, namespace, table or export
  5  the storage failed or refused a request, or a file is corrupt
  130, 143  interrupted, terminated""",
)
@click.option(
    "--root",
    envvar="TRINITYLAKE_ROOT",
    metavar="URI",
    help="Root of the lakehouse: an absolute path, or a URI such as s3://bucket/lake. [env: TRINITYLAKE_ROOT]",
)
@click.option(
    "--storage-option",
    "storage_options",
    multiple=True,
    metavar="NAME=VALUE",
    callback=storage_options_of,
    help="A storage option, such as region=eu-central-1. Repeatable. Pass credentials in the environment"
    " (AWS_ACCESS_KEY_ID and so on), because all users of the machine can see arguments."
    " [env: TRINITYLAKE_STORAGE_OPTIONS, as NAME=VALUE,NAME=VALUE]",
)
@click.option(
    "--allow-root",
    "allowed_roots",
    multiple=True,
    metavar="URI",
    envvar="TRINITYLAKE_ALLOWED_ROOTS",
    help="Also allow access below this root, for example for registered tables. Repeatable. The content of a lakehouse"
    " never extends the allowed roots. [env: TRINITYLAKE_ALLOWED_ROOTS, separated by spaces]",
)
@click.option(
    "--metrics-file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    envvar=FILE_VARIABLE,
    help="Write metrics of this command to FILE at the end, for the textfile collector of Prometheus."
    f" [env: {FILE_VARIABLE}]",
)
@click.option(
    "--metrics-push",
    metavar="URL",
    envvar=PUSH_VARIABLE,
    help=f"Push metrics of this command to a Pushgateway at the end. [env: {PUSH_VARIABLE}]",
)
@click.option("--otel", is_flag=True, help=f"Send traces and metrics with OpenTelemetry. [env: {OTEL_VARIABLE}]")
@click.option("--log-json", is_flag=True, help="Log JSON lines to standard error, including info messages.")
@click.version_option(package_name="trinitylake-ops", prog_name="trinitylake")
@click.pass_context
def trinitylake(
    context: click.Context,
    /,
    root: str | None,
    storage_options: StorageOptions,
    allowed_roots: tuple[str, ...],
    log_json: bool,
    **telemetry_options: Any,
) -> None:
    """Inspect and operate a TrinityLake lakehouse.

    Commands that drop, roll back or reclaim space print their plan and change nothing. With --apply and the digest of
    the plan, they make the plan again and apply it if its effects are the same. The digest covers the effects of the
    plan, not the options, so pass the options that the plan was made with, or others with the same effects. With --yes
    they apply the plan without showing it. With --json a command prints one JSON document on standard output.
    """
    context.obj = Session(root, with_allowed_roots(storage_options, allowed_roots))
    _start_telemetry(context, log_json, **telemetry_options)


def _start_telemetry(
    context: click.Context, log_json: bool, metrics_file: Path | None, metrics_push: str | None, otel: bool
) -> None:
    """Run telemetry with the settings from the command line and the environment until the command ends."""
    if log_json:
        log_as_json(redact_assignments)
        context.with_resource(about(command=context.invoked_subcommand, run_id=str(uuid.uuid4())))
    environment_settings = TelemetrySettings.of_environment()
    settings = replace(
        environment_settings,
        metrics_file=metrics_file,
        push_url=metrics_push or None,
        otel=otel or environment_settings.otel,
    )
    context.call_on_close(settings.start())


def main() -> None:
    """Run the command line, and exit the process."""
    sys.exit(run())


def run(*, has_output: bool = True) -> int:
    """Run the command line, or print completions for a shell, and return the exit code.

    Args:
        has_output: Whether standard output was open at the start. If not, the command does not run, because its
            result would be lost.
    """
    if not has_output:
        message = "standard output is closed, so nothing was done; redirect it, for example to /dev/null"
        return _fail(message, OutputError.exit_code, OutputError.code)
    exit_code = complete_if_requested(trinitylake)
    return _run() if exit_code is None else exit_code


def _run() -> int:
    """Run the command line, print any error as one line on standard error, and return the exit code."""
    buffered_warnings = _buffered_warnings()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # names may contain characters that the terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    try:
        # click's `main` would end the process when the reader of the output has closed the pipe
        with trinitylake.make_context("trinitylake", sys.argv[1:]) as context:
            trinitylake.invoke(context)
        code = 0
        if sys.stdout is not None:
            sys.stdout.flush()
        background.drain()  # so that its warnings are shown
        buffered_warnings.flush()
    except click.exceptions.Exit as ended:
        buffered_warnings.flush()
        code = ended.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        code = EXIT_USAGE
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx is not None else "trinitylake"
        code = _fail(f"{error.format_message().rstrip('.')}; see {command} -h", EXIT_USAGE, "usage")
    except click.ClickException as error:
        code = _fail(error.format_message(), EXIT_USAGE, "usage")
    except (click.Abort, KeyboardInterrupt) as ended:
        is_signal = isinstance(ended, Terminated)
        name, code = ("terminated", EXIT_TERMINATED) if is_signal else ("interrupted", EXIT_INTERRUPTED)
        _fail(name, code, name)
    except BrokenPipeError:
        code = _exit_without_reader()
    except TrinityLakeError as error:
        code = _fail_with(error)
    except OSError as error:
        _mute_output()
        code = _fail(str(error), EXIT_STORAGE, StorageError.code)
    buffered_warnings.setTarget(None)  # logging flushes standard error again at exit
    return code


def _buffered_warnings() -> MemoryHandler:
    """Buffer warnings until the command succeeds. If it fails, only its one-line error is shown."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLineFormatter("%(levelname)s: %(message)s"))
    buffered_warnings = MemoryHandler(
        capacity=10_000, flushLevel=logging.CRITICAL + 1, target=handler, flushOnClose=False
    )
    logging.basicConfig(level=logging.WARNING, handlers=[buffered_warnings])
    warnings.showwarning = log_warning
    return buffered_warnings


def _exit_without_reader() -> int:
    """Return the exit code for a closed pipe, as with ``| head``, which is not an error."""
    _mute_output()
    return 0


def _mute_output() -> None:
    """Discard the buffer of standard output, because Python would fail to flush it at exit."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail_with(error: TrinityLakeError) -> int:
    """Print an error of the package, and return its exit code."""
    if isinstance(error, OutputError):
        _mute_output()
    return _fail(str(error), error.exit_code, error.code, path=error.path, version=error.version)


def _fail(message: str, exit_code: int, code: str, path: str | None = None, version: int | None = None) -> int:
    """Print an error as one line on standard error, which is JSON for a command with ``--json``.

    Args:
        message: The human-readable message.
        exit_code: The exit code of the process.
        code: The code of the error.
        path: The path of the file that the error concerns, if any.
        version: The version that the error concerns, if any.

    Returns:
        The exit code.
    """
    if "--json" in sys.argv[1:]:
        document = {"code": code, "message": printable(message), "path": path and printable(path), "version": version}
        click.echo(json.dumps({"error": document}), err=True)
    else:
        click.echo(f"Error: {printable(message)}", err=True)
    return exit_code
