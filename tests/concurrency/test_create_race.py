"""Concurrent creates of one name on each kind of storage: exactly one succeeds.

Each round uses a new name. At its end, the file must have the winner's content, and all other racers must have received
"file exists". A normal test run has few rounds for each storage, size and kind of racer; ``make soak`` runs all rounds.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.races import race_processes, race_threads
from tests.servers.gcs import GcsServer
from tests.servers.s3_server import S3Server
from trinitylake_ops.storage import Storage, open_storage
from trinitylake_ops.storage.contract.suite import MIB

N_ROUNDS = 100
_MAX_ROUNDS = 200

#: Rounds in a normal test run by storage and size. Other combinations run all rounds.
FEWER_ROUNDS = {
    ("local", MIB): 10,
    ("local", 9 * MIB): 2,
    ("s3fs", 0): 6,
    ("s3fs", MIB): 2,
    ("s3fs", 9 * MIB): 1,
    ("obstore", 0): 6,
    ("obstore", MIB): 2,
    ("obstore", 9 * MIB): 1,
    ("gcs", 0): 6,
    ("gcs", MIB): 2,
    ("gcs", 9 * MIB): 1,
}

SIZES_BYTES = (0, MIB, 9 * MIB)
STORAGE_MARKS = {
    "local": [],
    "s3fs": [pytest.mark.debian_packages],
    "obstore": [pytest.mark.debian_packages],
    "gcs": [],
}


def thread_race_cases() -> Iterator[object]:
    """Yield storage, body size and number of rounds, with few rounds, and with all rounds for ``make soak``."""
    for storage_kind, marks in STORAGE_MARKS.items():
        for size_bytes in SIZES_BYTES:
            n_rounds = FEWER_ROUNDS.get((storage_kind, size_bytes), N_ROUNDS)
            case_id = f"{storage_kind}-{size_bytes}-bytes"
            if storage_kind == "local" or size_bytes < 9 * MIB:
                yield pytest.param(storage_kind, size_bytes, n_rounds, marks=marks, id=case_id)
            if n_rounds < N_ROUNDS:
                full_marks = [*marks, pytest.mark.soak, pytest.mark.timeout(1800)]
                yield pytest.param(storage_kind, size_bytes, N_ROUNDS, marks=full_marks, id=f"{case_id}-full")


def process_race_cases() -> Iterator[object]:
    """Yield storage and number of rounds by size. One case has all sizes, because starting processes takes longer."""
    for storage_kind, marks in STORAGE_MARKS.items():
        fewer_rounds = {
            size_bytes: FEWER_ROUNDS.get((storage_kind, size_bytes), N_ROUNDS) for size_bytes in SIZES_BYTES
        }
        yield pytest.param(storage_kind, fewer_rounds, marks=marks, id=storage_kind)
        full_marks = [*marks, pytest.mark.soak, pytest.mark.timeout(1800)]
        yield pytest.param(
            storage_kind, dict.fromkeys(SIZES_BYTES, N_ROUNDS), marks=full_marks, id=f"{storage_kind}-full"
        )


@pytest.fixture
def storage(request: pytest.FixtureRequest, storage_kind: str, tmp_path: Path) -> Iterator[Storage]:
    """An empty root on the storage that the test requests: ``local``, ``gcs``, or a client for radosgw."""
    if storage_kind == "local":
        yield open_storage(f"file://{tmp_path}/race/", {"fsync": "false"})
    elif storage_kind == "gcs":
        emulator: GcsServer = request.getfixturevalue("fake_gcs")
        root = emulator.fresh_root("race")
        yield open_storage(root, emulator.storage_options)
        emulator.delete_all(root)
    else:
        server: S3Server = request.getfixturevalue("radosgw")
        root = server.fresh_root("race")
        yield open_storage(root, {**server.storage_options, "client": storage_kind})
        server.delete_all(root)


@pytest.mark.parametrize(("storage_kind", "size_bytes", "n_rounds"), list(thread_race_cases()))
def test_concurrent_creates_in_32_threads_have_one_winner(storage: Storage, size_bytes: int, n_rounds: int) -> None:
    winners: list[int] = []
    # On a machine that runs racers sequentially, the first racer may win each round, so run more rounds then.
    while len(winners) < n_rounds or (len(set(winners)) < 2 and len(winners) < _MAX_ROUNDS):
        winners.append(race_threads(storage, f"race/{uuid.uuid4().hex}", size_bytes))


@pytest.mark.parametrize(("storage_kind", "rounds_by_size"), list(process_race_cases()))
def test_concurrent_creates_in_8_processes_have_one_winner(storage: Storage, rounds_by_size: dict[int, int]) -> None:
    sizes_bytes = [size_bytes for size_bytes, n_rounds in rounds_by_size.items() for _ in range(n_rounds)]
    names = {f"race/{uuid.uuid4().hex}": size_bytes for size_bytes in sizes_bytes}
    race_processes(storage, names)
