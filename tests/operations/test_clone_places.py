"""Clones at other places than their parents: in another bucket, by the parent's options, and on another storage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.operations.changes import append_rows
from tests.operations.copies import rows
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.operations import CloneState

pytestmark = pytest.mark.local_only("it has a server of its own")


@pytest.fixture
def buckets(moto: Any) -> Iterator[list[str]]:
    made = [moto.make_bucket() for _ in range(2)]
    yield made
    for bucket in made:
        moto.drop_bucket(bucket)


def work_in(lake: Lakehouse, root: str, options: dict[str, str], target_options: dict[str, str] | None) -> None:
    """Make a clone, and do all that is done with it."""
    operations.plan_clone(lake, root, "feature", target_options=target_options).execute()
    clone = Lakehouse.open(root, options)
    assert rows(clone) == [1, 2, 3]
    append_rows(clone)
    append_rows(lake)
    assert clone.snapshot("parent@1").version == 1
    assert operations.verify(clone, deep=True).is_clean
    (info,) = operations.list_clones(lake, target_options)
    assert (info.state, info.versions) == (CloneState.STANDING, 1)
    assert [one.name for one in operations.compare(lake, "feature", target_options=target_options).objects] == ["ns.t"]
    operations.plan_promotion(lake, "feature", target_options=target_options).execute()
    assert rows(lake) == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    operations.plan_refresh(lake, "feature", target_options=target_options).execute()
    assert rows(clone) == rows(lake)
    operations.drop_clone(lake, "feature", delete_files=True, target_options=target_options)
    assert list(clone.storage.list()) == []
    assert operations.verify(lake, deep=True).is_clean


def test_a_clone_in_another_bucket_goes_by_the_parents_options(moto: Any, buckets: list[str]) -> None:
    """Nothing but the parent's options is given, on both sides: its record lets the clone open it."""
    lake = Lakehouse.create(f"s3://{buckets[0]}/lake/", moto.storage_options)
    append_rows(lake)
    root = f"s3://{buckets[1]}/feature/"
    work_in(lake, root, moto.storage_options, None)


def test_a_clone_in_a_bucket_of_a_lakehouse_on_disk(moto: Any, buckets: list[str], tmp_path: Path) -> None:
    lake = Lakehouse.create(f"{tmp_path}/lake", {"fsync": "false", **moto_options(moto)})
    append_rows(lake)
    options = {**moto.storage_options, "allowed_roots": lake.root}
    work_in(lake, f"s3://{buckets[1]}/feature/", options, moto.storage_options)


def moto_options(moto: Any) -> dict[str, str]:
    return {f"s3.{name}": value for name, value in moto.storage_options.items()}
