"""Reads a column of an ORC file in a process of its own.

Damaged or hostile streams can end that process, but not the caller. Apache ORC believes the streams of a stripe.
Lengths, runs and dictionaries in them lead it out of its memory.
``python -m trinitylake_ops.iceberg.validation.orc_process PATH COLUMN`` is that process; it imports Arrow alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, BinaryIO, cast

if TYPE_CHECKING:
    import pyarrow as pa

#: The memory that the process may hold, the libraries in it included.
MAX_BYTES = 1 << 30
_PIECE_BYTES = 8 << 20
_LONGEST_REASON_CHARS = 200


def column_in_process(stream: IO[bytes], column: str) -> Iterator[pa.RecordBatch]:
    """Yield batches of a column of an ORC file, one for each stripe. Each has at most ``MAX_BYTES``.

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
    command = [sys.executable, "-m", __name__, path, column]
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
    import pyarrow as pa

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


def main(path: str, column: str) -> None:
    """Write the batches of a column to standard output, as a stream of Arrow."""
    # Arrow works without numpy, and to load that takes longer than all the rest.
    cast(dict[str, Any], sys.modules)["numpy"] = None
    import resource  # in this process only: not every system has it

    import pyarrow as pa
    from pyarrow import orc

    _, most_bytes = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, most_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    file = orc.ORCFile(path)
    schema = pa.schema([file.schema.field(column)])
    with pa.ipc.new_stream(sys.stdout.buffer, schema) as writer:
        for number in range(file.nstripes):
            writer.write_batch(file.read_stripe(number, columns=[column]))


if __name__ == "__main__":
    main(*sys.argv[1:])
