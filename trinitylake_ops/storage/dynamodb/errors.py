"""From the exceptions of botocore, and the answers of DynamoDB, to typed errors (S7)."""

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
#: Every exception that a request may end with.
CLIENT_ERRORS = (ClientError, BotoCoreError, ResponseParserError, ValueError, OSError)

MISSING_TABLE = frozenset({"ResourceNotFoundException", "TableNotFoundException"})
_ERRORS = (
    ErrorRow(FileExistsAlreadyError, EXISTS, codes={"ConditionalCheckFailedException"}, operations={Request.CREATE}),
    ErrorRow(
        StorageError,
        "{failure}: the table {bucket!r} does not exist, or is still being made; check its name and the options"
        " 'endpoint' and 'region', or make it: the option create_table=true does so at the first create",
        codes=MISSING_TABLE,
    ),
    # Without this text it is the limit of tables that are made at once.
    ErrorRow(
        StorageFullError,
        "{failure}: the account has as many tables as it may have; delete one, or have AWS raise the quota",
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
        "{failure}: a root in a table with local indexes has at most 10 GB; make a table without local indexes",
        codes={"ItemCollectionSizeLimitExceededException"},
    ),
    ErrorRow(
        StorageError,
        "{failure}: the table {bucket!r} has other keys; make one with the partition key 'root' and the sort key"
        " 'path', both strings",
        codes={"ValidationException"},
        text=re.compile("does not match the schema|not given a value|key schema|number of conditions on the keys"),
    ),
    ErrorRow(
        InvalidLocationError,
        "{failure}: the name is too long; use a shorter one",
        codes={"ValidationException"},
        text=re.compile(r"(?is)size.*key|key.*size"),
    ),
    ErrorRow(
        StorageError,
        "{what}: the table is in another place; set the option 'region' or 'endpoint' to it",
        statuses=REDIRECTS,
    ),
    *PERMISSION_CODES,
    PERMISSION_STATUSES,
    *TRANSIENT,
)
# OpenSSL's words for a connection that did not come about. Others may come from the middle of an answer.
_HANDSHAKE = ("CERTIFICATE_VERIFY_FAILED", "HANDSHAKE", "UNSUPPORTED_PROTOCOL", "WRONG_VERSION_NUMBER")


def code_of(error: BaseException) -> str | None:
    """Return DynamoDB's own word for a failure, if it gave one."""
    return error.response.get("Error", {}).get("Code") if isinstance(error, ClientError) else None


def error_response(error: BaseException) -> Mapping[str, Any] | None:
    """Return the parsed answer of the server that an exception stands for, if there was one."""
    response: Mapping[str, Any] | None = error.response if isinstance(error, ClientError) else None
    return response


def typed_error(request: StorageRequest, error: BaseException, endpoint: str) -> TrinityLakeError:
    """Return the typed error for the end of a request, one of ``CLIENT_ERRORS``."""
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
        f"{request.failure}: the DynamoDB client cannot be used ({request.safe(_reason(error))}); check the "
        "storage options, the region above all, and AWS's environment variables and configuration files",
        path=request.path,
    )


def throttled(request: StorageRequest) -> ThrottledError:
    """Return the error of a file that the server left out of a batch."""
    return ThrottledError(
        f"{request.failure}: the server left it out of a batch; retry at a slower pace", path=request.path
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
