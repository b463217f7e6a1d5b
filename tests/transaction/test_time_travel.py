"""Finding the version at a time: few reads among many versions, also with versions of other programs."""

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

pytestmark = [pytest.mark.local_only("looks at roots that no server holds"), pytest.mark.usefixtures("fixed_requests")]

ORDER = 3
ROOT = "memory://times/"
Times = Sequence[tuple[int, bool]]  # of each version: its creation time, and whether this package wrote it


class Versions(StorageWrapper):
    """Simulates an empty lakehouse with a version for each time."""

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
            raise FileMissingError("there is no such version", path=path)
        time_ms, is_ours = self.times[version]
        system = {**self._system, CREATED_AT_MILLIS: str(time_ms)}
        if not is_ours:
            del system[COMMIT_ID]
        return encode_node(NodeFile(system=system), ORDER)


def version_at(times: Times, time_ms: int) -> int | None:
    """Return the newest version up to which no version was created after the time."""
    for version, (created_at_ms, _) in enumerate(times):
        if created_at_ms > time_ms:
            return version - 1 if version else None
    return len(times) - 1


def found_at(times: Times, time_ms: int) -> int | None:
    try:
        return Lakehouse(Versions(times)).snapshot(timestamp=time_ms).version
    except VersionNotFoundError:
        return None
    finally:
        drop_memory_root(ROOT)


@pytest.mark.parametrize("version", [0, 1, 2, 31_007, 65_535, 65_536, 99_998, 99_999])
def test_time_travel_takes_at_most_twenty_reads_among_100_000_versions(version: int) -> None:
    storage = MeteredStorage(Versions([(10 + 10 * number, True) for number in range(100_000)]))
    try:
        with storage.measure() as measured:
            assert Lakehouse(storage).snapshot(timestamp=10 + 10 * version + 9).version == version
        assert measured.counts.requests.keys() == {"read"}
        assert measured.counts.total <= 20
    finally:
        drop_memory_root(ROOT)


@st.composite
def histories(draw: st.DrawFn) -> Times:
    """Return times of versions: those of this package increase, and those of other programs are arbitrary."""
    times: list[tuple[int, bool]] = []
    for _ in range(draw(st.integers(1, 40))):
        if draw(st.booleans()):
            times.append((max((time_ms for time_ms, _ in times), default=0) + draw(st.integers(1, 9)), True))
        else:
            times.append((draw(st.integers(1, 200)), False))
    return times


@given(histories(), st.integers(0, 210))
def test_time_travel_finds_newest_version_without_later_predecessor(times: Times, time_ms: int) -> None:
    assert found_at(times, time_ms) == version_at(times, time_ms)


def test_time_travel_handles_foreign_version_between_ours() -> None:
    """No probe of the bisection shows that version 2 is too young."""
    times = [(1, False), (2, False), (90, False), (4, False), (5, False), (6, False), (7, False), (8, False)]
    assert found_at(times, 5) == 1
    assert found_at(times, 90) == 7


def test_own_version_is_later_than_versions_of_other_programs() -> None:
    """Another program wrote a version that is far too young, and then an older one."""
    lake = Lakehouse.create("memory://holes/")
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
