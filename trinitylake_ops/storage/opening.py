"""Open the storage of a root after validating the options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.storage.meter import ObservedStorage
from trinitylake_ops.storage.options import COMMON_OPTIONS, WHOLE_FILE_LIMIT, StorageOptions
from trinitylake_ops.storage.registry import OWN_SCHEMES, Scheme, external_schemes, scheme_of
from trinitylake_ops.storage.retry import RetryStorage
from trinitylake_ops.telemetry.settings import is_enabled


def open_storage(root_uri: str, storage_options: Mapping[str, str] | None = None) -> Storage:
    """Open the storage of a normalized root URI (FORMAT.md, L1), with retries.

    Opening accesses no file and sends no request. If telemetry is enabled, the storage reports its requests.

    Args:
        root_uri: A root, for example ``file:///folder/`` or ``s3://bucket/prefix/``.
        storage_options: Options of its scheme and ``COMMON_OPTIONS`` (docs/storages/README.md). ``SCHEME.NAME`` is an
            option for all roots of a scheme; options of other schemes are for other roots.

    Raises:
        InvalidLocationError: The root is invalid. The message contains no credentials.
        InvalidInputError: An option is unknown or invalid. The message contains no credentials.
        MissingExtraError: The library of the client is not installed.
    """
    scheme = scheme_of(root_uri)
    all_options = StorageOptions(storage_options)
    options = all_options.of_scheme(scheme.name)
    _check_names(scheme, options)
    for name in all_options:
        _check_name_of_other_scheme(name)
    for option in (*scheme.options, WHOLE_FILE_LIMIT):
        option.value(options)
    storage = scheme.open(root_uri, options)
    return RetryStorage(ObservedStorage(storage) if is_enabled() else storage)


def with_environment(root_uri: str, options: Mapping[str, str]) -> StorageOptions:
    """Add the options that environment variables set, including credentials, for tasks on other machines.

    Args:
        root_uri: Root of the lakehouse.
        options: Options of the lakehouse, which take precedence.

    Returns:
        The options. Options for roots of other schemes have names of the form ``SCHEME.NAME``.
    """
    storage_options, own_scheme = StorageOptions(options), root_uri.partition("://")[0]
    values: dict[str, str] = {}
    for name, scheme in OWN_SCHEMES.items():
        of_scheme = storage_options.of_scheme(name, is_own=name == own_scheme)
        added = scheme.from_environment(root_uri if name == own_scheme else f"{name}://", of_scheme)
        values |= added if name == own_scheme else {f"{name}.{option}": value for option, value in added.items()}
    return StorageOptions({**values, **storage_options})


def _check_names(scheme: Scheme, names: Iterable[str]) -> None:
    known_names = {option.name for option in (*scheme.options, *COMMON_OPTIONS)}
    if unknown := sorted(set(names) - known_names):
        scheme_names = ", ".join(sorted(known_names))
        raise InvalidInputError(f"unknown storage option {unknown[0]!r}: {scheme.name}:// supports {scheme_names}")


def _check_name_of_other_scheme(name: str) -> None:
    """Reject an option of an unknown scheme. Options from other packages are checked when their scheme is opened."""
    scheme, dot, plain = name.partition(".")
    if dot and scheme in OWN_SCHEMES:
        _check_names(OWN_SCHEMES[scheme], [plain])
    elif dot and scheme not in external_schemes():
        schemes = ", ".join(OWN_SCHEMES)
        raise InvalidInputError(
            f"unknown storage option {name!r}: the part before the dot must be a scheme, for example {schemes}"
        )
