"""The obstore clients of one root: where the bucket is, who asks, and how long a request may take."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

import botocore
import botocore.session
from botocore.credentials import RefreshableCredentials
from obstore.store import S3Store

from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.storage.remote.kept_clients import KeptClients
from trinitylake_ops.storage.remote.obstore_clients import ObstoreClients
from trinitylake_ops.storage.s3.botocore_places import bucket_place, new_session
from trinitylake_ops.storage.s3.s3fs_client import S3Client
from trinitylake_ops.storage.s3.settings import S3Settings

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Credential


class S3Stores(ObstoreClients[S3Store]):
    """Clients for the requests of one bucket.

    Botocore resolves credentials, region and place that are not given as options, as for s3fs.
    """

    def __init__(self, bucket: str, settings: S3Settings, options: StorageOptions):
        super().__init__(settings)
        self._bucket = bucket
        self._settings = settings
        self._options = options
        self._place: tuple[str, str, bool] | None = None
        self._provider: Callable[[], S3Credential] | None = None

    @classmethod
    def shared(cls, client: S3Client, bucket: str, settings: S3Settings, options: StorageOptions) -> S3Stores:
        """Return the clients of this process for a bucket, beside the shared one of s3fs (docs/decisions/0080).

        That one is the same for equal settings in an equal environment, so it stands for both here.
        """
        return _kept.get((client, bucket), lambda: cls(bucket, settings, options))

    def _new_store(self, limits: ClientConfig, timeout: timedelta) -> S3Store:
        if self._place is None or self._provider is None:
            self._resolve()
        assert self._place is not None and self._provider is not None
        endpoint, region, virtual = self._place
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
            client_options={"allow_http": endpoint.startswith("http://"), **limits},
            # A client that repeats a create after a lost answer meets its own file. RetryStorage repeats only safe
            # requests.
            retry_config={"max_retries": 0, "retry_timeout": timeout},
            credential_provider=self._provider,
        )

    def _resolve(self) -> None:
        session = new_session(self._options)
        self._provider = _credential_provider(session)
        place = bucket_place(session, self._settings, self._bucket)
        parts = urlsplit(place.endpoint)
        netloc = f"{self._bucket}.{parts.netloc}" if place.is_virtual else parts.netloc
        endpoint = urlunsplit((parts.scheme, netloc, parts.path, "", ""))
        self._place = (endpoint, place.region, place.is_virtual)


_kept: KeptClients[S3Stores] = KeptClients()


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
