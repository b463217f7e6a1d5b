"""Concurrent creates of one file in a container by several processes and threads, with concurrent reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.azurite import AzureServer, start_azurite
from tests.servers.daemons import Daemons
from tests.servers.plugin import REPOSITORY
from trinitylake_ops.errors import FileMissingError
from trinitylake_ops.storage import Storage, open_storage
from trinitylake_ops.storage.contract.suite import is_whole

pytestmark = pytest.mark.debian_packages

N_PROCESSES, N_THREADS = 8, 4
SIZES = (0, 1 << 20, 9 << 20)
#: Maximum size of all creates of a test, which the in-memory server keeps.
SERVER_BYTES = 100 * N_PROCESSES * N_THREADS << 20


@pytest.fixture
def root(azurite: AzureServer) -> Iterator[str]:
    new_root = azurite.fresh_root(scheme="abfss")
    yield new_root
    azurite.delete_all(new_root)


def check_complete(storage: Storage, name: str, size_bytes: int) -> None:
    try:
        data = storage.read(name)
    except FileMissingError:
        return
    assert is_whole(data) if size_bytes else data == b"", f"{name} was read partially"


def race(server: AzureServer, root: str, rounds: list[tuple[str, int, int]]) -> None:
    options = server.storage_options
    plan = {
        "root": root, "options": options, "n_processes": N_PROCESSES, "rounds": rounds,
    }  # fmt: skip
    storage = open_storage(root, options)
    output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed below; a pipe could fill up
    racers = subprocess.Popen(
        [sys.executable, "-m", "tests.storage.azure_racers"],
        stdin=subprocess.PIPE, stdout=output, text=True, cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert racers.stdin is not None
    with racers, output:
        racers.stdin.write(json.dumps(plan))
        racers.stdin.close()
        while racers.poll() is None:
            for name, size_bytes, _ in rounds[:: max(1, len(rounds) // 10)]:
                check_complete(storage, name, size_bytes)
            time.sleep(0.02)
        output.seek(0)
        outcomes = json.loads(output.read() or "null")
    assert (racers.returncode, outcomes is None) == (0, False)
    for (name, size_bytes, n_threads), round_outcomes in zip(rounds, outcomes, strict=True):
        assert Counter(round_outcomes) == {"won": 1, "FileExistsAlreadyError": N_PROCESSES * n_threads - 1}, name
        check_complete(storage, name, size_bytes)
    assert sorted(info.path for info in storage.list("race/")) == sorted(name for name, _, _ in rounds)


@pytest.mark.soak
def test_concurrent_creates_in_eight_processes_have_one_winner(azurite: AzureServer, root: str) -> None:
    # Fewer threads for the largest files, which would take most of the time of a normal run.
    race(azurite, root, [(f"race/{size}", size, 1 if size == SIZES[-1] else N_THREADS) for size in SIZES])


@pytest.fixture
def separate_azurite(tmp_path: Path) -> Iterator[AzureServer]:
    """A separate Azurite, because Azurite keeps the content of rejected creates in memory."""
    daemons = Daemons(tmp_path / "log")
    try:
        yield AzureServer("azurite", start_azurite(tmp_path, daemons), tmp_path)
    finally:
        daemons.stop()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("size_bytes", SIZES)
def test_concurrent_creates_of_many_files_have_one_winner_each(separate_azurite: AzureServer, size_bytes: int) -> None:
    n_names = min(100, SERVER_BYTES // max(1, N_PROCESSES * N_THREADS * size_bytes))
    rounds = [(f"race/{number}", size_bytes, N_THREADS) for number in range(n_names)]
    race(separate_azurite, separate_azurite.fresh_root(scheme="abfss"), rounds)
