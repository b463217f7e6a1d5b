"""Error responses of S3 servers map to typed errors with messages of one line, without secrets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinitylake_ops.errors import (
    AmbiguousWriteError,
    FileExistsAlreadyError,
    FileMissingError,
    InvalidLocationError,
    StorageError,
    StorageFullError,
    StoragePermissionError,
    ThrottledError,
    TransientError,
    TrinityLakeError,
    UnreachableError,
)
from trinitylake_ops.storage.http.aws import error_without_credentials
from trinitylake_ops.storage.http.requests import Request, StorageRequest, TransportFailure, error_from_transport
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.storage.s3.errors import error_from_response, is_range_beyond_end

SECRETS = {
    "access_key_id": "AKIDOFTESTS",
    "secret_access_key": "wJalr/secret+key",
    "session_token": "FwoGZXIvYXdzEXAMPLE",
}
ROOT = "s3://bucket/lake/"
WRITES = [Request.CREATE, Request.WRITE, Request.DELETE]
READS = [Request.READ, Request.STAT, Request.LIST, Request.CLOCK]


def request_for(operation: Request, path: str = "a/b") -> StorageRequest:
    return StorageRequest(operation, path, ROOT, StorageOptions(SECRETS))


def error_for(operation: Request, status: int | None, code: str | None, message: str | None = None) -> TrinityLakeError:
    return error_from_response(request_for(operation), status, code, message)


@pytest.mark.parametrize(
    ("operation", "status", "code", "error_type", "advice"),
    [
        (Request.READ, 404, "NoSuchKey", FileMissingError, "there is no file 'a/b' under s3://bucket/lake/"),
        (Request.STAT, 404, None, FileMissingError, "no file"),
        (Request.STAT, 404, "404", FileMissingError, "no file"),
        (Request.READ, 404, "NoSuchBucket", StorageError, "the bucket 'bucket' does not exist; check its name"),
        (Request.CREATE, 404, "NoSuchBucket", StorageError, "does not exist"),
        (Request.LIST, 404, None, StorageError, "the bucket 'bucket' does not exist"),
        (Request.CLOCK, 404, "404", StorageError, "the bucket 'bucket' does not exist"),
        (Request.CREATE, 412, "PreconditionFailed", FileExistsAlreadyError, "'a/b' already exists"),
        (Request.CREATE, 412, None, FileExistsAlreadyError, "choose another name"),
        (Request.WRITE, 412, "PreconditionFailed", StorageError, "412 PreconditionFailed"),
        (Request.CREATE, 409, "ConditionalRequestConflict", TransientError, "retry"),
        (Request.CREATE, 409, None, AmbiguousWriteError, "may have taken effect"),
        (Request.READ, 403, "AccessDenied", StoragePermissionError, "policy of the bucket"),
        (Request.STAT, 403, None, StoragePermissionError, "credentials"),
        (Request.READ, 401, "Anything", StoragePermissionError, "credentials"),
        (Request.READ, 403, "InvalidAccessKeyId", StoragePermissionError, "credentials are invalid"),
        (Request.READ, 403, "SignatureDoesNotMatch", StoragePermissionError, "credentials are invalid"),
        (Request.CREATE, 400, "ExpiredToken", StoragePermissionError, "expired; get new ones"),
        (Request.READ, 400, "TokenRefreshRequired", StoragePermissionError, "expired"),
        (Request.READ, 400, "InvalidToken", StoragePermissionError, "session token"),
        (Request.READ, 403, "RequestTimeTooSkewed", StoragePermissionError, "the clocks of this machine"),
        (Request.READ, 301, "PermanentRedirect", StorageError, "option 'region' or 'endpoint'"),
        (Request.STAT, 301, None, StorageError, "option 'region' or 'endpoint'"),
        (Request.READ, 400, "AuthorizationHeaderMalformed", StorageError, "option 'region'"),
        (Request.READ, 403, "IllegalLocationConstraintException", StorageError, "option 'region'"),
        (Request.STAT, 400, None, StorageError, "credentials have not expired"),
        (Request.CREATE, 429, None, AmbiguousWriteError, "may have taken effect"),
        (Request.READ, 429, None, ThrottledError, "slower"),
        (Request.CREATE, 503, "SlowDown", ThrottledError, "slower"),
        (Request.CREATE, 503, "ServiceUnavailable", ThrottledError, "slower"),
        (Request.READ, 503, "TooManyRequests", ThrottledError, "slower"),
        (Request.CREATE, 507, "InsufficientStorage", StorageFullError, "free space"),
        (Request.CREATE, 403, "QuotaExceeded", StorageFullError, "quota"),
        (Request.CREATE, 400, "EntityTooLarge", StorageError, "smaller files"),
        (Request.CREATE, 400, "KeyTooLongError", InvalidLocationError, "shorter"),
        (Request.READ, 400, "InvalidURI", InvalidLocationError, "simpler name"),
        (Request.READ, 403, "InvalidObjectState", StorageError, "archived"),
        (Request.CREATE, 400, "BadDigest", TransientError, "damaged"),
        (Request.CREATE, 501, "NotImplemented", StorageError, "If-None-Match"),
        (Request.DELETE, None, "AccessDenied", StoragePermissionError, "policy"),
        (Request.DELETE, None, "InternalError", AmbiguousWriteError, "may have taken effect"),
        (Request.CREATE, 418, "Teapot", StorageError, "418 Teapot"),
        (Request.CREATE, None, None, StorageError, "no reason"),
    ],
)  # fmt: skip
def test_responses_map_to_typed_errors(
    operation: Request, status: int | None, code: str | None, error_type: type[TrinityLakeError], advice: str
) -> None:
    error = error_for(operation, status, code)
    assert type(error) is error_type
    assert advice in str(error)
    assert operation is Request.CLOCK or error.path == "a/b"


@pytest.mark.parametrize(
    ("status", "code"),
    [(500, "InternalError"), (500, None), (502, None), (503, None), (503, "503"), (504, None), (599, "New"),
     (400, "RequestTimeout"), (408, None)],
)  # fmt: skip
def test_unclear_create_responses_are_ambiguous(status: int, code: str | None) -> None:
    assert {type(error_for(operation, status, code)) for operation in WRITES} == {AmbiguousWriteError}
    assert {type(error_for(operation, status, code)) for operation in READS} == {TransientError}


def test_missing_response_is_ambiguous_or_transient() -> None:
    def error_types(failure: TransportFailure, operations: list[Request]) -> set[type[TrinityLakeError]]:
        errors = [
            error_from_transport(request_for(operation), failure, "http://host:9000", "reset")
            for operation in operations
        ]
        assert all("http://host:9000" in str(error) and "reset" in str(error) for error in errors)
        return {type(error) for error in errors}

    assert error_types(TransportFailure.NO_RESPONSE, WRITES) == {AmbiguousWriteError}
    assert error_types(TransportFailure.NO_RESPONSE, READS) == {TransientError}
    assert error_types(TransportFailure.NOT_CONNECTED, [*WRITES, *READS]) == {UnreachableError}
    assert error_types(TransportFailure.NOT_TRUSTED, [*WRITES, *READS]) == {StorageError}


def test_range_beyond_the_end_maps_to_its_error() -> None:
    assert is_range_beyond_end(416, None)
    assert is_range_beyond_end(None, "InvalidRange")
    assert not is_range_beyond_end(404, "NoSuchKey")
    assert not is_range_beyond_end(None, None)


@pytest.mark.parametrize(
    "text",
    [
        *SECRETS.values(),
        "The key AKIAIOSFODNN7EXAMPLE is unknown",
        "X-Amz-Signature=d00df00d",
        "Credential=ABCDEFGH/20261121/us-east-1/s3/aws4_request",
        "x-amz-security-token: d00df00d",
        "<Error><Message>d00df00d</Message></Error>",
    ],
)
def test_secrets_are_redacted_from_messages(text: str) -> None:
    errors = [
        error_for(Request.CREATE, 418, "Teapot", f"some\nlines {text} more"),
        error_for(Request.CREATE, 500, text, f"{text}"),
        error_from_transport(request_for(Request.READ), TransportFailure.NO_RESPONSE, f"http://{text}/", f"{text}"),
        error_without_credentials(request_for(Request.READ), f"{text}"),
    ]
    for message in map(str, errors):
        assert not any(secret in message for secret in [*SECRETS.values(), "AKIAIOSFODNN7EXAMPLE", "ABCDEFGH"])
        assert "<" not in message
        assert "=d00df00d" not in message
        assert "token: d00df00d" not in message


def test_permission_errors_omit_the_message_of_the_server() -> None:
    error = error_for(Request.READ, 403, "SignatureDoesNotMatch", "the string to sign was AWS4-HMAC-SHA256 xyz")
    assert "xyz" not in str(error)


@given(
    st.sampled_from(list(Request)),
    st.none() | st.integers(100, 599),
    st.none() | st.sampled_from(["NoSuchKey", "SlowDown", "AccessDenied", "InternalError"]) | st.text(max_size=40),
    st.none() | st.text(max_size=400),
)
def test_every_response_is_a_short_typed_error(
    operation: Request, status: int | None, code: str | None, message: str | None
) -> None:
    error = error_for(operation, status, code, message)
    assert isinstance(error, StorageError | InvalidLocationError)
    assert len(str(error).splitlines()) == 1
    assert len(str(error)) < 700
    if operation in READS:
        assert not isinstance(error, AmbiguousWriteError | FileExistsAlreadyError)
