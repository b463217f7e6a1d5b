"""From a root URI and string options to a storage."""

from __future__ import annotations

from collections.abc import Mapping

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.storage.cache.options import CACHE_OPTIONS
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.storage.options import ALLOWED_ROOTS, WHOLE_FILE_LIMIT, StorageOptions
from trinitylake_ops.storage.schemes import scheme_of
from trinitylake_ops.storage.wrappers.retry import RetryStorage

_OF_ALL = CACHE_OPTIONS | {ALLOWED_ROOTS, WHOLE_FILE_LIMIT}


def open_storage(root_uri: str, storage_options: Mapping[str, str] | None = None) -> Storage:
    """Open the storage of a normalised root URI (FORMAT.md, L1), wrapped in retries.

    Each kind of storage takes options of its own (docs/storage.md): ``file:///folder/`` takes ``fsync`` (``true``, the
    default, or ``false``), ``memory://name/`` none. ``s3://bucket/prefix/`` takes ``S3_OPTIONS``; ``client`` (``s3fs``,
    the default, or ``obstore``) picks the library. The other kinds take the options of their schemes
    (``storage/schemes.py``). Every root takes ``whole_file_limit_bytes``, and the options of the cache and
    ``allowed_roots``, which mean nothing here. Opening touches no file and sends no request.
    ``SCHEME.NAME`` is the option of that name for one scheme; those of other schemes are for other roots.

    Raises InvalidLocationError for a root of another scheme or form, and InvalidInputError for an option that is not
    known or not valid. Neither repeats credentials. Raises MissingExtraError if a client's library is missing.
    """
    scheme = scheme_of(root_uri)
    options = StorageOptions(storage_options).of_scheme(scheme.name)
    known = scheme.options | _OF_ALL
    if unknown := sorted(set(options) - known):
        supported = ", ".join(sorted(known))
        raise InvalidInputError(f"unknown storage option {unknown[0]!r}: {scheme.name}:// supports {supported}")
    return RetryStorage(scheme.open(root_uri, options))
