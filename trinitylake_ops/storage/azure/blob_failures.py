"""From the exceptions of azure-core, azure-identity and aiohttp to typed errors (S7)."""

from __future__ import annotations

import aiohttp
from azure.core.exceptions import AzureError, ClientAuthenticationError, HttpResponseError
from azure.identity import CredentialUnavailableError

from trinitylake_ops.errors import StorageError, TrinityLakeError
from trinitylake_ops.storage.azure.answers import AzureRequest, error_from_answer, error_without_credentials
from trinitylake_ops.storage.remote.aiohttp_failures import reason, transport_failure
from trinitylake_ops.storage.remote.requests import error_from_transport

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
        return error_from_transport(request, transport_failure(inner), endpoint, reason(inner))
    return StorageError(
        f"{request.failure}: the client of Azure cannot be used ({request.safe(str(error))}); check the storage"
        " options",
        path=request.path,
    )


def code_of(error: BaseException) -> str | None:
    """Return the service's own word behind an exception of its library, if there is one."""
    code = getattr(error, "error_code", None)
    return getattr(code, "value", code)


def _inner(error: BaseException) -> BaseException:
    """Return the exception of aiohttp behind one of azure-core."""
    given = getattr(error, "inner_exception", None)
    return given if isinstance(given, BaseException) else error
