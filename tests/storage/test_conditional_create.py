"""Create-if-absent with read-back, for each response of the storage."""

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


def request_kinds(storage: FaultyStorage) -> list[str]:
    return [request.kind for request in storage.log]


def test_create_without_conflict_sends_one_request() -> None:
    storage = storage_with()
    assert create_settled(storage, "name", b"ours", is_ours=is_ours)
    assert request_kinds(storage) == ["create"]


def test_file_of_another_writer_is_not_ours() -> None:
    storage = storage_with()
    storage.inner.create("name", b"theirs")
    assert not create_settled(storage, "name", b"ours", is_ours=is_ours)
    assert storage.inner.read("name") == b"theirs"
    assert request_kinds(storage) == ["create", "read"]


@pytest.mark.parametrize(
    "error", [AmbiguousWriteError, TransientError, ThrottledError, StoragePermissionError, StorageError]
)
def test_created_file_is_ours_after_any_response(error: type[StorageError]) -> None:
    storage = storage_with(fail(1, error, "after", kind="create"))
    assert create_settled(storage, "name", b"ours", is_ours=is_ours)
    assert request_kinds(storage) == ["create", "read"]


@pytest.mark.parametrize("error", [TransientError, ThrottledError, StoragePermissionError, StorageError])
def test_rejection_without_a_file_is_raised_unchanged(error: type[StorageError]) -> None:
    storage = storage_with(fail(1, error, kind="create"))
    with pytest.raises(error, match="injected before"):
        create_settled(storage, "name", b"ours", is_ours=is_ours)
    assert request_kinds(storage) == ["create", "read"], "a rejected request is not resent"


def test_lost_request_is_resent() -> None:
    storage = storage_with(fail(1, AmbiguousWriteError, kind="create", times=4))
    assert create_settled(storage, "name", b"ours", is_ours=is_ours)
    assert request_kinds(storage) == ["create", "read"] * 4 + ["create"]


def test_repeatedly_lost_requests_are_ambiguous() -> None:
    storage = storage_with(fail(1, AmbiguousWriteError, kind="create", times=99))
    with pytest.raises(AmbiguousWriteError, match="'name'"):
        create_settled(storage, "name", b"ours", is_ours=is_ours)


@pytest.mark.parametrize("error", [StoragePermissionError, ThrottledError])
def test_rejection_after_a_lost_response_is_ambiguous(error: type[StorageError]) -> None:
    storage = storage_with(fail(1, AmbiguousWriteError, kind="create"), fail(2, error, kind="create"))
    with pytest.raises(AmbiguousWriteError):
        create_settled(storage, "name", b"ours", is_ours=is_ours)


@pytest.mark.parametrize(
    "create_error", [AmbiguousWriteError, FileExistsAlreadyError, StoragePermissionError, ThrottledError]
)
@pytest.mark.parametrize("read_error", [StoragePermissionError, TransientError, CorruptFileError])
def test_unreadable_path_makes_the_outcome_ambiguous(
    create_error: type[StorageError], read_error: type[StorageError]
) -> None:
    storage = storage_with(fail(1, create_error, "after", kind="create"), fail(1, read_error, kind="read"))
    with pytest.raises(AmbiguousWriteError):
        create_settled(storage, "name", b"ours", is_ours=is_ours)


def test_unreachable_server_means_not_created() -> None:
    storage = storage_with(fail(1, UnreachableError, kind="create"), fail(1, UnreachableError, kind="read"))
    with pytest.raises(UnreachableError):
        create_settled(storage, "name", b"ours", is_ours=is_ours)


def test_expiry_is_definite_only_before_the_first_send() -> None:
    def expire() -> None:
        raise TransactionExpiredError("too late")

    storage = storage_with()
    with pytest.raises(TransactionExpiredError):
        create_settled(storage, "name", b"ours", is_ours=is_ours, before_send=expire)
    assert "create" not in request_kinds(storage)

    sends: list[None] = []

    def expire_before_resend() -> None:
        sends.append(None)
        if len(sends) == 2:
            expire()

    storage = storage_with(fail(1, AmbiguousWriteError, kind="create"))
    with pytest.raises(AmbiguousWriteError):
        create_settled(storage, "name", b"ours", is_ours=is_ours, before_send=expire_before_resend)
    assert request_kinds(storage) == ["create", "read", "read"]


def test_create_fresh_resolves_files_in_one_round_trip() -> None:
    faults = [lose_response(2, kind="create"), fail(4, AmbiguousWriteError, kind="create")]
    storage = storage_with(*faults)
    meter = MeteredStorage(storage)
    files = {f"fresh/{number}": bytes([number]) for number in range(20)}
    create_fresh(meter, files)
    assert {info.path: storage.inner.read(info.path) for info in storage.inner.list()} == files
    assert meter.snapshot().rounds == 1


def test_existing_file_with_other_content_is_an_error() -> None:
    storage = storage_with()
    storage.inner.create("fresh/1", b"theirs")
    with pytest.raises(FileExistsAlreadyError, match="fresh/1"):
        create_fresh(storage, {"fresh/0": b"0", "fresh/1": b"1", "fresh/2": b"2"})
    assert storage.inner.read("fresh/1") == b"theirs"


@pytest.mark.parametrize("rejection", [InvalidLocationError, ThrottledError, StoragePermissionError])
def test_any_rejection_after_a_lost_response_is_ambiguous(rejection: type[TrinityLakeError]) -> None:
    """The first request may still take effect, regardless of the response to the second request."""

    class LostThenRejected(StorageWrapper):
        n_sends = 0

        def create(self, path: str, data: bytes) -> None:
            self.n_sends += 1
            raise (AmbiguousWriteError if self.n_sends == 1 else rejection)("injected", path=path)

    with pytest.raises(AmbiguousWriteError):
        create_settled(LostThenRejected(MemoryStorage(ROOT)), "name", b"ours", is_ours=is_ours)


@pytest.mark.parametrize("read_error", [StoragePermissionError, TransientError, CorruptFileError])
@pytest.mark.parametrize("rejection", [StoragePermissionError, ThrottledError, StorageError])
def test_rejected_fresh_file_fails_even_if_unreadable(
    rejection: type[StorageError], read_error: type[StorageError]
) -> None:
    storage = storage_with(fail(1, rejection, kind="create"), fail(1, read_error, kind="read"))
    with pytest.raises(rejection, match="injected before"):
        create_fresh(storage, {"fresh/1": b"1"})


def test_check_runs_before_every_resend() -> None:
    storage = storage_with(fail(1, ThrottledError, kind="create", times=3))
    checks: list[int] = []
    retrying = RetryStorage(storage, base_delay_seconds=0)
    assert create_settled(
        retrying, "name", b"ours", is_ours=is_ours, before_send=lambda: checks.append(len(storage.log))
    )
    assert request_kinds(storage) == ["create"] * 4
    assert checks == [0, 1, 2, 3], "the check runs once before each of the four sends"


def test_failed_check_between_resends_stops_them() -> None:
    storage = storage_with(fail(1, ThrottledError, kind="create", times=9))

    def check_deadline() -> None:
        if len(storage.log) == 2:
            raise TransactionExpiredError("too late")

    with pytest.raises(TransactionExpiredError):
        create_settled(
            RetryStorage(storage, base_delay_seconds=0), "name", b"ours", is_ours=is_ours, before_send=check_deadline
        )
    assert request_kinds(storage) == ["create", "create", "read"]


def test_check_applies_only_to_its_create() -> None:
    storage = storage_with(fail(2, ThrottledError, kind="create"))
    retrying = RetryStorage(storage, base_delay_seconds=0)
    checks: list[str] = []
    create_settled(retrying, "first", b"ours", is_ours=is_ours, before_send=lambda: checks.append("first"))
    create_fresh(retrying, {"second": b"x"})
    assert checks == ["first"]
    assert request_kinds(storage) == ["create"] * 3
