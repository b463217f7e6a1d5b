"""Access delegation on Google Cloud Storage: downscoped tokens for one folder.

Google's Security Token Service (STS) exchanges a token of this process for a token with a credential access
boundary (decision 37) and the same lifetime. The credentials of this process are never vended.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC
from typing import Any
from urllib.parse import quote, urlsplit

import google.auth
from google.auth import downscoped
from google.auth.exceptions import GoogleAuthError, TransportError
from google.auth.transport.requests import Request
from google.oauth2 import sts

from trinitylake_ops._lazy import cached_attribute
from trinitylake_ops.errors import InvalidInputError, StorageError, StoragePermissionError, TransientError
from trinitylake_ops.storage.delegation import CachedCredentials, DelegationSettings
from trinitylake_ops.storage.gcs.client import AUTH_ERRORS, scoped_credentials
from trinitylake_ops.storage.gcs.settings import ANONYMOUS, GcsLocation, GcsSettings
from trinitylake_ops.storage.http.settings import is_loopback
from trinitylake_ops.storage.options import StorageOptions

#: Scope that tokens must have before they can be downscoped. The roles of the account limit the rights of a token.
_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_READER, _CREATOR = "inRole:roles/storage.objectViewer", "inRole:roles/storage.objectCreator"
_LIST_PREFIX = "api.getAttribute('storage.googleapis.com/objectListPrefix', '')"
_MAX_EXPRESSION_CHARS = 2_048
#: Characters without a special meaning in quoted strings within expressions and in resource names.
_PLAIN = re.compile(r"[A-Za-z0-9._=+@,:/-]+")
_OAUTH_CODE = re.compile(
    r"(?:Error code )?(access_denied|invalid_(?:client|grant|request|scope|target)|unauthorized_client"
    r"|unsupported_grant_type)\b"
)
_TOKEN = re.compile(r"[\x21-\x7e]{1,16384}")
#: Exceptions of google-auth and this module for an invalid response.
_INVALID_RESPONSE_ERRORS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True, slots=True)
class DownscopedToken:
    """A temporary token for one folder. Its ``repr`` does not show the token."""

    token: str = field(repr=False)
    #: Expiration time on the clock of this machine, in milliseconds since the epoch.
    expires_at_ms: int

    @property
    def properties(self) -> Mapping[str, str]:
        """The token as configuration properties of Iceberg clients."""
        return {"gcs.oauth2.token": self.token, "gcs.oauth2.token-expires-at": str(self.expires_at_ms)}


class GcsDelegate:
    """Vends tokens for folders of one storage.

    Args:
        options: Options of the storage.
        settings: The configuration of access delegation.

    Raises:
        InvalidInputError: The storage has no credentials, or the address of the token service is invalid.
    """

    scheme = "gs"

    def __init__(self, options: StorageOptions, settings: DelegationSettings):
        self.settings = settings
        self._storage_settings = GcsSettings.of(options)
        if self._storage_settings.credentials == ANONYMOUS:
            raise InvalidInputError(
                "cannot vend downscoped tokens: the storage is accessed without credentials; configure credentials of"
                " the server"
            )
        _check_address(settings.sts_endpoint)
        self._cached: CachedCredentials[DownscopedToken] = CachedCredentials()

    def credentials(self, folder: str, *, writes: bool, name: str) -> DownscopedToken:
        """Return a token that is restricted to one folder. The token is reused for half of its lifetime.

        Args:
            folder: URI of the folder, with a trailing ``/``.
            writes: Whether the token allows writes.
            name: Name of the principal. Each principal gets a separate token. Google's logs do not show the name.

        Raises:
            InvalidInputError: An access boundary cannot describe the folder.
            StoragePermissionError: The service rejected the request.
            TransientError: The service did not respond.
            StorageError: The response is invalid.
        """
        location = GcsLocation.of(folder)

        def exchange_token() -> DownscopedToken:
            return self._call_typed(lambda: self._exchange(location, folder_boundary(location, writes=writes)))

        return self._cached.get((folder, writes, name), exchange_token)

    @cached_attribute
    def _source(self) -> Any:
        try:
            if self._storage_settings.credentials is None:
                return google.auth.default(scopes=[_SCOPE])[0]
            return scoped_credentials(self._storage_settings.credentials, _SCOPE)
        except AUTH_ERRORS as error:
            raise StoragePermissionError(
                "cannot vend downscoped tokens: the server has no credentials; ask its operator to configure them"
            ) from error

    def _exchange(self, location: GcsLocation, boundary: downscoped.CredentialAccessBoundary) -> DownscopedToken:
        request = functools.partial(self._send, Request())
        source = copy.copy(self._source)  # another thread may refresh it at the same time
        credentials = _Downscoped(source, boundary, self.settings.sts_endpoint)
        credentials.refresh(request)
        token = credentials.token
        is_token = isinstance(token, str) and _TOKEN.fullmatch(token) and token != source.token
        if token is None or not is_token or credentials.expiry is None:
            raise ValueError("the response has no token")
        self._check_bucket(location.bucket, source, request)
        return DownscopedToken(token, int(credentials.expiry.replace(tzinfo=UTC).timestamp() * 1_000))

    def _send(self, request: Request, url: str, **arguments: Any) -> Any:
        """Send a request of google-auth without following redirects, because its body may contain our token."""
        settings = self._storage_settings
        limits = {
            "timeout": (settings.connect_timeout_seconds, settings.read_timeout_seconds),
            "allow_redirects": False,
        }
        response = request(url, **{**arguments, **limits})
        if response.status >= 500 or response.status == 429:
            raise TransientError(
                f"cannot vend downscoped tokens: the token service or the storage is busy ({response.status}); retry"
            )
        return response

    def _check_bucket(self, bucket: str, source: Any, request: Callable[..., Any]) -> None:
        """Raise StoragePermissionError for a bucket with ACLs, which access boundaries do not restrict."""
        endpoint = self._storage_settings.endpoint or f"https://storage.{source.universe_domain}"
        headers: dict[str, str] = {}
        source.apply(headers)
        url = f"{endpoint}/storage/v1/b/{quote(bucket, safe='')}?fields=iamConfiguration"
        response = request(url=url, method="GET", headers=headers)
        if response.status != 200:
            raise StoragePermissionError(
                f"cannot vend downscoped tokens: the settings of the bucket cannot be read ({response.status}); grant"
                " the server the permission storage.buckets.get"
            )
        access_setting = json.loads(response.data).get("iamConfiguration", {}).get("uniformBucketLevelAccess", {})
        if access_setting.get("enabled") is not True:
            raise StoragePermissionError(
                "cannot vend downscoped tokens: the bucket has no uniform bucket-level access; enable it"
            )

    def _call_typed(self, fetch_token: Callable[[], DownscopedToken]) -> DownscopedToken:
        """Call a function and convert its errors to typed errors, whose messages do not repeat any response."""
        try:
            return fetch_token()
        except (StorageError, InvalidInputError):
            raise
        except TransportError as error:
            raise TransientError(
                "cannot vend downscoped tokens: the token service or the storage did not respond; retry"
            ) from error
        except GoogleAuthError as error:
            raise StoragePermissionError(
                f"cannot vend credentials for this table: the token service rejected the request{_code(error)}; ask the"
                " operator of the server to check its credentials and their access to Google's Security Token Service"
            ) from error
        except _INVALID_RESPONSE_ERRORS as error:
            raise StorageError(
                "cannot vend downscoped tokens: the response is not from Google's token service or storage; check their"
                " addresses"
            ) from error
        except OSError as error:
            raise StorageError(
                f"cannot vend downscoped tokens: the request to the token service failed ({type(error).__name__});"
                " check the network"
            ) from error


class _Downscoped(downscoped.Credentials):
    """Downscoped credentials whose token service may have a different address than Google's public service."""

    def __init__(self, source: Any, boundary: downscoped.CredentialAccessBoundary, sts_endpoint: str):
        super().__init__(source, boundary, universe_domain=source.universe_domain)  # type: ignore[no-untyped-call]
        if sts_endpoint:
            self._sts_client = sts.Client(sts_endpoint)  # type: ignore[no-untyped-call]


def folder_boundary(location: GcsLocation, *, writes: bool) -> downscoped.CredentialAccessBoundary:
    """Return the access boundary of a token for a folder.

    The boundary never allows deletes, and therefore no overwrites, which require the same permission on Google Cloud
    Storage. Only the server writes metadata files and the owner file.

    Args:
        location: Folder of a table.
        writes: Whether the token may create files below ``data/`` and ``metadata/``.

    Raises:
        InvalidInputError: The path of the folder is too long, or contains characters that may have a special meaning in
            an expression.
    """
    prefix = location.key_prefix
    if not prefix.strip("/") or not _PLAIN.fullmatch(prefix):
        raise InvalidInputError(
            "cannot restrict credentials to the table: its path contains characters that may have a special meaning in"
            " an access boundary"
        )
    bucket = f"projects/_/buckets/{location.bucket}"
    objects = f"resource.name.startsWith('{bucket}/objects/{prefix}"
    rules = [_rule(bucket, _READER, f"{objects}') || {_LIST_PREFIX}.startsWith('{prefix}')")]
    if writes:
        exceptions = "".join(f" && !resource.name.endsWith('.metadata.json{end}')" for end in ("", ".gz"))
        rules.append(_rule(bucket, _CREATOR, f"({objects}data/') || {objects}metadata/')){exceptions}"))
    return downscoped.CredentialAccessBoundary(rules)  # type: ignore[no-untyped-call]


def _rule(bucket: str, role: str, expression: str) -> downscoped.AccessBoundaryRule:
    if len(expression) > _MAX_EXPRESSION_CHARS:
        raise InvalidInputError("cannot restrict credentials to the table: its path is too long for an access boundary")
    condition = downscoped.AvailabilityCondition(expression)  # type: ignore[no-untyped-call]
    return downscoped.AccessBoundaryRule(f"//storage.googleapis.com/{bucket}", [role], condition)  # type: ignore[no-untyped-call]


def _check_address(endpoint: str) -> None:
    """Raise InvalidInputError for an address to which the server's token must not be sent."""
    if not endpoint:
        return
    try:
        parts = urlsplit(endpoint)
        host = parts.hostname or ""
        is_private = parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host))
        is_plain = bool(host) and "@" not in parts.netloc and not (parts.query or parts.fragment)
    except ValueError:
        is_private = is_plain = False
    if not is_private or not is_plain or re.search(r"[\s\x00-\x1f\x7f]", endpoint):
        raise InvalidInputError(
            "the address of the token service must be https://HOST[:PORT]/PATH without credentials, because the"
            " server's token is sent to it"
        )


def _code(error: GoogleAuthError) -> str:
    """Return the OAuth code of an error in parentheses. The rest of the message may quote the request."""
    code = _OAUTH_CODE.match(str(error.args[0])) if error.args else None
    return f" ({code[1]})" if code else ""
