"""Reads a column of an ORC file in a process of its own.

Damaged or hostile streams can end that process, but not the caller. Apache ORC believes the streams of a stripe.
Lengths, runs and dictionaries in them lead it out of its memory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, BinaryIO, cast

import pyarrow as pa

from trinitylake_ops.tables.claims import orc_reader

_PIECE_BYTES = 8 << 20
_LONGEST_REASON_CHARS = 200


def column_in_process(stream: IO[bytes], column: str) -> Iterator[pa.RecordBatch]:
    """Yield batches of a column of an ORC file, one for each stripe. Each has at most as much as that process may hold.

    The file is copied to the local disk meanwhile. Raises ValueError for a file that cannot be read.
    """
    with tempfile.NamedTemporaryFile(prefix="trinitylake-", suffix=".orc") as copy:
        shutil.copyfileobj(stream, copy, _PIECE_BYTES)
        copy.flush()
        with _started(copy.name, column) as process:
            yield from _batches_of(process)


@contextmanager
def _started(path: str, column: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", orc_reader.__name__, path, column]
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment) as process,
    ):
        try:
            yield process
            _check_end(process, errors)
        finally:
            process.kill()


def _batches_of(process: subprocess.Popen[bytes]) -> Iterator[pa.RecordBatch]:
    try:
        with pa.ipc.open_stream(cast(BinaryIO, process.stdout)) as reader:
            yield from reader
    except (pa.ArrowException, OSError):
        if not process.wait():  # otherwise its exit says what was wrong
            raise


def _check_end(process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
    """Raise ValueError where the process did not end well."""
    code = process.wait()
    if code < 0:
        raise ValueError(f"its streams are damaged: reading them ends a process with signal {-code}")
    if code:
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines() or [f"exit code {code}"]
        raise ValueError(lines[-1][:_LONGEST_REASON_CHARS])
