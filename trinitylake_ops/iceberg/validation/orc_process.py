"""Read a column of an ORC file in a separate process, because damaged or hostile streams may crash the process.

Apache ORC trusts the streams of a stripe: their lengths, runs and dictionaries can make it access memory out of bounds.
``python -m trinitylake_ops.iceberg.validation.orc_process PATH COLUMN`` runs in this process, which imports only Arrow.
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

#: Maximum memory of the process, including its libraries.
MAX_BYTES = 1 << 30
_PIECE_BYTES = 8 << 20
_MAX_REASON_CHARS = 200


def column_in_process(stream: IO[bytes], column: str) -> Iterator[pa.RecordBatch]:
    """Yield batches of a column of an ORC file, one per stripe, of at most ``MAX_BYTES`` each.

    The file is temporarily copied to the local disk.

    Args:
        stream: The file.
        column: Name of the column.

    Raises:
        ValueError: The file cannot be read.
    """
    with tempfile.NamedTemporaryFile(prefix="trinitylake-", suffix=".orc") as copy:
        shutil.copyfileobj(stream, copy, _PIECE_BYTES)
        copy.flush()
        with _start(copy.name, column) as process:
            yield from _read_batches(process)


@contextmanager
def _start(path: str, column: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", __name__, path, column]
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment) as process,
    ):
        try:
            yield process
            _check_exit(process, errors)
        finally:
            process.kill()


def _read_batches(process: subprocess.Popen[bytes]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    try:
        with pa.ipc.open_stream(cast(BinaryIO, process.stdout)) as reader:
            yield from reader
    except (pa.ArrowException, OSError):
        if not process.wait():  # otherwise its exit status is reported
            raise


def _check_exit(process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
    """Raise ValueError if the process failed."""
    code = process.wait()
    if code < 0:
        raise ValueError(f"its streams are damaged: the process reading them ended with signal {-code}")
    if code:
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines() or [f"exit code {code}"]
        raise ValueError(lines[-1][:_MAX_REASON_CHARS])


def main(path: str, column: str) -> None:
    """Write the batches of a column to standard output, as an Arrow stream."""
    # Arrow works without numpy, whose import takes longer than everything else.
    cast(dict[str, Any], sys.modules)["numpy"] = None
    import resource  # not available on every system

    import pyarrow as pa
    from pyarrow import orc

    _, hard_limit_bytes = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, hard_limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    file = orc.ORCFile(path)
    schema = pa.schema([file.schema.field(column)])
    with pa.ipc.new_stream(sys.stdout.buffer, schema) as writer:
        for number in range(file.nstripes):
            writer.write_batch(file.read_stripe(number, columns=[column]))


if __name__ == "__main__":
    main(*sys.argv[1:])
