"""Run the servers of the tests for benchmarks."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.servers.keeper import ENDPOINT, start
from tests.servers.kinds import KINDS


@contextmanager
def running_server(kind: str) -> Iterator[Any]:
    """Start a server of a kind, yield it, and stop it. Raise ServerStartError if it does not start."""
    with tempfile.TemporaryDirectory(prefix="trinitylake-bench-") as folder:
        daemons = start(kind, Path(folder))
        try:
            endpoint, data = (Path(folder) / ENDPOINT).read_text().split("\n")
            yield KINDS[kind].server(kind, endpoint, Path(data))
        finally:
            daemons.stop()
