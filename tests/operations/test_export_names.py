"""Names of copies: uuids in the form of version 4, and those that earlier exports gave are known again."""

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


def versions_of_uuids(storage: Storage) -> set[int | None]:
    names = (info.path.rpartition("tables/")[2] for info in storage.list())
    return {uuid.UUID(found).version for name in names for found in _UUID.findall(name)}


@pytest.fixture
def lake(lakes: Lakes) -> Lakehouse:
    made = lakes.local("source")
    create(made, "ns", "plain")
    append_rows(made)
    return made


@pytest.mark.parametrize("level", ["minimal", "partial", "full"])
def test_all_names_have_the_form_of_version_4(lakes: Lakes, lake: Lakehouse, level: str) -> None:
    target = f"file://{lakes.folder}/target/"
    operations.plan_export(lake, "there", target=target, level=level).execute()
    operations.plan_export(lake, "here", level=level).execute()
    assert versions_of_uuids(lake.storage) == versions_of_uuids(Lakehouse.open(target).storage) == {4}


def test_copies_under_older_names_are_not_made_again(
    lakes: Lakes, lake: Lakehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = f"file://{lakes.folder}/target/"
    with monkeypatch.context() as older:
        for module in (names, export_roots, copy):
            older.setattr(module, "derived_uuid", uuid.uuid5)
        operations.plan_export(lake, "first", target=target, level="full").execute()
    there = Lakehouse.open(target)
    assert 5 in versions_of_uuids(there.storage)
    before = listed(there.storage)
    create(lake, "more")
    operations.plan_export(lake, "second", target=target, level="full").execute()
    new = listed(there.storage) - before
    assert not [path for path in new if "-table-" in path or path.startswith("tables/")], new
    assert operations.verify(Lakehouse.open(target)).findings == ()
