"""Retries of requests: which requests are resent, how often, and after which delays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import pytest

from tests.faults import Fault, FaultyStorage, fail, lose_response
from trinitylake_ops.errors import (
    AmbiguousWriteError,
    FileExistsAlreadyError,
    FileMissingError,
    InvalidInputError,
    StorageError,
    StorageFullError,
    StoragePermissionError,
    ThrottledError,
    TransientError,
)
from trinitylake_ops.storage import MemoryStorage, RetryStorage, StorageWrapper, drop_memory_root

ROOT_NUMBERS = count()
Operation = Callable[[RetryStorage], object]

OPERATIONS: dict[str, Operation] = {
    "read": lambda storage: storage.read("old"),
    "stat": lambda storage: storage.stat("old"),
    "create": lambda storage: storage.send_with_retries(lambda: storage.create("new", b"x")),
    "write": lambda storage: storage.write("new", b"x"),
    "delete": lambda storage: storage.delete("old"),
    "list": lambda storage: list(storage.list("o")),
}


class RetrySetup:
    """A storage with one file, wrapped in faults and in retries without waits."""

    def __init__(self, root: str, *plan: Fault, attempts: int = 5):
        memory = MemoryStorage(root)
        memory.write("old", b"old")
        self.faulty = FaultyStorage(memory, plan)
        self.waits_seconds: list[float] = []
        self.storage = RetryStorage(self.faulty, attempts, sleep=self.waits_seconds.append)

    @property
    def request_kinds(self) -> list[str]:
        return [request.kind for request in self.faulty.log]


@pytest.fixture
def root() -> Iterator[str]:
    root = f"memory://retry-{next(ROOT_NUMBERS)}/"
    yield root
    drop_memory_root(root)


@pytest.mark.parametrize("kind", OPERATIONS)
@pytest.mark.parametrize("error", [ThrottledError, TransientError])
def test_transient_failures_are_retried(root: str, kind: str, error: type[StorageError]) -> None:
    setup = RetrySetup(root, fail(1, error, times=4))
    OPERATIONS[kind](setup.storage)
    assert setup.request_kinds == [kind] * 5
    assert len(setup.waits_seconds) == 4


@pytest.mark.parametrize("kind", OPERATIONS)
def test_last_error_is_raised_after_all_attempts(root: str, kind: str) -> None:
    setup = RetrySetup(root, fail(1, ThrottledError, times=2), fail(3, TransientError), attempts=3)
    with pytest.raises(TransientError):
        OPERATIONS[kind](setup.storage)
    assert setup.request_kinds == [kind] * 3
    assert len(setup.waits_seconds) == 2


@pytest.mark.parametrize("kind", OPERATIONS)
@pytest.mark.parametrize("error", [StoragePermissionError, StorageFullError, StorageError, FileMissingError])
def test_permanent_failures_are_not_retried(root: str, kind: str, error: type[StorageError]) -> None:
    setup = RetrySetup(root, fail(1, error))
    with pytest.raises(error):
        OPERATIONS[kind](setup.storage)
    assert setup.request_kinds == [kind]
    assert setup.waits_seconds == []


@pytest.mark.parametrize("error", [ThrottledError, TransientError])
def test_create_is_sent_once(root: str, error: type[StorageError]) -> None:
    """The caller decides whether to resend the request."""
    setup = RetrySetup(root, fail(1, error))
    with pytest.raises(error):
        setup.storage.create("new", b"x")
    assert setup.request_kinds == ["create"]


def test_create_with_a_lost_response_is_not_retried(root: str) -> None:
    setup = RetrySetup(root, lose_response(1))
    with pytest.raises(AmbiguousWriteError):
        OPERATIONS["create"](setup.storage)
    assert setup.request_kinds == ["create"]
    assert setup.storage.read("new") == b"x"


def test_lost_response_after_a_retried_create_is_ambiguous(root: str) -> None:
    setup = RetrySetup(root, fail(1, TransientError), lose_response(2))
    with pytest.raises(AmbiguousWriteError):
        OPERATIONS["create"](setup.storage)
    assert setup.request_kinds == ["create", "create"]


@pytest.mark.parametrize("kind", ["write", "delete"])
def test_write_and_delete_with_lost_responses_are_retried(root: str, kind: str) -> None:
    setup = RetrySetup(root, lose_response(1, times=2))
    OPERATIONS[kind](setup.storage)
    assert setup.request_kinds == [kind] * 3
    assert setup.storage.exists("new") == (kind == "write")
    assert setup.storage.exists("old") == (kind == "write")


def test_conflicting_create_is_not_retried(root: str) -> None:
    setup = RetrySetup(root)
    with pytest.raises(FileExistsAlreadyError):
        setup.storage.send_with_retries(lambda: setup.storage.create("old", b"x"))
    assert setup.request_kinds == ["create"]


def test_create_many_retries_each_file_separately(root: str) -> None:
    setup = RetrySetup(root, *(fail(1, TransientError, path_part=f"many/{number}", times=2) for number in range(5)))
    names = [f"many/{number}" for number in range(5)]
    setup.storage.create_many(dict.fromkeys(names, b"x"))
    assert setup.request_kinds == ["create"] * 15
    assert setup.storage.read_many(names) == [b"x"] * 5


def test_listing_that_fails_after_its_first_file_is_not_retried(root: str) -> None:
    setup = RetrySetup(root, fail(1, TransientError, "after"))
    files = setup.storage.list()
    assert next(files).path == "old"
    with pytest.raises(TransientError):
        next(files)
    assert setup.request_kinds == ["list"]


def test_listing_that_fails_before_its_first_file_is_retried(root: str) -> None:
    setup = RetrySetup(root, fail(1, TransientError, "after"))
    assert list(setup.storage.list("nothing/")) == []
    assert setup.request_kinds == ["list", "list"]


def test_server_time_request_is_retried(root: str) -> None:
    class ClockFailingOnce(StorageWrapper):
        n_calls = 0

        def now_ms(self) -> int:
            self.n_calls += 1
            if self.n_calls == 1:
                raise TransientError("no response")
            return 7

    storage = RetryStorage(ClockFailingOnce(MemoryStorage(root)), sleep=lambda seconds: None)
    assert storage.now_ms() == 7


def test_retry_delays_grow_randomly_up_to_a_limit(root: str) -> None:
    waits: list[list[float]] = []
    for _ in range(60):
        setup = RetrySetup(root, fail(1, ThrottledError, times=11), attempts=12)
        setup.storage.read("old")
        waits.append(setup.waits_seconds)
    longest_waits = [max(attempt_waits) for attempt_waits in zip(*waits, strict=True)]
    for number, wait in enumerate(longest_waits):
        longest_delay = min(5.0, 0.1 * 2**number)
        assert longest_delay * 0.8 < wait <= longest_delay
    assert len({tuple(run_waits) for run_waits in waits}) == 60


@pytest.mark.parametrize(
    "invalid_settings", [{"attempts": 0}, {"base_delay_seconds": -1.0}, {"max_delay_seconds": -1.0}]
)
def test_invalid_settings_are_rejected(root: str, invalid_settings: dict[str, float]) -> None:
    with pytest.raises(InvalidInputError):
        RetryStorage(MemoryStorage(root), **invalid_settings)  # type: ignore[arg-type]
