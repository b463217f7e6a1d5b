"""Edge cases of the process: signals during imports, failing streams, and long or hostile input."""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import subprocess
import sys

import pytest

from tests.cli.forked import run
from tests.cli.test_processes import PROGRAM
from tests.lakes import Lakes, lakes
from trinitylake_ops.cli.terminal import MAX_ECHO_CHARS, OneLineFormatter, printable

__all__ = ["lakes"]

# The process prints a character when it is ready for the signal: at the first slow import, or in a command.
_LOADING = """
import builtins, os, sys, time
from trinitylake_ops.cli.entry import main
real = builtins.__import__
def slow(name, *rest):
    if name == "trinitylake_ops.cli.app":
        os.write(1, b"!")
        time.sleep(60)
    return real(name, *rest)
builtins.__import__ = slow
sys.argv = ["trinitylake", "ls"]
main()
"""
_RUNNING = """
import os, sys, time
from trinitylake_ops.cli import app
from trinitylake_ops.cli.entry import main
def wait(*_):
    os.write(1, b"!")
    time.sleep(60)
app.trinitylake.invoke = wait
sys.argv = ["trinitylake", "ls"]
main()
"""


@pytest.mark.parametrize("moment", [_LOADING, _RUNNING], ids=["loading", "running"])
@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_signal_ends_process_with_one_line_and_exit_code(moment: str, number: signal.Signals, word: str) -> None:
    with subprocess.Popen([sys.executable, "-c", moment], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"!"
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err.decode()) == (128 + number, f"Error: {word}\n")


# The signal is sent at the n-th import, counted from the first import of this package.
_AT_IMPORT = """
import os, runpy, signal, sys
number, left = int(sys.argv.pop(1)), 0
has_begun = False
def hook(event, arguments):
    global left, has_begun
    if event != "import":
        return
    has_begun = has_begun or arguments[0] == "trinitylake_ops.cli.app"
    left += has_begun
    if left == number:
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(hook)
runpy.run_module("trinitylake_ops.cli", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("number", [1, 2, 20, 100, 300, 330])
def test_signal_during_any_import_shows_no_traceback(number: int) -> None:
    """This includes imports of modules that suppress exceptions."""
    process = subprocess.run(
        [sys.executable, "-c", _AT_IMPORT, str(number), "--root", "/nowhere", "log"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (process.returncode, process.stdout, process.stderr) == (130, "", "Error: interrupted\n")


@pytest.mark.parametrize("command", [("log",), ("create-namespace", "fresh"), ("--help",)], ids=" ".join)
def test_closed_output_fails_before_command_runs(lakes: Lakes, command: tuple[str, ...]) -> None:
    lake = lakes.local("lake")
    program = shlex.join([*PROGRAM, "--root", lake.root, *command])
    process = subprocess.run(["bash", "-c", f"{program} >&-"], capture_output=True, text=True, timeout=60)
    assert (process.returncode, process.stderr.count("\n")) == (1, 1), process.stderr
    assert process.stderr.startswith("Error: standard output is closed")
    assert lake.latest_version() == 0
    process = subprocess.run(["bash", "-c", f"{program} --json >&-"], capture_output=True, text=True, timeout=60)
    assert json.loads(process.stderr)["error"]["code"] == "output-failed"


def test_failing_streams_do_not_change_exit_code(lakes: Lakes) -> None:
    lake = lakes.local("lake")
    program = shlex.join([*PROGRAM, "--root", lake.root])
    expected = {
        f"{program} ls nowhere 2>/dev/full": 4,
        f"{program} ls nowhere 2>&-": 4,
        f"{program} ls nowhere 2>&- <&-": 4,
        f"{program} expire --keep-last 1 2>/dev/full": 0,
        f"{program} log --json 2>&- | head -1": 0,
    }
    for command, code in expected.items():
        process = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=60)
        assert (process.returncode, process.stderr) == (code, ""), command


def test_messages_truncate_long_input(lakes: Lakes) -> None:
    lake = lakes.local("lake")
    long_text = "x" * 5000
    calls: list[tuple[str, ...]] = [
        ("ls", "--version", long_text),
        ("ls", long_text),
        ("ls", f"{long_text} y" * 3),
        ("show", f"{long_text}.{long_text}"),
        ("show", "--timestamp", long_text),
        ("expire", "--apply", long_text, "--keep-last", "1"),
        ("log", "--limit", long_text),
        ("purge", "--grace", long_text),
        (long_text,),
        (f"--{long_text}",),
        ("export", "name", "--target", f"/{long_text}"),
        ("orphans", "--inventory", long_text),
        ("resolve-commit", "1", long_text),
    ]
    for arguments in calls:
        result = run("--root", lake.root, *arguments)
        assert result.code in (2, 3, 4, 5), result
        assert "x" * MAX_ECHO_CHARS not in result.err
        assert len(result.err) < 1000, arguments[:1]


def test_messages_escape_input() -> None:
    assert printable("a\x1b[31m\nb") == "a\\x1b[31m b"
    assert printable(f"file {'a/' * 300!r} is gone").startswith("file 'a/a/")
    assert len(printable(f"{'word ' * 100!r} it's {'y' * 300}")) < 400
    plain = "the lakehouse's own 'level' is not 'snapshot'; " * 20
    assert printable(plain) == plain
    record = logging.LogRecord("name", logging.WARNING, "path", 1, "file %r\x1b]0;x\x07", ("\u202e",), None)
    assert OneLineFormatter("%(message)s").format(record) == "file '\\u202e'\\x1b]0;x\\x07"


@pytest.mark.parametrize("version", ["-1", "+1", "-0"])
def test_signed_version_is_rejected(lakes: Lakes, version: str) -> None:
    result = run("--root", lakes.local("lake").root, "ls", "--version", version)
    assert result.code == 4
    assert f"{version!r} is not a version, export or clone" in result.err
    assert os.linesep not in result.err.rstrip(os.linesep)
