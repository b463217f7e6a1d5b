"""What an operator lets others have to reach files, and credentials that were given to them already."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from cachetools import LRUCache

from trinitylake_ops.errors import InvalidInputError

SHORTEST_SESSION_SECONDS, LONGEST_SESSION_SECONDS, USUAL_SESSION_SECONDS = 900, 43_200, 3_600
ROLE = re.compile(r"arn:([a-z-]+):iam::[0-9a-z]*:role/[\w+=,.@/-]{1,576}")
_MOST_KEPT = 10_000


@dataclass(frozen=True, slots=True)
class DelegationSettings:
    """What an operator lets others have, so that they read and write files without keys of their own.

    On S3 ``role`` is the ARN of the role whose sessions they get, empty for none. A session lasts ``seconds``. With
    ``sign`` single requests of theirs are signed. On Google Cloud Storage ``downscope`` lets them have downscoped
    tokens, which last as long as those of the server. ``sts_endpoint`` is where sessions and tokens are asked for.
    Empty stands for the storage's endpoint on S3, for AWS's, or for Google's. Raises InvalidInputError.

    With ``create_only`` a session of the role writes only objects that do not exist. It is for storages that know the
    condition ``s3:if-none-match``, and for clients that send this header.
    """

    role: str = ""
    seconds: int = USUAL_SESSION_SECONDS
    sts_endpoint: str = ""
    sign: bool = False
    downscope: bool = False
    create_only: bool = False

    def __post_init__(self) -> None:
        if self.role and not ROLE.fullmatch(self.role):
            raise InvalidInputError("the role is no ARN of one, such as arn:aws:iam::123456789012:role/lake")
        if self.create_only and not self.role:
            raise InvalidInputError("create_only is a condition of the sessions of a role; set a role, or leave it out")
        if not SHORTEST_SESSION_SECONDS <= self.seconds <= LONGEST_SESSION_SECONDS:
            raise InvalidInputError(
                f"a session lasts {SHORTEST_SESSION_SECONDS} to {LONGEST_SESSION_SECONDS} seconds, not {self.seconds}"
            )
        if self.downscope and (self.role or self.sign or self.seconds != USUAL_SESSION_SECONDS):
            raise InvalidInputError(
                "downscoped tokens are Google's, while a role, its seconds and signatures are those of S3;"
                " leave one kind out"
            )

    @property
    def is_on(self) -> bool:
        """Whether others get anything."""
        return self.vends_credentials or self.sign

    @property
    def vends_credentials(self) -> bool:
        """Whether others get credentials."""
        return bool(self.role) or self.downscope


class FolderCredentials(Protocol):
    """Credentials for one folder, which end. No text form of them shows a secret."""

    @property
    def expires_at_ms(self) -> int:
        """When they end."""

    @property
    def properties(self) -> Mapping[str, str]:
        """What they are, by the names that clients of Iceberg know."""


class Delegate(Protocol):
    """Gives others access to folders of one storage."""

    settings: DelegationSettings

    @property
    def scheme(self) -> str:
        """The scheme of the roots that it is for."""

    def credentials(self, folder: str, *, writes: bool, name: str) -> FolderCredentials:
        """Return credentials for a folder, a URI that ends with ``/``, and for nothing beside it.

        The same are returned until half of their time is over. ``name`` says for whom.
        Raises InvalidInputError for a folder that they cannot be bound to, StorageError.
        """


C = TypeVar("C", bound=FolderCredentials)


class CachedCredentials(Generic[C]):
    """Credentials that were given, until half of their time is over. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: LRUCache[Hashable, tuple[float, C]] = LRUCache(_MOST_KEPT)

    def get(self, key: Hashable, make: Callable[[], C]) -> C:
        """Return those of a key, made anew if there are none. Raises what ``make`` raises."""
        begun_s = time.time()
        with self._lock:
            until_s, kept = self._kept.get(key, (0.0, None))
        if kept is not None and begun_s < until_s:
            return kept
        made = make()
        with self._lock:
            self._kept[key] = ((begun_s + made.expires_at_ms / 1_000) / 2, made)
        return made
