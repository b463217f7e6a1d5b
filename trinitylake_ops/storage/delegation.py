"""Access delegation: vend temporary credentials or signed requests to clients that have no credentials of their own."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from cachetools import LRUCache

from trinitylake_ops.errors import InvalidInputError

MIN_SESSION_SECONDS, MAX_SESSION_SECONDS, USUAL_SESSION_SECONDS = 900, 43_200, 3_600
ROLE = re.compile(r"arn:([a-z-]+):iam::[0-9a-z]*:role/[\w+=,.@/-]{1,576}")
_MAX_CACHED = 10_000


@dataclass(frozen=True, slots=True)
class DelegationSettings:
    """Configuration of access delegation: which credentials and signatures the server vends to its clients.

    Raises InvalidInputError for a role that is not an ARN, a duration out of range, and for settings that exclude each
    other.
    """

    #: S3: ARN of the role whose sessions are vended. If empty, no sessions are vended.
    role: str = ""
    #: S3: Duration of a session, in seconds. Google Cloud Storage tokens last as long as the server's own tokens.
    seconds: int = USUAL_SESSION_SECONDS
    #: Endpoint that issues sessions and tokens. If empty, the S3 storage's own endpoint, or that of AWS or Google.
    sts_endpoint: str = ""
    #: S3: Whether the server signs individual client requests.
    sign: bool = False
    #: Google Cloud Storage: Whether downscoped tokens are vended.
    downscope: bool = False
    #: S3: Whether a session can create objects but not overwrite them. The storage must support the condition
    #: ``s3:if-none-match``, and clients must send this header.
    create_only: bool = False

    def __post_init__(self) -> None:
        if self.role and not ROLE.fullmatch(self.role):
            raise InvalidInputError("invalid role: it must be an ARN, for example arn:aws:iam::123456789012:role/lake")
        if self.create_only and not self.role:
            raise InvalidInputError("create_only requires a role, because it restricts the role's sessions; set a role")
        if not MIN_SESSION_SECONDS <= self.seconds <= MAX_SESSION_SECONDS:
            raise InvalidInputError(
                f"invalid session duration {self.seconds} s: it must be from {MIN_SESSION_SECONDS} to"
                f" {MAX_SESSION_SECONDS} s"
            )
        if self.downscope and (self.role or self.sign or self.seconds != USUAL_SESSION_SECONDS):
            raise InvalidInputError(
                "downscope is for Google Cloud Storage, and role, seconds and sign are for S3; remove one of them"
            )

    @property
    def is_on(self) -> bool:
        """Whether clients get access to files, by credentials or signatures."""
        return self.vends_credentials or self.sign

    @property
    def vends_credentials(self) -> bool:
        """Whether credentials are vended."""
        return bool(self.role) or self.downscope


class FolderCredentials(Protocol):
    """Temporary credentials for one folder. Their ``repr`` shows no secrets."""

    @property
    def expires_at_ms(self) -> int:
        """Expiration time, in milliseconds since the epoch."""

    @property
    def properties(self) -> Mapping[str, str]:
        """The credentials as configuration properties of Iceberg clients."""


class Delegate(Protocol):
    """Vends credentials for folders of one storage."""

    settings: DelegationSettings

    @property
    def scheme(self) -> str:
        """Scheme of the roots for which this delegate vends credentials."""

    def credentials(self, folder: str, *, writes: bool, name: str) -> FolderCredentials:
        """Return credentials that are restricted to one folder. They are reused for half of their lifetime.

        Args:
            folder: URI of the folder, with a trailing ``/``.
            writes: Whether the credentials allow writes.
            name: Name of the principal, for the audit log of the service.

        Raises:
            InvalidInputError: The credentials cannot be restricted to the folder.
            StorageError: The service did not issue credentials.
        """


C = TypeVar("C", bound=FolderCredentials)


class CachedCredentials(Generic[C]):
    """A thread-safe cache of vended credentials. Credentials are reused for half of their lifetime."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Credentials with the time until which they are reused, in seconds since the epoch.
        self._cache: LRUCache[Hashable, tuple[float, C]] = LRUCache(_MAX_CACHED)

    def get(self, key: Hashable, issue: Callable[[], C]) -> C:
        """Return the cached credentials for a key, or new credentials.

        Args:
            key: Identifies the folder, the rights and the principal.
            issue: Requests new credentials. Its errors are raised.
        """
        now_s = time.time()
        with self._lock:
            reuse_until_s, cached = self._cache.get(key, (0.0, None))
        if cached is not None and now_s < reuse_until_s:
            return cached
        new_credentials = issue()
        with self._lock:
            self._cache[key] = ((now_s + new_credentials.expires_at_ms / 1_000) / 2, new_credentials)
        return new_credentials
