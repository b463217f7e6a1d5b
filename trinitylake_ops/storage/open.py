"""From a root URI and string options to a storage."""

from __future__ import annotations

from collections.abc import Mapping

from trinitylake_ops.errors import InvalidInputError, InvalidLocationError
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.storage.local import LocalStorage
from trinitylake_ops.storage.memory import MemoryStorage
from trinitylake_ops.storage.retry import RetryStorage

_OPTIONS_BY_SCHEME: Mapping[str, frozenset[str]] = {"file": frozenset({"fsync"}), "memory": frozenset()}


def open_storage(root_uri: str, storage_options: Mapping[str, str] | None = None) -> Storage:
    """Open the storage of a normalised root URI (FORMAT.md, L1), wrapped in retries.

    ``file:///folder/`` takes the option ``fsync`` (``true``, the default, or ``false``),
    ``memory://name/`` none. Opening touches no file. Raises InvalidLocationError for a root of
    another scheme or form and InvalidInputError for an option that is not known; neither message
    repeats credentials.
    """
    scheme, separator, _ = root_uri.partition("://")
    if not separator or scheme not in _OPTIONS_BY_SCHEME:
        shown = f"the scheme {scheme!r}" if separator else "a root without a scheme"
        supported = " and ".join(f"{known}://" for known in _OPTIONS_BY_SCHEME)
        raise InvalidLocationError(f"{shown} is not supported: roots start with {supported}")
    options = dict(storage_options or {})
    _check_option_names(scheme, options)
    if scheme == "memory":
        return RetryStorage(MemoryStorage(root_uri))
    return RetryStorage(LocalStorage(root_uri, fsync=_flag(options, "fsync", default=True)))


def _check_option_names(scheme: str, options: Mapping[str, str]) -> None:
    known = _OPTIONS_BY_SCHEME[scheme]
    unknown = sorted(set(options) - known)
    if unknown:
        supported = ", ".join(sorted(known)) or "none"
        raise InvalidInputError(f"unknown storage option {unknown[0]!r}: {scheme}:// supports {supported}")


def _flag(options: Mapping[str, str], name: str, *, default: bool) -> bool:
    value = options.get(name)
    if value is None:
        return default
    if value not in ("true", "false"):
        raise InvalidInputError(f"storage option {name!r} must be 'true' or 'false', not {value!r}")
    return value == "true"
