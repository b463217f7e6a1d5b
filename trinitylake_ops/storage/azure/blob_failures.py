"""From the exceptions of azure-core, azure-identity and aiohttp to typed errors (S7)."""

from __future__ import annotations

import aiohttp
from azure.core.exceptions import AzureError, ClientAuthenticationError, HttpResponseError
from azure.identity import CredentialUnavailableError

from trinitylake_ops.errors import StorageError, TrinityLakeError
from trinitylake_ops.storage.azure.answers import AzureRequest, error_from_answer, error_without_credentials
from trinitylake_ops.storage.s3.answers import TransportFailure, error_from_transport, safe

#: Every exception that a request may end with.
CLIENT_ERRORS = (AzureError, aiohttp.ClientError, OSError, ValueError)  # TimeoutError too


def typed_error(request: AzureRequest, error: BaseException, endpoint: str) -> TrinityLakeError:
    """Return the typed error for the end of a request without an answer, one of ``CLIENT_ERRORS``."""
    if isinstance(error, (ClientAuthenticationError, CredentialUnavailableError)):
        return error_without_credentials(request, "there are no valid credentials")
    if isinstance(error, HttpResponseError) and error.status_code is not None:
        return error_from_answer(request, error.status_code, code_of(error), None)
    inner = _inner(error)
    if isinstance(error, (AzureError, OSError, aiohttp.ClientError)):
        return error_from_transport(request, _transport_failure(inner), endpoint, _reason(inner))
    return StorageError(
        f"{request.failure}: the client of Azure cannot be used ({safe(request, str(error))}); check the storage"
        " options",
        path=request.path,
    )


def code_of(error: BaseException) -> str | None:
    """Return the service's own word behind an exception of its library, if there is one."""
    code = getattr(error, "error_code", None)
    return getattr(code, "value", code)


def _transport_failure(error: BaseException) -> TransportFailure:
    if isinstance(error, (aiohttp.ClientSSLError, aiohttp.ClientConnectorCertificateError)):
        return TransportFailure.NOT_TRUSTED
    if isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)):
        return TransportFailure.NOT_CONNECTED
    return TransportFailure.NO_ANSWER


def _reason(error: BaseException) -> str:
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return "time-out while connecting"
    if isinstance(error, TimeoutError):
        return "time-out"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _inner(error: BaseException) -> BaseException:
    """Return the exception of aiohttp behind one of azure-core."""
    given = getattr(error, "inner_exception", None)
    return given if isinstance(given, BaseException) else error
