"""The obstore clients for S3, their timeouts and their credentials."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

import botocore
import botocore.session
from botocore.credentials import RefreshableCredentials
from obstore.store import S3Store

from trinitylake_ops.storage.http.clients import ClientCache
from trinitylake_ops.storage.http.settings import MIN_BYTES_PER_SECOND, max_seconds
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.storage.s3.s3fs_client import S3Client, bucket_address, new_session
from trinitylake_ops.storage.s3.settings import S3Settings

if TYPE_CHECKING:
    from obstore import GetResult
    from obstore.store import ClientConfig, S3Credential

#: Requests with bodies up to this size share one client. For each doubling of the size, there is a separate client with
#: longer timeouts.
_SMALL_BODY_BYTES = 4 * 1024 * 1024
_ONE_DAY = timedelta(days=1)


class Fork:
    """Tracks whether this process was forked from a process that had used obstore.

    obstore has one runtime per process, whose threads do not exist in a forked child. Every request of the child would
    hang, even through a new client. A process that only imported obstore has no such threads.
    """

    happened = False
    #: Whether this process created a client. The first request of a client starts the threads.
    has_clients = False


def _note_fork() -> None:
    Fork.happened = Fork.happened or Fork.has_clients


os.register_at_fork(after_in_child=_note_fork)


class S3Stores:
    """The obstore clients of one bucket, created on first use. Thread-safe.

    obstore's timeouts belong to a client, not to a request, and its read timeout also runs while a body is sent.
    Uploads therefore use a client whose timeouts allow for the size of the body.

    As for s3fs, botocore resolves the credentials, region and endpoint if options do not specify them.
    """

    def __init__(self, bucket: str, settings: S3Settings, options: StorageOptions):
        self._bucket = bucket
        self._settings = settings
        self._options = options
        #: URL of the server, region, and whether the bucket is in the host.
        self._address: tuple[str, str, bool] | None = None
        self._provider: Callable[[], S3Credential] | None = None
        self._lock = threading.Lock()
        #: Clients by the size of the largest body in bytes, or None for responses of unknown size.
        self._by_allowance: dict[int | None, S3Store] = {}

    @classmethod
    def shared(cls, client: S3Client, bucket: str, settings: S3Settings, options: StorageOptions) -> S3Stores:
        """Return the clients of this process for a bucket (decision 33).

        Args:
            client: The shared s3fs client. It is the same object for equal settings and environments, so it identifies
                both.
            bucket: Name of the bucket.
            settings: Validated options.
            options: The options, with credentials.
        """
        return _clients.get((client, bucket), lambda: cls(bucket, settings, options))

    def for_body(self, n_bytes: int = 0) -> S3Store:
        """Return the client for a request with a body of this size, and a short response.

        Errors of the credentials library, for example for missing credentials, are raised unchanged.
        """
        allowance_bytes = _SMALL_BODY_BYTES
        while allowance_bytes < n_bytes:
            allowance_bytes *= 2
        return self._store(allowance_bytes)

    def for_reading(self) -> S3Store:
        """Return the client for responses of unknown size. Read them with ``body_of``."""
        return self._store(None)

    def body_of(self, response: GetResult) -> bytes:
        """Read the body of a response. Raise TimeoutError if it takes too long for its size."""
        start, end = response.range
        deadline = time.monotonic() + max_seconds(self._settings, end - start)
        chunks = []
        for chunk in response.stream(min_chunk_size=1):
            chunks.append(bytes(chunk))
            if time.monotonic() > deadline:
                raise TimeoutError
        return b"".join(chunks)

    def _store(self, allowance_bytes: int | None) -> S3Store:
        store = self._by_allowance.get(allowance_bytes)
        if store is not None:
            return store
        with self._lock:
            if allowance_bytes not in self._by_allowance:
                self._by_allowance[allowance_bytes] = self._create_store(allowance_bytes)
            return self._by_allowance[allowance_bytes]

    def _create_store(self, allowance_bytes: int | None) -> S3Store:
        Fork.has_clients = True
        read_timeout, timeout = timedelta(seconds=self._settings.read_timeout_seconds), _ONE_DAY
        if allowance_bytes is not None:
            timeout = timedelta(seconds=max_seconds(self._settings, allowance_bytes))
            if allowance_bytes > _SMALL_BODY_BYTES:
                read_timeout += timedelta(seconds=allowance_bytes / MIN_BYTES_PER_SECOND)
        limits: ClientConfig = {
            "connect_timeout": timedelta(seconds=self._settings.connect_timeout_seconds),
            "read_timeout": read_timeout,
            "timeout": timeout,
        }
        return self._new_store(limits, timeout)

    def _new_store(self, limits: ClientConfig, timeout: timedelta) -> S3Store:
        if self._address is None or self._provider is None:
            self._resolve()
        assert self._address is not None and self._provider is not None
        endpoint, region, virtual = self._address
        return S3Store(
            self._bucket,
            # Defaults are passed explicitly, because obstore would read other values from AWS_ENDPOINT_URL_S3,
            # AWS_CONDITIONAL_PUT and AWS_SKIP_SIGNATURE.
            config={
                "aws_endpoint_url_s3": endpoint,
                "endpoint": endpoint,
                "region": region,
                "virtual_hosted_style_request": virtual,
                "conditional_put": "etag",
                "skip_signature": False,
                "s3_express": False,
            },
            client_options={"allow_http": endpoint.startswith("http://"), **limits},
            # A client that resends a create after a lost response would find its own file. RetryStorage resends only
            # requests that are safe to repeat.
            retry_config={"max_retries": 0, "retry_timeout": timeout},
            credential_provider=self._provider,
        )

    def _resolve(self) -> None:
        session = new_session(self._options)
        self._provider = _credential_provider(session)
        address = bucket_address(session, self._settings, self._bucket)
        parts = urlsplit(address.endpoint)
        netloc = f"{self._bucket}.{parts.netloc}" if address.is_virtual else parts.netloc
        endpoint = urlunsplit((parts.scheme, netloc, parts.path, "", ""))
        self._address = (endpoint, address.region, address.is_virtual)


_clients: ClientCache[S3Stores] = ClientCache()


def _credential_provider(session: botocore.session.Session) -> Callable[[], S3Credential]:
    """Return a credential provider for obstore that uses botocore's chain, which renews temporary credentials.

    Raise NoCredentialsError if there are no credentials.
    """
    credentials = session.get_credentials()
    if credentials is None:
        raise botocore.exceptions.NoCredentialsError
    is_refreshable = isinstance(credentials, RefreshableCredentials)

    def current() -> S3Credential:
        frozen_credentials = credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen_credentials.access_key,
            "secret_access_key": frozen_credentials.secret_key,
            "token": frozen_credentials.token,
            # Expire immediately, so that obstore calls the provider before each request and botocore decides when to
            # renew.
            "expires_at": datetime.now(UTC) if is_refreshable else None,
        }

    return current
