"""Test the names of files that exports copy."""

from __future__ import annotations

import re
import uuid

import pytest

from tests.lakes import Lakes, listed
from tests.operations.changes import append_rows, create
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.iceberg import copy
from trinitylake_ops.operations.exports import roots as export_roots
from trinitylake_ops.operations.transfer import names
from trinitylake_ops.storage import Storage

_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def uuid_versions(storage: Storage) -> set[int | None]:
    names = (info.path.rpartition("tables/")[2] for info in storage.list())
    return {uuid.UUID(text).version for name in names for text in _UUID.findall(name)}


@pytest.fixture
def lake(lakes: Lakes) -> Lakehouse:
    lake = lakes.local("source")
    create(lake, "ns", "plain")
    append_rows(lake)
    return lake


@pytest.mark.parametrize("level", ["minimal", "partial", "full"])
def test_names_of_copies_are_version_4_uuids(lakes: Lakes, lake: Lakehouse, level: str) -> None:
    target = f"file://{lakes.folder}/target/"
    operations.plan_export(lake, "there", target=target, level=level).execute()
    operations.plan_export(lake, "here", level=level).execute()
    assert uuid_versions(lake.storage) == uuid_versions(Lakehouse.open(target).storage) == {4}


def test_copies_named_by_older_releases_are_recognized(
    lakes: Lakes, lake: Lakehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = f"file://{lakes.folder}/target/"
    with monkeypatch.context() as patch:
        for module in (names, export_roots, copy):
            patch.setattr(module, "derived_uuid", uuid.uuid5)
        operations.plan_export(lake, "first", target=target, level="full").execute()
    target_lake = Lakehouse.open(target)
    assert 5 in uuid_versions(target_lake.storage)
    before = listed(target_lake.storage)
    create(lake, "more")
    operations.plan_export(lake, "second", target=target, level="full").execute()
    new = listed(target_lake.storage) - before
    assert not [path for path in new if "-table-" in path or path.startswith("tables/")], new
    assert operations.verify(Lakehouse.open(target)).findings == ()
