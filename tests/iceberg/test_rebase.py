"""Staged tables are rebased onto newer table versions. Changes of the same data conflict."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.table.snapshots import Operation

from tests.lakes import Lakes, check_lake
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import CommitConflictError, InvalidInputError
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.write.arrow import stage_arrow
from trinitylake_ops.iceberg.write.presence import STAGED_AS, Presence, presence, undone_by
from trinitylake_ops.iceberg.write.publication import Publication, publication_id, publish_once
from trinitylake_ops.iceberg.write.replacement import TableRead
from trinitylake_ops.iceberg.write.staged_table import StagedTable
from trinitylake_ops.iceberg.write.staging import Mode
from trinitylake_ops.storage import open_storage

TABLE = ("ns", "t")


@pytest.fixture
def local_lake(lakes: Lakes) -> Lakehouse:
    return lakes.local()


def month(
    lake: Lakehouse, number: int, n: int = 1, *, mode: Mode = "replace_partitions", **options: object
) -> StagedTable:
    """Stage a month of one row."""
    rows = pa.table({"month": pa.array([number]), "n": [n], **{name: [value] for name, value in options.items()}})
    partitions = [{"month": number}] if mode == "replace_partitions" else None
    return stage_arrow(lake, rows, *TABLE, mode=mode, partition_by=["month"], partitions=partitions)


def publish(lake: Lakehouse, *staged: StagedTable, run: str = "", **options: object) -> Publication:
    return publish_once(lake, staged, publication_id(run or staged[0].metadata_location), **options)  # type: ignore[arg-type]


def rows(lake: Lakehouse) -> dict[int, list[int]]:
    """Return the values of each month, and check that manifests have no duplicates."""
    table = catalog_at(lake).load_table(TABLE)
    files = [task.file.file_path for task in table.scan().plan_files()]
    assert len(files) == len(set(files))
    values_by_month: dict[int, list[int]] = {}
    for row in table.scan().to_arrow().to_pylist():
        values_by_month.setdefault(row["month"], []).append(row["n"])
    return {number: sorted(values_by_month[number]) for number in sorted(values_by_month)}


def test_appends_and_replacements_of_other_partitions_are_rebased(local_lake: Lakehouse) -> None:
    publish(local_lake, month(local_lake, 1))
    publish(local_lake, month(local_lake, 1, mode="append"))
    staged = [
        month(local_lake, 1, 10),
        month(local_lake, 2, 20),
        month(local_lake, 2, 21, mode="append"),
        month(local_lake, 3, 30),
    ]
    publications = [publish(local_lake, table) for table in staged]
    assert [publication.version for publication in publications] == [3, 4, 5, 6]
    assert rows(local_lake) == {1: [10], 2: [20, 21], 3: [30]}
    table = catalog_at(local_lake).load_table(TABLE)
    summary = table.metadata.snapshots[-1].summary
    assert summary is not None and (summary.operation, summary["total-records"]) == (Operation.APPEND, "4")
    assert summary[STAGED_AS] == staged[-1].metadata_location
    numbers = [snapshot.sequence_number for snapshot in table.metadata.snapshots]
    assert numbers == sorted(numbers)
    (published,) = publications[-1].tables
    assert (published.base_version, published.row_count, published.added_rows) == (5, 4, 1)
    assert operations.verify(local_lake).is_clean
    check_lake(local_lake)


def test_concurrent_publication_is_preserved(local_lake: Lakehouse) -> None:
    publish(local_lake, month(local_lake, 1))

    def batches() -> Iterator[pa.RecordBatch]:
        yield rows_of_two.to_batches()[0]
        publish(local_lake, month(local_lake, 3))

    rows_of_two = pa.table({"month": pa.array([2]), "n": [2]})
    reader = pa.RecordBatchReader.from_batches(rows_of_two.schema, batches())
    publish(local_lake, stage_arrow(local_lake, reader, *TABLE, mode="replace_partitions", partitions=[{"month": 2}]))
    assert rows(local_lake) == {1: [1], 2: [2], 3: [1]}


def test_concurrent_creations_of_a_table_are_merged(local_lake: Lakehouse) -> None:
    """Several writers stage the first partitions of a table concurrently, and each of them creates the table."""
    staged = [month(local_lake, number) for number in (1, 2)] + [month(local_lake, 2, 5, mode="append")]
    for staged_table in staged:
        publish(local_lake, staged_table)
    assert rows(local_lake) == {1: [1], 2: [1, 5]}
    assert operations.verify(local_lake).is_clean
    other = [stage_arrow(local_lake, pa.table({"a": [1], "b": [2]}), "ns", "other", mode="append") for _ in range(2)]
    reordered = stage_arrow(local_lake, pa.table({"b": [1], "a": [2]}), "ns", "other", mode="append")
    for staged_table in other:
        publish(local_lake, staged_table)
    with pytest.raises(CommitConflictError, match=r"ns\.other"):
        publish(local_lake, reordered)


def test_conflict_names_the_changed_partition(local_lake: Lakehouse) -> None:
    publish(local_lake, month(local_lake, 1))
    message = (
        r"ns\.t was staged on version 1 and since then other writers changed the data that it replaces \(month=2\);"
        " stage it again"
    )
    for mode in ("replace_partitions", "append"):
        ours, other = month(local_lake, 2, 2), month(local_lake, 2, 3, mode=mode)  # type: ignore[arg-type]
        publish(local_lake, other)
        with pytest.raises(CommitConflictError, match=message):
            publish(local_lake, ours)
        message = message.replace("version 1", "version 2")
    replacement = stage_arrow(local_lake, pa.table({"month": [1], "n": [9]}), *TABLE, mode="replace_table")
    empty = [
        stage_arrow(
            local_lake,
            pa.table({"month": [7], "n": [9]}).slice(1),
            *TABLE,
            mode="replace_partitions",
            partitions=[{"month": 7}],
        )
    ]
    publish(local_lake, month(local_lake, 7))
    for staged_table in (replacement, *empty):
        with pytest.raises(CommitConflictError, match="month=7"):
            publish(local_lake, staged_table)


def test_staged_files_are_not_added_twice(local_lake: Lakehouse) -> None:
    publish(local_lake, month(local_lake, 1))
    staged = month(local_lake, 2, 2, mode="append")
    publish(local_lake, month(local_lake, 3))
    assert publish(local_lake, staged).version == 3
    publish(local_lake, month(local_lake, 4))
    with pytest.raises(CommitConflictError):
        publish(local_lake, staged, run="another")
    assert rows(local_lake) == {1: [1], 2: [2], 3: [1], 4: [1]}
    new = stage_arrow(local_lake, pa.table({"n": [1]}), "ns", "new", mode="append")
    publish(local_lake, new)
    publish(local_lake, stage_arrow(local_lake, pa.table({"n": [2]}), "ns", "new", mode="append"))
    with pytest.raises(CommitConflictError):
        publish(local_lake, new, run="another")


def test_rebased_table_is_recognized_as_staged(local_lake: Lakehouse) -> None:
    """A repeated run keeps the tables that its publication rebased, and stages the rest again."""
    unchanged, first = month(local_lake, 1), stage_arrow(local_lake, pa.table({"n": [1]}), "ns", "rest", mode="append")
    publish(local_lake, month(local_lake, 2))
    read = TableRead.of(local_lake.snapshot(), *TABLE)
    publish(local_lake, unchanged, first, run="one")
    restaged = stage_arrow(local_lake, pa.table({"n": [2]}), "ns", "rest", mode="append")
    publication = publish(local_lake, unchanged, restaged, run="two", reads=[read], isolation="serializable")
    assert publication.version == 3
    assert {(change.kind, change.table) for change in local_lake.diff(2, 3)} == {("changed", "rest")}
    assert publish(local_lake, unchanged, restaged, run="two").was_published
    assert rows(local_lake) == {1: [1], 2: [1]}


def test_changed_read_conflicts_after_rebase(local_lake: Lakehouse) -> None:
    publish(
        local_lake, month(local_lake, 1), stage_arrow(local_lake, pa.table({"n": [1]}), "ns", "read", mode="append")
    )
    read = TableRead.of(local_lake.snapshot(), "ns", "read")
    staged = month(local_lake, 2)
    publish(
        local_lake, month(local_lake, 3), stage_arrow(local_lake, pa.table({"n": [2]}), "ns", "read", mode="append")
    )
    with pytest.raises(CommitConflictError, match=r"ns\.read"):
        publish(local_lake, staged, reads=[read], isolation="serializable")
    assert publish(local_lake, staged, reads=[read]).version == 3


def test_compacted_files_are_replaced(local_lake: Lakehouse) -> None:
    for n in range(6):
        publish(local_lake, month(local_lake, 1, n, mode="append"))
    staged, other = month(local_lake, 1, 9), month(local_lake, 2, mode="append")
    plan = operations.plan_compact_tables(local_lake, min_input_files=2)
    assert plan.execute().version is not None
    publish(local_lake, staged)
    publish(local_lake, other)
    assert rows(local_lake) == {1: [9], 2: [1]}


def test_rebase_requires_same_table_and_compatible_columns(local_lake: Lakehouse) -> None:
    """Columns that either writer added are kept. A table that was dropped, recreated or rolled back conflicts."""
    publish(local_lake, month(local_lake, 1))
    added, same = month(local_lake, 2, extra="a"), month(local_lake, 3, extra="b")
    other = month(local_lake, 4, another=5)
    publish(local_lake, added)
    publish(local_lake, same)
    assert catalog_at(local_lake).load_table(TABLE).schema().column_names == ["month", "n", "extra"]
    with pytest.raises(CommitConflictError):
        publish(local_lake, other)
    staged = month(local_lake, 5)
    operations.plan_rollback(local_lake, 1).execute()
    with pytest.raises(CommitConflictError):
        publish(local_lake, staged)
    appended = month(local_lake, 6, mode="append")
    operations.plan_rollback(local_lake, 3).execute()
    publish(local_lake, appended)
    assert rows(local_lake) == {1: [1], 2: [1], 3: [1], 6: [1]}
    dropped = month(local_lake, 7)
    with local_lake.transaction() as txn:
        txn.drop_table(*TABLE)
    with pytest.raises(CommitConflictError):
        publish(local_lake, dropped)


def test_replaced_columns_are_rebased(local_lake: Lakehouse) -> None:
    publish(local_lake, month(local_lake, 1))
    rows_of_text = pa.table({"month": [1], "n": ["one"]})
    staged = [
        stage_arrow(local_lake, rows_of_text, *TABLE, mode="replace_table", replaces_columns=True),
        stage_arrow(local_lake, rows_of_text.drop(["n"]), *TABLE, mode="replace_table", replaces_columns=True),
    ]
    with catalog_at(local_lake).load_table(TABLE).transaction() as change:
        change.set_properties({"note": "set by another engine"})
    publish(local_lake, staged[0])
    table = catalog_at(local_lake).load_table(TABLE)
    assert table.scan().to_arrow().to_pylist() == [{"month": 1, "n": "one"}]
    with pytest.raises(CommitConflictError):
        publish(local_lake, staged[1])
    stale = month(local_lake, 2, "two")  # type: ignore[arg-type]
    publish(
        local_lake,
        stage_arrow(
            local_lake, pa.table({"month": [3], "n": [3]}), *TABLE, mode="replace_table", replaces_columns=True
        ),
    )
    with pytest.raises(CommitConflictError):
        publish(local_lake, stale)


def test_replaces_latest_replaces_current_rows(local_lake: Lakehouse) -> None:
    publish(local_lake, month(local_lake, 1))
    ours = month(local_lake, 2, 2)
    empty = stage_arrow(
        local_lake,
        pa.table({"month": [2], "n": [9]}).slice(1),
        *TABLE,
        mode="replace_partitions",
        partitions=[{"month": 2}],
    )
    publish(local_lake, month(local_lake, 2, 3))
    publish(local_lake, month(local_lake, 2, 4, mode="append"))
    publish(local_lake, ours, replaces_latest=[ours])
    assert rows(local_lake) == {1: [1], 2: [2]}
    publish(local_lake, empty, replaces_latest=[empty])
    assert rows(local_lake) == {1: [1]}


def test_null_partition_differs_from_string_null(local_lake: Lakehouse) -> None:
    """Partitions are compared by value, so conflicts and removals do not confuse NULL with a string."""

    def region(value: str | None, n: int, mode: Mode = "replace_partitions") -> StagedTable:
        rows = pa.table({"region": pa.array([value], pa.string()), "n": [n]})
        partitions = [{"region": value}] if mode == "replace_partitions" else None
        return stage_arrow(local_lake, rows, *TABLE, mode=mode, partition_by=["region"], partitions=partitions)

    def values() -> list[tuple[str | None, int]]:
        table = catalog_at(local_lake).load_table(TABLE).scan().to_arrow()
        return sorted(((row["region"], row["n"]) for row in table.to_pylist()), key=repr)

    publish(local_lake, region(None, 1, "append"), run="null")
    assert publish(local_lake, text := region("null", 2)).tables[0].partitions == ("region=null",)
    assert text.replaced_partitions != region(None, 1).replaced_partitions
    restaged, null = region("null", 3), region(None, 4)
    publish(local_lake, region("null", 5))
    with pytest.raises(CommitConflictError, match="region=null"):
        publish(local_lake, restaged)
    publish(local_lake, restaged, replaces_latest=[restaged])
    assert values() == [("null", 3), (None, 1)]
    assert publish(local_lake, null).tables[0].partitions == ("region is null",)
    assert values() == [("null", 3), (None, 4)]


def test_replacement_matches_partition_values_of_each_type(local_lake: Lakehouse) -> None:
    """Encoded partition values are compared with those of the table's manifests."""
    timestamp = dt.datetime(2030, 1, 2, 3, 4, 5, 6, tzinfo=dt.UTC)
    columns: dict[str, tuple[pa.Array, Any]] = {
        "b": (pa.array([True]), True),
        "i": (pa.array([7], pa.int32()), 7),
        "l": (pa.array([-(1 << 40)]), -(1 << 40)),
        "d": (pa.array([decimal.Decimal("-1.50")]), decimal.Decimal("-1.50")),
        "s": (pa.array(["a/b=c ü"]), "a/b=c ü"),
        "x": (pa.array([b"\x00\xff"]), b"\x00\xff"),
        "f": (pa.array([b"ab"], pa.binary(2)), b"ab"),
        "day": (pa.array([timestamp.date()]), timestamp.date()),
        "time": (pa.array([timestamp.time()]), timestamp.time()),
        "at": (pa.array([timestamp.replace(tzinfo=None)]), timestamp.replace(tzinfo=None)),
        "atz": (pa.array([timestamp], pa.timestamp("us", "UTC")), timestamp),
    }
    first = pa.table({**{name: array for name, (array, _) in columns.items()}, "n": [1]})
    other = first.set_column(first.schema.get_field_index("s"), "s", pa.array(["other"]))
    values = {name: value for name, (_, value) in columns.items()}

    def stage(rows: pa.Table, **options: Any) -> StagedTable:
        row = {**values, **options}
        staged = stage_arrow(
            local_lake, rows, *TABLE, mode="replace_partitions", partition_by=list(columns), partitions=[row]
        )
        return StagedTable.from_json(staged.to_json())

    publish(local_lake, stage(first))
    staged, staged_other = stage(first), stage(other, s="other")
    publish(local_lake, stage(first))
    with pytest.raises(CommitConflictError):
        publish(local_lake, staged)
    publish(local_lake, staged, replaces_latest=[staged])
    publish(local_lake, staged_other)
    assert sorted(row["s"] for row in catalog_at(local_lake).load_table(TABLE).scan().to_arrow().to_pylist()) == [
        "a/b=c ü",
        "other",
    ]


def test_invalid_encoded_partition_is_rejected(local_lake: Lakehouse) -> None:
    publish(local_lake, month(local_lake, 1))
    staged = month(local_lake, 2)
    publish(local_lake, month(local_lake, 3))
    for values in (("zz",), ("01",), (), ("0" * 16, "0" * 16)):
        damaged = StagedTable.from_json(dataclasses.replace(staged, replaced_partitions=(values,)).to_json())
        with pytest.raises(InvalidInputError):
            publish(local_lake, damaged)
    assert rows(local_lake) == {1: [1], 3: [1]}


def test_unsupported_changes_conflict(local_lake: Lakehouse) -> None:
    publish(local_lake, month(local_lake, 1))
    incomplete = dataclasses.replace(month(local_lake, 2), replaces=None, replaced_partitions=())
    assert StagedTable.from_json(incomplete.to_json()) == incomplete
    publish(local_lake, month(local_lake, 3))
    with pytest.raises(CommitConflictError):
        publish(local_lake, incomplete)


def test_racing_writers_of_different_partitions_all_publish(local_lake: Lakehouse) -> None:
    def write(number: int) -> None:
        writer_lake = Lakehouse(open_storage(local_lake.root, local_lake.storage_options))
        publish(writer_lake, month(writer_lake, number, number))
        publish(writer_lake, month(writer_lake, number, -number, mode="append"))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(1, 9)))
    assert rows(local_lake) == {number: [-number, number] for number in range(1, 9)}
    assert operations.verify(local_lake).is_clean


def trim(lake: Lakehouse) -> None:
    """Keep only the current snapshot of each table, whatever the age of older snapshots."""
    policy = operations.RetentionPolicy(maximum_age_ms=0, minimum_versions=1, protected_ms=0)
    operations.plan_trim_tables(lake, policy).execute()


def rewrite(lake: Lakehouse) -> None:
    table = catalog_at(lake).load_table(TABLE)
    table.overwrite(table.scan().to_arrow())


@pytest.mark.parametrize("is_new", [True, False])
def test_append_is_not_published_twice_after_trim(local_lake: Lakehouse, is_new: bool) -> None:
    """Another engine rewrote the appended rows, so neither files nor snapshots show the append."""
    publish(local_lake, month(local_lake, 1))
    if is_new:
        catalog_at(local_lake).drop_table(TABLE)
    staged = month(local_lake, 1, 5, mode="append")
    publish(local_lake, staged, run="first")
    expected = rows(local_lake)
    rewrite(local_lake)
    trim(local_lake)
    version = local_lake.latest_version()
    with pytest.raises(CommitConflictError):
        publish(local_lake, staged, run="second")
    assert publish(local_lake, staged, run="first").was_published
    assert (local_lake.latest_version(), rows(local_lake)) == (version, expected)


def test_rows_of_other_writers_are_not_replaced_after_trim(local_lake: Lakehouse) -> None:
    """Both writers create the table. The table history no longer shows which partitions the other writer wrote."""
    staged = month(local_lake, 1, 5)
    publish(local_lake, month(local_lake, 1))
    publish(local_lake, month(local_lake, 1, 2, mode="append"))
    operations.plan_compact_tables(local_lake, min_input_files=2).execute()
    trim(local_lake)
    with pytest.raises(CommitConflictError):
        publish(local_lake, staged)
    assert rows(local_lake) == {1: [1, 2]}


def test_presence_after_a_trim(local_lake: Lakehouse) -> None:
    publish(local_lake, month(local_lake, 1))
    published, other = month(local_lake, 2), month(local_lake, 3)
    publish(local_lake, published)
    publish(local_lake, month(local_lake, 4))
    trim(local_lake)

    def presence_of(staged: StagedTable) -> Presence:
        return presence(local_lake, local_lake.snapshot(), staged)

    assert presence_of(published) is Presence.TRIMMED
    assert undone_by(local_lake, 2, [published]) is None
    operations.rollback(local_lake, 1)
    assert [presence_of(staged_table) for staged_table in (published, other)] == [Presence.ABSENT] * 2
    publish(local_lake, month(local_lake, 5))
    assert presence_of(published) is Presence.ABSENT
