"""Many racers create one name at the same moment, on local disk, on a real S3 server and others: one of them wins.

Each round has a fresh name. The winner's content must stand there afterwards, and everybody else
must have been told that the file exists. Here each place, size and kind of racer has as many rounds
as fit into a test run; ``make soak`` runs all of them at full length.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.races import round_of_threads, rounds_of_processes
from tests.servers.gcs import GcsServer
from tests.servers.s3_server import S3Server
from trinitylake_ops.storage import Storage, open_storage
from trinitylake_ops.storage.contract.suite import MIB

N_ROUNDS = 100
_MOST_ROUNDS = 200

#: Rounds of a test run by place and size; what is not here has all of them.
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
PLACES = {"local": [], "s3fs": [pytest.mark.debian_packages], "obstore": [pytest.mark.debian_packages], "gcs": []}


def contests() -> Iterator[object]:
    """Place, size of the bodies, rounds: the short ones, and the full ones for ``make soak``."""
    for place, marks in PLACES.items():
        for size_bytes in SIZES_BYTES:
            n_rounds = FEWER_ROUNDS.get((place, size_bytes), N_ROUNDS)
            title = f"{place}-{size_bytes}-bytes"
            yield pytest.param(place, size_bytes, n_rounds, marks=marks, id=title)
            if n_rounds < N_ROUNDS:
                full = [*marks, pytest.mark.soak, pytest.mark.timeout(1800)]
                yield pytest.param(place, size_bytes, N_ROUNDS, marks=full, id=f"{title}-full")


def long_contests() -> Iterator[object]:
    """Place, and the rounds by size: processes take longer to start than most rounds, so they have them all."""
    for place, marks in PLACES.items():
        fewer = {size_bytes: FEWER_ROUNDS.get((place, size_bytes), N_ROUNDS) for size_bytes in SIZES_BYTES}
        yield pytest.param(place, fewer, marks=marks, id=place)
        full = [*marks, pytest.mark.soak, pytest.mark.timeout(1800)]
        yield pytest.param(place, dict.fromkeys(SIZES_BYTES, N_ROUNDS), marks=full, id=f"{place}-full")


@pytest.fixture
def storage(request: pytest.FixtureRequest, place: str, tmp_path: Path) -> Iterator[Storage]:
    """An empty root at the place that the test names: ``local``, ``gcs``, or the client for a root on radosgw."""
    if place == "local":
        yield open_storage(f"file://{tmp_path}/race/", {"fsync": "false"})
    elif place == "gcs":
        emulator: GcsServer = request.getfixturevalue("fake_gcs")
        root = emulator.fresh_root("race")
        yield open_storage(root, emulator.storage_options)
        emulator.delete_all(root)
    else:
        server: S3Server = request.getfixturevalue("radosgw")
        root = server.fresh_root("race")
        yield open_storage(root, {**server.storage_options, "client": place})
        server.delete_all(root)


@pytest.mark.parametrize(("place", "size_bytes", "n_rounds"), list(contests()))
def test_32_threads_create_one_name(storage: Storage, size_bytes: int, n_rounds: int) -> None:
    winners: list[int] = []
    # On a machine that runs them one after the other the first may win each round: then there are more.
    while len(winners) < n_rounds or (len(set(winners)) < 2 and len(winners) < _MOST_ROUNDS):
        winners.append(round_of_threads(storage, f"race/{uuid.uuid4().hex}", size_bytes))


@pytest.mark.parametrize(("place", "n_rounds"), list(long_contests()))
def test_8_processes_create_one_name(storage: Storage, n_rounds: dict[int, int]) -> None:
    sizes_bytes = [size_bytes for size_bytes, times in n_rounds.items() for _ in range(times)]
    names = {f"race/{uuid.uuid4().hex}": size_bytes for size_bytes in sizes_bytes}
    rounds_of_processes(storage, names)
