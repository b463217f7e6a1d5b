"""From a root URI and string options to a storage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.storage.cache.memory import CACHE_OPTIONS
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.storage.meter import ObservedStorage
from trinitylake_ops.storage.options import ALLOWED_ROOTS, WHOLE_FILE_LIMIT, StorageOptions
from trinitylake_ops.storage.registry import OWN_SCHEMES, Scheme, is_added, scheme_of
from trinitylake_ops.storage.retry import RetryStorage
from trinitylake_ops.telemetry.settings import is_enabled

_OF_ALL = CACHE_OPTIONS | {ALLOWED_ROOTS, WHOLE_FILE_LIMIT}


def open_storage(root_uri: str, storage_options: Mapping[str, str] | None = None) -> Storage:
    """Open the storage of a normalized root URI (FORMAT.md, L1), wrapped in retries.

    Each kind of storage takes options of its own (docs/storage.md): ``file:///folder/`` takes ``fsync`` (``true``, the
    default, or ``false``), ``memory://name/`` none. ``s3://bucket/prefix/`` takes ``S3_OPTIONS``; ``client`` (``s3fs``,
    the default, or ``obstore``) picks the library. The other kinds take the options of their schemes
    (``storage/registry.py``). Every root takes ``whole_file_limit_bytes``, and the options of the cache and
    ``allowed_roots``, which mean nothing here. Opening touches no file and sends no request.
    ``SCHEME.NAME`` is the option of that name for one scheme; those of other schemes are for other roots.

    Where somebody listens (``telemetry``), it tells of its requests.

    Raises InvalidLocationError for a root of another scheme or form, and InvalidInputError for an option that is not
    known or not valid. Neither repeats credentials. Raises MissingExtraError if a client's library is missing.
    """
    scheme = scheme_of(root_uri)
    given = StorageOptions(storage_options)
    options = given.of_scheme(scheme.name)
    _check_names(scheme, options)
    for name in given:
        _check_other(name)
    opened = scheme.open(root_uri, options)
    return RetryStorage(ObservedStorage(opened) if is_enabled() else opened)


def _check_names(scheme: Scheme, names: Iterable[str]) -> None:
    known = scheme.options | _OF_ALL
    if unknown := sorted(set(names) - known):
        supported = ", ".join(sorted(known))
        raise InvalidInputError(f"unknown storage option {unknown[0]!r}: {scheme.name}:// supports {supported}")


def _check_other(name: str) -> None:
    """Refuse an option for roots of a scheme that nobody has. What another package takes is checked when it opens."""
    scheme, dot, plain = name.partition(".")
    if dot and scheme in OWN_SCHEMES:
        _check_names(OWN_SCHEMES[scheme], [plain])
    elif dot and not is_added(scheme):
        known = ", ".join(OWN_SCHEMES)
        raise InvalidInputError(f"unknown storage option {name!r}: what stands before the dot is a scheme, as {known}")
