"""Whose file stands under a name, whatever the answers were."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults import Fault, FaultyStorage, fail, lose_response
from trinitylake_ops.errors import (
    AmbiguousWriteError,
    CorruptFileError,
    FileExistsAlreadyError,
    InvalidLocationError,
    StorageError,
    StoragePermissionError,
    ThrottledError,
    TransactionExpiredError,
    TransientError,
    TrinityLakeError,
    UnreachableError,
)
from trinitylake_ops.storage import MemoryStorage, MeteredStorage, RetryStorage, StorageWrapper, drop_memory_root
from trinitylake_ops.storage.conditional_create import create_fresh, create_settled

ROOT = "memory://write-outcome/"


@pytest.fixture(autouse=True)
def empty_storage() -> Iterator[None]:
    yield
    drop_memory_root(ROOT)


def storage_with(*faults: Fault) -> FaultyStorage:
    drop_memory_root(ROOT)
    return FaultyStorage(MemoryStorage(ROOT), faults)


def is_ours(data: bytes) -> bool:
    return data == b"ours"


def kinds(storage: FaultyStorage) -> list[str]:
    return [request.kind for request in storage.log]


def test_a_plain_create_costs_one_request() -> None:
    storage = storage_with()
    assert create_settled(storage, "name", b"ours", is_ours=is_ours)
    assert kinds(storage) == ["create"]


def test_the_file_of_another_is_not_ours() -> None:
    storage = storage_with()
    storage.inner.create("name", b"theirs")
    assert not create_settled(storage, "name", b"ours", is_ours=is_ours)
    assert storage.inner.read("name") == b"theirs"
    assert kinds(storage) == ["create", "read"]


@pytest.mark.parametrize(
    "error", [AmbiguousWriteError, TransientError, ThrottledError, StoragePermissionError, StorageError]
)
def test_a_file_that_landed_is_ours_whatever_the_answer_was(error: type[StorageError]) -> None:
    storage = storage_with(fail(1, error, "after", kind="create"))
    assert create_settled(storage, "name", b"ours", is_ours=is_ours)
    assert kinds(storage) == ["create", "read"]


@pytest.mark.parametrize("error", [TransientError, ThrottledError, StoragePermissionError, StorageError])
def test_a_refusal_that_left_no_file_is_raised_as_it_is(error: type[StorageError]) -> None:
    storage = storage_with(fail(1, error, kind="create"))
    with pytest.raises(error, match="injected before"):
        create_settled(storage, "name", b"ours", is_ours=is_ours)
    assert kinds(storage) == ["create", "read"], "a refused request is not sent again"


def test_a_lost_request_is_sent_again() -> None:
    storage = storage_with(fail(1, AmbiguousWriteError, kind="create", times=4))
    assert create_settled(storage, "name", b"ours", is_ours=is_ours)
    assert kinds(storage) == ["create", "read"] * 4 + ["create"]


def test_requests_that_get_lost_each_time_leave_it_open() -> None:
    storage = storage_with(fail(1, AmbiguousWriteError, kind="create", times=99))
    with pytest.raises(AmbiguousWriteError, match="'name'"):
        create_settled(storage, "name", b"ours", is_ours=is_ours)


@pytest.mark.parametrize("error", [StoragePermissionError, ThrottledError])
def test_a_refusal_after_a_lost_request_leaves_it_open(error: type[StorageError]) -> None:
    storage = storage_with(fail(1, AmbiguousWriteError, kind="create"), fail(2, error, kind="create"))
    with pytest.raises(AmbiguousWriteError):
        create_settled(storage, "name", b"ours", is_ours=is_ours)


@pytest.mark.parametrize(
    "answer", [AmbiguousWriteError, FileExistsAlreadyError, StoragePermissionError, ThrottledError]
)
@pytest.mark.parametrize("unreadable", [StoragePermissionError, TransientError, CorruptFileError])
def test_a_name_that_cannot_be_read_leaves_it_open(answer: type[StorageError], unreadable: type[StorageError]) -> None:
    storage = storage_with(fail(1, answer, "after", kind="create"), fail(1, unreadable, kind="read"))
    with pytest.raises(AmbiguousWriteError):
        create_settled(storage, "name", b"ours", is_ours=is_ours)


def test_without_any_connection_nothing_was_created() -> None:
    storage = storage_with(fail(1, UnreachableError, kind="create"), fail(1, UnreachableError, kind="read"))
    with pytest.raises(UnreachableError):
        create_settled(storage, "name", b"ours", is_ours=is_ours)


def test_before_send_stops_the_first_send_and_leaves_later_ones_open() -> None:
    def too_late() -> None:
        raise TransactionExpiredError("too late")

    storage = storage_with()
    with pytest.raises(TransactionExpiredError):
        create_settled(storage, "name", b"ours", is_ours=is_ours, before_send=too_late)
    assert "create" not in kinds(storage)

    sends: list[None] = []

    def late_at_second() -> None:
        sends.append(None)
        if len(sends) == 2:
            too_late()

    storage = storage_with(fail(1, AmbiguousWriteError, kind="create"))
    with pytest.raises(AmbiguousWriteError):
        create_settled(storage, "name", b"ours", is_ours=is_ours, before_send=late_at_second)
    assert kinds(storage) == ["create", "read", "read"]


def test_fresh_files_settle_one_by_one_in_one_round() -> None:
    faults = [lose_response(2, kind="create"), fail(4, AmbiguousWriteError, kind="create")]
    storage = storage_with(*faults)
    meter = MeteredStorage(storage)
    files = {f"fresh/{number}": bytes([number]) for number in range(20)}
    create_fresh(meter, files)
    assert {info.path: storage.inner.read(info.path) for info in storage.inner.list()} == files
    assert meter.snapshot().rounds == 1


def test_other_bytes_under_a_fresh_name_are_an_error() -> None:
    storage = storage_with()
    storage.inner.create("fresh/1", b"theirs")
    with pytest.raises(FileExistsAlreadyError, match="fresh/1"):
        create_fresh(storage, {"fresh/0": b"0", "fresh/1": b"1", "fresh/2": b"2"})
    assert storage.inner.read("fresh/1") == b"theirs"


@pytest.mark.parametrize("refused", [InvalidLocationError, ThrottledError, StoragePermissionError])
def test_any_refusal_after_a_lost_request_leaves_it_open(refused: type[TrinityLakeError]) -> None:
    """The first request may still land, whatever the second was told."""

    class LostThenRefused(StorageWrapper):
        n_sends = 0

        def create(self, path: str, data: bytes) -> None:
            self.n_sends += 1
            raise (AmbiguousWriteError if self.n_sends == 1 else refused)("injected", path=path)

    with pytest.raises(AmbiguousWriteError):
        create_settled(LostThenRefused(MemoryStorage(ROOT)), "name", b"ours", is_ours=is_ours)


@pytest.mark.parametrize("unreadable", [StoragePermissionError, TransientError, CorruptFileError])
@pytest.mark.parametrize("refused", [StoragePermissionError, ThrottledError, StorageError])
def test_a_refused_fresh_file_is_refused_also_where_its_name_cannot_be_read(
    refused: type[StorageError], unreadable: type[StorageError]
) -> None:
    storage = storage_with(fail(1, refused, kind="create"), fail(1, unreadable, kind="read"))
    with pytest.raises(refused, match="injected before"):
        create_fresh(storage, {"fresh/1": b"1"})


def test_the_check_runs_before_every_repetition_too() -> None:
    storage = storage_with(fail(1, ThrottledError, kind="create", times=3))
    checks: list[int] = []
    retrying = RetryStorage(storage, base_delay_seconds=0)
    assert create_settled(
        retrying, "name", b"ours", is_ours=is_ours, before_send=lambda: checks.append(len(storage.log))
    )
    assert kinds(storage) == ["create"] * 4
    assert checks == [0, 1, 2, 3], "once before each of the four sends"


def test_a_check_that_fails_between_repetitions_ends_them() -> None:
    storage = storage_with(fail(1, ThrottledError, kind="create", times=9))

    def in_time() -> None:
        if len(storage.log) == 2:
            raise TransactionExpiredError("too late")

    with pytest.raises(TransactionExpiredError):
        create_settled(
            RetryStorage(storage, base_delay_seconds=0), "name", b"ours", is_ours=is_ours, before_send=in_time
        )
    assert kinds(storage) == ["create", "create", "read"]


def test_a_check_is_for_its_own_create_only() -> None:
    storage = storage_with(fail(2, ThrottledError, kind="create"))
    retrying = RetryStorage(storage, base_delay_seconds=0)
    checks: list[str] = []
    create_settled(retrying, "first", b"ours", is_ours=is_ours, before_send=lambda: checks.append("first"))
    create_fresh(retrying, {"second": b"x"})
    assert checks == ["first"]
    assert kinds(storage) == ["create"] * 3
