"""Run the command line in processes that are forked from the test process, so that no Python process starts."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import tempfile
import traceback
from typing import NamedTuple

from trinitylake_ops.cli import main
from trinitylake_ops.storage.cache.storage import clear_process_caches


class Result(NamedTuple):
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str


def run(*arguments: object, **environment: str) -> Result:
    """Run a command in a forked process, which need not start Python and import modules."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _run_and_exit([str(argument) for argument in arguments], environment, out.fileno(), err.fileno())
        _, status = os.waitpid(pid, 0)
        for stream in (out, err):
            stream.seek(0)
        return Result(os.waitstatus_to_exitcode(status), out.read().decode(), err.read().decode())


def _run_and_exit(arguments: list[str], environment: dict[str, str], out: int, err: int) -> None:
    code = 99
    try:
        signal.alarm(60)
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(io.FileIO(fd, "w", closefd=False), "utf-8", write_through=True) for fd in (1, 2)
        )
        os.environ.pop("TRINITYLAKE_ROOT", None)
        os.environ.update(environment)
        logging.getLogger().handlers = []
        sys.argv = ["trinitylake", *arguments]
        clear_process_caches()
        main()
    except SystemExit as exit_error:
        code = exit_error.code if isinstance(exit_error.code, int) else code
    except BaseException:  # noqa: BLE001 - the child must never continue in pytest
        traceback.print_exc()
    finally:
        os._exit(code)
