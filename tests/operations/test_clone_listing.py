"""Test the list of clones and reports about them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.lakes import Lakes
from tests.operations.aging import Aging
from tests.operations.changes import alter, append_rows, create, overwrite_rows
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import ExportNotFoundError
from trinitylake_ops.operations import CloneInfo


@pytest.fixture
def parent(aging: Aging, lakes: Lakes) -> Aging:
    append_rows(aging.lake)
    operations.plan_clone(aging.lake, lakes.named_root("clone"), "feature").execute()
    return aging


@pytest.fixture
def clone(parent: Aging, lakes: Lakes) -> Lakehouse:
    return Lakehouse.open(lakes.named_root("clone"))


def get_only_clone(lake: Lakehouse) -> CloneInfo:
    (info,) = operations.list_clones(lake)
    return info


def version_distance(lake: Lakehouse) -> tuple[int | None, int]:
    info = get_only_clone(lake)
    return info.versions, info.parent_versions


def test_only_versions_with_changes_are_counted(parent: Aging, clone: Lakehouse) -> None:
    lake = parent.lake
    assert version_distance(lake) == (0, 0), "recording the clone changes no object"
    operations.plan_export(lake, "kept").execute()
    lake.alter_definition(properties={"a": "b"})
    operations.drop_export(lake, "kept")
    operations.compact(lake)
    operations.plan_export(clone, "kept").execute()
    assert version_distance(lake) == (0, 0)
    create(lake, "later", "t")
    append_rows(lake)
    append_rows(clone, "ns.own")
    assert version_distance(lake) == (2, 2), "a table is created by one version, and filled by another"
    parent.later()
    parent.expire()
    assert version_distance(lake) == (2, 2)
    operations.plan_promotion(lake, "feature").execute()
    assert version_distance(lake) == (2, 2), "the clone already has promoted changes"
    operations.plan_refresh(lake, "feature").execute()
    assert version_distance(lake) == (2, 0)
    overwrite_rows(lake, "ns.t")
    parent.clean_up()
    assert version_distance(lake) == (2, 3), "purged versions keep their operation"


def test_list_shows_version_of_last_refresh(parent: Aging, clone: Lakehouse) -> None:
    lake = parent.lake
    first = get_only_clone(lake)
    assert first.version == first.cloned_version
    append_rows(lake)
    version = lake.latest_version()
    operations.plan_refresh(lake, "feature").execute()
    info = get_only_clone(lake)
    assert (info.version, info.cloned_version) == (version, first.cloned_version)


def test_partial_clone_counts_parent_changes_of_its_namespaces(parent: Aging, lakes: Lakes) -> None:
    lake = parent.lake
    operations.drop_clone(lake, "feature", delete_files=True)
    operations.plan_clone(lake, lakes.named_root("clone"), "some", namespaces=["n1"]).execute()
    create(lake, "later", "t")
    append_rows(lake)
    assert version_distance(lake) == (0, 0)
    alter(lake, "n1", "a")
    assert version_distance(lake) == (0, 1)


def test_log_names_clone_operations(parent: Aging, clone: Lakehouse) -> None:
    lake = parent.lake
    append_rows(lake)
    operations.plan_refresh(lake, "feature").execute()
    operations.drop_clone(lake, "feature")
    logged_operations = [info.operation for info in lake.history(20) if "feature" in (info.message or "")]
    assert logged_operations == ["drop-clone", "refresh", "clone", "clone"]


def test_verify_distinguishes_clones_from_exports(parent: Aging, clone: Lakehouse) -> None:
    append_rows(parent.lake, "ns.more")
    operations.plan_refresh(parent.lake, "feature").execute()
    report = operations.verify(parent.lake)
    assert (report.is_clean, report.clones, report.exports) == (True, 1, 0)
    assert "0 exports, 1 clones" in str(report)
    definition = parent.lake.snapshot().definition
    parent.lake.alter_definition(exported_snapshots={})
    errors = [finding for finding in operations.verify(parent.lake).findings if finding.severity == "error"]
    assert {error.fix for error in errors} == {"drop-clone"}
    assert {error.message.partition("'")[0] for error in errors} == {"clone "}
    damaged_exports = tuple(replace(export, manifest_path=f"{export.manifest_path}x") for export in definition.exports)
    parent.lake.alter_definition(exports=damaged_exports, exported_snapshots=definition.exported_snapshots)
    errors = [finding for finding in operations.verify(parent.lake).findings if finding.severity == "error"]
    assert {finding.fix for finding in errors} == {"drop-clone"}
    assert {finding.message.partition("'")[0] for finding in errors} == {"clone "}


def test_verify_reports_duplicate_record_names(parent: Aging, clone: Lakehouse) -> None:
    lake = parent.lake
    (record,) = lake.snapshot().definition.exports
    operations.plan_export(lake, "kept").execute()
    other = next(export for export in lake.snapshot().definition.exports if export.name == "kept")
    lake.alter_definition(exports=(record, replace(other, name="feature")))
    findings = [finding for finding in operations.verify(lake).findings if finding.code == "name-taken-twice"]
    assert [(finding.severity, finding.fix) for finding in findings] == [("error", "drop-clone")]
    assert "2 exports or clones have the name 'feature'" in findings[0].message


def test_compare_omits_objects_equal_on_both_sides(parent: Aging, clone: Lakehouse) -> None:
    lake = parent.lake
    append_rows(clone)
    operations.plan_promotion(lake, "feature").execute()
    comparison = operations.compare(lake, "feature")
    assert (comparison.table().rows, "1 changed alike in both" in str(comparison)) == ((), True)
    plan = operations.plan_refresh(lake, "feature")
    assert (plan.changes, plan.same, plan.is_empty) == ((), ("ns.t",), False)
    assert [row[:2] for row in plan.rows()] == [("same", "ns.t")]
    assert [row[:2] for row in plan.steps().rows] == [
        ("keep", f"version {lake.latest_version()} for the clone"),
        ("read", "ns.t"),
    ]
    assert plan.execute(plan.digest).changed == 0
    assert operations.compare(lake, "feature").objects == ()
    assert operations.plan_refresh(lake, "feature").is_empty


def test_error_explains_how_to_name_parent_versions(parent: Aging, clone: Lakehouse) -> None:
    with pytest.raises(ExportNotFoundError, match="'parent@x'"):
        clone.snapshot("parent@x")
    with pytest.raises(ExportNotFoundError, match="'parent@2'"):
        parent.lake.snapshot("parent@2")
    with pytest.raises(ExportNotFoundError, match="'nothing'"):
        parent.lake.snapshot("nothing")


def test_refreshed_clone_is_listed_once(parent: Aging, clone: Lakehouse) -> None:
    """The parent keeps a second version for the clone, but the record of that version is not another clone."""
    for _ in range(2):
        append_rows(parent.lake)
        operations.plan_refresh(parent.lake, "feature").execute()
    status = operations.lakehouse_status(parent.lake)
    assert (status.clones, status.exports) == (1, 0)
    assert next(due.why for due in status.due if due.what == "clones") == "1 clones"
    with pytest.raises(ExportNotFoundError) as raised:
        parent.lake.snapshot("nothing")
    assert str(raised.value).endswith("; clones: feature")
