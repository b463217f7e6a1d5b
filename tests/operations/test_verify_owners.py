"""Test what verify reports about owner files."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest

from tests.faults import FaultyStorage
from tests.lakes import Lakes
from tests.operations.changes import append_rows
from tests.operations.test_folding_file_systems import RemoteExecutor
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import FileExistsAlreadyError
from trinitylake_ops.format.file_names import owner_path
from trinitylake_ops.iceberg.managed import owner_file, read_owner
from trinitylake_ops.operations.executor import LOCAL

pytestmark = pytest.mark.usefixtures("fixed_requests")


@pytest.fixture
def lake(lakes: Lakes) -> Lakehouse:
    """A lakehouse with two managed tables."""
    lake = lakes.memory()
    for name in ("t", "u"):
        append_rows(lake, f"ns.{name}")
    return lake


def owner_path_of(lake: Lakehouse, table: str = "t") -> str:
    return owner_path(lake.snapshot().table("ns", table).id)


def findings_of(lake: Lakehouse, *, deep: bool) -> list[tuple[str, str, str | None]]:
    reports = [operations.verify(lake, deep=deep, executor=executor) for executor in (LOCAL, RemoteExecutor())]
    assert reports[0].findings == reports[1].findings
    return [(finding.severity, finding.code, finding.path) for finding in reports[0].findings]


@pytest.mark.parametrize("deep", [False, True])
def test_missing_owner_file_is_reported_once_and_repaired(lake: Lakehouse, deep: bool) -> None:
    paths = sorted([owner_path_of(lake), owner_path_of(lake, "u")])
    version = lake.latest_version()
    for path in paths:
        lake.storage.delete(path)
    assert findings_of(lake, deep=deep) == [("warning", "owner-missing", paths[0])]
    plan = operations.plan_repair(lake)
    assert ([step.action for step in plan.steps], plan.remaining) == (["claim"], ())
    assert not lake.storage.exists(paths[0])
    plan.execute(plan.digest)
    assert [read_owner(lake.storage.read(path), path) for path in paths] == [lake.snapshot().definition.id] * 2
    assert plan.execute().version == version, "a second run changes nothing"
    assert operations.verify(lake, deep=True).findings == ()
    assert operations.plan_repair(lake).is_empty


def test_repair_does_not_claim_folder_of_another_lakehouse(lake: Lakehouse) -> None:
    path = owner_path_of(lake)
    lake.storage.delete(path)
    plan = operations.plan_repair(lake)
    foreign_data = owner_file(replace(lake.snapshot().definition, id="another"))
    lake.storage.create(path, foreign_data)
    with pytest.raises(FileExistsAlreadyError):
        plan.execute()
    assert lake.storage.read(path) == foreign_data


@pytest.mark.parametrize("deep", [False, True])
def test_damaged_owner_file_is_reported(lake: Lakehouse, deep: bool) -> None:
    path = owner_path_of(lake)
    content = lake.storage.read(path)
    lake.storage.write(path, content[:-1])
    assert findings_of(lake, deep=deep) == [("error", "owner-damaged", path)]
    assert [(finding.code, finding.path) for finding in operations.plan_repair(lake).remaining] == [
        ("owner-damaged", path)
    ]
    lake.storage.write(path, content.replace(b"lakehouse_id", b"lakehouse_ix"))
    assert findings_of(lake, deep=deep) == ([("error", "owner-damaged", path)] if deep else []), "the size is the same"


@pytest.mark.parametrize("deep", [False, True])
def test_owner_file_of_another_lakehouse_is_reported(lake: Lakehouse, deep: bool) -> None:
    path, definition = owner_path_of(lake), lake.snapshot().definition
    lake.storage.write(path, owner_file(replace(definition, id="another")))
    assert findings_of(lake, deep=deep) == [("error", "owner-other", path)]
    lake.storage.write(path, owner_file(replace(definition, id=str(uuid.uuid4()))))
    assert findings_of(lake, deep=deep) == ([("error", "owner-other", path)] if deep else []), "the size is the same"


def test_folders_of_undefined_tables_are_not_reported(lake: Lakehouse) -> None:
    lake.storage.create("tables/foreign/data/1", b"")
    lake.storage.create(owner_path("other"), owner_file(replace(lake.snapshot().definition, id="another")))
    assert findings_of(lake, deep=True) == []
    lake.storage.create(owner_path("damaged"), b"{")
    assert findings_of(lake, deep=False) == [("error", "owner-damaged", owner_path("damaged"))]


def test_intact_owner_files_are_read_only_by_deep_run(lake: Lakehouse) -> None:
    storage_with_log = FaultyStorage(lake.storage)
    lake_with_log = Lakehouse(storage_with_log)

    def read_owner_paths() -> list[str]:
        return sorted(request.path for request in storage_with_log.log if request.path.endswith("_owner.json"))

    assert operations.verify(lake_with_log).findings == ()
    assert read_owner_paths() == []
    assert operations.verify(lake_with_log, deep=True).findings == ()
    assert read_owner_paths() == sorted([owner_path_of(lake), owner_path_of(lake, "u")])
