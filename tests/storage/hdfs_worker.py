"""A process that uses a root on HDFS. Run as ``python -m tests.storage.hdfs_worker create|commit ROOT NUMBER``.

``create``: for each line ``NAME BYTES START_NS`` on standard input, it waits until the monotonic clock reaches
``START_NS``, tries to create the file, and prints ``won`` or the name of the error. ``commit``: for each line ``N``, it
makes N commits, each of which creates a namespace, and prints the latest version.
"""

from __future__ import annotations

import sys
import time

from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import CommitAttemptsExhaustedError, StorageError
from trinitylake_ops.storage import open_storage


def create_all(root: str, number: int) -> None:
    storage = open_storage(root)
    storage.exists("warm-up")
    print("ready", flush=True)
    for line in sys.stdin:
        name, n_bytes, start_ns = line.split()
        data = bytes([number]) * int(n_bytes)
        while time.monotonic_ns() < int(start_ns):
            pass
        try:
            storage.create(name, data)
        except StorageError as error:
            print(type(error).__name__, flush=True)
        else:
            print("won", flush=True)


def commit_all(root: str, number: int) -> None:
    lake = Lakehouse.open(root)
    print("ready", flush=True)
    for line in sys.stdin:
        for commit in range(int(line)):
            _commit(lake, f"ns_{number}_{commit}")
        print(lake.latest_version(), flush=True)


def _commit(lake: Lakehouse, name: str) -> None:
    while True:
        try:
            with lake.transaction() as txn:
                txn.create_namespace(name)
            return
        except CommitAttemptsExhaustedError:  # each attempt conflicted with another process
            continue


if __name__ == "__main__":
    {"create": create_all, "commit": commit_all}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
