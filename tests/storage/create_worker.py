"""A process that races with others to create files. Run as ``python -m tests.storage.create_worker ROOT BODY``.

For each line ``NAME START_NS`` on standard input, it waits until the system-wide monotonic clock reaches ``START_NS``,
tries to create the file, and prints ``won`` or the class name of the error.
"""

from __future__ import annotations

import sys
import time

from trinitylake_ops.errors import StorageError
from trinitylake_ops.storage import LocalStorage


def main(root: str, body: str) -> None:
    storage = LocalStorage(root, fsync=False)
    data = body.encode() * 50_000
    print("ready", flush=True)
    for line in sys.stdin:
        name, start_ns = line.split()
        while time.monotonic_ns() < int(start_ns):
            pass
        try:
            storage.create(name, data)
        except StorageError as error:
            print(type(error).__name__, flush=True)
        else:
            print("won", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
