"""Pages: what they say of every kind of version, to whom they are safe, and how large they get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from tests.foreign import ForeignLake
from tests.lakes import Lakes, table
from tests.operations.aging import Aging, keeping, needed_files
from tests.operations.changes import alter, create
from tests.operations.pages import Parsed, enlarged, parsed
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.format.definitions import (
    ExpirationBatch,
    ExpirationState,
    ExportLevel,
    ExportRecord,
    ExportState,
    LakehouseDef,
)
from trinitylake_ops.format.file_names import HINT_PATH, root_path
from trinitylake_ops.operations import Finding
from trinitylake_ops.operations.version_records import VersionRecord
from trinitylake_ops.reports import (
    expiration_chart,
    expiration_page,
    log_page,
    verification_chart,
    verification_page,
)
from trinitylake_ops.reports.timeline import timeline
from trinitylake_ops.storage import MeteredStorage
from trinitylake_ops.versions.undone import rolled_back_to

pytestmark = pytest.mark.usefixtures("fixed_requests")

HOSTILE = "<script>alert('x')</script>\"'&amp;\u202egpj.exe\x00\x1b[31m{{ 7 * 7 }}]]>--><svg onload=x>"
MOST_PAGE_BYTES = 2_000_000


@pytest.fixture
def lake(aging: Aging) -> Lakehouse:
    return aging.lake


def log(lake: Lakehouse, limit: int | None = None) -> str:
    latest = lake.snapshot()
    return log_page(latest, list(lake.history(limit, latest)), lake.storage.now_ms())


def checked(lake: Lakehouse) -> str:
    return verification_page(operations.verify(lake), lake.storage.now_ms())


def states_of(page: Parsed) -> dict[str, tuple[str, str]]:
    """Return state -> (count, versions)."""
    return {row[0]: (row[1], row[2]) for row in page.rows("state", "count")}


# What pages say


def test_the_page_of_a_log(lake: Lakehouse) -> None:
    page = parsed(log(lake))
    assert page.headline == "6 versions; the latest is 5"
    assert states_of(page) == {"latest": ("1", "5"), "kept": ("5", "0–4")}
    assert page.bars() == {"latest": 1, "kept": 5}
    rows = page.rows("version", "created (UTC)")
    assert [row[0] for row in rows] == ["5", "4", "3", "2", "1", "0"]
    assert rows[5][3:5] == ["init", "create the lakehouse"]
    shape = lake.snapshot().tree_shape()
    levels = page.rows("level", "nodes")
    assert [(row[1], row[2]) for row in levels] == [(str(level.nodes), str(level.keys)) for level in shape.levels]
    assert [row[3].strip() for row in levels] == [f"{level.fill:.0%}" for level in shape.levels]
    assert f"version 3, {lake.snapshot(3).created_at:%Y-%m-%d %H:%M:%S} UTC" in page.text


def test_the_page_of_a_limited_log_says_that_it_is_one(lake: Lakehouse) -> None:
    page = parsed(log(lake, 2))
    assert page.headline == "The newest 2 versions; the latest is 5"
    assert [row[0] for row in page.rows("version", "created (UTC)")] == ["5", "4"]


def test_a_log_reads_no_more_for_its_page_than_the_nodes_of_the_latest_tree(lake: Lakehouse) -> None:
    def requests(work: Callable[[Lakehouse], object]) -> dict[str, int]:
        metered = MeteredStorage(lake.storage)
        opened = Lakehouse(metered)
        opened.latest_version()  # how roots are named is known from now on
        before = metered.snapshot().requests
        work(opened)
        return {kind: number - before.get(kind, 0) for kind, number in metered.snapshot().requests.items()}

    plain = requests(lambda opened: list(opened.history()))
    with_page = requests(log)
    nodes = lake.snapshot().tree_shape().nodes - 1
    assert nodes > 0
    assert with_page == {**plain, "read": plain["read"] + nodes}


def test_the_page_of_a_plan(lake: Lakehouse) -> None:
    plan = operations.plan_expiration(lake, keeping(2))
    page = parsed(expiration_page(plan))
    assert page.headline == f"6 versions; 4 would expire and reclaim {plan.bytes / 1_000:.1f} kB; the latest is 5"
    assert f"trinitylake expire --apply {plan.digest}" in page.text
    assert states_of(page) == {"latest": ("1", "5"), "kept": ("1", "4"), "would expire": ("4", "0–3")}
    assert page.bars() == {"latest": 1, "kept": 1, "expiring": 4, "bytes": len(set(plan.freed.writers.values()))}
    kinds = page.rows("files", "number")
    assert {row[0]: int(row[1]) for row in kinds} == plan.files
    assert [page.rows("version", "created (UTC)")[1][at] for at in (0, 2, 5)] == ["4", "kept", "among the minimum of 2"]


def test_a_page_reads_only_the_tree_of_the_plan(aging: Aging) -> None:
    metered = MeteredStorage(aging.lake.storage)
    plan = operations.plan_expiration(Lakehouse(metered), keeping(2))
    before = metered.snapshot().requests
    expiration_page(plan)
    after = metered.snapshot().requests
    nodes = aging.lake.snapshot().tree_shape().nodes - 1
    asked = {kind: after[kind] - before.get(kind, 0) for kind in after}
    assert asked.pop("read") <= nodes
    assert not any(asked.values())
    expiration_chart(plan)
    assert metered.snapshot().requests == after


def test_freed_bytes_count_to_the_version_that_wrote_them(lake: Lakehouse) -> None:
    plan = operations.plan_expiration(lake, keeping(2))
    needed = {version: set(needed_files(lake, version)) for version in range(6)}
    first = {path: min(version for version in needed if path in needed[version]) for path in plan.freed.sizes_bytes}
    assert plan.freed.writers == first
    assert sum(plan.freed.bytes_by(plan.freed.writers).values()) == plan.bytes


def test_the_page_of_what_expired_and_was_purged(aging: Aging) -> None:
    plan = operations.plan_expiration(aging.lake, keeping(2))
    report = plan.execute()
    page = parsed(expiration_page(plan, report))
    assert "; 4 expired just now, by version 6; a purge reclaims " in page.headline
    assert "trinitylake undelete 0-3" in page.text
    assert page.bars()["expired"] == 4
    page = parsed(log(aging.lake))
    assert page.headline == "7 versions, of which 4 expired; the latest is 6"
    assert "undelete can restore it until its purge begins" in page.text
    aging.later()
    assert aging.purge().is_complete
    for shown in (log(aging.lake), expiration_page(operations.plan_expiration(aging.lake, keeping(3)))):
        page = parsed(shown)
        assert ", of which 4 purged; " in page.headline
        assert page.bars()["purged"] == 4
        assert states_of(page)["purged"] == ("4", "0–3")
    assert parsed(checked(aging.lake)).headline.endswith(", of which 4 purged; the latest is 8; no findings")


def test_nothing_expires(lake: Lakehouse) -> None:
    plan = operations.plan_expiration(lake, keeping(100))
    page = parsed(expiration_page(plan))
    assert page.headline == "6 versions; none would expire; the latest is 5"
    assert "Nothing to do." in page.text
    assert "Reclaimed bytes, by" not in page.text
    assert "Nothing expired." in parsed(expiration_page(plan, plan.execute())).text


def test_exports_rollbacks_and_other_programs(aging: Aging) -> None:
    lake = aging.lake
    operations.plan_export(lake, "before-the-move", version=2).execute()
    bad = alter(lake, "n0", "a")
    operations.rollback(lake, 3, message="as it was on Monday")
    foreign = ForeignLake(lake.storage).commit_table("n1", "z")
    page = parsed(log(lake))
    rows = {int(row[0]): row for row in page.rows("version", "created (UTC)")}
    assert rows[2][4].startswith("exported as before-the-move")
    assert rows[2][5] == "exported as 'before-the-move'"
    assert rows[bad + 1][4] == f"rolled back from {bad} to 3as it was on Monday"
    assert rows[foreign][4] == "by another program"
    assert f"version {bad + 1} rolled back from version {bad} to the content of version 3" in page.text
    assert "version 2 is exported as before-the-move" in page.text
    assert f"version {foreign}: 1 version written by another program" in page.text
    assert page.headline == f"{foreign + 1} versions; the latest is {foreign}"
    classes = [attributes.get("class") for _, attributes in page.elements]
    assert [classes.count(name) for name in ("arc", "foreign", "pennant")] == [1, 1, 1]


def test_an_export_pins_its_version_on_the_page_of_a_plan(aging: Aging) -> None:
    operations.plan_export(aging.lake, "kept", version=2).execute()
    aging.later()
    page = parsed(expiration_page(operations.plan_expiration(aging.lake, keeping(1))))
    assert states_of(page)["kept"] == ("1", "2")
    assert "pinned by export 'kept'" in page.text


def test_exports_that_are_unfinished_or_of_other_programs_or_elsewhere() -> None:
    unfinished = ExportRecord(
        name="a",
        version=1,
        level=ExportLevel.MINIMAL,
        root_location="_export_x.arrow",
        state=ExportState.COPYING,
        created_at_millis=1,
        manifest_path="",
    )
    snapshots = {"b": root_path(2), "c": "_export_y.arrow", "d": "s3://else/where", "e": root_path(9)}
    definition = LakehouseDef(id="x", exports=(unfinished,), exported_snapshots=snapshots)
    records = [VersionRecord(version=version, created_at_ms=version, commit_id=str(version)) for version in range(4)]
    shown = timeline(records, definition)
    assert [version.exports for version in shown.versions] == [(), ("a (unfinished)",), ("b",), ()]
    assert shown.unplaced_exports == ("c", "d", "e")


def test_versions_that_an_expiry_spared_are_kept(lake: Lakehouse) -> None:
    plan = operations.plan_expiration(lake, keeping(2))
    operations.plan_export(lake, "meanwhile", version=1).execute()
    report = plan.execute()
    assert (report.versions, report.spared) == ("0,2-3", "1")
    page = parsed(expiration_page(plan, report))
    assert states_of(page) == {"latest": ("1", "5"), "kept": ("2", "4, 1"), "expired": ("3", "2–3, 0")}
    assert "not expired, because something keeps it now" in page.text


def test_the_page_of_a_deep_verify_says_what_had_no_checksum(lake: Lakehouse) -> None:
    ForeignLake(lake.storage).commit_table("n1", "z")
    report = operations.verify(lake, deep=True)
    assert dict(report.without_checksum) == {"definition": 1, "node": 1}
    text = parsed(verification_page(report, lake.storage.now_ms())).text
    checksums = "files compared with their checksums, 1 definition, 1 node without a checksum"
    assert f"{report.checked_files} {checksums}" in text
    assert "checksums" not in parsed(checked(lake)).text


def test_the_page_of_verify_says_what_is_wrong_and_what_mends_it(lake: Lakehouse) -> None:
    assert parsed(checked(lake)).headline == "6 versions; the latest is 5; no findings"
    lake.storage.write(HINT_PATH, b"2")
    page = parsed(checked(lake))
    assert page.headline == "1 warning; 6 versions; the latest is 5"
    (row,) = page.rows("severity", "finding")
    assert (row[0], row[1], row[5]) == ("warning", "hint-wrong", "repair-hint")


def test_pages_are_made_of_a_damaged_lakehouse(lakes: Lakes) -> None:
    aging = Aging.on(lakes.storage())  # nobody checks it at the end
    lake = aging.lake
    create(lake, "n", *(f"t{number}" for number in range(40)))
    alter(lake, "n", "t1")
    lake.storage.delete_many([lake.files.roots.path(0)])
    snapshot = lake.snapshot()
    (node, *_) = [child for child in snapshot.root.children if child is not None]
    lake.storage.write(node, b"garbage")
    lake = Lakehouse(lake.storage, cache="off")
    page = parsed(checked(lake))
    assert page.headline.startswith("2 errors; 3 versions, of which 1 unreadable; the latest is 2")
    assert page.bars()["unreadable"] == 1
    assert {row[1] for row in page.rows("severity", "finding")} == {"root-missing", "node-corrupt"}
    classes = [attributes.get("class") for _, attributes in page.elements]
    assert classes.count("finding") == 2
    page = parsed(log(lake))
    assert "The tree cannot be read: " in page.text
    assert node in page.text
    assert page.headline == "The newest 2 versions; the latest is 2"


def test_versions_deleted_by_another_program_are_shown_between_others() -> None:
    records = [VersionRecord(version=version, created_at_ms=version, commit_id=str(version)) for version in (3, 4, 7)]
    shown = timeline(records, None)
    assert [version.state for version in shown.versions] == ["kept", "kept", "deleted", "deleted", "latest"]


@pytest.mark.parametrize("requests", [1, 6])
def test_the_page_of_a_verify_that_ended_early(aging: Aging, requests: int) -> None:
    for _ in range(70):
        alter(aging.lake, "n0", "a")
    report = operations.verify(aging.lake, budget=operations.Budget(max_requests=requests))
    assert not report.is_complete
    page = parsed(verification_page(report, aging.lake.storage.now_ms()))
    assert page.headline.startswith("Not finished, because the budget of ")
    assert page.headline.endswith(f"; the latest is {report.latest_version}")
    seen = len(report.records)
    assert page.bars()["unseen"] == report.latest_version + 1 - seen > 0
    assert "Not checked: " in page.text


def test_versions_that_nobody_looked_at_are_shown_after_the_others() -> None:
    records = [VersionRecord(version=version, created_at_ms=version, commit_id=str(version)) for version in range(3)]
    shown = timeline(records, None, latest=4)
    assert [version.state for version in shown.versions] == ["kept", "kept", "kept", "unseen", "unseen"]
    assert shown.latest.number == 4
    assert [version.state for version in timeline([], None, latest=1).versions] == ["unseen", "unseen"]


def test_states_come_from_expirations_before_verdicts() -> None:
    definition = LakehouseDef(
        id="x",
        expirations=tuple(
            ExpirationBatch(
                id=str(state),
                versions=str(at),
                expired_at_version=1,
                expired_at_millis=1,
                plan_path="",
                digest="",
                state=state,
            )
            for at, state in enumerate(ExpirationState)
        ),
    )
    records = [VersionRecord(version=version, created_at_ms=version, commit_id=str(version)) for version in range(6)]
    shown = timeline([*records[:5], replace(records[5], version=5)], definition, expired_now=[4])
    assert [version.state for version in shown.versions] == [
        "expired",
        "expired",
        "purged",
        "kept",
        "expired",
        "latest",
    ]
    assert shown.versions[1].why == "its purge has begun, so it cannot be restored"


# Who may read them


def test_hostile_names_are_text(lakes: Lakes) -> None:
    lake = lakes.memory(properties={"owner": HOSTILE})
    name = HOSTILE.replace("\x00", "").replace("\x1b", "").replace(" ", "")
    with lake.transaction(message=HOSTILE.replace("\x00", ""), properties={"<b>": "<i>"}) as txn:
        txn.create_namespace(name)
        txn.create_table(name, name, table(comment=HOSTILE))
    operations.plan_export(lake, name, version=1).execute()
    report = operations.verify(lake)
    finding = Finding(severity="error", code=HOSTILE, message=HOSTILE, path=HOSTILE, version=1, fix=HOSTILE)
    pages = [
        log(lake),
        verification_page(replace(report, findings=(finding,)), lake.storage.now_ms()),
        expiration_page(operations.plan_expiration(lake)),
    ]
    for page in pages:
        text = parsed(page).text  # asserts that no element or attribute came of it
        assert "<script>alert('x')</script>" in text
        assert "{{7*7}}" in text
        assert "\\u202e" in text
        for control in "\u202e\x00\x1b":
            assert control not in page
        assert "<script" not in page
        assert "<svg onload" not in page
    pictures = [expiration_chart(operations.plan_expiration(lake)), verification_chart(report)]
    for picture in pictures:
        assert "<script" not in picture
        assert "<script>" in "".join(ET.fromstring(picture).itertext())


def test_commit_info_of_other_programs_may_hold_anything() -> None:
    system = {"created_at_millis": "5", "commit_info": '{"operation": ["<b>"], "message": {"a": 1}, "properties": 3}'}
    record = VersionRecord.of(4, {**system, "rollback_from_root": "no root at all"})
    assert (record.operation, record.message, record.rollback_from, record.rollback_to) == (None, None, None, None)
    assert VersionRecord.of(4, {"created_at_millis": "5", "commit_info": '{"message": "' + "m" * 900 + '"}'}).message
    assert len(VersionRecord.of(4, {"created_at_millis": "5", "commit_info": "[]"}).message or "") == 0


@pytest.mark.parametrize(
    ("message", "properties", "expected"),
    [
        ("to version 3", {}, 3),
        ("of our own", {"to_version": "4"}, 4),
        ("to version 3", {"to_version": "4"}, 4),
        ("to version 3: n.t", {}, 3),
        ("to version 12", {}, None),
        (None, {"to_version": "-1"}, None),
        (None, {"to_version": "٣"}, None),
        (None, {"to_version": 3}, None),
        (None, None, None),
    ],
    ids=[f"case{number}" for number in range(9)],
)
def test_where_a_rollback_went(message: str | None, properties: object, expected: int | None) -> None:
    assert rolled_back_to(9, message, properties) == expected


# How large they get


@pytest.mark.parametrize("versions", [3, 300, 20_000])
def test_pages_stay_small_and_are_the_same_for_the_same_input(lake: Lakehouse, versions: int) -> None:
    plan = enlarged(operations.plan_expiration(lake, keeping(2)), versions)
    page = expiration_page(plan)
    assert page == expiration_page(plan)
    assert len(page.encode()) < MOST_PAGE_BYTES / 10
    found = parsed(page)
    purged, half = versions // 5, versions // 2
    of_which = f", of which {purged:,} purged" if purged else ""
    assert found.headline.startswith(f"{versions:,} versions{of_which}; {half - purged:,} would expire and reclaim ")
    rows = found.rows("version", "created (UTC)")
    assert len(rows) == min(versions, 200)
    assert rows[0][0] == f"{versions - 1:,}"
    assert (f"{versions - 200:,} versions not listed" in found.text) == (versions > 200)
    assert len(expiration_chart(plan)) < MOST_PAGE_BYTES / 20


def test_pages_stay_small_where_everything_is_long(lake: Lakehouse) -> None:
    plan = enlarged(operations.plan_expiration(lake, keeping(2)), 3_000)
    names = [f"{number:04}{'<&>' * 60}" for number in range(3_000)]
    exports = tuple(
        ExportRecord(
            name=name,
            version=number,
            level=ExportLevel.MINIMAL,
            root_location="_export_x.arrow",
            state=ExportState.COMPLETE,
            created_at_millis=1,
            manifest_path="",
        )
        for number, name in enumerate(names)
    )
    plan.base.__dict__["definition"] = replace(plan.base.definition, exports=exports)
    records = tuple(replace(record, message="<&>" * 1_300, operation="<&>" * 100) for record in plan.records)
    page = expiration_page(replace(plan, records=records))
    assert len(page.encode()) < MOST_PAGE_BYTES
    assert "2,960 more exports are not shown" in parsed(page).text
    findings = tuple(
        Finding(severity="warning", code=f"c{number % 3}", message="<&>" * 1_000, path="<&>" * 300, version=number)
        for number in range(3_000)
    )
    report = replace(operations.verify(lake), findings=findings, _records=records)
    page = verification_page(report, plan.now_ms)
    assert len(page.encode()) < MOST_PAGE_BYTES
    assert "Not listed: 934 more c2, 933 more c0, 933 more c1." in parsed(page).text
