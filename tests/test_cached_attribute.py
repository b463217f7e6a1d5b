"""``cached_attribute`` computes a value once per object, and objects do not wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from tests.processes import fork
from trinitylake_ops._lazy import cached_attribute


class CountingObject:
    """Has a cached attribute, and counts how often it is computed."""

    def __init__(self, compute: Callable[[], int] = lambda: 7):
        self.n_computed = 0
        self._compute = compute

    @cached_attribute
    def value(self) -> int:
        """The value."""
        self.n_computed += 1
        return self._compute()


@pytest.fixture
def _slow_computation() -> Iterator[None]:
    """Another thread that is computing the attribute of another object while the test runs."""
    has_begun, may_end = threading.Event(), threading.Event()

    def compute() -> int:
        has_begun.set()
        return int(may_end.wait(60))

    slow = CountingObject(compute)
    thread = threading.Thread(target=lambda: slow.value)
    thread.start()
    assert has_begun.wait(60)
    yield
    may_end.set()
    thread.join()
    assert slow.value == 1


def test_attribute_is_computed_once_per_object() -> None:
    first, second = CountingObject(), CountingObject()
    assert (first.value, first.value, second.value) == (7, 7, 7)
    assert (first.n_computed, second.n_computed) == (1, 1)
    assert vars(first)["value"] == 7
    assert CountingObject.value.__doc__ == "The value."


@pytest.mark.usefixtures("_slow_computation")
def test_slow_computation_does_not_block_other_objects() -> None:
    values: list[int] = []
    thread = threading.Thread(target=lambda: values.append(CountingObject().value), daemon=True)
    thread.start()
    thread.join(20)
    assert values == [7]


@pytest.mark.usefixtures("_slow_computation")
def test_slow_computation_does_not_block_forked_child() -> None:
    child = fork(lambda report: report(str(CountingObject().value)), time_limit_seconds=20)
    assert child.finish() == (0, ["7"])
