"""Test clones in another bucket or on another storage than their parent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.operations.changes import append_rows
from tests.operations.copies import rows
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.operations import CloneState

pytestmark = pytest.mark.local_only("starts a separate server")


@pytest.fixture
def buckets(moto: Any) -> Iterator[list[str]]:
    names = [moto.make_bucket() for _ in range(2)]
    yield names
    for bucket in names:
        moto.drop_bucket(bucket)


def run_clone_operations(
    lake: Lakehouse, root: str, options: dict[str, str], target_options: dict[str, str] | None
) -> None:
    """Create a clone and run all operations on it."""
    operations.plan_clone(lake, root, "feature", target_options=target_options).execute()
    clone = Lakehouse.open(root, options)
    assert rows(clone) == [1, 2, 3]
    append_rows(clone)
    append_rows(lake)
    assert clone.snapshot("parent@1").version == 1
    assert operations.verify(clone, deep=True).is_clean
    (info,) = operations.list_clones(lake, target_options)
    assert (info.state, info.versions) == (CloneState.ACTIVE, 1)
    assert [item.name for item in operations.compare(lake, "feature", target_options=target_options).objects] == [
        "ns.t"
    ]
    operations.plan_promotion(lake, "feature", target_options=target_options).execute()
    assert rows(lake) == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    operations.plan_refresh(lake, "feature", target_options=target_options).execute()
    assert rows(clone) == rows(lake)
    operations.drop_clone(lake, "feature", delete_files=True, target_options=target_options)
    assert list(clone.storage.list()) == []
    assert operations.verify(lake, deep=True).is_clean


def test_clone_in_another_bucket_uses_storage_options_of_its_parent(moto: Any, buckets: list[str]) -> None:
    """Both sides use only the parent's options; the parent's record allows the clone to open it."""
    lake = Lakehouse.create(f"s3://{buckets[0]}/lake/", moto.storage_options)
    append_rows(lake)
    root = f"s3://{buckets[1]}/feature/"
    run_clone_operations(lake, root, moto.storage_options, None)


def test_clone_of_local_lakehouse_in_a_bucket(moto: Any, buckets: list[str], tmp_path: Path) -> None:
    lake = Lakehouse.create(f"{tmp_path}/lake", {"fsync": "false", **moto_options(moto)})
    append_rows(lake)
    options = {**moto.storage_options, "allowed_roots": lake.root}
    run_clone_operations(lake, f"s3://{buckets[1]}/feature/", options, moto.storage_options)


def moto_options(moto: Any) -> dict[str, str]:
    return {f"s3.{name}": value for name, value in moto.storage_options.items()}
