"""All options of all commands with invalid values: each command prints one escaped line without secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tests.cli.test_commands import Cli, cli, restore_logging
from tests.cli.test_hostile_text import is_harmless
from tests.lakes import table
from trinitylake_ops import Lakehouse
from trinitylake_ops.cli.app import trinitylake
from trinitylake_ops.cli.context import Duration, Timestamp
from trinitylake_ops.storage import drop_memory_root

__all__ = ["cli", "restore_logging"]

ROOT = "memory://values/"


@pytest.fixture(autouse=True)
def _separate_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use a separate working directory, because HTML reports are written to unusual relative paths."""
    monkeypatch.chdir(tmp_path)


SECRET = "verysecret42"
MAX_LINE_CHARS = 420
LONG_TEXT = "x" * 10_000

TEXTS = {
    "empty": "",
    "long": LONG_TEXT,
    "long-of-words": "word " * 2_000,
    "long-path": "a/" * 5_000,
    "escape": "\x1b[2J\x1b]0;pwned\x07",
    "lines": "a\r\nError: none\nDone",
    "bidi": "a\u202egpj.exe\u2066",
    "bytes": "a\udcff\udc80z",
    "dash": "-",
    "nul-like": "\u2028\u200b",
    "credentials": f"s3://user:{SECRET}@host/path",
    "parent": "../../etc/passwd",
    "percent": "%s%d{0}{x}",
}
NUMBERS = {
    "negative": "-1",
    "zero": "0",
    "huge": "9" * 30,
    "beyond-float": "1e400",
    "nan": "nan",
    "infinite": "inf",
    "other-digits": "\u0663",
    "underscore": "1_0",
    "spaces": " 1 ",
}
DURATIONS = {"no-unit": "5", "negative-days": "-1d", "huge-days": "999999999d", "huge-hours": "9" * 9 + "h", "0d": "0d"}
TIMES = {
    "year-0": "0000-01-01",
    "year-9999": "9999-12-31T23:59:59",
    "no-month": "2026-13-01",
    "negative": "-62135596800001",
}
_FEW = ("empty", "long", "escape", "bytes", "credentials", "negative")
#: The arguments that a command needs in addition to the tested option.
REQUIRED_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "create-namespace": ("fresh",),
    "diff": ("0", "1"),
    "drop-export": ("export",),
    "drop-namespace": ("ns",),
    "export": ("fresh",),
    "register-table": ("ns.fresh", "memory://values/none.json"),
    "resolve-commit": ("1", "0f0f0f0f-0f0f-4f0f-8f0f-0f0f0f0f0f0f"),
    "restore": ("export",),
    "rollback": ("0",),
    "serve": ("memory://values-none/",),  # no lakehouse exists there, so that no server starts
    "undelete": ("0",),
    "verify-export": ("export",),
}
#: Options that would start a Spark session, connect to a server, or run until they are stopped.
_EXCLUDED_OPTIONS = {("--spark-master", None), ("--spark-remote", None), ("--watch", None)}


@pytest.fixture
def lake() -> Iterator[Lakehouse]:
    drop_memory_root(ROOT)
    lakehouse = Lakehouse.create(ROOT)
    with lakehouse.transaction() as txn:
        txn.create_namespace("ns")
        txn.create_table("ns", "t", table())
    yield lakehouse
    drop_memory_root(ROOT)


def _values(parameter: click.Parameter) -> dict[str, str]:
    kind = parameter.type
    if isinstance(kind, click.types.IntParamType | click.types.FloatParamType):
        return TEXTS | NUMBERS
    if isinstance(kind, Duration) or parameter.metavar == "DURATION":
        return TEXTS | NUMBERS | DURATIONS
    if isinstance(kind, Timestamp) or parameter.metavar == "TIME":
        return TEXTS | NUMBERS | TIMES
    return TEXTS | {"negative": "-1", "huge": "9" * 30}


def _cases() -> Iterator[tuple[str, click.Parameter, dict[str, str]]]:
    """Yield commands, parameters and values. A shared parameter has all values only in its first command."""
    tested: set[tuple[str, str]] = set()
    for name, command in sorted(trinitylake.commands.items()):
        for parameter in command.params:
            if (isinstance(parameter, click.Option) and parameter.is_flag) or (
                parameter.opts[0],
                None,
            ) in _EXCLUDED_OPTIONS:
                continue
            values = _values(parameter)
            shared = (parameter.opts[0], type(parameter.type).__name__)
            yield name, parameter, {kind: values[kind] for kind in _FEW} if shared in tested else values
            tested.add(shared)


def _calls(name: str, parameter: click.Parameter, value: str) -> list[str]:
    required = list(REQUIRED_ARGUMENTS.get(name, ()))
    if isinstance(parameter, click.Option):
        return [name, *required, f"{parameter.opts[0]}={value}"]
    arguments = [param for param in trinitylake.commands[name].params if isinstance(param, click.Argument)]
    index = arguments.index(parameter)
    return [name, "--", *required[:index], value, *required[index + 1 :]]


@pytest.mark.parametrize(
    ("name", "parameter", "values"),
    [pytest.param(*case, id=f"{case[0]}-{case[1].name}") for case in _cases()],
)
def test_error_of_invalid_option_value_is_one_line(
    cli: Cli, lake: Lakehouse, name: str, parameter: click.Parameter, values: dict[str, str]
) -> None:
    for kind, value in values.items():
        result = cli(*_calls(name, parameter, value), root=lake.root)
        _check(f"{name} {parameter.opts[0]} {kind}", result.code, result.out, result.err)


def _check(case: str, code: int, out: str, err: str) -> None:
    assert code in (0, 1, 2, 3, 4, 5), (case, err)
    assert is_harmless(out), (case, out)
    assert is_harmless(err), (case, err)
    for text in ("Traceback", SECRET):
        assert text not in err, (case, err)
    assert not re.search(r"(?<!\w)b['\"]", err), (case, err)
    if code >= 2:
        assert err.startswith("Error: "), (case, err)
        assert err.count("\n") == 1, (case, err)
        assert len(err) <= MAX_LINE_CHARS, (case, len(err), err)
    assert "x" * 201 not in err, case
