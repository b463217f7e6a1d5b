"""Pages: what they say of every kind of version, to whom they are safe, and how large they get."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.foreign import ForeignLake
from tests.lakes import Lakes, table
from tests.maintenance.aging import Aging, keeping, needed_files
from tests.maintenance.changes import alter, create
from tests.maintenance.pages import Parsed, enlarged, parsed
from trinitylake_ops import Lakehouse, maintenance
from trinitylake_ops.errors import StorageError
from trinitylake_ops.format.definitions import (
    ExpirationBatch,
    ExpirationState,
    ExportLevel,
    ExportRecord,
    ExportState,
    LakehouseDef,
)
from trinitylake_ops.format.file_names import HINT_PATH
from trinitylake_ops.maintenance import Finding
from trinitylake_ops.maintenance.page import chart as charts
from trinitylake_ops.maintenance.page import (
    expiration_page,
    expiration_picture,
    log_page,
    verification_page,
    verification_picture,
    write_page,
)
from trinitylake_ops.maintenance.page.chart import MOST_BARS, WIDTH, draw
from trinitylake_ops.maintenance.page.timeline import VersionState, timeline
from trinitylake_ops.maintenance.page.wording import ago, clipped, ranges
from trinitylake_ops.maintenance.version_record import VersionRecord, rolled_back_to
from trinitylake_ops.storage import MeteredStorage

HOSTILE = "<script>alert('x')</script>\"'&amp;\u202egpj.exe\x00\x1b[31m{{ 7 * 7 }}]]>--><svg onload=x>"
MOST_PAGE_BYTES = 2_000_000


@pytest.fixture
def lake(aging: Aging) -> Lakehouse:
    return aging.lake


def log(lake: Lakehouse, limit: int | None = None) -> str:
    latest = lake.snapshot()
    return log_page(latest, list(lake.history(limit, latest)), lake.storage.now_ms())


def checked(lake: Lakehouse) -> str:
    return verification_page(maintenance.verify(lake), lake.storage.now_ms())


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
    plan = maintenance.plan_expiration(lake, keeping(2))
    page = parsed(expiration_page(plan))
    assert page.headline == f"6 versions; 4 would expire and free {plan.bytes} bytes; the latest is 5"
    assert f"trinitylake expire --apply {plan.digest}" in page.text
    assert states_of(page) == {"latest": ("1", "5"), "kept": ("1", "4"), "would expire": ("4", "0–3")}
    assert page.bars() == {"latest": 1, "kept": 1, "expiring": 4, "bytes": len(set(plan.freed.writers.values()))}
    kinds = page.rows("files", "number")
    assert {row[0]: int(row[1]) for row in kinds} == plan.files
    assert [page.rows("version", "created (UTC)")[1][at] for at in (0, 2, 5)] == ["4", "kept", "among the minimum of 2"]


def test_a_page_reads_only_the_tree_of_the_plan(aging: Aging) -> None:
    metered = MeteredStorage(aging.lake.storage)
    plan = maintenance.plan_expiration(Lakehouse(metered), keeping(2))
    before = metered.snapshot().requests
    expiration_page(plan)
    after = metered.snapshot().requests
    nodes = aging.lake.snapshot().tree_shape().nodes - 1
    asked = {kind: after[kind] - before.get(kind, 0) for kind in after}
    assert asked.pop("read") <= nodes
    assert not any(asked.values())
    expiration_picture(plan)
    assert metered.snapshot().requests == after


def test_freed_bytes_count_to_the_version_that_wrote_them(lake: Lakehouse) -> None:
    plan = maintenance.plan_expiration(lake, keeping(2))
    needed = {version: set(needed_files(lake, version)) for version in range(6)}
    first = {path: min(version for version in needed if path in needed[version]) for path in plan.freed.sizes_bytes}
    assert plan.freed.writers == first
    assert sum(plan.freed.bytes_by(plan.freed.writers).values()) == plan.bytes


def test_the_page_of_what_expired_and_was_purged(aging: Aging) -> None:
    plan = maintenance.plan_expiration(aging.lake, keeping(2))
    report = plan.execute()
    page = parsed(expiration_page(plan, report))
    assert "; 4 expired just now, by version 6; a purge frees " in page.headline
    assert "trinitylake undelete 0-3" in page.text
    assert page.bars()["expired"] == 4
    page = parsed(log(aging.lake))
    assert page.headline == "7 versions, of which 4 expired; the latest is 6"
    assert "undelete brings it back until its purge begins" in page.text
    aging.later()
    assert aging.purge().is_complete
    for shown in (log(aging.lake), expiration_page(maintenance.plan_expiration(aging.lake, keeping(3)))):
        page = parsed(shown)
        assert ", of which 4 purged; " in page.headline
        assert page.bars()["purged"] == 4
        assert states_of(page)["purged"] == ("4", "0–3")
    assert parsed(checked(aging.lake)).headline.endswith(", of which 4 purged; the latest is 8; no findings")


def test_nothing_expires(lake: Lakehouse) -> None:
    plan = maintenance.plan_expiration(lake, keeping(100))
    page = parsed(expiration_page(plan))
    assert page.headline == "6 versions; none would expire; the latest is 5"
    assert "There is nothing to do." in page.text
    assert "Freed, by" not in page.text
    assert "Nothing expired." in parsed(expiration_page(plan, plan.execute())).text


def test_exports_rollbacks_and_other_programs(aging: Aging) -> None:
    lake = aging.lake
    maintenance.plan_export(lake, "before-the-move", version=2).execute()
    bad = alter(lake, "n0", "a")
    maintenance.rollback(lake, 3, message="as it was on Monday")
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
    maintenance.plan_export(aging.lake, "kept", version=2).execute()
    aging.later()
    page = parsed(expiration_page(maintenance.plan_expiration(aging.lake, keeping(1))))
    assert states_of(page)["kept"] == ("1", "2")
    assert "pinned by export 'kept'" in page.text


def test_the_page_of_verify_says_what_is_wrong_and_what_mends_it(lake: Lakehouse) -> None:
    assert parsed(checked(lake)).headline == "6 versions; the latest is 5; no findings"
    lake.storage.write(HINT_PATH, b"2")
    page = parsed(checked(lake))
    assert page.headline == "1 warning; 6 versions; the latest is 5"
    (row,) = page.rows("severity", "finding")
    assert (row[0], row[1], row[5]) == ("warning", "hint-wrong", "hint --repair")


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
    assert "It cannot be read: " in page.text
    assert node in page.text
    assert page.headline == "The newest 2 versions; the latest is 2"


def test_versions_deleted_by_another_program_are_shown_between_others() -> None:
    records = [VersionRecord(version=version, created_at_ms=version, commit_id=str(version)) for version in (3, 4, 7)]
    shown = timeline(records, None)
    assert [version.state for version in shown.versions] == ["kept", "kept", "deleted", "deleted", "latest"]


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
    assert shown.versions[1].why == "its purge has begun: it cannot come back"


# Who may read them


def test_hostile_names_are_text(lakes: Lakes) -> None:
    lake = lakes.memory(properties={"owner": HOSTILE})
    name = HOSTILE.replace("\x00", "").replace("\x1b", "").replace(" ", "")
    with lake.transaction(message=HOSTILE.replace("\x00", ""), properties={"<b>": "<i>"}) as txn:
        txn.create_namespace(name)
        txn.create_table(name, name, table(comment=HOSTILE))
    maintenance.plan_export(lake, name, version=1).execute()
    report = maintenance.verify(lake)
    finding = Finding(severity="error", code=HOSTILE, message=HOSTILE, path=HOSTILE, version=1, mend=HOSTILE)
    pages = [
        log(lake),
        verification_page(replace(report, findings=(finding,)), lake.storage.now_ms()),
        expiration_page(maintenance.plan_expiration(lake)),
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
    pictures = [expiration_picture(maintenance.plan_expiration(lake)), verification_picture(report)]
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
        ("to version 3: n.t", {}, None),
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
    plan = enlarged(maintenance.plan_expiration(lake, keeping(2)), versions)
    page = expiration_page(plan)
    assert page == expiration_page(plan)
    assert len(page.encode()) < MOST_PAGE_BYTES / 10
    found = parsed(page)
    purged, half = versions // 5, versions // 2
    of_which = f", of which {purged:,} purged" if purged else ""
    assert found.headline.startswith(f"{versions:,} versions{of_which}; {half - purged:,} would expire and free ")
    rows = found.rows("version", "created (UTC)")
    assert len(rows) == min(versions, 200)
    assert rows[0][0] == f"{versions - 1:,}"
    assert (f"{versions - 200:,} versions more" in found.text) == (versions > 200)
    assert len(expiration_picture(plan)) < MOST_PAGE_BYTES / 20


def test_pages_stay_small_where_everything_is_long(lake: Lakehouse) -> None:
    plan = enlarged(maintenance.plan_expiration(lake, keeping(2)), 3_000)
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
    page = expiration_page(replace(plan, _records=records))
    assert len(page.encode()) < MOST_PAGE_BYTES
    assert "2,960 more exports are not drawn" in parsed(page).text
    findings = tuple(
        Finding(severity="warning", code=f"c{number % 3}", message="<&>" * 1_000, path="<&>" * 300, version=number)
        for number in range(3_000)
    )
    report = replace(maintenance.verify(lake), findings=findings, _records=records)
    page = verification_page(report, plan.now_ms)
    assert len(page.encode()) < MOST_PAGE_BYTES
    assert "Not listed: 934 more c2, 933 more c0, 933 more c1." in parsed(page).text


# The drawing


@given(
    first=st.integers(0, 2**32 - 5_000),
    states=st.lists(st.booleans(), min_size=1, max_size=2_000),
    spacing_ms=st.sampled_from([0, 1, 1_000, 60_000, 3_600_000, 86_400_000, 40 * 86_400_000]),
)
def test_a_drawing_shows_every_version_once_and_no_text_on_another(
    first: int, states: list[bool], spacing_ms: int
) -> None:
    records = [
        VersionRecord(version=first + at, created_at_ms=at * spacing_ms, commit_id=str(at), is_sealed=sealed)
        for at, sealed in enumerate(states)
    ]
    shown = timeline(records, None)
    drawn = draw(shown, bytes_by_version={first: 7, first + len(states) - 1: 3})
    assert len(drawn.bars) <= MOST_BARS
    assert (len(drawn.bars) - 1) * drawn.versions_per_bar < len(states) <= len(drawn.bars) * drawn.versions_per_bar
    for bar, following in itertools.pairwise(drawn.bars):
        assert bar.x + bar.width <= following.x + 1e-6
    assert drawn.bars[0].x >= 0
    assert drawn.bars[-1].x + drawn.bars[-1].width <= WIDTH + 1e-6
    for bar in drawn.bars:
        assert sum(segment.height for segment in bar.segments) == pytest.approx(drawn.bar_height)
    assert sum(bar.bytes_height > 0 for bar in drawn.bars) == len({0, (len(states) - 1) // drawn.versions_per_bar})
    for ticks in (drawn.version_ticks, drawn.time_ticks):
        assert ticks
        boxes = sorted(map(_box, ticks))
        assert all(right <= left for (_, right), (left, _) in itertools.pairwise(boxes)), ticks
    assert drawn.version_ticks[-1].text == f"{first + len(states) - 1:,}"


def _box(tick: charts.Tick) -> tuple[float, float]:
    width = len(tick.text) * 6.0
    start = {"start": 0.0, "middle": -width / 2, "end": -width}[tick.anchor]
    return tick.x + start, tick.x + start + width


def test_every_state_is_seen_in_a_bar_of_many() -> None:
    records = [
        VersionRecord(version=at, created_at_ms=at, commit_id=str(at), is_readable=at != 19_000) for at in range(20_000)
    ]
    drawn = draw(timeline(records, None), findings_by_version={19_000: 3})
    heights = {segment.state: segment.height for bar in drawn.bars for segment in bar.segments}
    assert heights.keys() == {VersionState.KEPT, VersionState.LATEST, VersionState.UNREADABLE}
    assert min(heights.values()) >= 3
    (mark,) = drawn.marks
    assert mark.title == "versions 19,000 to 19,199: 3 findings"


def test_words() -> None:
    assert ranges([5, 4, 3, 9]) == "9, 3–5"
    assert ranges(range(0, 40, 2)) == "38, 36, 34, 32, 30, 28, 26, 24 and 12 ranges more"
    assert [ago(seconds * 1000) for seconds in (0, 59, 60, 119, 120, 7_200, 172_800)] == [
        *("just now", "just now", "1 minute ago", "1 minute ago"),
        *("2 minutes ago", "2 hours ago", "2 days ago"),
    ]
    assert clipped("abc", 3) == "abc"
    assert clipped("abcd", 3) == "ab…"
    assert clipped("\u202e", 3) == "\\u…"


# Writing them


def test_a_page_replaces_a_file_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("before")
    path.chmod(0o640)
    (tmp_path / "link.html").symlink_to(path)
    write_page(tmp_path / "link.html", "a page\n")
    assert path.read_bytes() == b"a page\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert (tmp_path / "link.html").is_symlink()
    write_page(tmp_path / ("n" * 250 + ".html"), "a name as long as names can be")
    assert len(list(tmp_path.iterdir())) == 3


def test_a_page_that_cannot_be_written_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    path.write_text("before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            with pytest.raises(StorageError, match=r"page\.html' cannot be written: No space left on device"):
                write_page(path, "after")
        assert [file.name for file in tmp_path.iterdir()] == ["page.html"]
        assert path.read_text() == "before"


def test_a_page_goes_nowhere_but_into_a_file(tmp_path: Path) -> None:
    for path, reason in (
        (tmp_path / "none" / "page.html", "there is no folder"),
        (tmp_path, "no file"),
        (Path("/dev/null"), "no file"),
        (Path("/proc/page.html"), "cannot be written"),
    ):
        with pytest.raises(StorageError, match=reason) as raised:
            write_page(path, "page")
        assert raised.value.exit_code == 5
        assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []
