"""The process that reads a column of an ORC file: ``python -m trinitylake_ops.tables.claims.orc_reader PATH COLUMN``.

It imports Arrow alone.
"""

from __future__ import annotations

import sys
from typing import Any, cast

#: The memory that the process may hold, the libraries in it included.
MAX_BYTES = 1 << 30


def main(path: str, column: str) -> None:
    """Write the batches of a column to standard output, as a stream of Arrow."""
    # Arrow works without numpy, and loading it takes longer than all the rest.
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
