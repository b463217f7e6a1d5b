"""Commits on the version that the server made a moment ago: nobody asks for the latest first, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest

from tests.clock import TickingClock
from tests.server.requests import COMMIT, TABLE, TABLES, commit_of, created, new_key, properties
from tests.server.served import Served
from trinitylake_ops import Lakehouse
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.storage import process_clock
from trinitylake_ops.transaction import lakehouse as lakehouse_module

ROWS = pa.table({"id": pa.array([1, 2], pa.int64())})


@pytest.fixture(autouse=True)
def clock() -> Iterator[TickingClock]:
    """Let a commit take some milliseconds, so that its version is taken for the latest one for some requests."""
    clock = TickingClock(0.001)
    with process_clock.using(clock):
        yield clock


@pytest.fixture
def own(served: Served) -> Lakehouse:
    """The lakehouse as the server has it open, with a table of which it has committed a change."""
    assert served.application is not None
    own = served.application.warehouses.served[0].lake
    assert served.ask("POST", "/v1/main/namespaces", {"namespace": ["ns"]}).status == 200
    for name in ("t", "u"):
        assert served.ask("POST", TABLES, created(name)).status == 200
    assert served.ask("POST", TABLE, commit_of(properties(a="0"))).status == 200
    return own


@pytest.fixture
def other(own: Lakehouse) -> Lakehouse:
    """The same lakehouse, as another process has it open."""
    return Lakehouse(own.storage)


def asked(own: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with each question for the latest version by who begins a transaction."""
    questions: list[int] = []
    ask = lakehouse_module.latest_snapshot

    def counting(*arguments: Any) -> Any:
        questions.append(1)
        return ask(*arguments)

    monkeypatch.setattr(lakehouse_module, "latest_snapshot", counting)
    return questions


def test_nobody_asks_for_the_version_that_was_just_made(
    served: Served, own: Lakehouse, clock: TickingClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions, before = asked(own, monkeypatch), own.latest_version()
    for value in "12":
        assert served.ask("POST", TABLE, commit_of(properties(a=value))).status == 200
    changes = [commit_of(properties(b="1")), commit_of(properties(b="1"), name="u")]
    assert served.ask("POST", COMMIT, {"table-changes": changes}).status == 204
    assert questions == []
    assert own.latest_version() == before + 3
    clock.advance(1)
    assert served.ask("POST", TABLE, commit_of(properties(a="3"))).status == 200
    assert questions == [1], "the moment is over"


def test_what_must_be_asked_is_asked(served: Served, own: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = asked(own, monkeypatch)
    assert served.ask("POST", TABLE, commit_of(properties(a="1")), {"Idempotency-Key": new_key()}).status == 200
    assert len(questions) > 0, "a key is looked for in all versions up to the latest"


def _changes_table(other: Lakehouse) -> None:
    with catalog_at(other).load_table("ns.t").transaction() as change:
        change.set_properties(a="1", other="1")


def _appends(other: Lakehouse) -> None:
    catalog_at(other).load_table("ns.t").append(ROWS)


def _changes_another(other: Lakehouse) -> None:
    catalog_at(other).load_table("ns.u").append(ROWS)


@pytest.mark.parametrize("change", [_changes_table, _appends, _changes_another])
def test_a_commit_of_another_process_is_found(
    served: Served, own: Lakehouse, other: Lakehouse, change: Callable[[Lakehouse], None]
) -> None:
    change(other)
    before = other.latest_version()
    assert served.ask("POST", TABLE, commit_of(properties(a="0", b="2"))).status == 200
    assert other.latest_version() == before + 1
    now = catalog_at(Lakehouse(own.storage)).load_table("ns.t")
    expected = {"a": "0", "b": "2", **({"other": "1"} if change is _changes_table else {})}
    assert now.properties.items() >= expected.items()
    assert now.scan().to_arrow().num_rows == (2 if change is _appends else 0)
    just_committed = own.just_committed()
    assert just_committed is not None
    assert just_committed.version == before + 1


def test_a_requirement_that_only_the_latest_version_holds(served: Served, own: Lakehouse, other: Lakehouse) -> None:
    catalog_at(other).load_table("ns.t").append(ROWS)
    snapshot = catalog_at(other).load_table("ns.t").metadata.current_snapshot_id
    requirement = {"type": "assert-ref-snapshot-id", "ref": "main", "snapshot-id": snapshot}
    assert served.ask("POST", TABLE, commit_of(properties(a="1"), requirements=(requirement,))).status == 200
    former = {**requirement, "snapshot-id": None}
    refused = served.ask("POST", TABLE, commit_of(properties(a="2"), requirements=(former,)))
    assert refused.error == (409, "CommitFailedException")


def test_a_table_that_another_process_made_or_dropped(served: Served, own: Lakehouse, other: Lakehouse) -> None:
    catalog_at(other).create_table("ns.new", ROWS.schema)
    assert served.ask("POST", f"{TABLES}/new", commit_of(properties(a="1"), name="new")).status == 200
    catalog_at(other).drop_table("ns.t")
    assert served.ask("POST", TABLE, commit_of(properties(a="1"))).error == (404, "NoSuchTableException")


def test_a_change_that_changes_nothing_but_on_the_latest_version(
    served: Served, own: Lakehouse, other: Lakehouse
) -> None:
    _changes_table(other)
    answer = served.ask("POST", TABLE, commit_of(properties(a="0")))
    assert answer.document["metadata"]["properties"].items() >= {"a": "0", "other": "1"}.items()
    assert catalog_at(Lakehouse(own.storage)).load_table("ns.t").properties["a"] == "0"


def test_a_later_version_that_is_known_is_no_longer_taken_for_absent(
    served: Served, own: Lakehouse, other: Lakehouse
) -> None:
    assert own.just_committed() is not None
    _changes_another(other)
    assert served.ask("GET", TABLE).status == 200
    assert own.just_committed() is None


def test_changes_of_one_table_at_once_wait_for_each_other(served: Served, own: Lakehouse) -> None:
    """Without their line all but one of them would lose each time, some of them too often."""
    before = own.latest_version()

    def change(number: int) -> int:
        return served.ask("POST", TABLE, commit_of(properties(**{f"k{number}": "1"}))).status

    with ThreadPoolExecutor(12) as threads:
        assert set(threads.map(change, range(36))) == {200}
    assert own.latest_version() == before + 36
    metrics = served.ask("GET", "/metrics").body.decode()
    lost = [line for line in metrics.splitlines() if line.startswith("trinitylake_lost_attempts_total")]
    assert [line.rpartition(" ")[2] for line in lost] in ([], ["0.0"])
