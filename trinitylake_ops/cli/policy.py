"""The command that shows, checks and sets the maintenance policy."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import BinaryIO

import click

from trinitylake_ops.cli.context import (
    Session,
    json_option,
    pass_session,
    print_committed,
    print_json,
    print_line,
    print_notice,
    print_table,
    write_output,
)
from trinitylake_ops.declarations.policy_yaml import MAX_YAML_BYTES, policy_of_yaml, policy_yaml
from trinitylake_ops.errors import InvalidInputError, UnreadablePolicyError
from trinitylake_ops.operations.policy.document import DEFAULT_POLICY, MaintenancePolicy
from trinitylake_ops.operations.policy.explanation import policy_changes, policy_sentences
from trinitylake_ops.operations.policy.stored import policy_of, read_policy, set_policy, with_policy
from trinitylake_ops.operations.rendering import new_table


@click.command(short_help="Show, check or set the maintenance policy.")
@click.argument("action", type=click.Choice(["show", "check", "set"]), default="show", metavar="[show|check|set]")
@click.argument("file", metavar="[FILE]", required=False)
@click.option("--version", metavar="N|NAME", help="With show: the policy of a version, or of an export.")
@json_option
@pass_session
def policy(session: Session, action: str, file: str | None, version: str | None, as_json: bool) -> None:
    """Show the maintenance policy, check the one in FILE, or set it.

    The policy says what maintenance keeps, what it may do without approval, and when. It is part of the lakehouse and
    versioned with it. FILE is YAML or JSON, and - reads standard input.

    show prints the policy as YAML, with all fields. check prints what FILE means, and which fields would change; it
    changes nothing. set commits FILE as a new version. Sections that FILE leaves out have their defaults, except that
    rules of retention.versions that it leaves out stay as they are.

    Example: trinitylake policy set policy.yaml
    """
    if action == "show":
        if file is not None:
            raise click.UsageError("show takes no FILE; use check or set")
        _show(session, version, as_json)
        return
    if file is None:
        raise click.UsageError(f"{action} needs a FILE, or - for standard input")
    if version is not None:
        raise click.UsageError("--version is only for show")
    document = policy_of_yaml(_read_text(file))
    if action == "check":
        _check(session, document, as_json)
    else:
        _set(session, document, as_json)


def _show(session: Session, version: str | None, as_json: bool) -> None:
    stored = read_policy(session.lake(), version)
    if as_json:
        content = {"version": stored.version, "is_default": stored.is_default}
        print_json({**content, "policy": stored.policy.to_document()})
        return
    note = "the default, because none is set" if stored.is_default else "set"
    print_line(f"# The maintenance policy of version {stored.version} ({note})")
    write_output(policy_yaml(stored.policy).rstrip("\n"))


def _check(session: Session, document: MaintenancePolicy, as_json: bool) -> None:
    latest = session.lake().snapshot()
    after = policy_of(with_policy(latest.definition, document))
    try:
        before, is_readable = policy_of(latest.definition), True
    except UnreadablePolicyError:
        before, is_readable = DEFAULT_POLICY, False
    changes, sentences = policy_changes(before, after), policy_sentences(after)
    if as_json:
        rows = [dict(zip(("field", "before", "after"), change, strict=True)) for change in changes]
        print_json({"version": latest.version, "meaning": sentences, "changes": rows, "policy": after.to_document()})
    else:
        for sentence in sentences:
            print_line(sentence)
        rows_shown = [(name, *map(_value, values)) for name, *values in changes]
        title = f"Changes to version {latest.version}" if changes else f"No changes to version {latest.version}"
        print_table(new_table(title, "field", "now", "then", rows=rows_shown))
    if not is_readable:
        print_notice("The current policy cannot be read, so the changes are those to the default policy.")


def _value(value: object) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def _set(session: Session, document: MaintenancePolicy, as_json: bool) -> None:
    lake = session.lake()
    version = set_policy(lake, document)
    stored = read_policy(lake, version)
    print_committed(
        stored.version,
        as_json,
        "Set the maintenance policy",
        has_changed=version is not None,
        policy=stored.policy.to_document(),
    )


def _read_text(file: str) -> str:
    """Return the content of a file, or of standard input. Raises InvalidInputError."""
    try:
        data = _read_bounded(sys.stdin.buffer) if file == "-" else _read_file(Path(file))
        return data.decode("utf-8-sig")
    except OSError as error:
        raise InvalidInputError(f"cannot read {file!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidInputError(f"{file!r} is not UTF-8") from None


def _read_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return _read_bounded(file)


def _read_bounded(file: BinaryIO) -> bytes:
    return file.read(MAX_YAML_BYTES + 1)
