"""The obstore clients of one root: where the bucket is, who asks, and how long a request may take."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

import botocore
import botocore.session
from botocore.config import Config
from botocore.credentials import RefreshableCredentials
from obstore.store import S3Store

from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.storage.s3.s3fs_client import MIN_BYTES_PER_SECOND, service_models
from trinitylake_ops.storage.s3.settings import S3Settings

if TYPE_CHECKING:
    from obstore.store import S3Credential

#: Bodies up to this size share one client. Each doubling has a client of its own, with more time.
_SMALL_BODY_BYTES = 4 * 1024 * 1024
_ONE_DAY = timedelta(days=1)
_NO_REGION = "us-east-1"


class ObstoreClients:
    """Clients for the requests of one bucket. Nothing is read or sent before the first use. Thread-safe.

    A time-out of obstore belongs to a client, not to a request. Its time-out for reading runs while a body is sent,
    too. So uploads take a client whose time-outs allow for the size of the body. Botocore resolves credentials, region
    and place that are not given as options, as for s3fs.
    """

    def __init__(self, bucket: str, settings: S3Settings, options: StorageOptions):
        self._bucket = bucket
        self._settings = settings
        self._options = options
        self._lock = threading.Lock()
        self._place: tuple[str, str, bool] | None = None
        self._provider: Callable[[], S3Credential] | None = None
        self._by_allowance: dict[int | None, S3Store] = {}

    @property
    def waiting_seconds(self) -> float:
        """How long a request may take apart from the transfer of its body."""
        return self._settings.connect_timeout_seconds + 2 * self._settings.read_timeout_seconds

    def for_body(self, n_bytes: int = 0) -> S3Store:
        """Return the client for a request with a body of this size, or with a short answer.

        Raises botocore's exceptions when there are no credentials or the configuration cannot be used.
        """
        allowance_bytes = _SMALL_BODY_BYTES
        while allowance_bytes < n_bytes:
            allowance_bytes *= 2
        return self._store(allowance_bytes)

    def for_reading(self) -> S3Store:
        """Return the client for answers of unknown size. The caller bounds the time of the transfer.

        Raises as ``for_body`` does.
        """
        return self._store(None)

    def _store(self, allowance_bytes: int | None) -> S3Store:
        found = self._by_allowance.get(allowance_bytes)
        if found is not None:
            return found
        with self._lock:
            if allowance_bytes not in self._by_allowance:
                self._by_allowance[allowance_bytes] = self._new_store(allowance_bytes)
            return self._by_allowance[allowance_bytes]

    def _new_store(self, allowance_bytes: int | None) -> S3Store:
        if self._place is None or self._provider is None:
            self._resolve()
        assert self._place is not None and self._provider is not None
        endpoint, region, virtual = self._place
        read_timeout = timedelta(seconds=self._settings.read_timeout_seconds)
        timeout = _ONE_DAY
        if allowance_bytes is not None:
            transfer = timedelta(seconds=allowance_bytes / MIN_BYTES_PER_SECOND)
            timeout = timedelta(seconds=self.waiting_seconds) + transfer
            if allowance_bytes > _SMALL_BODY_BYTES:
                read_timeout += transfer
        return S3Store(
            self._bucket,
            # Defaults are given too, since obstore takes other values from the environment: AWS_ENDPOINT_URL_S3,
            # AWS_CONDITIONAL_PUT, AWS_SKIP_SIGNATURE would replace our own.
            config={
                "aws_endpoint_url_s3": endpoint,
                "endpoint": endpoint,
                "region": region,
                "virtual_hosted_style_request": virtual,
                "conditional_put": "etag",
                "skip_signature": False,
                "s3_express": False,
            },
            client_options={
                "allow_http": endpoint.startswith("http://"),
                "connect_timeout": timedelta(seconds=self._settings.connect_timeout_seconds),
                "read_timeout": read_timeout,
                "timeout": timeout,
            },
            # A client that repeats a create after a lost answer meets its own file. RetryStorage repeats only safe
            # requests.
            retry_config={"max_retries": 0, "retry_timeout": timeout},
            credential_provider=self._provider,
        )

    def _resolve(self) -> None:
        session = botocore.session.Session()
        session.register_component("data_loader", service_models())
        options = self._options
        if "access_key_id" in options:
            session.set_credentials(
                options["access_key_id"], options["secret_access_key"], options.get("session_token")
            )
        self._provider = _credential_provider(session)
        # This client signs and sends nothing. It knows all places where AWS's endpoints and regions are set up.
        client = session.create_client(
            "s3",
            region_name=self._settings.region,
            endpoint_url=self._settings.endpoint,
            config=Config(
                signature_version=botocore.UNSIGNED, s3={"addressing_style": self._settings.addressing_style}
            ),
        )
        region = client.meta.region_name
        example = client.generate_presigned_url("get_object", Params={"Bucket": self._bucket, "Key": "key"})
        parts = urlsplit(client.meta.endpoint_url)
        virtual = (urlsplit(example).hostname or "").startswith(f"{self._bucket.lower()}.")
        netloc = f"{self._bucket}.{parts.netloc}" if virtual else parts.netloc
        endpoint = urlunsplit((parts.scheme, netloc, parts.path.rstrip("/"), "", ""))
        self._place = (endpoint, region if region and region != "aws-global" else _NO_REGION, virtual)


def _credential_provider(session: botocore.session.Session) -> Callable[[], S3Credential]:
    """Return a provider of credentials for obstore: botocore's chain, which renews those that expire.

    Raises NoCredentialsError when there are none, and the errors of a source of credentials.
    """
    credentials = session.get_credentials()
    if credentials is None:
        raise botocore.exceptions.NoCredentialsError
    passing = isinstance(credentials, RefreshableCredentials)

    def current() -> S3Credential:
        frozen = credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            # The renewal is due at once: botocore itself knows when to renew, and is asked before each request.
            "expires_at": datetime.now(UTC) if passing else None,
        }

    return current
