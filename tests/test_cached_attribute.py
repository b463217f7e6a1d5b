"""Attributes that are computed once, each object by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from tests.processes import fork
from trinitylake_ops._lazy import cached_attribute


class Computed:
    """Computes a value, and says how often."""

    def __init__(self, compute: Callable[[], int] = lambda: 7):
        self.n_computed = 0
        self._compute = compute

    @cached_attribute
    def value(self) -> int:
        """The value."""
        self.n_computed += 1
        return self._compute()


@pytest.fixture
def _slow_read() -> Iterator[None]:
    """A thread computes the attribute of one object, and is held up: its file is read slowly."""
    has_begun, is_waiting = threading.Event(), threading.Event()

    def compute() -> int:
        has_begun.set()
        return int(is_waiting.wait(60))

    slow = Computed(compute)
    reader = threading.Thread(target=lambda: slow.value)
    reader.start()
    assert has_begun.wait(60)
    yield
    is_waiting.set()
    reader.join()
    assert slow.value == 1


def test_it_is_computed_once_for_each_object() -> None:
    first, second = Computed(), Computed()
    assert (first.value, first.value, second.value) == (7, 7, 7)
    assert (first.n_computed, second.n_computed) == (1, 1)
    assert vars(first)["value"] == 7
    assert Computed.value.__doc__ == "The value."


@pytest.mark.usefixtures("_slow_read")
def test_other_objects_do_not_wait_for_a_slow_one() -> None:
    done: list[int] = []
    other = threading.Thread(target=lambda: done.append(Computed().value), daemon=True)
    other.start()
    other.join(20)
    assert done == [7]


@pytest.mark.usefixtures("_slow_read")
def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent() -> None:
    child = fork(lambda report: report(str(Computed().value)), time_limit_seconds=20)
    assert child.finish() == (0, ["7"])
