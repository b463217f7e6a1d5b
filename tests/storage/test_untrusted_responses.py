"""Arbitrary server responses, and arbitrary files of other programs, are decoded or cause typed errors."""

from __future__ import annotations

import json

import pytest
from botocore.exceptions import ClientError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trinitylake_ops.errors import (
    AmbiguousWriteError,
    FileExistsAlreadyError,
    StoragePermissionError,
    TransientError,
    TrinityLakeError,
)
from trinitylake_ops.storage.azure.blob_client import page_of
from trinitylake_ops.storage.azure.errors import error_from_response as azure_error
from trinitylake_ops.storage.dynamodb.errors import typed_error as dynamodb_error
from trinitylake_ops.storage.dynamodb.items import StoredFile
from trinitylake_ops.storage.gcs.client import batch_responses
from trinitylake_ops.storage.gcs.errors import ErrorResponse
from trinitylake_ops.storage.gcs.errors import error_from_response as gcs_error
from trinitylake_ops.storage.http.requests import Request, StorageRequest
from trinitylake_ops.storage.interface import FileInfo
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.storage.paths import check_path
from trinitylake_ops.storage.redis.server import file_info
from trinitylake_ops.storage.s3.errors import error_from_response as s3_error

TOO_MANY_DIGITS = b"1" * 5_000  # more than Python converts to an integer
NESTED = b"[" * 50_000
PAGE = (
    b'<?xml version="1.0"?><EnumerationResults><Blobs><Blob><Name>a/b</Name><Properties><Last-Modified>'
    b"Tue, 24 Nov 2026 13:00:00 GMT</Last-Modified><Content-Length>7</Content-Length></Properties></Blob></Blobs>"
    b"<NextMarker>m</NextMarker></EnumerationResults>"
)
ERROR_DOCUMENT = json.dumps({"error": {"code": 403, "message": "no", "errors": [{"reason": "forbidden"}]}}).encode()
PARTS = (
    b"--x\r\nContent-Type: application/http\r\nContent-ID: <response-x+1>\r\n\r\nHTTP/1.1 404 Not Found\r\n"
    b"Content-Length: 2\r\n\r\n{}\r\n--x--\r\n"
)


def mutated(sample: bytes) -> st.SearchStrategy[bytes]:
    """Return a strategy for samples with some bytes replaced, and for arbitrary bytes."""
    index = st.integers(0, len(sample))
    mutations = st.builds(
        lambda start, length, replacement: sample[:start] + replacement + sample[start + length :],
        index,
        st.integers(0, 9),
        st.binary(),
    )
    return st.one_of(mutations, st.binary())


@settings(max_examples=300, deadline=None)
@given(mutated(b"folder/a/b\x0012 34"))
@example(b"a\x00" + TOO_MANY_DIGITS + b" 1")
@example(b"a\x001 " + TOO_MANY_DIGITS)
@example(b"\xff\x001 1")
@example(b"a//b\x001 1")
@example(b"../a\x001 1")
def test_arbitrary_redis_index_entries_are_parsed_or_rejected(member: bytes) -> None:
    info = file_info(member, "folder/")
    if info is not None:
        assert isinstance(info, FileInfo)
        check_path(info.path)


@settings(max_examples=300, deadline=None)
@given(mutated(PAGE))
@example(PAGE.replace(b">7<", b">" + TOO_MANY_DIGITS + b"<"))
@example(PAGE.replace(b"Tue, 24 Nov 2026", b"Tue, 24 Nov 0000"))
@example(PAGE.replace(b"GMT", b"-0000"))
@example(b"<a>" * 20_000)
def test_arbitrary_azure_pages_are_parsed_or_rejected(document: bytes) -> None:
    try:
        blobs, _ = page_of(document)
    except ValueError:
        return
    assert all(blob.size_bytes >= 0 for blob in blobs)


@settings(max_examples=300, deadline=None)
@given(mutated(ERROR_DOCUMENT))
@example(NESTED)
@example(b'{"error": [1]}')
@example(b'{"error": {"errors": {"reason": 1}, "message": null}}')
def test_arbitrary_google_errors_are_typed(body: bytes) -> None:
    error_response = ErrorResponse.of(403, body)
    assert error_response.reason is None or isinstance(error_response.reason, str)


@settings(max_examples=300, deadline=None)
@given(mutated(PARTS), mutated(b"multipart/mixed; boundary=x"))
@example(PARTS.replace(b"x+1", b"x+" + TOO_MANY_DIGITS), b"multipart/mixed; boundary=x")
@example(PARTS.replace(b"404", TOO_MANY_DIGITS), b"multipart/mixed; boundary=x")
def test_arbitrary_google_batch_responses_are_parsed_or_rejected(body: bytes, content_type: bytes) -> None:
    for number, response in batch_responses(content_type.decode("latin-1"), body).items():
        assert number >= 0
        assert 100 <= response.status <= 999


def test_batch_response_is_parsed() -> None:
    assert batch_responses("multipart/mixed; boundary=x", PARTS)[1].status == 404


_VALUES = st.fixed_dictionaries(
    {}, optional={"S": st.text(), "N": st.text(st.sampled_from("0123456789-.eEn")), "B": st.binary()}
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(["path", "size_bytes", "modified_ms", "body", "upload", "part_bytes"]), _VALUES))
def test_arbitrary_dynamodb_items_are_parsed_or_rejected(item: dict[str, dict[str, object]]) -> None:
    try:
        file = StoredFile.of_item(item)
    except (KeyError, ValueError):
        return
    assert file.size_bytes >= 0
    if file.parts is not None:
        assert file.part_bytes > 0


@pytest.mark.parametrize("size", ["-1", "1e9", "nan", TOO_MANY_DIGITS.decode()])
def test_item_with_an_invalid_size_is_rejected(size: str) -> None:
    item = {"path": {"S": "f"}, "size_bytes": {"N": size}, "modified_ms": {"N": "1"}}
    with pytest.raises(ValueError):
        StoredFile.of_item(item)


_CODES = st.none() | st.sampled_from(
    [
        "AccessDenied", "AuthenticationFailed", "BlobAlreadyExists", "ConditionalCheckFailedException",
        "ContainerNotFound", "InternalError", "LimitExceededException", "NoSuchBucket", "NoSuchKey", "NotImplemented",
        "PermanentRedirect", "QuotaExceeded", "ResourceNotFoundException", "ServerBusy", "SlowDown",
        "ValidationException", "keyTooLong", "quotaExceeded", "rateLimitExceeded", "required", "userProjectMissing",
    ]
) | st.text(max_size=20)  # fmt: skip


def _error_of(scheme: str, operation: Request, status: int, code: str | None, message: str) -> TrinityLakeError:
    request = StorageRequest(operation, "a/{b}", f"{scheme}://bucket/{{lake}}/", StorageOptions())
    if scheme == "s3":
        return s3_error(request, status, code, message)
    if scheme == "az":
        return azure_error(request, status, code, message)
    if scheme == "gs":
        reasons = [{"reason": code}] if code else []
        return gcs_error(request, status, json.dumps({"error": {"message": message, "errors": reasons}}).encode())
    response = {"Error": {"Code": code or "", "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return dynamodb_error(request, ClientError(response, "GetItem"), "http://host")


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(["s3", "az", "gs", "dynamodb"]), st.sampled_from(list(Request)), st.integers(300, 599), _CODES,
    st.sampled_from(["", "{x}", "the specified bucket does not exist", "requester pays", "There is a limit of 5"]),
)  # fmt: skip
def test_every_response_maps_to_a_typed_error_for_its_request(
    scheme: str, operation: Request, status: int, code: str | None, message: str
) -> None:
    error = _error_of(scheme, operation, status, code, message)
    assert len(str(error).splitlines()) == 1
    assert operation is Request.CREATE or not isinstance(error, FileExistsAlreadyError)
    assert operation.changes_files or not isinstance(error, AmbiguousWriteError)
    if status in (401, 403) and code is None:
        assert type(error) is StoragePermissionError
    if status in (500, 502, 504) and code in (None, "InternalError"):
        assert type(error) is (AmbiguousWriteError if operation.changes_files else TransientError)
