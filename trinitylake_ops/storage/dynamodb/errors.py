"""From the exceptions of botocore, and the answers of DynamoDB, to typed errors (S7)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    HTTPClientError,
    ProxyConnectionError,
    SSLError,
)
from botocore.exceptions import (
    ConnectionError as BotoConnectionError,
)
from botocore.parsers import ResponseParserError

from trinitylake_ops.errors import (
    FileExistsAlreadyError,
    InvalidLocationError,
    StorageError,
    StorageFullError,
    ThrottledError,
    TransientError,
    TrinityLakeError,
)
from trinitylake_ops.storage.http.aws import credentials_error, error_without_credentials, transient_error
from trinitylake_ops.storage.http.botocore_errors import NO_CREDENTIALS
from trinitylake_ops.storage.http.requests import Request, StorageRequest, TransportFailure, error_from_transport

_NO_RESPONSE = (BotoConnectionError, HTTPClientError, ResponseParserError, OSError)
#: Every exception that a request may end with.
CLIENT_ERRORS = (ClientError, BotoCoreError, ResponseParserError, ValueError, OSError)

MISSING_TABLE = frozenset({"ResourceNotFoundException", "TableNotFoundException"})
_SLOWER = frozenset(
    {
        "LimitExceededException", "ProvisionedThroughputExceededException", "RequestLimitExceeded", "Throttling",
        "ThrottlingException",
    }
)  # fmt: skip
#: What tells the quota of tables from that of tables that are made at once.
_TOO_MANY_TABLES = "There is a limit of"
_NOT_ALLOWED = {
    "AccessDeniedException": "AccessDenied",
    "IncompleteSignatureException": "SignatureDoesNotMatch",
    "InvalidSignatureException": "SignatureDoesNotMatch",
    "KMSAccessDeniedException": "AccessDenied",
    "MissingAuthenticationTokenException": "MissingAuthenticationToken",
    "NotAuthorized": "AccessDenied",
    "OptInRequired": "AccessDenied",
}
_IN_PASSING = frozenset({"ReplicatedWriteConflictException", "ResourceInUseException", "TransactionConflictException"})
_WRONG_KEYS = ("does not match the schema", "not given a value", "key schema", "number of conditions on the keys")
# OpenSSL's words for a connection that did not come about. Others may come from the middle of an answer.
_HANDSHAKE = ("CERTIFICATE_VERIFY_FAILED", "HANDSHAKE", "UNSUPPORTED_PROTOCOL", "WRONG_VERSION_NUMBER")


def code_of(error: BaseException) -> str | None:
    """Return DynamoDB's own word for a failure, if it gave one."""
    return error.response.get("Error", {}).get("Code") if isinstance(error, ClientError) else None


def error_response(error: BaseException) -> Mapping[str, Any] | None:
    """Return the parsed answer of the server that an exception stands for, if there was one."""
    response: Mapping[str, Any] | None = error.response if isinstance(error, ClientError) else None
    return response


def typed_error(request: StorageRequest, error: BaseException, table: str, endpoint: str) -> TrinityLakeError:
    """Return the typed error for the end of a request, one of ``CLIENT_ERRORS``."""
    if isinstance(error, ClientError):
        return _from_response(request, error.response, table)
    if isinstance(error, NO_CREDENTIALS):
        return error_without_credentials(request, str(error))
    if isinstance(error, _NO_RESPONSE):
        return error_from_transport(request, _transport_failure(error), endpoint, _reason(error))
    return StorageError(
        f"{request.failure}: the DynamoDB client cannot be used ({request.safe(_reason(error))}); check the "
        "storage options, the region above all, and AWS's environment variables and configuration files",
        path=request.path,
    )


def throttled(request: StorageRequest) -> ThrottledError:
    """Return the error of a file that the server left out of a batch."""
    return ThrottledError(
        f"{request.failure}: the server left it out of a batch; retry at a slower pace", path=request.path
    )


def _from_response(request: StorageRequest, response: Mapping[str, Any], table: str) -> TrinityLakeError:
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    code = str(response.get("Error", {}).get("Code", ""))
    message = str(response.get("Error", {}).get("Message", ""))
    path = request.path
    if code == "ConditionalCheckFailedException" and request.operation is Request.CREATE:
        return FileExistsAlreadyError(f"a file stands at {path!r} already; choose another name", path=path)
    if code in MISSING_TABLE:
        return StorageError(
            f"{request.failure}: the table {table!r} does not exist, or is still being made; check its name and the "
            "options 'endpoint' and 'region', or make it: the option create_table=true does so at the first create",
            path=path,
        )
    if code == "LimitExceededException" and _TOO_MANY_TABLES in message:
        return StorageFullError(
            f"{request.failure}: the account has as many tables as it may have; delete one, or have AWS raise the"
            " quota",
            path=path,
        )
    if code in _SLOWER:
        return ThrottledError(f"{request.failure}: the server says {code}; retry at a slower pace", path=path)
    if code in _IN_PASSING:
        return TransientError(f"{request.failure}: the server says {code}; retry", path=path)
    if code == "ItemCollectionSizeLimitExceededException":
        return StorageFullError(f"{request.failure}: a root in a table with local indexes has at most 10 GB", path=path)
    if code == "ValidationException":
        return _invalid(request, message, table)
    if status == 404 and not code.endswith("Exception"):  # a file is never missing by a status
        status = 400
    return _about_all(request, status, _NOT_ALLOWED.get(code, code), message)


def _invalid(request: StorageRequest, message: str, table: str) -> TrinityLakeError:
    if any(words in message for words in _WRONG_KEYS):
        return StorageError(
            f"{request.failure}: the table {table!r} has other keys; make one with the partition key 'root' and the "
            "sort key 'path', both strings",
            path=request.path,
        )
    if "size" in message.lower() and "key" in message.lower():
        return InvalidLocationError(f"{request.failure}: the name is too long; use a shorter one", path=request.path)
    return _about_all(request, 400, "ValidationException", message)


def _about_all(request: StorageRequest, status: int | None, code: str | None, message: str) -> TrinityLakeError:
    """Return the error for an answer that says nothing of its own about tables or items."""
    code = None if not code or code.isdigit() else code
    what = f"{request.failure}: the server says {request.described(status, code, message)}"
    if status is not None and 300 <= status < 400:
        return StorageError(
            f"{what}: the table lives elsewhere; set the option 'region' or 'endpoint' to its place", path=request.path
        )
    return (
        credentials_error(request, status, code, "table")
        or transient_error(request, what, status, code)
        or StorageError(f"{what}; check the request and the server's log", path=request.path)
    )


def _transport_failure(error: BaseException) -> TransportFailure:
    if isinstance(error, SSLError):
        is_handshake = any(words in str(error).upper() for words in _HANDSHAKE)
        return TransportFailure.NOT_TRUSTED if is_handshake else TransportFailure.NO_ANSWER
    if isinstance(error, (ConnectTimeoutError, EndpointConnectionError, ProxyConnectionError)):
        return TransportFailure.NOT_CONNECTED
    return TransportFailure.NO_ANSWER


def _reason(error: BaseException) -> str:
    if isinstance(error, ConnectTimeoutError):
        return "time-out while connecting"
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return "time-out"
    inner = error.kwargs.get("error") if isinstance(error, BotoCoreError) else None
    shown = str(inner if isinstance(inner, BaseException) else error)
    return shown.splitlines()[0] if shown else type(error).__name__
