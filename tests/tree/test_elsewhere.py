"""Where files beyond a root are: what several readers at once find out."""

from __future__ import annotations

import threading
import uuid

import pytest

from trinitylake_ops.errors import UnreachableError
from trinitylake_ops.format.definitions import LakehouseDef, SourceRecord
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.tree.nodes.elsewhere import Elsewhere

ROOT, SOURCE = "memory://copy/", "memory://source/"
FILE = f"{SOURCE}tables/{uuid.UUID(int=1)}/data/a.parquet"
DEFINITION = LakehouseDef(id="copy", sources=(SourceRecord(root=SOURCE, lakehouse_id="source", version=1),))


def test_a_second_reader_waits_for_what_the_first_looks_up() -> None:
    """Else it would take the file of a source for a moved one of the copy's own, which is missing."""
    found: list[str] = []

    def look_up() -> LakehouseDef:
        second.start()
        second.join(0.2)
        return DEFINITION

    elsewhere = Elsewhere(ROOT, StorageOptions(), look_up=look_up)
    second = threading.Thread(target=lambda: found.append(elsewhere.place_named(FILE).root))
    assert elsewhere.place_named(FILE).root == SOURCE
    second.join()
    assert found == [SOURCE]


def test_what_cannot_be_looked_up_is_asked_for_again() -> None:
    answers: list[Exception | LakehouseDef] = [UnreachableError("not now"), DEFINITION]

    def look_up() -> LakehouseDef:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    elsewhere = Elsewhere(ROOT, StorageOptions(), look_up=look_up)
    with pytest.raises(UnreachableError):
        elsewhere.place_named(FILE)
    assert elsewhere.place_named(FILE).root == SOURCE
    assert elsewhere.place_named(FILE).root == SOURCE
    assert answers == []
