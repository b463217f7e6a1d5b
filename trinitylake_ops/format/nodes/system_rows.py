"""System rows of node files: a root's entries about itself and its commit (FORMAT.md, "Node files")."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.format.file_names import version_named

CREATED_AT_MILLIS = "created_at_millis"
N_KEYS = "n_keys"
LAKEHOUSE_DEF = "lakehouse_def"
PREVIOUS_ROOT = "previous_root"
ROLLBACK_FROM_ROOT = "rollback_from_root"
COMMIT_ID = "commit_id"
COMMIT_INFO = "commit_info"
SEALED_AT_MILLIS = "sealed_at_millis"
#: The newest version at which the clock was set back, up to the version of the root.
CLOCK_RESET = "clock_reset"

#: The entry of ``commit_info`` that names the version it was written for.
STAMPED_VERSION = "version"

MAX_COMMIT_INFO_BYTES = 4096

MAX_TIME_MS = 253_402_300_799_999  # the end of the year 9999, in milliseconds since the epoch

_VERSION_DIGITS = 10

#: The name of ``LAKEHOUSE_DEF`` in the older layout.
OLD_LAKEHOUSE_DEF = "lakehouse"

#: The keys of system rows that this version knows. Other system rows are kept and ignored, if they can be told from
#: objects.
SYSTEM_KEYS = frozenset(
    {
        CREATED_AT_MILLIS,
        N_KEYS,
        LAKEHOUSE_DEF,
        OLD_LAKEHOUSE_DEF,
        PREVIOUS_ROOT,
        ROLLBACK_FROM_ROOT,
        COMMIT_ID,
        COMMIT_INFO,
        SEALED_AT_MILLIS,
        CLOCK_RESET,
    }
)


def own_rows(system: dict[str, str], path: str) -> dict[str, str]:
    """Return the system rows of a file without a stamp that was written for another version.

    Programs that know only the published format may carry on the stamp of an earlier version. Early stamps do not name
    their version. They are believed, as far as one file can tell.
    """
    if COMMIT_ID not in system and COMMIT_INFO not in system:
        return system
    version = version_named(path)
    if version is None:  # the root of an export, perhaps a copy of another program's: after which does it come?
        before = version_named(system.get(PREVIOUS_ROOT, ""))
        version = 0 if before is None else before + 1
    stamped = decode_commit_info(system).get(STAMPED_VERSION, version)
    return system if type(stamped) is int and stamped == version else _unstamped(system)


def without_carried_stamp(system: dict[str, str], before: Mapping[str, str]) -> dict[str, str]:
    """Return the system rows of a root, without a stamp that the root ``before`` it has, too.

    This finds stamps that were carried on from a root whose stamp does not name its version.
    """
    commit_id = system.get(COMMIT_ID)
    return _unstamped(system) if commit_id is not None and commit_id == before.get(COMMIT_ID) else system


def clock_reset(system: Mapping[str, str], version: int) -> int | None:
    """Return the newest version up to ``version`` at which the clock was set back, by the root of ``version``.

    None if there is none, or if the row holds no version that can be it.
    """
    text = system.get(CLOCK_RESET, "")
    reset = int(text) if text.isascii() and text.isdecimal() and len(text) <= _VERSION_DIGITS else 0
    return reset if 1 <= reset <= version else None


def is_clock_reset(system: Mapping[str, str], version: int) -> bool:
    """Whether the clock was set back at ``version``, by its own root, which we wrote."""
    return COMMIT_ID in system and clock_reset(system, version) == version


def _unstamped(system: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in system.items() if name not in (COMMIT_ID, COMMIT_INFO)}


_COMMIT_INFO_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def encode_commit_info(info: dict[str, Any]) -> str:
    """Return ``commit_info`` as one JSON object of at most 4 KiB. Raises InvalidInputError when larger or no JSON."""
    try:
        text = _COMMIT_INFO_JSON.encode(info)
        size_bytes = len(text.encode("utf-8"))
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"message and properties of a commit are text only: {error}") from error
    if size_bytes > MAX_COMMIT_INFO_BYTES:
        raise InvalidInputError(
            f"message and properties of this commit take {size_bytes} bytes, more than {MAX_COMMIT_INFO_BYTES};"
            " shorten them"
        )
    return text


def decode_commit_info(system: Mapping[str, str]) -> dict[str, Any]:
    """Return the ``commit_info`` of a root's system rows.

    It is empty if absent, or if another program wrote no JSON object.
    """
    text = system.get(COMMIT_INFO, "{}")
    try:
        info = json.loads(text, parse_constant=_refused_constant)
        if "\\u" in text:
            json.dumps(info, ensure_ascii=False).encode()  # escapes can be halves of characters, which no text holds
    except (ValueError, RecursionError):
        return {}
    return info if isinstance(info, dict) else {}


def _refused_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
