"""Test that the sums of space equal the files that versions and exports reach, in any history and with any summary."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyiceberg.manifest import ManifestEntryStatus

from tests.clock import AgingStorage
from tests.faults import DeathError, FaultyStorage, Moment, fail
from tests.foreign_files import commit_unchecked, data_files_of, manifests_of, write_manifest_of
from tests.lakes import Lakes, listed
from tests.operations.aging import DAY_MS, HOUR_MS, LONG_MS, Aging, keeping
from tests.operations.changes import ROWS, append_rows, create, overwrite_rows
from tests.operations.generated_lakes import random_step
from tests.operations.space_model import model_space
from tests.telemetry.listener import recorded_metrics
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import CorruptFileError, StorageError, StoragePermissionError, TrinityLakeError
from trinitylake_ops.format.definitions import METADATA_LOCATION
from trinitylake_ops.format.file_names import SPACE_PREFIX, parse_space_index_path
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.operations import SpaceReport
from trinitylake_ops.operations.space import update
from trinitylake_ops.storage import MemoryStorage, Storage, StorageWrapper, drop_memory_root

pytestmark = pytest.mark.filterwarnings("ignore:Delete operation did not match")


def check_sums(lake: Lakehouse, report: SpaceReport) -> None:
    """Assert that the sums of a report equal those of complete marks."""
    expected = model_space(lake)
    assert report.catalog == expected.catalog
    assert report.use == expected.use
    needed = {row.version: row.needed.bytes for row in report.growth}
    assert needed == {version: expected.needed_bytes[version] for version in needed}
    assert sum(namespace.use.total.bytes for namespace in report.namespaces) == (
        report.use.total.bytes - report.catalog.total.bytes
    )


def summary_paths(storage: Storage) -> list[str]:
    return sorted(info.path for info in storage.list(SPACE_PREFIX))


def delete_summary(storage: Storage) -> None:
    for path in summary_paths(storage):
        storage.delete(path)


def iceberg_step(lake: Lakehouse, rng: random.Random) -> None:
    """Change a managed table in one of several ways."""
    catalog = catalog_at(lake)
    catalog.create_namespace_if_not_exists("i")
    name = f"i.t{rng.randrange(3)}"
    kind = rng.choice(["append", "append", "overwrite", "delete", "drop", "rename"])
    if kind in ("drop", "rename"):
        if catalog.table_exists(name) and kind == "drop":
            catalog.drop_table(name)
        elif catalog.table_exists(name) and not catalog.table_exists("i.renamed"):
            catalog.rename_table(name, "i.renamed")
        return
    table = catalog.create_table_if_not_exists(name, ROWS.schema)
    if kind == "append":
        table.append(ROWS)
    elif kind == "overwrite":
        table.overwrite(pa.table({"id": pa.array([rng.randrange(100)], pa.int64())}))
    elif table.scan().to_arrow().filter(pc.field("id") == 2).num_rows:
        table.delete("id = 2")


def maintain(aging: Aging, rng: random.Random) -> None:
    """Run a random operation that reclaims space or keeps versions."""
    lake = aging.lake
    kind = rng.choice(["expire", "purge", "undelete", "orphans", "trim", "later", "export", "compact"])
    if kind == "expire":
        aging.later(rng.choice([HOUR_MS, LONG_MS]))
        operations.plan_expiration(lake).execute()
    elif kind == "purge":
        aging.later()
        operations.plan_purge(lake).execute()
    elif kind == "undelete":
        batches = lake.snapshot().definition.expirations
        if batches:
            operations.undelete(lake, rng.choice(batches).versions)
    elif kind == "orphans":
        operations.plan_orphan_removal(lake).execute()
    elif kind == "trim":
        operations.plan_trim_tables(lake).execute()
    elif kind == "compact":
        operations.compact(lake)
    elif kind == "export":
        version = rng.randrange(lake.latest_version() + 1)
        level, days = rng.choice(["minimal", "partial"]), rng.choice([None, 1])
        operations.plan_export(
            lake,
            f"p{lake.latest_version()}",
            version=version,
            level=level,
            retain_for=None if days is None else timedelta(days=days),
        ).execute()
    else:
        aging.later(rng.choice([HOUR_MS, DAY_MS, LONG_MS]))


@pytest.mark.parametrize("seed", range(10))
def test_sums_equal_complete_marks(lakes: Lakes, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "_TABLES_PER_SHARD", 4)
    rng = random.Random(seed)
    aging = Aging.on(
        lakes.storage(), minimum_versions_to_keep=rng.choice([1, 2, 5]), maximum_version_age_millis=HOUR_MS
    )
    lake = aging.lake
    for _ in range(24):
        chosen = rng.random()
        try:
            if chosen < 0.45:
                iceberg_step(lake, rng)
            elif chosen < 0.6:
                random_step(lake, rng)
            else:
                maintain(aging, rng)
        except TrinityLakeError:  # such a step is not possible now
            continue
        if rng.random() < 0.5:
            report = operations.measure_space(Lakehouse(aging.clock), last=5, read_only=rng.random() < 0.2)
            check_sums(lake, report)
    continued = operations.measure_space(Lakehouse(aging.clock), last=100)
    check_sums(lake, continued)
    delete_summary(aging.clock)
    fresh = operations.measure_space(Lakehouse(aging.clock), last=100)
    assert fresh.from_version is None
    kept = ("use", "catalog", "reclaimable", "data", "small", "deletes", "namespaces", "tables", "growth", "damaged")
    assert [getattr(fresh, name) for name in kept] == [getattr(continued, name) for name in kept]


@pytest.fixture
def clock(lakes: Lakes) -> AgingStorage:
    """A storage with a settable clock."""
    storage = lakes.storage()
    return AgingStorage(storage, storage.now_ms())


@pytest.fixture
def lake(lakes: Lakes, clock: AgingStorage) -> Lakehouse:
    """A lakehouse with the tables ``ns.t`` and ``ns.u``, of which the first has snapshots that a trim drops."""
    lakehouse = Lakehouse.create(
        clock.root, storage=clock, minimum_versions_to_keep=1, maximum_version_age_millis=HOUR_MS
    )
    lakes.watch(lakehouse)
    append_rows(lakehouse, "ns.u")
    overwrite_rows(lakehouse, "ns.t")
    return lakehouse


def test_second_run_reads_only_changed_table(lake: Lakehouse) -> None:
    first = operations.measure_space(lake)
    assert (first.from_version, first.tables_read, first.is_stored) == (None, 2, True)
    append_rows(lake, "ns.u")
    second = operations.measure_space(Lakehouse(lake.storage))
    assert (second.from_version, second.tables_read) == (first.version, 1)
    third = operations.measure_space(Lakehouse(lake.storage))
    assert (third.from_version, third.tables_read) == (second.version, 0)
    assert "create" not in third.cost.requests
    check_sums(lake, third)


def test_read_only_run_writes_nothing(lake: Lakehouse) -> None:
    before = listed(lake.storage)
    report = operations.measure_space(lake, read_only=True)
    assert not report.is_stored
    assert listed(lake.storage) == before
    check_sums(lake, report)


class _RefusingStorage(StorageWrapper):
    """A storage without permission to write."""

    def create(self, path: str, data: bytes) -> None:
        raise StoragePermissionError("not permitted", path=path)


def test_run_without_permission_to_write_reports_sums(lake: Lakehouse) -> None:
    report = operations.measure_space(Lakehouse(_RefusingStorage(lake.storage)))
    assert not report.is_stored
    check_sums(lake, report)


def test_reclaimable_bytes_equal_those_of_plans(lake: Lakehouse, clock: AgingStorage) -> None:
    clock.time_ms += LONG_MS
    expirable = {item.command: item for item in operations.measure_space(lake).reclaimable}
    plan = operations.plan_expiration(lake)
    roots = sum(clock.stat(lake.files.roots.path(version)).size_bytes for version in range(plan.base_version))
    assert expirable["expire"].amount.bytes == plan.bytes + roots
    assert expirable["trim"].amount.files > 0
    assert "purge" not in expirable

    plan.execute()
    waiting = {item.command: item for item in operations.measure_space(lake).reclaimable}["purge"]
    assert not waiting.is_runnable
    clock.time_ms += LONG_MS
    report = operations.measure_space(lake)
    due = {item.command: item for item in report.reclaimable}["purge"]
    assert due.is_runnable
    assert due.deletable_at == waiting.deletable_at
    assert report.deletable == due.amount
    assert due.amount.bytes == operations.plan_purge(lake).bytes + roots


def test_trim_reclaims_what_the_report_promised(lake: Lakehouse, clock: AgingStorage) -> None:
    clock.time_ms += LONG_MS
    trimmable = operations.measure_space(lake).tables[0].trimmable
    assert trimmable.bytes
    operations.plan_trim_tables(lake).execute()
    clock.time_ms += LONG_MS
    report = operations.measure_space(lake)
    table = next(table for table in report.tables if table.name == "ns.t")
    assert table.trimmable.files == 0
    assert table.use.expirable.bytes >= trimmable.bytes


def test_snapshots_that_the_policy_retains_are_not_trimmable(lake: Lakehouse) -> None:
    document = {"retention": {"tables": [{"pattern": "ns.*", "min_snapshots": 100}]}}
    operations.set_policy(lake, operations.MaintenancePolicy.of_document(document))
    report = operations.measure_space(lake)
    assert all(table.trimmable.files == 0 for table in report.tables)
    assert operations.plan_trim_tables(lake).is_empty


def test_small_files_follow_the_target_size_of_the_policy(lake: Lakehouse) -> None:
    assert operations.measure_space(lake).small.files == 2
    policy = operations.MaintenancePolicy.of_document({"targets": {"file_size": "1B"}})
    operations.set_policy(lake, policy)
    report = operations.measure_space(lake)
    assert (report.small.files, report.data.files, report.tables_read) == (0, 2, 0)


def test_export_with_missing_root_is_not_counted(lake: Lakehouse) -> None:
    operations.plan_export(lake, "kept", version=1).execute()
    (path,) = lake.snapshot().definition.exported_snapshots.values()
    lake.storage.delete(path)
    assert operations.measure_space(lake).use.exports.files == 0


def test_advice_names_what_helps(lake: Lakehouse, clock: AgingStorage) -> None:
    for _ in range(5):
        append_rows(lake, "ns.u")
    clock.time_ms += LONG_MS
    advice = {table.name: [item.command for item in table.advice] for table in operations.measure_space(lake).tables}
    assert advice["ns.u"][-1] == "compact-tables ns.u"
    assert set(advice["ns.t"]) == {"trim ns.t", "expire"}


def test_exports_and_clones_have_their_own_sums(lake: Lakehouse, clock: AgingStorage, lakes: Lakes) -> None:
    operations.plan_export(lake, "kept", version=1).execute()
    operations.plan_clone(lake, lakes.named_root("clone"), "branch", version=3).execute()
    clock.time_ms += LONG_MS
    append_rows(lake, "ns.u")
    clock.time_ms += LONG_MS
    report = operations.measure_space(lake)
    check_sums(lake, report)
    assert report.use.exports.files and report.use.clones.files
    operations.drop_export(lake, "kept")
    operations.drop_clone(lake, "branch")
    without = operations.measure_space(lake)
    check_sums(lake, without)
    assert without.use.exports.files == without.use.clones.files == 0
    lakes.drop(lakes.named_root("clone"))


def test_clone_counts_only_its_own_files(lakes: Lakes) -> None:
    parent = lakes.local("parent")
    append_rows(parent, "ns.t")
    clone_root = lakes.root("clone")
    operations.plan_clone(parent, clone_root, "branch").execute()
    clone = Lakehouse.open(clone_root)
    append_rows(clone, "ns.t")
    report = operations.measure_space(clone)
    sizes_bytes = {info.path: info.size_bytes for info in clone.storage.list("tables/")}
    own = sum(size for path, size in sizes_bytes.items() if not path.endswith("_owner.json"))
    assert report.use.total.bytes - report.catalog.total.bytes == own


def test_dropped_table_is_reported_by_its_last_name(lake: Lakehouse) -> None:
    operations.measure_space(lake)
    catalog_at(lake).drop_table("ns.u")
    tables = {table.name: table for table in operations.measure_space(lake).tables}
    assert tables["ns.u"].is_dropped
    assert tables["ns.u"].data.files == 0
    assert not tables["ns.t"].is_dropped


def test_registered_tables_are_not_counted(lake: Lakehouse) -> None:
    create(lake, "registered", "t")
    with lake.transaction() as txn:
        definition = txn.base.table("registered", "t")
        txn.alter_table("registered", "t", replace(definition, table_type="EXTERNAL"))
    report = operations.measure_space(lake)
    assert report.uncounted_tables == 1
    assert {table.name for table in report.tables} == {"ns.t", "ns.u"}
    assert "1 tables with files of other owners" in report.table().title


# Damage


def _break_manifest(lake: Lakehouse) -> str:
    path = manifests_of(lake, "ns.t")[0].manifest_path.removeprefix(lake.root)
    lake.storage.write(path, b"not Avro")
    return path


def _break_metadata(lake: Lakehouse) -> str:
    path = lake.snapshot().table("ns", "t").format_properties[METADATA_LOCATION]
    lake.storage.write(path, b'{"format-version": 2')
    return path


def _delete_metadata(lake: Lakehouse) -> str:
    path = lake.snapshot().table("ns", "t").format_properties[METADATA_LOCATION]
    lake.storage.delete(path)
    return path


@pytest.mark.parametrize("damage", [_break_manifest, _break_metadata, _delete_metadata])
def test_damaged_table_is_reported_and_others_are_summed(lake: Lakehouse, damage: Callable[[Lakehouse], str]) -> None:
    before = {info.path: lake.storage.read(info.path) for info in lake.storage.list()}
    intact = operations.measure_space(lake, read_only=True)
    path = damage(lake)
    for _ in range(2):
        report = operations.measure_space(Lakehouse(lake.storage))
        assert list(report.damaged) == ["ns.t"]
        assert "ns.t" in report.table().title
        (other,) = (table for table in report.tables if table.name == "ns.u")
        assert other == next(table for table in intact.tables if table.name == "ns.u")
        assert report.tables_read <= 2
    lake.storage.write(path, before[path])
    repaired = operations.measure_space(Lakehouse(lake.storage))
    assert not repaired.damaged
    assert repaired.use == intact.use


def test_damage_after_a_summary_keeps_known_files(lake: Lakehouse) -> None:
    operations.measure_space(lake)
    append_rows(lake, "ns.t")
    path = _break_metadata(lake)
    for number in range(2):
        report = operations.measure_space(Lakehouse(lake.storage))
        assert report.damaged.keys() == {"ns.t"}
        assert report.from_version is not None
        assert report.tables_read == 1, number
    assert path in next(iter(report.damaged.values()))


def test_unreadable_definition_is_counted(lake: Lakehouse) -> None:
    intact = operations.measure_space(lake, read_only=True)
    snapshot = lake.snapshot()
    path = snapshot.entry(snapshot.keys.table_key("ns", "u"))
    assert path is not None
    data = lake.storage.read(path)
    lake.storage.write(path, b"\xff\xff")
    for _ in range(2):
        report = operations.measure_space(Lakehouse(lake.storage, cache="off"))
        assert report.unreadable_definitions == 1
    lake.storage.write(path, data)
    assert operations.measure_space(Lakehouse(lake.storage, cache="off")).use == intact.use


@pytest.mark.parametrize("size_bytes", [-1, -(1 << 62), (1 << 63) - 1])
def test_impossible_size_is_damage(lake: Lakehouse, size_bytes: int) -> None:
    files = data_files_of(lake, "ns.u")
    for file in files:
        file._data[5] = size_bytes
    table = catalog_at(lake).load_table("ns.u")
    manifest = write_manifest_of(lake, table, files, ManifestEntryStatus.EXISTING, 5)
    commit_unchecked(lake, "ns.u", [manifest], 5)
    report = operations.measure_space(lake)
    assert list(report.damaged) == ["ns.u"]
    assert all(amount.bytes >= 0 for amount in (report.use.current, report.data, report.small))


def test_damaged_node_raises_typed_error(lakes: Lakes) -> None:
    lake = Aging.on(lakes.storage(), minimum_versions_to_keep=5).lake
    for number in range(4):
        create(lake, f"n{number}", "a", "b", "c")
    node = next(iter(lake.snapshot().root.children))
    lake.storage.write(node, b"ARROW1 damaged")
    with pytest.raises(CorruptFileError):
        operations.measure_space(Lakehouse(lake.storage, cache="off"))


# The files of the summary


def test_any_damage_of_the_summary_is_harmless(lake: Lakehouse) -> None:
    operations.measure_space(lake)
    append_rows(lake, "ns.t")
    expected = model_space(lake).use
    for path in summary_paths(lake.storage):
        data = lake.storage.read(path)
        rng = random.Random(path)
        for position in sorted(rng.sample(range(len(data)), 12)):
            changed = bytearray(data)
            changed[position] ^= 1 << rng.randrange(8)
            lake.storage.write(path, bytes(changed))
            assert operations.measure_space(Lakehouse(lake.storage), read_only=True).use == expected
        for size in (0, 1, len(data) // 2):
            lake.storage.write(path, data[:size])
            assert operations.measure_space(Lakehouse(lake.storage), read_only=True).use == expected
        lake.storage.delete(path)
        assert operations.measure_space(Lakehouse(lake.storage), read_only=True).use == expected
        lake.storage.write(path, data)


def test_summary_of_another_lakehouse_is_not_used(lake: Lakehouse, lakes: Lakes) -> None:
    other = lakes.memory("other")
    append_rows(other, "ns.t")
    operations.measure_space(other)
    for path in summary_paths(other.storage):
        lake.storage.write(path, other.storage.read(path))
    report = operations.measure_space(lake)
    assert report.from_version is None
    check_sums(lake, report)


def test_summary_of_replaced_version_is_not_used(lake: Lakehouse) -> None:
    """A backup of the lakehouse was restored, and other versions were committed since."""
    operations.measure_space(lake)
    backup = {info.path: lake.storage.read(info.path) for info in lake.storage.list()}
    append_rows(lake, "ns.u")
    operations.measure_space(lake)
    summary = {path: lake.storage.read(path) for path in summary_paths(lake.storage)}
    for info in list(lake.storage.list()):
        lake.storage.delete(info.path)
    for path, data in {**backup, **summary}.items():
        lake.storage.write(path, data)
    restored = Lakehouse(lake.storage)
    append_rows(restored, "ns.t")
    append_rows(restored, "ns.t")
    check_sums(restored, operations.measure_space(restored))


def test_purged_version_of_summary_is_replaced(lake: Lakehouse, clock: AgingStorage) -> None:
    operations.measure_space(lake)
    append_rows(lake, "ns.t")
    clock.time_ms += LONG_MS
    operations.plan_trim_tables(lake).execute()
    clock.time_ms += LONG_MS
    operations.plan_expiration(lake, keeping(1)).execute()
    clock.time_ms += LONG_MS
    operations.plan_purge(lake).execute()
    report = operations.measure_space(lake)
    assert report.from_version is not None
    check_sums(lake, report)


def test_concurrent_runs_leave_a_usable_summary(lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    operations.measure_space(lake)
    append_rows(lake, "ns.t")
    run_update = update.update_summary
    is_nested = False

    def update_twice(inputs: update.SummaryInputs) -> update.UpdatedSummary:
        nonlocal is_nested
        if not is_nested:
            is_nested = True
            append_rows(lake, "ns.u")
            check_sums(lake, operations.measure_space(Lakehouse(lake.storage)))
        return run_update(inputs)

    monkeypatch.setattr("trinitylake_ops.operations.space.measure.update_summary", update_twice)
    operations.measure_space(Lakehouse(lake.storage))
    check_sums(lake, operations.measure_space(Lakehouse(lake.storage)))


def test_superseded_files_are_deleted_after_an_hour(lake: Lakehouse, clock: AgingStorage) -> None:
    operations.measure_space(lake)
    first = summary_paths(clock)
    append_rows(lake, "ns.t")
    operations.measure_space(lake)
    assert set(first) <= set(summary_paths(clock))
    clock.time_ms += 2 * HOUR_MS
    append_rows(lake, "ns.t")
    operations.measure_space(lake)
    left = summary_paths(clock)
    (path,) = (path for path in left if parse_space_index_path(path) is not None)
    parts = json.loads(clock.read(path))["parts"].values()
    assert sorted(part[0] for shards in parts for part in shards if part) == [other for other in left if other != path]


def test_orphan_removal_keeps_the_summary(lake: Lakehouse, clock: AgingStorage) -> None:
    operations.measure_space(lake)
    before = summary_paths(clock)
    clock.time_ms += LONG_MS
    assert not set(operations.plan_orphan_removal(lake).paths) & set(before)
    assert operations.verify(lake).is_clean


@pytest.mark.local_only("copies a storage in memory")
def test_kill_at_every_request_is_harmless(lake: Lakehouse) -> None:
    operations.measure_space(lake)
    append_rows(lake, "ns.t")
    create(lake, "more", "a")
    files = {info.path: lake.storage.read(info.path) for info in lake.storage.list()}
    expected = model_space(lake).use

    def restored() -> MemoryStorage:
        drop_memory_root(lake.root)
        storage = MemoryStorage(lake.root)
        for path, data in files.items():
            storage.create(path, data)
        return storage

    recorded = FaultyStorage(restored(), concurrency=1)
    operations.measure_space(Lakehouse(recorded, cache="off"))
    log = recorded.log
    moments: tuple[Moment, ...] = ("before", "after")
    for request, moment in itertools.product(log, moments):
        storage = restored()
        with pytest.raises(DeathError):
            faulty = FaultyStorage(storage, [fail(request.number, DeathError, moment)], concurrency=1)  # type: ignore[arg-type]
            operations.measure_space(Lakehouse(faulty, cache="off"))
        assert operations.measure_space(Lakehouse(storage)).use == expected


# Files that no version needs


def test_orphans_and_staged_files_are_measured_by_a_listing(lake: Lakehouse, clock: AgingStorage) -> None:
    folder = catalog_at(lake).load_table("ns.t").location().removeprefix(lake.root)
    lake.storage.create(f"{folder}/data/left.parquet", b"x" * 1_000)
    clock.time_ms += LONG_MS
    lake.storage.create(f"{folder}/data/staged.parquet", b"x" * 70)
    report = operations.measure_space(lake, find_unreached=True)
    assert report.unreached.orphans is not None and report.unreached.staged is not None
    assert (report.unreached.orphans.files, report.unreached.orphans.bytes) == (1, 1_000)
    assert (report.unreached.staged.files, report.unreached.staged.bytes) == (1, 70)
    assert report.unreached.orphans.bytes == operations.plan_orphan_removal(lake).bytes
    assert "orphans" in {item.command for item in report.reclaimable}
    operations.plan_orphan_removal(lake).execute()
    unmeasured = operations.measure_space(lake).unreached
    assert unmeasured.orphans is unmeasured.staged is None
    assert unmeasured.orphans_removed_before is not None


def test_table_root_is_counted(lakes: Lakes) -> None:
    tables = lakes.root("tables")
    lake = lakes.local("with-table-root", table_root=tables)
    append_rows(lake, "ns.t")
    append_rows(lake, "ns.t")
    report = operations.measure_space(lake)
    (table,) = report.tables
    assert table.data.files == 2
    check = operations.measure_space(Lakehouse(lake.storage))
    assert check.use == report.use


def test_metrics_contain_each_use(lake: Lakehouse) -> None:
    report = operations.measure_space(lake, find_unreached=True)
    with recorded_metrics() as metrics:
        operations.emit_space_metrics(report, "main")
    uses = {labels[2]: value for labels, value in metrics.gauges.items() if labels[0] == "space_bytes"}
    assert uses["current"] == report.use.current.bytes
    assert {"older", "exports", "clones", "expirable", "expired", "operations", "orphans", "staged"} <= uses.keys()


def test_failure_of_the_storage_is_raised(lake: Lakehouse) -> None:
    faulty = FaultyStorage(lake.storage, [fail(1, StorageError, kind="list", times=9)])
    with pytest.raises(StorageError):
        operations.measure_space(Lakehouse(faulty))
