"""The keys of an issuer, fetched within bounds and kept for a while.

The address is the operator's. What stands there is not believed: its size, the time it takes and the number of keys
have bounds. Only keys of the algorithms that the operator named are taken. Whoever needs keys that are being
fetched waits for the same request, and in no thread.
"""

from __future__ import annotations

import http.client
import json
import logging
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError, URLError

import jwt

from trinitylake_ops.errors import TrinityLakeError

logger = logging.getLogger(__name__)

#: Keys are asked for again when they are older, so that a key that was withdrawn is out after that time.
KEPT_SECONDS = 300.0
#: Keys are used for so long while their address does not answer.
LONGEST_KEPT_SECONDS = 3_600.0
#: A token with an unknown key lets keys be fetched no more often than this.
PAUSE_SECONDS = 10.0
LONGEST_FETCH_SECONDS = 10.0
MOST_BYTES = 1 << 20
MOST_KEYS = 100
_CONNECT_SECONDS = 5.0
_PART_BYTES = 64 << 10
_FAMILIES = {"RS": "RSA", "PS": "RSA", "ES": "EC", "Ed": "OKP"}


@dataclass(frozen=True, slots=True)
class Key:
    """A public key, and the only algorithm that its issuer lets it have, None for any of its family."""

    key: jwt.PyJWK
    algorithm: str | None

    def fits(self, algorithm: str) -> bool:
        """Whether a signature by an algorithm can be of this key."""
        return self.key.key_type == _FAMILIES[algorithm[:2]] and self.algorithm in (None, algorithm)


class KeysUnavailableError(TrinityLakeError):
    """The keys of an issuer could not be had."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


class Keys:
    """The keys at an address, by their ids. ``now`` is a clock in seconds that never goes back."""

    def __init__(self, url: str, algorithms: tuple[str, ...], now: Callable[[], float] = time.monotonic):
        self._url = url
        self._algorithms = algorithms
        self._now = now
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="keys")
        self._keys: Mapping[str | None, tuple[Key, ...]] = {}
        self._fetched_s: float | None = None
        self._asked_s: float | None = None
        self._fetching: Future[None] | None = None

    def wanted(self, kid: str | None) -> Future[None] | None:
        """Return the request to wait for before a token with a key id is checked, None if the keys are good for it."""
        now_s = self._now()
        with self._lock:
            is_old = self._fetched_s is None or now_s - self._fetched_s >= KEPT_SECONDS
            if not is_old and (kid is None or kid in self._keys):
                return None
            if self._fetching is not None:
                return self._fetching
            if self._asked_s is not None and now_s - self._asked_s < PAUSE_SECONDS:
                return None
            self._asked_s = now_s
            self._fetching = self._thread.submit(self._fetch)
            return self._fetching

    def named(self, kid: str | None, algorithm: str) -> jwt.PyJWK | None:
        """Return the key of an id that fits an algorithm, None if there is none. Raises KeysUnavailableError.

        A token without an id is checked by the only key of its family.
        """
        now_s = self._now()
        with self._lock:
            if self._fetched_s is None or now_s - self._fetched_s >= LONGEST_KEPT_SECONDS:
                raise KeysUnavailableError("the keys of the issuer cannot be had")
            found = (
                self._keys.get(kid, ()) if kid is not None else [one for many in self._keys.values() for one in many]
            )
        fitting = [key for key in found if key.fits(algorithm)]
        return fitting[0].key if len(fitting) == 1 else None

    def close(self) -> None:
        """End the thread that fetches."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _fetch(self) -> None:
        try:
            keys = self._parsed(_read(self._url))
        except (OSError, ValueError, http.client.HTTPException, RecursionError, jwt.PyJWTError) as error:
            reason = error.reason if isinstance(error, URLError) else error
            logger.warning("the keys at %s cannot be had: %s", self._url, str(reason)[:300] or type(error).__name__)
            keys = None
        with self._lock:
            self._fetching = None
            if keys is not None:
                self._keys, self._fetched_s = keys, self._now()

    def _parsed(self, data: bytes) -> Mapping[str | None, tuple[Key, ...]]:
        content = json.loads(data)
        listed = content.get("keys") if isinstance(content, dict) else None
        if not isinstance(listed, list) or not 1 <= len(listed) <= MOST_KEYS:
            raise ValueError(f"it is no set of 1 to {MOST_KEYS} keys")
        found: dict[str | None, tuple[Key, ...]] = {}
        for one in listed:
            key = self._key(one)
            if key is not None:
                kid = key.key.key_id
                found[kid] = (*found.get(kid, ()), key)
        if not found:
            raise ValueError(f"it holds no key for {', '.join(self._algorithms)}")
        return found

    def _key(self, content: Any) -> Key | None:
        """Return a key of the set, None for one that is not for signatures, or of an algorithm that is not taken."""
        if not isinstance(content, dict) or content.get("use", "sig") != "sig":
            return None
        if content.get("alg", self._algorithms[0]) not in self._algorithms or "d" in content:
            return None
        if content.get("kty") not in _FAMILIES.values() or not isinstance(content.get("kid", ""), str):
            return None
        try:
            return Key(jwt.PyJWK(content), content.get("alg"))
        except jwt.PyJWTError as error:
            logger.warning("a key at %s cannot be used: %s", self._url, type(error).__name__)
            return None


def _read(url: str) -> bytes:
    """Return what stands at an address. Raises OSError, HTTPException, and ValueError beyond the bounds."""
    deadline_s = time.monotonic() + LONGEST_FETCH_SECONDS
    request = urllib.request.Request(url, headers={"Accept": "application/json"})
    parts, n_bytes = [], 0
    try:
        opened = urllib.request.build_opener(_NoRedirect).open(request, timeout=_CONNECT_SECONDS)
    except HTTPError as error:  # which is an open answer, too
        error.close()
        raise OSError(f"it answers {error.code}") from None
    with opened as answer:
        while part := answer.read1(_PART_BYTES):
            n_bytes += len(part)
            if n_bytes > MOST_BYTES:
                raise ValueError(f"it has more than {MOST_BYTES} bytes")
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"it took longer than {LONGEST_FETCH_SECONDS:.0f} seconds")
            parts.append(part)
    return b"".join(parts)
