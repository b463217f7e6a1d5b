"""Properties of catalogs and FileIOs: where the lakehouse is, and how its storage is opened."""

from __future__ import annotations

from collections.abc import Mapping

from trinitylake_ops.storage.options import StorageOptions, is_secret

ROOT = "root"
STORAGE_OPTION_PREFIX = "storage."


def storage_options_of(properties: Mapping[str, str]) -> StorageOptions:
    """Return the storage options among the properties of a catalog or FileIO: those named ``storage.*``."""
    return StorageOptions(
        {
            name.removeprefix(STORAGE_OPTION_PREFIX): value
            for name, value in properties.items()
            if name.startswith(STORAGE_OPTION_PREFIX)
        }
    )


def public_properties(properties: Mapping[str, str], root: str, options: StorageOptions) -> dict[str, str]:
    """Return the properties of a catalog or FileIO that is open: with its root and options, without credentials.

    Anybody may print properties. Objects that open further storages keep their StorageOptions beside them.
    """
    kept = {name: value for name, value in properties.items() if not name.startswith(STORAGE_OPTION_PREFIX)}
    shown = {f"{STORAGE_OPTION_PREFIX}{name}": options[name] for name in options if not is_secret(name)}
    return {**kept, **shown, ROOT: root}
