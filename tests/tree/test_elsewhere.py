"""Reading beyond the root, from many threads at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from trinitylake_ops.format.definitions import LakehouseDef, SourceRecord
from trinitylake_ops.format.places import Place
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.tree.nodes.elsewhere import Elsewhere

SOURCE = "memory://elsewhere-source/"
NODE = "1101/0111/0011/01111110-node-6fcb514b-b878-4c9d-95b7-8dc3a7ce6fd8.arrow"


def test_a_thread_waits_for_the_look_of_another() -> None:
    """The first reader looks for the roots that the definition names. Those beside it were refused meanwhile."""
    looking, others = threading.Event(), threading.Event()

    def look_up() -> LakehouseDef:
        looking.set()
        others.wait(0.2)  # nobody sets it: whoever else asks has to wait for this
        return LakehouseDef(id="x", sources=(SourceRecord(root=SOURCE),))

    elsewhere = Elsewhere("memory://elsewhere-copy/", StorageOptions(), look_up=look_up)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(elsewhere.find, SOURCE + NODE)
        assert looking.wait(10)
        second = threads.submit(elsewhere.find, SOURCE + NODE)
        assert second.result() == first.result() == Place(SOURCE, NODE)
