"""The entry point of the process: handles signals and failing streams before heavy modules are imported."""

from __future__ import annotations

import io
import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from trinitylake_ops.cli.terminal import Terminated

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_STDERR = 2


def main() -> NoReturn:
    """Run the command line, and exit the process with its exit code."""
    # During imports there are no resources to close, and some modules would swallow an exception.
    signal.signal(signal.SIGINT, _exit_on_signal)
    signal.signal(signal.SIGTERM, _exit_on_signal)
    has_output = _open_missing_streams()
    sys.stderr = io.TextIOWrapper(
        _BestEffortStderr(), encoding=sys.stderr.encoding, errors="backslashreplace", write_through=True
    )
    from trinitylake_ops.cli.app import run

    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = run(has_output=has_output)
    except Terminated:  # raised outside the try block in `run`
        code = _exit_code(signal.SIGTERM)
    except KeyboardInterrupt:
        code = _exit_code(signal.SIGINT)
    # Python waits for threads at exit. A second interrupt ends the process at once.
    signal.signal(signal.SIGINT, _exit_on_signal)
    signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        sys.stdout.flush()
    except (OSError, ValueError):  # the error was printed; at exit it would cause a different exit code and a traceback
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(code)


class _BestEffortStderr(io.BufferedIOBase):
    """Standard error that ignores write errors, because a missing reader must not fail a command."""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return _STDERR

    def isatty(self) -> bool:
        return os.isatty(_STDERR)

    def write(self, data: ReadableBuffer, /) -> int:
        remaining = memoryview(data).cast("B")
        size = len(remaining)
        while remaining:
            try:
                remaining = remaining[os.write(_STDERR, remaining) :]
            except OSError:
                break
        return size


def _exit_code(number: int) -> int:
    return 128 + number


def _exit_on_signal(number: int, _frame: FrameType | None) -> NoReturn:
    reason = b"terminated" if number == signal.SIGTERM else b"interrupted"
    _BestEffortStderr().write(b"Error: %s\n" % reason)
    os._exit(_exit_code(number))


def _terminate(_number: int, _frame: FrameType | None) -> NoReturn:
    raise Terminated


def _open_missing_streams() -> bool:
    """Redirect closed standard streams to the null device, and return whether standard output was open.

    Otherwise the next file to be opened gets the descriptor of the closed stream, and printed text goes into that file.
    """
    has_output = True
    for number, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (_STDERR, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, mode), number)
            has_output = has_output and number != 1
    if sys.stdout is None:
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = io.TextIOWrapper(io.FileIO(_STDERR, "w", closefd=False), encoding="utf-8")
    return has_output
