"""Places that definitions name, for readers of several threads."""

from __future__ import annotations

import threading

import pytest

from trinitylake_ops.access.allowed_roots import Place
from trinitylake_ops.access.external_files import Elsewhere
from trinitylake_ops.errors import LocationNotAllowedError, TransientError
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.storage.options import StorageOptions

ROOT = "redis://host/0/lake/"
TABLES = "s3://bucket/tables/"
FILE = f"{TABLES}tables/an-id/data/a.parquet"
DEFINITION = LakehouseDef(id="an-id", table_root=TABLES)
FOUND = Place(TABLES, "tables/an-id/data/a.parquet", is_writable=True)


def test_a_thread_waits_for_the_names_that_another_looks_up() -> None:
    """Without them the file would be taken for a moved one of this lakehouse, as its path holds ``tables/`` twice."""
    places: list[Place] = []
    others = [threading.Thread(target=lambda: places.append(elsewhere.place_named(FILE))) for _ in range(3)]

    def look_up() -> LakehouseDef:
        for other in others:
            other.start()
        others[0].join(0.3)  # whoever does not wait is through by then
        return DEFINITION

    elsewhere = Elsewhere(ROOT, StorageOptions(), look_up=look_up)
    places.append(elsewhere.place_named(FILE))
    for other in others:
        other.join()
    assert places == [FOUND] * 4


def test_names_are_looked_up_again_after_a_failure() -> None:
    failures = [TransientError("no answer")]

    def look_up() -> LakehouseDef:
        if failures:
            raise failures.pop()
        return DEFINITION

    elsewhere = Elsewhere(ROOT, StorageOptions(), look_up=look_up)
    with pytest.raises(TransientError):
        elsewhere.place_named(FILE)
    assert elsewhere.place_named(FILE) == FOUND


def test_a_look_up_that_needs_a_place_itself_does_not_wait_for_itself() -> None:
    met: list[str] = []

    def look_up() -> LakehouseDef:
        with pytest.raises(LocationNotAllowedError):
            elsewhere.place_named("s3://others/file")
        met.append("refused")
        return DEFINITION

    elsewhere = Elsewhere(ROOT, StorageOptions(), look_up=look_up)
    assert elsewhere.place_named(FILE) == FOUND
    assert met == ["refused"]
