"""A process that races with others to create files: ``python -m tests.storage.create_worker ROOT BODY``.

For each line ``NAME MOMENT`` on standard input it waits until the system-wide monotonic clock (ns) reaches the moment,
tries to create the file, and prints ``won`` or the class name of the error.
"""

from __future__ import annotations

import sys
import time

from trinitylake_ops.errors import StorageError
from trinitylake_ops.storage import LocalStorage


def main(root: str, text: str) -> None:
    storage = LocalStorage(root, fsync=False)
    data = text.encode() * 50_000
    print("ready", flush=True)
    for line in sys.stdin:
        name, moment = line.split()
        while time.monotonic_ns() < int(moment):
            pass
        try:
            storage.create(name, data)
        except StorageError as error:
            print(type(error).__name__, flush=True)
        else:
            print("won", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
