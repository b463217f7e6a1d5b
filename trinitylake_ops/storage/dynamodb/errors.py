"""The error table of DynamoDB (S7), and typed errors for exceptions of botocore."""

from __future__ import annotations

import re
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
from trinitylake_ops.storage.error_table import EXISTS, RETRY, ErrorRow
from trinitylake_ops.storage.http.aws import (
    PERMISSION_CODES,
    PERMISSION_STATUSES,
    TRANSIENT,
    error_without_credentials,
    is_without_credentials,
)
from trinitylake_ops.storage.http.requests import (
    REDIRECTS,
    Request,
    StorageRequest,
    TransportFailure,
    error_from_table,
    error_from_transport,
)

_NO_RESPONSE = (BotoConnectionError, HTTPClientError, ResponseParserError, OSError)
#: All exceptions that a request may raise.
CLIENT_ERRORS = (ClientError, BotoCoreError, ResponseParserError, ValueError, OSError)

MISSING_TABLE = frozenset({"ResourceNotFoundException", "TableNotFoundException"})
_ERRORS = (
    ErrorRow(FileExistsAlreadyError, EXISTS, codes={"ConditionalCheckFailedException"}, operations={Request.CREATE}),
    ErrorRow(
        StorageError,
        "{failure}: the table {bucket!r} does not exist, or is still being created; check its name and the options"
        " 'endpoint' and 'region', or set the option 'create_table' to 'true' to create it",
        codes=MISSING_TABLE,
    ),
    # The same code, without this text, means that too many tables are being created at the same time.
    ErrorRow(
        StorageFullError,
        "{failure}: the account has reached its quota of tables; delete a table, or ask AWS to raise the quota",
        codes={"LimitExceededException"},
        text=re.compile("There is a limit of"),
    ),
    ErrorRow(
        TransientError,
        RETRY,
        codes={"ReplicatedWriteConflictException", "ResourceInUseException", "TransactionConflictException"},
    ),
    ErrorRow(
        StorageFullError,
        "{failure}: a root in a table with local indexes cannot exceed 10 GB; use a table without local indexes",
        codes={"ItemCollectionSizeLimitExceededException"},
    ),
    ErrorRow(
        StorageError,
        "{failure}: the table {bucket!r} has other keys; use a table with the partition key 'root' and the sort key"
        " 'path', both strings",
        codes={"ValidationException"},
        text=re.compile("does not match the schema|not given a value|key schema|number of conditions on the keys"),
    ),
    ErrorRow(
        InvalidLocationError,
        "{failure}: the path is too long; use a shorter one",
        codes={"ValidationException"},
        text=re.compile(r"(?is)size.*key|key.*size"),
    ),
    ErrorRow(
        StorageError,
        "{what}: the table is in another region or on another server; set the option 'region' or 'endpoint'",
        statuses=REDIRECTS,
    ),
    *PERMISSION_CODES,
    PERMISSION_STATUSES,
    *TRANSIENT,
)
# OpenSSL's errors during the handshake. Other errors may occur while a response is read.
_HANDSHAKE = ("CERTIFICATE_VERIFY_FAILED", "HANDSHAKE", "UNSUPPORTED_PROTOCOL", "WRONG_VERSION_NUMBER")


def code_of(error: BaseException) -> str | None:
    """Return DynamoDB's error code, if there is one."""
    return error.response.get("Error", {}).get("Code") if isinstance(error, ClientError) else None


def error_response(error: BaseException) -> Mapping[str, Any] | None:
    """Return the parsed response that caused an exception, if there is one."""
    response: Mapping[str, Any] | None = error.response if isinstance(error, ClientError) else None
    return response


def typed_error(request: StorageRequest, error: BaseException, endpoint: str) -> TrinityLakeError:
    """Return the typed error for an exception of a request.

    Args:
        request: The request that failed.
        error: One of ``CLIENT_ERRORS``.
        endpoint: Address of the server, for the message.
    """
    if isinstance(error, ClientError):
        response = error.response.get("Error", {})
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        code = str(response.get("Code", ""))
        code = "" if code.isdigit() else code
        return error_from_table(_ERRORS, request, status, code or None, str(response.get("Message", "")))
    if is_without_credentials(error):
        return error_without_credentials(request, str(error))
    if isinstance(error, _NO_RESPONSE):
        return error_from_transport(request, _transport_failure(error), endpoint, _reason(error))
    return StorageError(
        f"{request.failure}: the DynamoDB client failed ({request.safe(_reason(error))}); check the storage options,"
        " especially 'region', and the environment variables and configuration files of AWS",
        path=request.path,
    )


def throttled(request: StorageRequest) -> ThrottledError:
    """Return the error for a file that the server did not process in a batch."""
    return ThrottledError(
        f"{request.failure}: the server did not process it in the batch; retry at a slower pace", path=request.path
    )


def _transport_failure(error: BaseException) -> TransportFailure:
    if isinstance(error, SSLError):
        is_handshake = any(words in str(error).upper() for words in _HANDSHAKE)
        return TransportFailure.NOT_TRUSTED if is_handshake else TransportFailure.NO_RESPONSE
    if isinstance(error, (ConnectTimeoutError, EndpointConnectionError, ProxyConnectionError)):
        return TransportFailure.NOT_CONNECTED
    return TransportFailure.NO_RESPONSE


def _reason(error: BaseException) -> str:
    if isinstance(error, ConnectTimeoutError):
        return "timeout while connecting"
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return "timeout"
    inner = error.kwargs.get("error") if isinstance(error, BotoCoreError) else None
    message = str(inner if isinstance(inner, BaseException) else error)
    return message.splitlines()[0] if message else type(error).__name__
