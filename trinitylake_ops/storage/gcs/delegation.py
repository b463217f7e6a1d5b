"""Access to a folder of a bucket for others: tokens that Google's service of tokens (STS) downscopes.

A token is bound by a credential access boundary (decision 37). It reaches one folder, for the time of a token of this
process. The credentials of this process are given to nobody.
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

#: Tokens that are to be downscoped need it. What they may do is bound by the roles of their account.
_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_READER, _CREATOR = "inRole:roles/storage.objectViewer", "inRole:roles/storage.objectCreator"
_LIST_PREFIX = "api.getAttribute('storage.googleapis.com/objectListPrefix', '')"
_LONGEST_EXPRESSION_CHARS = 2_048
#: Within the quotes of an expression these stand for themselves, and in no name of a resource for others.
_PLAIN = re.compile(r"[A-Za-z0-9._=+@,:/-]+")
_OAUTH_CODE = re.compile(
    r"(?:Error code )?(access_denied|invalid_(?:client|grant|request|scope|target)|unauthorized_client"
    r"|unsupported_grant_type)\b"
)
_TOKEN = re.compile(r"[\x21-\x7e]{1,16384}")
#: What a strange answer of the service may end with, in google-auth or here.
_STRANGE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True, slots=True)
class DownscopedToken:
    """A token for one folder, which ends. Its text form hides it. ``expires_at_ms`` is by the clock of this machine."""

    token: str = field(repr=False)
    expires_at_ms: int

    @property
    def properties(self) -> Mapping[str, str]:
        """What it is, by the names that clients of Iceberg know."""
        return {"gcs.oauth2.token": self.token, "gcs.oauth2.token-expires-at": str(self.expires_at_ms)}


class GcsDelegate:
    """Gives others access to folders of one storage. Raises InvalidInputError for options that make no sense."""

    scheme = "gs"

    def __init__(self, options: StorageOptions, settings: DelegationSettings):
        self.settings = settings
        self._of_storage = GcsSettings.of(options)
        if self._of_storage.credentials == ANONYMOUS:
            raise InvalidInputError(
                "requests to this storage carry no token, so there is none to downscope; give the server credentials"
            )
        _check_address(settings.sts_endpoint)
        self._kept: CachedCredentials[DownscopedToken] = CachedCredentials()

    def credentials(self, folder: str, *, writes: bool, name: str) -> DownscopedToken:
        """Return a token for a folder, a URI that ends with ``/``, and for nothing beside it.

        The same is returned until half of its time is over, to the same ``name``. Google's logs do not say it.
        Raises InvalidInputError for a folder that no boundary can name, StoragePermissionError, TransientError,
        StorageError.
        """
        location = GcsLocation.of(folder)

        def exchanged() -> DownscopedToken:
            return self._typed(lambda: self._exchanged(location, folder_boundary(location, writes=writes)))

        return self._kept.get((folder, writes, name), exchanged)

    @cached_attribute
    def _source(self) -> Any:
        try:
            if self._of_storage.credentials is None:
                return google.auth.default(scopes=[_SCOPE])[0]
            return scoped_credentials(self._of_storage.credentials, _SCOPE)
        except AUTH_ERRORS as error:
            raise StoragePermissionError("there are no credentials that may ask for downscoped tokens") from error

    def _exchanged(self, location: GcsLocation, boundary: downscoped.CredentialAccessBoundary) -> DownscopedToken:
        request = functools.partial(self._send, Request())
        source = copy.copy(self._source)  # another thread may refresh it at the same time
        made = _Downscoped(source, boundary, self.settings.sts_endpoint)
        made.refresh(request)
        token = made.token
        is_token = isinstance(token, str) and _TOKEN.fullmatch(token) and token != source.token
        if token is None or not is_token or made.expiry is None:
            raise ValueError("the answer has no token")
        self._check_bucket(location.bucket, source, request)
        return DownscopedToken(token, int(made.expiry.replace(tzinfo=UTC).timestamp() * 1_000))

    def _send(self, request: Request, url: str, **sent: Any) -> Any:
        """Send a request of google-auth. The own token, which may be in its body, follows no redirect."""
        settings = self._of_storage
        bounds = {
            "timeout": (settings.connect_timeout_seconds, settings.read_timeout_seconds),
            "allow_redirects": False,
        }
        response = request(url, **{**sent, **bounds})
        if response.status >= 500 or response.status == 429:
            raise TransientError(f"the service that gives tokens, or the storage, is busy ({response.status}); retry")
        return response

    def _check_bucket(self, bucket: str, source: Any, request: Callable[..., Any]) -> None:
        """Raise StoragePermissionError for a bucket with lists of rights (ACLs), which no boundary is for."""
        endpoint = self._of_storage.endpoint or f"https://storage.{source.universe_domain}"
        headers: dict[str, str] = {}
        source.apply(headers)
        url = f"{endpoint}/storage/v1/b/{quote(bucket, safe='')}?fields=iamConfiguration"
        response = request(url=url, method="GET", headers=headers)
        if response.status != 200:
            raise StoragePermissionError(
                f"no downscoped token is given, as the settings of the bucket cannot be read ({response.status}); the"
                " operator gives the server the permission storage.buckets.get"
            )
        access_setting = json.loads(response.data).get("iamConfiguration", {}).get("uniformBucketLevelAccess", {})
        if access_setting.get("enabled") is not True:
            raise StoragePermissionError(
                "no downscoped token is given, as the bucket has no uniform bucket-level access; its operator turns"
                " that on"
            )

    def _typed(self, fetch_token: Callable[[], DownscopedToken]) -> DownscopedToken:
        """Return what a call returns. Its errors become typed, and none repeats what a service said."""
        try:
            return fetch_token()
        except (StorageError, InvalidInputError):
            raise
        except TransportError as error:
            raise TransientError("the service that gives tokens, or the storage, does not answer; retry") from error
        except GoogleAuthError as error:
            raise StoragePermissionError(
                f"no downscoped token is given for this table{_code(error)}; the operator of the server looks at its"
                " credentials, and whether they may ask Google's service of tokens"
            ) from error
        except _STRANGE as error:
            raise StorageError("the answer is not one of Google's services of tokens and storage") from error
        except OSError as error:
            raise StorageError(f"the service of tokens cannot be asked: {type(error).__name__}") from error


class _Downscoped(downscoped.Credentials):
    """Downscoped credentials, which may ask a service of tokens at another address than Google's public one."""

    def __init__(self, source: Any, boundary: downscoped.CredentialAccessBoundary, sts_endpoint: str):
        super().__init__(source, boundary, universe_domain=source.universe_domain)  # type: ignore[no-untyped-call]
        if sts_endpoint:
            self._sts_client = sts.Client(sts_endpoint)  # type: ignore[no-untyped-call]


def folder_boundary(location: GcsLocation, *, writes: bool) -> downscoped.CredentialAccessBoundary:
    """Return the boundary of a token for a folder.

    Nothing is deleted by it, and so nothing is replaced: for Google that is to delete. Metadata files and the owner
    file are the server's. Raises InvalidInputError for a folder whose name may mean something else in an expression,
    or that is too long.
    """
    prefix = location.key_prefix
    if not prefix.strip("/") or not _PLAIN.fullmatch(prefix):
        raise InvalidInputError(
            "no access boundary can name the table's place, as its path has a character that may have a meaning there"
        )
    bucket = f"projects/_/buckets/{location.bucket}"
    objects = f"resource.name.startsWith('{bucket}/objects/{prefix}"
    rules = [_rule(bucket, _READER, f"{objects}') || {_LIST_PREFIX}.startsWith('{prefix}')")]
    if writes:
        kept = "".join(f" && !resource.name.endsWith('.metadata.json{end}')" for end in ("", ".gz"))
        rules.append(_rule(bucket, _CREATOR, f"({objects}data/') || {objects}metadata/')){kept}"))
    return downscoped.CredentialAccessBoundary(rules)  # type: ignore[no-untyped-call]


def _rule(bucket: str, role: str, expression: str) -> downscoped.AccessBoundaryRule:
    if len(expression) > _LONGEST_EXPRESSION_CHARS:
        raise InvalidInputError(
            "the path of the lakehouse's root is too long for an access boundary; tokens are not given"
        )
    condition = downscoped.AvailabilityCondition(expression)  # type: ignore[no-untyped-call]
    return downscoped.AccessBoundaryRule(f"//storage.googleapis.com/{bucket}", [role], condition)  # type: ignore[no-untyped-call]


def _check_address(endpoint: str) -> None:
    """Raise InvalidInputError for an address to which no token of the server may go. It is not repeated."""
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
            "the address of the service of tokens must be https://HOST[:PORT]/PATH, without credentials;"
            " the server's own token goes there"
        )


def _code(error: GoogleAuthError) -> str:
    """Return the word of OAuth that an error begins with, in brackets. The rest may quote what was sent."""
    found = _OAUTH_CODE.match(str(error.args[0])) if error.args else None
    return f" ({found[1]})" if found else ""
