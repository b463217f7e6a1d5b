"""From a root URI and string options to a storage."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from trinitylake_ops.errors import InvalidInputError, InvalidLocationError
from trinitylake_ops.extras import needs
from trinitylake_ops.storage.cache.options import CACHE_OPTIONS
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.storage.local.storage import LocalStorage
from trinitylake_ops.storage.memory import MemoryStorage
from trinitylake_ops.storage.options import ALLOWED_ROOTS, WHOLE_FILE_LIMIT, StorageOptions, whole_file_limit_bytes
from trinitylake_ops.storage.s3.settings import S3_CLIENTS, S3_OPTIONS
from trinitylake_ops.storage.wrappers.retry import RetryStorage


def open_storage(root_uri: str, storage_options: Mapping[str, str] | None = None) -> Storage:
    """Open the storage of a normalised root URI (FORMAT.md, L1), wrapped in retries.

    ``file:///folder/`` takes the option ``fsync`` (``true``, the default, or ``false``), ``memory://name/`` none of its
    own. ``s3://bucket/prefix/`` takes ``S3_OPTIONS``; ``client`` (``s3fs``, the default, or ``obstore``) picks the
    library. Every root takes ``whole_file_limit_bytes``, and the options of the cache and ``allowed_roots``, which mean
    nothing here. Opening touches no file and sends no request.

    Raises InvalidLocationError for a root of another scheme or form, and InvalidInputError for an option that is not
    known or not valid. Neither repeats credentials. Raises MissingExtraError if an S3 client's library is missing.
    """
    scheme, separator, _ = root_uri.partition("://")
    if not separator or scheme not in _SCHEMES:
        # The text there may be no scheme at all, but a credential in the wrong place.
        shown = f"the scheme {scheme!r}" if _SCHEME.fullmatch(scheme) else "this scheme"
        shown = shown if separator else "a root without a scheme"
        *others, last = (f"{known}://" for known in _SCHEMES)
        raise InvalidLocationError(f"{shown} is not supported: roots start with {', '.join(others)} or {last}")
    known_options, open_inner = _SCHEMES[scheme]
    options = StorageOptions(storage_options)
    _check_option_names(scheme, options, known_options | CACHE_OPTIONS | {ALLOWED_ROOTS, WHOLE_FILE_LIMIT})
    return RetryStorage(open_inner(root_uri, options))


_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,15}")


def _open_local(root: str, options: StorageOptions) -> Storage:
    limit_bytes = whole_file_limit_bytes(options)
    return LocalStorage(root, fsync=options.flag("fsync", default=True), whole_file_limit_bytes=limit_bytes)


def _open_memory(root: str, options: StorageOptions) -> Storage:
    return MemoryStorage(root, whole_file_limit_bytes=whole_file_limit_bytes(options))


def _open_s3(root: str, options: StorageOptions) -> Storage:
    # The client libraries take a good part of a second to load. Other roots should not pay for that.
    if options.one_of("client", S3_CLIENTS) == "obstore":
        with needs("obstore"):
            from trinitylake_ops.storage.s3.obstore_storage import ObstoreS3Storage

        return ObstoreS3Storage(root, options)
    with needs("s3"):
        from trinitylake_ops.storage.s3.s3fs_storage import S3Storage

    return S3Storage(root, options)


_SCHEMES: Mapping[str, tuple[frozenset[str], Callable[[str, StorageOptions], Storage]]] = {
    "file": (frozenset({"fsync"}), _open_local),
    "memory": (frozenset(), _open_memory),
    "s3": (S3_OPTIONS, _open_s3),
}


def _check_option_names(scheme: str, options: Mapping[str, str], known: frozenset[str]) -> None:
    unknown = sorted(set(options) - known)
    if unknown:
        supported = ", ".join(sorted(known))
        raise InvalidInputError(f"unknown storage option {unknown[0]!r}: {scheme}:// supports {supported}")
