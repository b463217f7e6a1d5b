"""Test HTML reports: their content for every kind of version, the escaping of hostile names, and their size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from tests.foreign import ForeignLake
from tests.lakes import Lakes, table
from tests.operations.aging import Aging, keeping, needed_files
from tests.operations.changes import alter, create
from tests.operations.html_pages import ParsedPage, enlarge, parse_page
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
MAX_PAGE_BYTES = 2_000_000


@pytest.fixture
def lake(aging: Aging) -> Lakehouse:
    return aging.lake


def render_log(lake: Lakehouse, limit: int | None = None) -> str:
    latest = lake.snapshot()
    return log_page(latest, list(lake.history(limit, latest)), lake.storage.now_ms())


def render_verification(lake: Lakehouse) -> str:
    return verification_page(operations.verify(lake), lake.storage.now_ms())


def states_of(page: ParsedPage) -> dict[str, tuple[str, str]]:
    """Return state -> (count, versions)."""
    return {row[0]: (row[1], row[2]) for row in page.rows("state", "count")}


# Content


def test_log_page_shows_versions_and_tree(lake: Lakehouse) -> None:
    page = parse_page(render_log(lake))
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


def test_log_page_headline_mentions_limit(lake: Lakehouse) -> None:
    page = parse_page(render_log(lake, 2))
    assert page.headline == "The newest 2 versions; the latest is 5"
    assert [row[0] for row in page.rows("version", "created (UTC)")] == ["5", "4"]


def test_log_page_additionally_reads_only_nodes_of_latest_tree(lake: Lakehouse) -> None:
    def requests(read: Callable[[Lakehouse], object]) -> dict[str, int]:
        metered = MeteredStorage(lake.storage)
        reader = Lakehouse(metered)
        reader.latest_version()  # caches the naming scheme of roots
        before = metered.snapshot().requests
        read(reader)
        return {kind: number - before.get(kind, 0) for kind, number in metered.snapshot().requests.items()}

    history_requests = requests(lambda reader: list(reader.history()))
    page_requests = requests(render_log)
    nodes = lake.snapshot().tree_shape().nodes - 1
    assert nodes > 0
    assert page_requests == {**history_requests, "read": history_requests["read"] + nodes}


def test_expiration_page_shows_plan(lake: Lakehouse) -> None:
    plan = operations.plan_expiration(lake, keeping(2))
    page = parse_page(expiration_page(plan))
    assert page.headline == f"6 versions; 4 would expire and reclaim {plan.bytes / 1_000:.1f} kB; the latest is 5"
    assert f"trinitylake expire --apply {plan.digest}" in page.text
    assert states_of(page) == {"latest": ("1", "5"), "kept": ("1", "4"), "would expire": ("4", "0–3")}
    assert page.bars() == {"latest": 1, "kept": 1, "expiring": 4, "bytes": len(set(plan.freed.writers.values()))}
    kinds = page.rows("files", "number")
    assert {row[0]: int(row[1]) for row in kinds} == plan.files
    assert [page.rows("version", "created (UTC)")[1][column] for column in (0, 2, 5)] == [
        "4",
        "kept",
        "among the minimum of 2",
    ]


def test_expiration_page_reads_only_tree_of_plan(aging: Aging) -> None:
    metered = MeteredStorage(aging.lake.storage)
    plan = operations.plan_expiration(Lakehouse(metered), keeping(2))
    before = metered.snapshot().requests
    expiration_page(plan)
    after = metered.snapshot().requests
    nodes = aging.lake.snapshot().tree_shape().nodes - 1
    additional_requests = {kind: after[kind] - before.get(kind, 0) for kind in after}
    assert additional_requests.pop("read") <= nodes
    assert not any(additional_requests.values())
    expiration_chart(plan)
    assert metered.snapshot().requests == after


def test_reclaimed_bytes_are_attributed_to_writing_version(lake: Lakehouse) -> None:
    plan = operations.plan_expiration(lake, keeping(2))
    needed = {version: set(needed_files(lake, version)) for version in range(6)}
    first_versions = {
        path: min(version for version in needed if path in needed[version]) for path in plan.freed.sizes_bytes
    }
    assert plan.freed.writers == first_versions
    assert sum(plan.freed.bytes_by(plan.freed.writers).values()) == plan.bytes


def test_pages_show_expired_and_purged_versions(aging: Aging) -> None:
    plan = operations.plan_expiration(aging.lake, keeping(2))
    report = plan.execute()
    page = parse_page(expiration_page(plan, report))
    assert "; 4 expired just now, by version 6; a purge reclaims " in page.headline
    assert "trinitylake undelete 0-3" in page.text
    assert page.bars()["expired"] == 4
    page = parse_page(render_log(aging.lake))
    assert page.headline == "7 versions, of which 4 expired; the latest is 6"
    assert "undelete can restore it until its purge begins" in page.text
    aging.later()
    assert aging.purge().is_complete
    for html in (render_log(aging.lake), expiration_page(operations.plan_expiration(aging.lake, keeping(3)))):
        page = parse_page(html)
        assert ", of which 4 purged; " in page.headline
        assert page.bars()["purged"] == 4
        assert states_of(page)["purged"] == ("4", "0–3")
    assert parse_page(render_verification(aging.lake)).headline.endswith(
        ", of which 4 purged; the latest is 8; no findings"
    )


def test_expiration_page_shows_empty_plan(lake: Lakehouse) -> None:
    plan = operations.plan_expiration(lake, keeping(100))
    page = parse_page(expiration_page(plan))
    assert page.headline == "6 versions; none would expire; the latest is 5"
    assert "Nothing to do." in page.text
    assert "Reclaimed bytes, by" not in page.text
    assert "Nothing expired." in parse_page(expiration_page(plan, plan.execute())).text


def test_log_page_shows_exports_rollbacks_and_foreign_versions(aging: Aging) -> None:
    lake = aging.lake
    operations.plan_export(lake, "before-migration", version=2).execute()
    bad_version = alter(lake, "n0", "a")
    operations.rollback(lake, 3, message="undo Monday")
    foreign_version = ForeignLake(lake.storage).commit_table("n1", "z")
    page = parse_page(render_log(lake))
    rows = {int(row[0]): row for row in page.rows("version", "created (UTC)")}
    assert rows[2][4].startswith("exported as before-migration")
    assert rows[2][5] == "exported as 'before-migration'"
    assert rows[bad_version + 1][4] == f"rolled back from {bad_version} to 3undo Monday"
    assert rows[foreign_version][4] == "by another program"
    assert f"version {bad_version + 1} rolled back from version {bad_version} to the content of version 3" in page.text
    assert "version 2 is exported as before-migration" in page.text
    assert f"version {foreign_version}: 1 version written by another program" in page.text
    assert page.headline == f"{foreign_version + 1} versions; the latest is {foreign_version}"
    classes = [attributes.get("class") for _, attributes in page.elements]
    assert [classes.count(name) for name in ("arc", "foreign", "pennant")] == [1, 1, 1]


def test_expiration_page_shows_version_pinned_by_export(aging: Aging) -> None:
    operations.plan_export(aging.lake, "kept", version=2).execute()
    aging.later()
    page = parse_page(expiration_page(operations.plan_expiration(aging.lake, keeping(1))))
    assert states_of(page)["kept"] == ("1", "2")
    assert "pinned by export 'kept'" in page.text


def test_timeline_shows_unfinished_foreign_and_external_exports() -> None:
    unfinished_export = ExportRecord(
        name="a",
        version=1,
        level=ExportLevel.MINIMAL,
        root_location="_export_x.arrow",
        state=ExportState.COPYING,
        created_at_millis=1,
        manifest_path="",
    )
    snapshots = {"b": root_path(2), "c": "_export_y.arrow", "d": "s3://other/root", "e": root_path(9)}
    definition = LakehouseDef(id="x", exports=(unfinished_export,), exported_snapshots=snapshots)
    records = [VersionRecord(version=version, created_at_ms=version, commit_id=str(version)) for version in range(4)]
    result = timeline(records, definition)
    assert [version.exports for version in result.versions] == [(), ("a (unfinished)",), ("b",), ()]
    assert result.unplaced_exports == ("c", "d", "e")


def test_expiration_page_shows_spared_versions_as_kept(lake: Lakehouse) -> None:
    plan = operations.plan_expiration(lake, keeping(2))
    operations.plan_export(lake, "concurrent", version=1).execute()
    report = plan.execute()
    assert (report.versions, report.spared) == ("0,2-3", "1")
    page = parse_page(expiration_page(plan, report))
    assert states_of(page) == {"latest": ("1", "5"), "kept": ("2", "4, 1"), "expired": ("3", "2–3, 0")}
    assert "not expired, because it is kept now" in page.text


def test_verify_page_counts_files_without_checksum(lake: Lakehouse) -> None:
    ForeignLake(lake.storage).commit_table("n1", "z")
    report = operations.verify(lake, deep=True)
    assert dict(report.without_checksum) == {"definition": 1, "node": 1}
    text = parse_page(verification_page(report, lake.storage.now_ms())).text
    checksums = "files compared with their checksums, 1 definition, 1 node without a checksum"
    assert f"{report.checked_files} {checksums}" in text
    assert "checksums" not in parse_page(render_verification(lake)).text


def test_verify_page_shows_findings_and_repair_commands(lake: Lakehouse) -> None:
    assert parse_page(render_verification(lake)).headline == "6 versions; the latest is 5; no findings"
    lake.storage.write(HINT_PATH, b"2")
    page = parse_page(render_verification(lake))
    assert page.headline == "1 warning; 6 versions; the latest is 5"
    (row,) = page.rows("severity", "finding")
    assert (row[0], row[1], row[5]) == ("warning", "hint-wrong", "repair-hint")


def test_pages_show_damage(lakes: Lakes) -> None:
    aging = Aging.on(lakes.storage())  # not checked after the test
    lake = aging.lake
    create(lake, "n", *(f"t{number}" for number in range(40)))
    alter(lake, "n", "t1")
    lake.storage.delete_many([lake.files.roots.path(0)])
    snapshot = lake.snapshot()
    (node, *_) = [child for child in snapshot.root.children if child is not None]
    lake.storage.write(node, b"garbage")
    lake = Lakehouse(lake.storage, cache="off")
    page = parse_page(render_verification(lake))
    assert page.headline.startswith("2 errors; 3 versions, of which 1 unreadable; the latest is 2")
    assert page.bars()["unreadable"] == 1
    assert {row[1] for row in page.rows("severity", "finding")} == {"root-missing", "node-corrupt"}
    classes = [attributes.get("class") for _, attributes in page.elements]
    assert classes.count("finding") == 2
    page = parse_page(render_log(lake))
    assert "The tree cannot be read: " in page.text
    assert node in page.text
    assert page.headline == "The newest 2 versions; the latest is 2"


def test_timeline_shows_versions_deleted_by_another_program() -> None:
    records = [VersionRecord(version=version, created_at_ms=version, commit_id=str(version)) for version in (3, 4, 7)]
    result = timeline(records, None)
    assert [version.state for version in result.versions] == ["kept", "kept", "deleted", "deleted", "latest"]


@pytest.mark.parametrize("max_requests", [1, 6])
def test_verify_page_shows_incomplete_run(aging: Aging, max_requests: int) -> None:
    for _ in range(70):
        alter(aging.lake, "n0", "a")
    report = operations.verify(aging.lake, budget=operations.Budget(max_requests=max_requests))
    assert not report.is_complete
    page = parse_page(verification_page(report, aging.lake.storage.now_ms()))
    assert page.headline.startswith("Not finished, because the budget of ")
    assert page.headline.endswith(f"; the latest is {report.latest_version}")
    n_checked = len(report.records)
    assert page.bars()["unseen"] == report.latest_version + 1 - n_checked > 0
    assert "Not checked: " in page.text


def test_timeline_shows_unchecked_versions_last() -> None:
    records = [VersionRecord(version=version, created_at_ms=version, commit_id=str(version)) for version in range(3)]
    result = timeline(records, None, latest=4)
    assert [version.state for version in result.versions] == ["kept", "kept", "kept", "unseen", "unseen"]
    assert result.latest.number == 4
    assert [version.state for version in timeline([], None, latest=1).versions] == ["unseen", "unseen"]


def test_recorded_expirations_take_precedence_over_verdicts() -> None:
    definition = LakehouseDef(
        id="x",
        expirations=tuple(
            ExpirationBatch(
                id=str(state),
                versions=str(number),
                expired_at_version=1,
                expired_at_millis=1,
                plan_path="",
                digest="",
                state=state,
            )
            for number, state in enumerate(ExpirationState)
        ),
    )
    records = [VersionRecord(version=version, created_at_ms=version, commit_id=str(version)) for version in range(6)]
    result = timeline([*records[:5], replace(records[5], version=5)], definition, expired_now=[4])
    assert [version.state for version in result.versions] == [
        "expired",
        "expired",
        "purged",
        "kept",
        "expired",
        "latest",
    ]
    assert result.versions[1].why == "its purge has begun, so it cannot be restored"


# Escaping


def test_hostile_names_are_escaped(lakes: Lakes) -> None:
    lake = lakes.memory(properties={"owner": HOSTILE})
    name = HOSTILE.replace("\x00", "").replace("\x1b", "").replace(" ", "")
    with lake.transaction(message=HOSTILE.replace("\x00", ""), properties={"<b>": "<i>"}) as txn:
        txn.create_namespace(name)
        txn.create_table(name, name, table(comment=HOSTILE))
    operations.plan_export(lake, name, version=1).execute()
    report = operations.verify(lake)
    finding = Finding(severity="error", code=HOSTILE, message=HOSTILE, path=HOSTILE, version=1, fix=HOSTILE)
    pages = [
        render_log(lake),
        verification_page(replace(report, findings=(finding,)), lake.storage.now_ms()),
        expiration_page(operations.plan_expiration(lake)),
    ]
    for page in pages:
        text = parse_page(page).text  # fails if the names created elements or attributes
        assert "<script>alert('x')</script>" in text
        assert "{{7*7}}" in text
        assert "\\u202e" in text
        for control in "\u202e\x00\x1b":
            assert control not in page
        assert "<script" not in page
        assert "<svg onload" not in page
    charts = [expiration_chart(operations.plan_expiration(lake)), verification_chart(report)]
    for chart in charts:
        assert "<script" not in chart
        assert "<script>" in "".join(ET.fromstring(chart).itertext())


def test_invalid_commit_info_of_other_programs_is_ignored() -> None:
    system = {"created_at_millis": "5", "commit_info": '{"operation": ["<b>"], "message": {"a": 1}, "properties": 3}'}
    record = VersionRecord.of(4, {**system, "rollback_from_root": "not a root"})
    assert (record.operation, record.message, record.rollback_from, record.rollback_to) == (None, None, None, None)
    assert VersionRecord.of(4, {"created_at_millis": "5", "commit_info": '{"message": "' + "m" * 900 + '"}'}).message
    assert len(VersionRecord.of(4, {"created_at_millis": "5", "commit_info": "[]"}).message or "") == 0


@pytest.mark.parametrize(
    ("message", "properties", "expected"),
    [
        ("to version 3", {}, 3),
        ("custom message", {"to_version": "4"}, 4),
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
def test_rollback_target_is_read_from_commit_info(
    message: str | None, properties: object, expected: int | None
) -> None:
    assert rolled_back_to(9, message, properties) == expected


# Size


@pytest.mark.parametrize("n_versions", [3, 300, 20_000])
def test_pages_are_small_and_deterministic(lake: Lakehouse, n_versions: int) -> None:
    plan = enlarge(operations.plan_expiration(lake, keeping(2)), n_versions)
    page = expiration_page(plan)
    assert page == expiration_page(plan)
    assert len(page.encode()) < MAX_PAGE_BYTES / 10
    parsed = parse_page(page)
    n_purged, n_before_middle = n_versions // 5, n_versions // 2
    purged_text = f", of which {n_purged:,} purged" if n_purged else ""
    assert parsed.headline.startswith(
        f"{n_versions:,} versions{purged_text}; {n_before_middle - n_purged:,} would expire and reclaim "
    )
    rows = parsed.rows("version", "created (UTC)")
    assert len(rows) == min(n_versions, 200)
    assert rows[0][0] == f"{n_versions - 1:,}"
    assert (f"{n_versions - 200:,} versions not listed" in parsed.text) == (n_versions > 200)
    assert len(expiration_chart(plan)) < MAX_PAGE_BYTES / 20


def test_pages_with_long_names_are_small(lake: Lakehouse) -> None:
    plan = enlarge(operations.plan_expiration(lake, keeping(2)), 3_000)
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
    assert len(page.encode()) < MAX_PAGE_BYTES
    assert "2,960 more exports are not shown" in parse_page(page).text
    findings = tuple(
        Finding(severity="warning", code=f"c{number % 3}", message="<&>" * 1_000, path="<&>" * 300, version=number)
        for number in range(3_000)
    )
    report = replace(operations.verify(lake), findings=findings, _records=records)
    page = verification_page(report, plan.now_ms)
    assert len(page.encode()) < MAX_PAGE_BYTES
    assert "Not listed: 934 more c2, 933 more c0, 933 more c1." in parse_page(page).text
