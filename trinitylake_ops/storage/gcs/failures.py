"""From the exceptions of gcsfs, google-auth and aiohttp to typed errors (S7)."""

from __future__ import annotations

from collections.abc import Iterator

import aiohttp
from gcsfs.retry import HttpError, NonRetryableError
from google.auth.exceptions import GoogleAuthError, TransportError

from trinitylake_ops.errors import StorageError
from trinitylake_ops.storage.gcs.answers import (
    GcsRequest,
    TransportFailure,
    error_from_transport,
    error_without_credentials,
)


class CredentialsError(Exception):
    """Credentials could not be loaded, or gave no token. Nothing was sent to the storage."""


#: What loading credentials and asking for a token may end with.
AUTH_ERRORS = (GoogleAuthError, HttpError, NonRetryableError, OSError, ValueError, KeyError, TypeError)
#: Every exception that a request may end with.
CLIENT_ERRORS = (CredentialsError, aiohttp.ClientError, OSError)  # TimeoutError is an OSError


def typed_error(request: GcsRequest, error: BaseException, endpoint: str) -> StorageError:
    """Return the typed error for the end of a request, one of ``CLIENT_ERRORS``."""
    if isinstance(error, CredentialsError):
        causes = list(_causes(error))
        told = next((cause for cause in causes if isinstance(cause, GoogleAuthError)), error.__cause__)
        is_passing = any(
            isinstance(cause, (TransportError, TimeoutError)) or getattr(cause, "retryable", False) for cause in causes
        )
        return error_without_credentials(request, _reason_for_no_token(told), is_passing=is_passing)
    return error_from_transport(request, _transport_failure(error), endpoint, _reason(error))


def _transport_failure(error: BaseException) -> TransportFailure:
    if isinstance(error, (aiohttp.ClientSSLError, aiohttp.ServerFingerprintMismatch)):
        return TransportFailure.NOT_TRUSTED
    if isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)):
        return TransportFailure.NOT_CONNECTED
    return TransportFailure.NO_ANSWER  # an established connection that broke, or a time-out after that


def _reason(error: BaseException) -> str:
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return "time-out while connecting"
    if isinstance(error, TimeoutError):
        return "time-out"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _reason_for_no_token(cause: BaseException | None) -> str:
    """Return the first text of google-auth's exception. Errors of other kinds may quote a file: only their name."""
    if isinstance(cause, GoogleAuthError) and cause.args:
        return str(cause.args[0]).splitlines()[0] if str(cause.args[0]) else type(cause).__name__
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return type(cause).__name__


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Return the causes of an exception. gcsfs wraps those of google-auth."""
    current = error.__cause__
    while current is not None:
        yield current
        current = current.__cause__
