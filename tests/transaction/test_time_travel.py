"""Time travel: finding the version at a time takes few reads, even among versions of other programs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import FileMissingError, VersionNotFoundError
from trinitylake_ops.format.file_names import HINT_PATH, parse_root_path, root_path
from trinitylake_ops.format.keys import COMMIT_ID, COMMIT_INFO, CREATED_AT_MILLIS, LAKEHOUSE_DEF
from trinitylake_ops.format.node_file import NodeFile, decode_node, encode_node
from trinitylake_ops.storage import MemoryStorage, MeteredStorage, StorageWrapper, drop_memory_root

pytestmark = [
    pytest.mark.local_only("reads simulated roots, which exist on no server"),
    pytest.mark.usefixtures("fixed_requests"),
]

ORDER = 3
ROOT = "memory://times/"
Times = Sequence[tuple[int, bool]]  # the creation time of each version, and whether this package wrote it


class SimulatedVersions(StorageWrapper):
    """Simulates an empty lakehouse with one version per time."""

    def __init__(self, times: Times):
        super().__init__(MemoryStorage(ROOT))
        self.times = times
        Lakehouse.create(ROOT, storage=self.inner, order=ORDER)
        self._system = decode_node(self.inner.read(root_path(0)), root_path(0)).system
        del self._system[COMMIT_INFO]  # it refers to version 0
        self.inner.write(HINT_PATH, str(len(times) - 1).encode())

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        version = parse_root_path(path)
        if version is None:
            return self.inner.read(path, offset=offset, length=length, limit_bytes=limit_bytes)
        if version >= len(self.times):
            raise FileMissingError("the version does not exist", path=path)
        time_ms, is_ours = self.times[version]
        system = {**self._system, CREATED_AT_MILLIS: str(time_ms)}
        if not is_ours:
            del system[COMMIT_ID]
        return encode_node(NodeFile(system=system), ORDER)


def version_at(times: Times, time_ms: int) -> int | None:
    """Return the version before the first one that was created after the time."""
    for version, (created_at_ms, _) in enumerate(times):
        if created_at_ms > time_ms:
            return version - 1 if version else None
    return len(times) - 1


def find_version(times: Times, time_ms: int) -> int | None:
    try:
        return Lakehouse(SimulatedVersions(times)).snapshot(timestamp=time_ms).version
    except VersionNotFoundError:
        return None
    finally:
        drop_memory_root(ROOT)


@pytest.mark.parametrize("version", [0, 1, 2, 31_007, 65_535, 65_536, 99_998, 99_999])
def test_time_travel_takes_at_most_twenty_reads_among_100_000_versions(version: int) -> None:
    storage = MeteredStorage(SimulatedVersions([(10 + 10 * number, True) for number in range(100_000)]))
    try:
        with storage.measure() as measured:
            assert Lakehouse(storage).snapshot(timestamp=10 + 10 * version + 9).version == version
        assert measured.counts.requests.keys() == {"read"}
        assert measured.counts.total <= 20
    finally:
        drop_memory_root(ROOT)


@st.composite
def histories(draw: st.DrawFn) -> Times:
    """Generate version times: those of this package increase, and those of other programs are arbitrary."""
    times: list[tuple[int, bool]] = []
    for _ in range(draw(st.integers(1, 40))):
        if draw(st.booleans()):
            times.append((max((time_ms for time_ms, _ in times), default=0) + draw(st.integers(1, 9)), True))
        else:
            times.append((draw(st.integers(1, 200)), False))
    return times


@given(histories(), st.integers(0, 210))
def test_time_travel_finds_newest_version_without_later_predecessor(times: Times, time_ms: int) -> None:
    assert find_version(times, time_ms) == version_at(times, time_ms)


def test_time_travel_handles_foreign_version_between_ours() -> None:
    """The bisection does not probe version 2, which was created after the time."""
    times = [(1, False), (2, False), (90, False), (4, False), (5, False), (6, False), (7, False), (8, False)]
    assert find_version(times, 5) == 1
    assert find_version(times, 90) == 7


def test_new_version_is_later_than_versions_of_other_programs() -> None:
    """Another program wrote a version with a far too late time, and then one with an earlier time."""
    lake = Lakehouse.create("memory://foreign-times-ahead/")
    try:
        root = decode_node(lake.storage.read(root_path(0)), root_path(0))
        start_ms = root.created_at_ms
        order = lake.snapshot().definition.order
        for version, offset_ms in ((1, 200_000), (2, 10)):
            system = {CREATED_AT_MILLIS: str(start_ms + offset_ms), LAKEHOUSE_DEF: root.system[LAKEHOUSE_DEF]}
            lake.storage.create(root_path(version), encode_node(NodeFile(system=system), order))
        assert lake.alter_definition(properties={"a": "b"}) == 3
        assert lake.snapshot().created_at_ms == start_ms + 200_001
        assert lake.snapshot(timestamp=start_ms + 60).version == 0
        assert lake.snapshot(timestamp=start_ms + 200_000).version == 2
    finally:
        drop_memory_root(lake.root)
