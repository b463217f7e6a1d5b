"""What the exceptions of aiohttp say of a request that got no answer."""

from __future__ import annotations

import aiohttp

from trinitylake_ops.storage.http.requests import TransportFailure


def transport_failure(error: BaseException) -> TransportFailure:
    """Return how far the request got."""
    if isinstance(error, (aiohttp.ClientSSLError, aiohttp.ServerFingerprintMismatch)):
        return TransportFailure.NOT_TRUSTED
    if isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)):
        return TransportFailure.NOT_CONNECTED
    return TransportFailure.NO_ANSWER  # an established connection that broke, or a time-out after that


def reason(error: BaseException) -> str:
    """Return why there is no answer."""
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return "time-out while connecting"
    if isinstance(error, TimeoutError):
        return "time-out"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).splitlines()[0] if str(error) else type(error).__name__
