"""Test what maintenance remembers: any content can be read, the file is small, and each table and step has its turn."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trinitylake_ops.format.checksums import MAX_NOTE_BYTES
from trinitylake_ops.format.file_names import MAINTENANCE_STATE_PATH
from trinitylake_ops.format.sealed_files import encode_sealed_json
from trinitylake_ops.operations.maintenance.state_file import MAX_TABLES, MaintenanceState, TablePass
from trinitylake_ops.operations.policy.document import Step
from trinitylake_ops.storage import MemoryStorage, drop_memory_root

ROOT = "memory://maintenance-state/"
FIELDS = (
    "turns_ms", "unfinished", "orphans_checked_ms", "tree_checked_version", "is_verify_unfinished", "compaction",
    "trim", "checked_version", "begun_version", "after", "waiting_since_ms", "unfinished_since_ms", "has_forgotten",
)  # fmt: skip

numbers = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=20) | st.sampled_from([step.value for step in Step]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS) | st.text(), inner, max_size=6),
    max_leaves=30,
)


@pytest.fixture
def storage() -> Any:
    drop_memory_root(ROOT)
    yield MemoryStorage(ROOT)
    drop_memory_root(ROOT)


def written(state: MaintenanceState) -> bytes:
    memory = MemoryStorage(ROOT)
    state.write(memory)
    return memory.read(MAINTENANCE_STATE_PATH)


@given(content=st.dictionaries(st.sampled_from(FIELDS), values))
@example(content={"turns_ms": {"trim": True}, "unfinished": [["trim"], "trim"]})
@example(content={"compaction": {"checked_version": -1, "after": "\ud800", "waiting_since_ms": {"a.b": 2**64}}})
def test_any_content_is_read_and_what_is_valid_is_written_again(content: dict[str, Any]) -> None:
    state = MaintenanceState.of(json.loads(json.dumps(content)))
    assert MaintenanceState.of(json.loads(written(state))) == state
    assert sorted(state.ordered(Step)) == sorted(Step)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"{}", b'{"turns_ms":{"trim":1e999}}', b"1" * 2_000_000])
def test_damaged_file_is_ignored(storage: MemoryStorage, data: bytes) -> None:
    storage.write(MAINTENANCE_STATE_PATH, data)
    assert MaintenanceState.read(storage) == MaintenanceState()


def test_file_of_newer_release_is_read(storage: MemoryStorage) -> None:
    state = MaintenanceState(tree_checked_version=7)
    content = json.loads(written(state))
    content = {name: value for name, value in content.items() if name in FIELDS} | {"new": {"entry": 1}}
    storage.write(MAINTENANCE_STATE_PATH, encode_sealed_json(content, MAINTENANCE_STATE_PATH))
    assert MaintenanceState.read(storage) == state


@pytest.mark.parametrize("character", ["x", "\N{SNOWMAN}", "\N{PILE OF POO}", "\x01"])
def test_file_is_small_whatever_the_names_are(storage: MemoryStorage, character: str) -> None:
    state = MaintenanceState()
    for tables in (state.compaction, state.trim):
        for number in range(1_000):
            name = f"{number}.{character * (number % 200)}"
            tables.wait(name, 2**43)
            tables.leave_unfinished(f"u{name}", 2**43)
        tables.advance(character * 5_000)
        tables.advance(character * 500_000)
        assert tables.after == character * 5_000
        assert tables.has_forgotten
        assert len(tables.waiting_since_ms) <= MAX_TABLES
    data = written(state)
    assert len(data) < MAX_NOTE_BYTES
    assert MaintenanceState.read(storage) == state


def test_unfinished_steps_come_first_and_the_one_that_waited_longest_at_the_beginning() -> None:
    state = MaintenanceState(turns_ms={"purge": 5, "verify": 3, "trim": 1}, unfinished={"purge", "verify", "export"})
    steps = [Step.TRIM, Step.PURGE, Step.VERIFY, Step.EXPORT]
    assert state.ordered(steps) == [Step.EXPORT, Step.VERIFY, Step.PURGE, Step.TRIM]


def turn(tables: TablePass, names: list[str], limit: int, busy: set[str], now_ms: int) -> list[str]:
    """Handle as many tables as the limit permits, as a step does, and return those that had their turn."""
    handled: list[str] = []
    for name in tables.ordered(names):
        if len(handled) == limit:
            tables.wait(name, now_ms)
            continue
        handled.append(name)
        if name in busy:
            tables.leave_unfinished(name, now_ms)
        else:
            tables.settle(name)
    tables.end_turn()
    return handled


@given(
    n_tables=st.integers(1, 40),
    limit=st.integers(1, 10),
    busy=st.sets(st.integers(0, 39)),
)
def test_each_table_has_a_turn_before_another_has_its_second(n_tables: int, limit: int, busy: set[int]) -> None:
    names = [f"n.t{number:02}" for number in range(n_tables)]
    tables = TablePass()
    handled: list[str] = []
    for now_ms in range(-(-n_tables // limit)):
        handled += turn(tables, names, limit, {names[number % n_tables] for number in busy}, now_ms)
    assert set(handled[:n_tables]) == set(names)


def test_table_that_waits_keeps_the_time_since_when() -> None:
    tables = TablePass()
    tables.wait("n.a", 1)
    tables.wait("n.a", 2)
    assert tables.waiting_since_ms == {"n.a": 1}
    tables.leave_unfinished("n.a", 3)
    tables.wait("n.b", 4)
    tables.end_turn()
    assert list(tables.waiting_since_ms) == ["n.b", "n.a"], "the table that had its turn comes last"
    tables.settle("n.b")
    assert (list(tables.waiting_since_ms), tables.is_pending) == (["n.a"], True)


def test_pass_that_forgot_tables_is_repeated() -> None:
    tables = TablePass(checked_version=3)
    tables.begin(5)
    tables.begin(6)
    assert tables.begun_version == 5
    tables.wait("n." + "x" * 600, 1)
    tables.finish()
    assert (tables.checked_version, tables.is_pending) == (3, False)
    tables.begin(7)
    tables.finish()
    assert tables.checked_version == 7
