"""Names of the files of a lakehouse (FORMAT.md, L4-L11)."""

from __future__ import annotations

import re
import unicodedata
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import mmh3

from trinitylake_ops.errors import InvalidDefinitionError, VersionNotFoundError

HINT_PATH = "_latest_hint.txt"
ROOT_PREFIX = "_"
OPERATIONS_PREFIX = "_ops/"
SLOT_REQUEST_PREFIX = f"{OPERATIONS_PREFIX}turn-"
LEASE_PREFIX = f"{OPERATIONS_PREFIX}lease-"
VERIFIED_PREFIX = f"{OPERATIONS_PREFIX}verified-"
SPACE_PREFIX = f"{OPERATIONS_PREFIX}space-"
ORPHAN_BARRIER_PATH = f"{OPERATIONS_PREFIX}orphan-barrier.json"
#: What maintenance remembers between runs. It may be lost at any time.
MAINTENANCE_STATE_PATH = f"{OPERATIONS_PREFIX}maintenance.json"
LAKEHOUSE_DEF_PREFIX = "_lakehouse_def_"
TABLES_PREFIX = "tables/"
#: The name of the file in a table's folder that identifies the lakehouse that owns the folder.
OWNER_NAME = "_owner.json"
MAX_VERSION = 2**32 - 1
MAX_SEGMENT_BYTES = 255

_HASH_BITS = 20
_UUID = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_ROOT_NAME = re.compile(r"_([01]{32}(?:[01]{32})?)(\.arrow|\.ipc)")
_IMMUTABLE_NAME = re.compile(
    r"(?:[01]{4}/[01]{4}/[01]{4}/[01]{8}-(?:[^/]*-)?|_lakehouse_def_)"
    r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\.(?:arrow|ipc|binpb)",
    re.DOTALL,
)
_REMOTE_NAME = re.compile(rf"([a-z0-9+.-]+://.*?/)(?:{_IMMUTABLE_NAME.pattern})", re.DOTALL)
_DEFINITION_NAME = re.compile(
    rf"(?:.*/)?(?:_(lakehouse)_def_|[01]{{4}}/[01]{{4}}/[01]{{4}}/[01]{{8}}-(namespace|table)-[^/]+-){_UUID}\.binpb",
    re.DOTALL,
)
_OPTIMIZED = re.compile(r"[01]{4}/[01]{4}/[01]{4}/[01]{8}-([^/]+)", re.DOTALL)
_TABLE_NAME = re.compile(rf"[01/]+-table-[^/]+-({_UUID})\.binpb")
_TABLE_METADATA_NAME = re.compile(rf"{TABLES_PREFIX}[^/]+/metadata/[^/]*{_UUID}[^/]*\.(?:avro|metadata\.json)")
_SLOT_REQUEST_NAME = re.compile(rf"{SLOT_REQUEST_PREFIX}([1-9][0-9]{{0,5}})-{_UUID}")
_LEASE_NAME = re.compile(rf"{LEASE_PREFIX}([1-9][0-9]{{0,14}})\.json")
_VERIFIED_NAME = re.compile(rf"{VERIFIED_PREFIX}{_UUID}\.arrow")
_SPACE_INDEX_NAME = re.compile(rf"{SPACE_PREFIX}(0|[1-9][0-9]{{0,9}})-{_UUID}\.json")
_SPACE_PART_NAME = re.compile(rf"{SPACE_PREFIX}{_UUID}\.arrow")
_OPERATION_NAME = re.compile(
    rf"{OPERATIONS_PREFIX}(?:(?:plan|export)-{_UUID}\.json|txn-{_UUID}\.binpb|verified-{_UUID}\.arrow"
    rf"|space-(?:{_UUID}\.arrow|(?:0|[1-9][0-9]{{0,9}})-{_UUID}\.json)|tmp/.+)"
    rf"|_export_{_UUID}\.arrow",
    re.DOTALL,
)
#: Names of roots, names with a UUID, and names of operation files that occur at most once per folder.
_NAME_OF_ONE_FILE = re.compile(
    rf"{_ROOT_NAME.pattern}|.*{_UUID}.*|(?:lease-[1-9][0-9]*|orphan-barrier|maintenance|_owner)\.json",
    re.DOTALL | re.IGNORECASE,
)
_HASH_PREFIX_BYTES = len("0000/0000/0000/00000000-")
_ASCII_NAME_CHARS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._~=-")


def derived_uuid(seed: uuid.UUID, name: str) -> uuid.UUID:
    """Derive a deterministic UUID of the form of version 4 from a name, because other programs may check the form.

    Args:
        seed: The namespace of the name.
        name: The name.
    """
    return as_version_4(uuid.uuid5(seed, name))


def as_version_4(identifier: uuid.UUID) -> uuid.UUID:
    """Return a UUID with the version and variant of a random UUID and all other bits unchanged."""
    return uuid.UUID(int=identifier.int, version=4)


def optimize_path(original: str) -> str:
    """Return the optimized file path of an original path (L4, L5)."""
    low_bits = mmh3.hash(original.encode("utf-8"), seed=0, signed=False) & ((1 << _HASH_BITS) - 1)
    bits = f"{low_bits:0{_HASH_BITS}b}"
    return f"{bits[0:4]}/{bits[4:8]}/{bits[8:12]}/{bits[12:20]}-{original.replace('/', '-')}"


def is_misnamed(path: str) -> bool:
    """Whether a path has the form of an optimized path, but its hash prefix does not match its name.

    This program never creates such a path, so a pointer to it is damaged. Another program may have hashed a path with
    ``/`` in place of ``-``, so the result is only meaningful if the file does not exist.
    """
    match = _OPTIMIZED.fullmatch(path)
    return match is not None and optimize_path(match[1]) != path


def new_node_path(identifier: uuid.UUID | None = None) -> str:
    """Return a path for a non-root node, with a random uuid by default (L6)."""
    return optimize_path(f"node-{identifier or uuid.uuid4()}.arrow")


def new_namespace_path(namespace: str, file_path_max_size_bytes: int, identifier: uuid.UUID | None = None) -> str:
    """Return a path for a namespace definition (L7, L8).

    Args:
        namespace: The name of the namespace.
        file_path_max_size_bytes: Maximum size of the path. The name is truncated if necessary.
        identifier: The uuid in the path, random by default.
    """
    return _definition_path(f"namespace-{readable_name(namespace)}", file_path_max_size_bytes, identifier)


def new_table_path(
    namespace: str, table: str, file_path_max_size_bytes: int, identifier: uuid.UUID | None = None
) -> str:
    """Return a path for a table definition (L7, L8). The name of the table precedes that of its namespace.

    Args:
        namespace: The name of the namespace.
        table: The name of the table.
        file_path_max_size_bytes: Maximum size of the path. The names are truncated if necessary.
        identifier: The uuid in the path, random by default.
    """
    return _definition_path(_table_stem(namespace, table, readable_name), file_path_max_size_bytes, identifier)


def readable_name(name: str) -> str:
    """Return the form of a name that is used in paths, in which characters that are not safe in paths are replaced."""
    return "".join(char if char in _ASCII_NAME_CHARS else "-" if char == "/" else "_" for char in name)


def _readable_beyond_ascii(name: str) -> str:
    """Return the form of a name in older paths, which contain non-ASCII letters that some file systems change."""
    chars = zip(name, readable_name(name), strict=True)
    return "".join(
        char if ord(char) > 0x7F and unicodedata.category(char)[0] in "LN" else ascii_char for char, ascii_char in chars
    )


def _table_stem(namespace: str, table: str, readable: Callable[[str], str]) -> str:
    return f"table-{readable(table)}-{readable(namespace)}"


def is_table_definition_path(path: str, namespace: str, table: str, file_path_max_size_bytes: int) -> bool:
    """Whether :func:`new_table_path` can return a path for this table.

    This is also true for tables whose names differ only in non-ASCII characters, because the path does not contain
    these characters. Older paths, which contain non-ASCII letters, are also recognized.

    Args:
        path: The path of a table definition.
        namespace: The name of the namespace.
        table: The name of the table.
        file_path_max_size_bytes: Maximum size of paths in the lakehouse.
    """
    match = _TABLE_NAME.fullmatch(path)
    return match is not None and any(
        path == _definition_path(_table_stem(namespace, table, readable), file_path_max_size_bytes, uuid.UUID(match[1]))
        for readable in (readable_name, _readable_beyond_ascii)
    )


def named_kind(location: str) -> str | None:
    """Return the kind of a definition according to its file name: lakehouse, namespace or table.

    Returns None for names that another program chose. Readers must not rely on the result.
    """
    match = _DEFINITION_NAME.fullmatch(location)
    return match[1] or match[2] if match else None


def min_path_limit_bytes() -> int:
    """Return the smallest ``file_path_max_size_bytes`` with room for one character of a name (L8)."""
    longest_definition = len(optimize_path(f"namespace-n-{uuid.UUID(int=0)}.binpb"))
    return max(longest_definition, len(new_lakehouse_def_path()), len(new_node_path()), len(new_export_root_path()))


def _definition_path(stem: str, file_path_max_size_bytes: int, identifier: uuid.UUID | None = None) -> str:
    tail = f"-{identifier or uuid.uuid4()}.binpb"
    segment_prefix_bytes = len("00000000-")
    room = min(
        file_path_max_size_bytes - _HASH_PREFIX_BYTES - len(tail),
        MAX_SEGMENT_BYTES - segment_prefix_bytes - len(tail),
    )
    return optimize_path(_cut_utf8(stem, room) + tail)


def _cut_utf8(text: str, size_bytes: int) -> str:
    return text.encode("utf-8")[:size_bytes].decode("utf-8", errors="ignore")


@dataclass(frozen=True, slots=True)
class RootNaming:
    """The naming of a lakehouse's roots (L9): ``_``, the version's binary digits reversed, a suffix."""

    digits: int = 32
    suffix: str = ".arrow"

    def path(self, version: int) -> str:
        """Return the path of a version's root node. Raise VersionNotFoundError if no version can have this number."""
        if not 0 <= version <= MAX_VERSION:
            raise VersionNotFoundError(f"version {version} is outside 0..{MAX_VERSION}", version=version)
        return f"{ROOT_PREFIX}{f'{version:0{self.digits}b}'[::-1]}{self.suffix}"

    def parse(self, path: str) -> int | None:
        """Parse the version in a root node's path. Return None if the path does not have this naming.

        Raises VersionNotFoundError for a version above the maximum, which 64 digits can encode.
        """
        return parse_root_path(path) if root_naming(path) == self else None


#: The naming of new lakehouses, and all namings that can be read. A lakehouse never changes its naming.
ROOT_NAMING = RootNaming()
ROOT_NAMINGS = tuple(RootNaming(digits, suffix) for suffix in (".arrow", ".ipc") for digits in (32, 64))


def root_path(version: int) -> str:
    """Return the path of a root node in ``ROOT_NAMING``. Raise VersionNotFoundError if no version has this number."""
    return ROOT_NAMING.path(version)


def root_naming(path: str) -> RootNaming | None:
    """Return the naming of a root node's path, or None if the path is not that of a root node."""
    match = _ROOT_NAME.fullmatch(path)
    return RootNaming(len(match[1]), match[2]) if match else None


def parse_root_path(path: str) -> int | None:
    """Parse the version in a root node's path in any naming. Return None if the path is not that of a root node (L9).

    Raises VersionNotFoundError for a version above the maximum, which 64 digits can encode.
    """
    match = _ROOT_NAME.fullmatch(path)
    if match is None:
        return None
    version = int(match[1][::-1], 2)
    if version > MAX_VERSION:
        raise VersionNotFoundError(
            f"{path!r} is the root of version {version}; versions beyond {MAX_VERSION} are not supported",
            path=path,
            version=version,
        )
    return version


def version_of_root(location: str) -> int | None:
    """Return the version if the last segment of a location is the name of a root, None otherwise."""
    try:
        return parse_root_path(location.rpartition("/")[2])
    except VersionNotFoundError:
        return None


def is_unique_name(path: str) -> bool:
    """Whether the last segment of a path is a name that this program gives to only one file.

    Any other name, chosen by a caller or another program, does not identify the content of the file.
    """
    return _NAME_OF_ONE_FILE.fullmatch(path.rpartition("/")[2]) is not None


def parse_hint(data: bytes) -> int | None:
    """Return the version in a hint file, or None if it does not contain a valid version (L10)."""
    text = data[:64].strip()
    if not text.isdigit() or len(text) > len(str(MAX_VERSION)):
        return None
    version = int(text)
    return version if version <= MAX_VERSION else None


def new_lakehouse_def_path(identifier: uuid.UUID | None = None) -> str:
    """Return a path for a lakehouse definition, with a random uuid by default (L11)."""
    return f"{LAKEHOUSE_DEF_PREFIX}{identifier or uuid.uuid4()}.binpb"


def new_export_root_path() -> str:
    """Return a new path for the root node of an export within its lakehouse."""
    return f"_export_{uuid.uuid4()}.arrow"


def new_manifest_path() -> str:
    """Return a new path for the manifest of an export."""
    return manifest_path(str(uuid.uuid4()))


def manifest_path(export_id: str) -> str:
    """Return the path of the manifest of an export with this id."""
    return f"{OPERATIONS_PREFIX}export-{export_id}.json"


def new_plan_path() -> str:
    """Return a new path for the plan of an operation that deletes files."""
    return f"{OPERATIONS_PREFIX}plan-{uuid.uuid4()}.json"


def new_verified_path() -> str:
    """Return a new path for a record of verified files."""
    return f"{VERIFIED_PREFIX}{uuid.uuid4()}.arrow"


def is_verified_path(path: str) -> bool:
    """Whether a path is that of a record of verified files."""
    return _VERIFIED_NAME.fullmatch(path) is not None


def new_space_index_path(version: int) -> str:
    """Return a new path for an index of the space summary of a version."""
    return f"{SPACE_PREFIX}{version}-{uuid.uuid4()}.json"


def new_space_part_path() -> str:
    """Return a new path for a part of the space summary."""
    return f"{SPACE_PREFIX}{uuid.uuid4()}.arrow"


def is_space_path(path: str) -> bool:
    """Whether a path is that of a file of the space summary."""
    return _SPACE_PART_NAME.fullmatch(path) is not None or parse_space_index_path(path) is not None


def parse_space_index_path(path: str) -> int | None:
    """Return the version of an index of the space summary, None for another path."""
    match = _SPACE_INDEX_NAME.fullmatch(path)
    return int(match[1]) if match else None


def lease_path(number: int) -> str:
    """Return the path of the lease with this number."""
    return f"{LEASE_PREFIX}{number}.json"


def parse_lease_path(path: str) -> int | None:
    """Return the lease number in a path, None if the path is not that of a lease."""
    match = _LEASE_NAME.fullmatch(path)
    return int(match[1]) if match else None


def is_operation_path(path: str) -> bool:
    """Whether a path is that of an operation's file: a plan, manifest, export root, transaction, slot request etc."""
    return _OPERATION_NAME.fullmatch(path) is not None or parse_slot_request_path(path) is not None


def saved_transaction_path(transaction_id: str) -> str:
    """Return the path of the saved transaction with this id."""
    return f"{OPERATIONS_PREFIX}txn-{transaction_id}.binpb"


def new_slot_request_path(attempt_ms: int) -> str:
    """Return a new path for a writer's slot request. The path contains the duration of the writer's attempts."""
    return f"{SLOT_REQUEST_PREFIX}{attempt_ms}-{uuid.uuid4()}"


def parse_slot_request_path(path: str) -> int | None:
    """Return the duration of an attempt in milliseconds from the path of a slot request, None for any other path."""
    match = _SLOT_REQUEST_NAME.fullmatch(path)
    return int(match[1]) if match else None


def table_prefix(table_id: str) -> str:
    """Return the prefix of all files of a MANAGED table.

    Raises InvalidDefinitionError for an id that would allow paths to refer to files outside the prefix.
    """
    if not table_id or "/" in table_id or table_id in (".", ".."):
        raise InvalidDefinitionError(f"table id {table_id!r} cannot name a folder")
    return f"{TABLES_PREFIX}{table_id}/"


def owner_path(table_id: str) -> str:
    """Return the path of a table's owner file. Raise InvalidDefinitionError if the id cannot name a folder."""
    return f"{table_prefix(table_id)}{OWNER_NAME}"


def is_immutable_path(path: str) -> bool:
    """Whether a file with this path is immutable: a node or a definition with a uuid in its name (L6, L7, L11).

    Roots are not immutable, because sealing overwrites them. Files without a uuid in their names are not, because
    another engine could reuse such a name.
    """
    return _IMMUTABLE_NAME.fullmatch(path) is not None


def is_table_metadata_path(path: str) -> bool:
    """Whether a path is that of a table's metadata file, manifest list or manifest with a uuid in its name.

    The writer chose such a name at random, so the file is immutable.
    """
    return _TABLE_METADATA_NAME.fullmatch(path) is not None


def root_of(uri: str) -> str | None:
    """Return the root of a lakehouse from the URI of one of its nodes or definitions, None for other URIs."""
    match = _REMOTE_NAME.fullmatch(uri)
    return match[1] if match else None
