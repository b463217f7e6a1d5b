"""From the exceptions of gcsfs, google-auth and aiohttp to typed errors (S7)."""

from __future__ import annotations

from collections.abc import Iterator

import aiohttp
from gcsfs.retry import HttpError, NonRetryableError
from google.auth.exceptions import GoogleAuthError, TransportError

from trinitylake_ops.errors import StorageError
from trinitylake_ops.storage.gcs.answers import GcsRequest, error_without_credentials
from trinitylake_ops.storage.remote.aiohttp_failures import reason, transport_failure
from trinitylake_ops.storage.remote.requests import error_from_transport


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
    return error_from_transport(request, transport_failure(error), endpoint, reason(error))


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
