"""Root URIs, paths and locations (FORMAT.md, L1-L3)."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from trinitylake_ops.errors import InvalidLocationError

# ``user:password@`` after the scheme. A port, or a path that contains ':' and '@', does not match.
_USER_INFO = re.compile(r"^(?:[A-Za-z][A-Za-z0-9+.-]*:/{1,2})?[^/@:]+:(?!\d+(?:/|$)|/)[^@]*@")
# Azure URIs have a container before the account, where other URIs have a user. An account key never matches this
# pattern.
_CONTAINER_AT_ACCOUNT = re.compile(r"(?:\$root|\$web|[a-z0-9-]{3,63})@[a-z0-9][a-z0-9.-]*")
_AZURE_SCHEMES = frozenset({"abfs", "abfss"})
_S3_SCHEMES = re.compile(r"^s3[an]://")
_NO_CREDENTIALS = "a root must not contain credentials; remove the part before '@' and pass it by the environment"
_FILE_PATH = re.compile(r"^file:/(?!/)")
_URI = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)(/.*)?$", re.DOTALL)


def normalize_root_uri(root: str) -> str:
    """Normalize a root to ``scheme://authority/path/`` (L1).

    An absolute POSIX path becomes a ``file://`` URI, and a missing trailing ``/`` is added. Nothing else is changed.
    Raises InvalidLocationError for an invalid root; the message does not contain credentials.
    """
    if _USER_INFO.search(root):
        raise InvalidLocationError(_NO_CREDENTIALS)
    uri = as_uri(root)
    match = _URI.match(uri)
    if match is None:
        raise InvalidLocationError(
            f"invalid root {root!r}: it is neither an absolute path nor a URI such as s3://bucket/lakehouse/", path=root
        )
    scheme, authority, path = match.group(1), match.group(2), match.group(3) or "/"
    if "@" in authority and not (scheme in _AZURE_SCHEMES and _CONTAINER_AT_ACCOUNT.fullmatch(authority)):
        raise InvalidLocationError(_NO_CREDENTIALS)
    if scheme == "file" and authority:
        raise InvalidLocationError(f"invalid root {root!r}: it has the host {authority!r}; use file:///path", path=root)
    if scheme != "file" and not authority:
        raise InvalidLocationError(f"invalid root {root!r}: it has no bucket or host", path=root)
    if not path.endswith("/"):
        path += "/"
    _check_segments(path[1:-1].split("/") if path != "/" else [], root)
    _check_segments([authority] if authority else [], root)
    return f"{scheme}://{authority}{path}"


def as_uri(location: str) -> str:
    """Convert an absolute POSIX path to a ``file://`` URI, and return anything else unchanged.

    ``file:/path``, as written by Hadoop's file systems, is also converted.
    """
    path = location.removeprefix("file:") if _FILE_PATH.match(location) else location
    return f"file://{path}" if path.startswith("/") else location


def is_uri(location: str) -> bool:
    """Whether a location is a full URI rather than a path relative to the root (L3)."""
    return _URI.match(location) is not None


def validate_location(location: str) -> str:
    """Return a location unchanged, or raise InvalidLocationError if it is not qualified (L2)."""
    match = _URI.match(location)
    if match is None:
        return validate_path(location)
    path = match.group(3) or ""
    segments = path[1:].split("/")
    if segments and segments[-1] == "":
        segments.pop()  # a URI may name a directory
    _check_segments(segments, location)
    if match.group(2):
        _check_segments([match.group(2)], location)
    return location


def validate_path(path: str) -> str:
    """Return a path relative to the root unchanged, or raise InvalidLocationError (L2)."""
    if path.startswith("/"):
        raise InvalidLocationError(f"path {path!r} starts with '/'; paths are relative to the root", path=path)
    _check_segments(path.split("/"), path)
    return path


def _check_segments(segments: list[str], location: str) -> None:
    for segment in segments:
        if segment in ("", ".", ".."):
            description = repr(segment) if segment else "an empty segment"
            raise InvalidLocationError(
                f"invalid location {location!r}: it contains {description}; use the normalized location", path=location
            )
        if "\0" in segment:
            raise InvalidLocationError(f"invalid location {location!r}: it contains a NUL character", path=location)


def to_uri(root: str, location: str) -> str:
    """Convert a location to a URI. Raise InvalidLocationError if it is not qualified.

    Args:
        root: The normalized root to which a path is relative.
        location: A path or a URI.
    """
    validate_location(location)
    return location if is_uri(location) else root + location


def to_location(root: str, uri: str) -> str:
    """Convert a URI under a root to a path, and return other locations unchanged (L3).

    Args:
        root: The normalized root.
        uri: A path or a URI.

    Raises:
        InvalidLocationError: The location is not qualified.
    """
    location = uri.removeprefix(root)
    if ":/" in location:
        converted = _convert_scheme(root, uri)
        location = converted.removeprefix(root) if converted.startswith(root) else location
    return validate_location(location)


def located(root: str) -> Callable[[str], str]:
    """Return :func:`to_location` for one root with an unbounded cache of results."""
    return functools.cache(functools.partial(to_location, root))


def _convert_scheme(root: str, uri: str) -> str:
    """Convert URI forms of Hadoop's file systems (``s3a://``, ``abfs://``, ``file:/path``) to the form of the root."""
    if root.startswith("s3://"):
        return _S3_SCHEMES.sub("s3://", uri)
    if root.startswith("abfss://") and uri.startswith("abfs://"):
        return uri.replace("abfs://", "abfss://", 1)
    return as_uri(uri) if _FILE_PATH.match(uri) else uri
