"""From the exceptions of s3fs, botocore and aiohttp to typed errors (S7)."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from typing import Any

import aiohttp
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    HTTPClientError,
    IncompleteReadError,
    ProxyConnectionError,
    ResponseStreamingError,
    SSLError,
)
from botocore.exceptions import (
    ConnectionError as BotoConnectionError,
)
from botocore.parsers import ResponseParserError

from trinitylake_ops.errors import StorageError, TrinityLakeError
from trinitylake_ops.storage.aws.answers import error_without_credentials
from trinitylake_ops.storage.aws.botocore_failures import NO_CREDENTIALS
from trinitylake_ops.storage.remote.requests import TransportFailure, error_from_transport
from trinitylake_ops.storage.s3.answers import S3Request, error_from_answer

_NO_ANSWER = (
    BotoConnectionError,
    HTTPClientError,
    IncompleteReadError,
    ResponseParserError,
    ResponseStreamingError,
    aiohttp.ClientError,
    OSError,  # TimeoutError too
)
#: Every exception that a request may end with.
CLIENT_ERRORS = (ClientError, BotoCoreError, ValueError, *_NO_ANSWER)


def answer_of(error: BaseException) -> Mapping[str, Any] | None:
    """Return the parsed answer of the server that a client's exception stands for, if there was one."""
    for cause in _causes(error):
        if isinstance(cause, ClientError):
            response: Mapping[str, Any] = cause.response
            return response
    return None


def status_and_code(answer: Mapping[str, Any]) -> tuple[int | None, str | None]:
    """Return HTTP status and S3 error code of a parsed answer."""
    return answer.get("ResponseMetadata", {}).get("HTTPStatusCode"), answer.get("Error", {}).get("Code")


def typed_error(request: S3Request, error: BaseException, endpoint: str) -> TrinityLakeError:
    """Return the typed error for the end of a request, one of ``CLIENT_ERRORS``."""
    answer = answer_of(error)
    if answer is not None:
        status, code = status_and_code(answer)
        return error_from_answer(request, status, code, answer.get("Error", {}).get("Message"))
    for cause in _causes(error):
        if isinstance(cause, NO_CREDENTIALS):
            return error_without_credentials(request, str(cause))
        if isinstance(cause, _NO_ANSWER):
            return error_from_transport(request, _transport_failure(cause), endpoint, _reason(cause))
    return StorageError(
        f"{request.failure}: the S3 client cannot be used ({request.safe(_reason(error))}); "
        "check the storage options and AWS's environment variables and configuration files",
        path=request.path,
    )


def _transport_failure(error: BaseException) -> TransportFailure:
    inner = _inner(error)
    if isinstance(error, SSLError) or isinstance(
        inner, (aiohttp.ClientSSLError, aiohttp.ClientConnectorCertificateError)
    ):
        return TransportFailure.NOT_TRUSTED
    if isinstance(error, (ConnectTimeoutError, ProxyConnectionError)):
        return TransportFailure.NOT_CONNECTED
    # An established connection that breaks is also called a failed connection by botocore.
    if isinstance(error, EndpointConnectionError) and isinstance(
        inner, (aiohttp.ClientConnectorError, socket.gaierror)
    ):
        return TransportFailure.NOT_CONNECTED
    return TransportFailure.NO_ANSWER


def _reason(error: BaseException) -> str:
    inner = _inner(error)
    if isinstance(error, TimeoutError):
        return "time-out"
    if isinstance(inner, TimeoutError) or "Timeout" in type(error).__name__:
        return "time-out while connecting" if isinstance(error, ConnectTimeoutError) else "time-out"
    if isinstance(inner, OSError) and inner.strerror:
        return inner.strerror
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _inner(error: BaseException) -> BaseException:
    given = getattr(error, "kwargs", {}).get("error") if isinstance(error, BotoCoreError) else None
    return given if isinstance(given, BaseException) else error


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Return the exception and its causes. For answers, s3fs raises OSErrors of its own, with the true one as cause."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__
