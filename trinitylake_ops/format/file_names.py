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
ORPHAN_BARRIER_PATH = f"{OPERATIONS_PREFIX}orphan-barrier.json"
LAKEHOUSE_DEF_PREFIX = "_lakehouse_def_"
TABLES_PREFIX = "tables/"
#: The file in a table's folder that says which lakehouse owns it.
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
_DISTANT_NAME = re.compile(rf"([a-z0-9+.-]+://.*?/)(?:{_IMMUTABLE_NAME.pattern})", re.DOTALL)
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
_OPERATION_NAME = re.compile(
    rf"{OPERATIONS_PREFIX}(?:(?:plan|export)-{_UUID}\.json|txn-{_UUID}\.binpb|verified-{_UUID}\.arrow|tmp/.+)"
    rf"|_export_{_UUID}\.arrow",
    re.DOTALL,
)
#: A root's name, any name with a uuid, and names of operations' files and folders that have one place each.
_NAME_OF_ONE_FILE = re.compile(
    rf"{_ROOT_NAME.pattern}|.*{_UUID}.*|(?:lease-[1-9][0-9]*|orphan-barrier|_owner)\.json", re.DOTALL | re.IGNORECASE
)
_HASH_PREFIX_BYTES = len("0000/0000/0000/00000000-")
_ASCII_NAME_CHARS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._~=-")


def derived_uuid(seed: uuid.UUID, name: str) -> uuid.UUID:
    """Return the uuid of a name, the same each time. In form it is one of version 4, as in all names.

    Other programs may check the form of a name, and need not know how it was made.
    """
    return as_version_4(uuid.uuid5(seed, name))


def as_version_4(identifier: uuid.UUID) -> uuid.UUID:
    """Return a uuid with the version and variant of a random one, its other bits unchanged."""
    return uuid.UUID(int=identifier.int, version=4)


def optimize_path(original: str) -> str:
    """Return the optimized file path of an original path (L4, L5)."""
    low_bits = mmh3.hash(original.encode("utf-8"), seed=0, signed=False) & ((1 << _HASH_BITS) - 1)
    bits = f"{low_bits:0{_HASH_BITS}b}"
    return f"{bits[0:4]}/{bits[4:8]}/{bits[8:12]}/{bits[12:20]}-{original.replace('/', '-')}"


def is_misnamed(path: str) -> bool:
    """Whether a path has the form of an optimized path, but another prefix than its name gives.

    No file of ours has such a path, so a pointer to it is damaged. Other programs may have hashed a path with ``/`` in
    place of ``-``. So this says something only if there is no file.
    """
    match = _OPTIMIZED.fullmatch(path)
    return match is not None and optimize_path(match[1]) != path


def new_node_path(identifier: uuid.UUID | None = None) -> str:
    """Return a fresh path for a non-root node, or the one of a uuid (L6)."""
    return optimize_path(f"node-{identifier or uuid.uuid4()}.arrow")


def new_namespace_path(namespace: str, file_path_max_size_bytes: int, identifier: uuid.UUID | None = None) -> str:
    """Return a fresh path for a namespace definition, or the one of a uuid (L7, L8)."""
    return _definition_path(f"namespace-{_readable(namespace)}", file_path_max_size_bytes, identifier)


def new_table_path(
    namespace: str, table: str, file_path_max_size_bytes: int, identifier: uuid.UUID | None = None
) -> str:
    """Return a fresh path for a table definition, or the one of a uuid (L7, L8).

    The table comes before its namespace.
    """
    return _definition_path(_table_stem(namespace, table, _readable), file_path_max_size_bytes, identifier)


def _readable(name: str) -> str:
    return "".join(char if char in _ASCII_NAME_CHARS else "-" if char == "/" else "_" for char in name)


def _readable_beyond_ascii(name: str) -> str:
    """Return the former readable form of names. Later some file systems were found to change letters beyond ASCII."""
    chars = zip(name, _readable(name), strict=True)
    return "".join(
        char if ord(char) > 0x7F and unicodedata.category(char)[0] in "LN" else shown for char, shown in chars
    )


def _table_stem(namespace: str, table: str, readable: Callable[[str], str]) -> str:
    return f"table-{readable(table)}-{readable(namespace)}"


def is_table_definition_path(path: str, namespace: str, table: str, file_path_max_size_bytes: int) -> bool:
    """Whether :func:`new_table_path` gives a path for this table, or for a table whose name reads alike.

    A name that reads alike has other letters beyond ASCII. The path itself may have such letters, as we gave them once.
    """
    match = _TABLE_NAME.fullmatch(path)
    return match is not None and any(
        path == _definition_path(_table_stem(namespace, table, readable), file_path_max_size_bytes, uuid.UUID(match[1]))
        for readable in (_readable, _readable_beyond_ascii)
    )


def named_kind(location: str) -> str | None:
    """Return the kind of definition that a location has by its name, as we give it: lakehouse, namespace or table.

    Returns None for a name of another program. No reader may rely on the name.
    """
    match = _DEFINITION_NAME.fullmatch(location)
    return match[1] or match[2] if match else None


def shortest_path_limit_bytes() -> int:
    """Return the smallest ``file_path_max_size_bytes`` that leaves one character of name (L8)."""
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
        """Return the path of a root node. Raises VersionNotFoundError for numbers that no version can have."""
        if not 0 <= version <= MAX_VERSION:
            raise VersionNotFoundError(f"version {version} is outside 0..{MAX_VERSION}", version=version)
        return f"{ROOT_PREFIX}{f'{version:0{self.digits}b}'[::-1]}{self.suffix}"

    def parse(self, path: str) -> int | None:
        """Return the version of a root node path, or None when the path is none of this naming.

        Raises VersionNotFoundError for a version beyond the largest one: 64 digits can name such a version.
        """
        return parse_root_path(path) if root_naming(path) == self else None


#: Our own naming, and all namings that are read. A lakehouse keeps the naming that it has.
ROOT_NAMING = RootNaming()
ROOT_NAMINGS = tuple(RootNaming(digits, suffix) for suffix in (".arrow", ".ipc") for digits in (32, 64))


def root_path(version: int) -> str:
    """Return the path of a root node in our own naming. Raises VersionNotFoundError as :class:`RootNaming` does."""
    return ROOT_NAMING.path(version)


def root_naming(path: str) -> RootNaming | None:
    """Return the naming of a root node's path, or None when the path is no root node's."""
    match = _ROOT_NAME.fullmatch(path)
    return RootNaming(len(match[1]), match[2]) if match else None


def parse_root_path(path: str) -> int | None:
    """Return the version of a root node path in any naming, or None when the path is not one (L9).

    Raises VersionNotFoundError for a version beyond the largest one: 64 digits can name such a version.
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


def version_named(location: str) -> int | None:
    """Return the version whose root's name is the last part of a location, None for another name."""
    try:
        return parse_root_path(location.rpartition("/")[2])
    except VersionNotFoundError:
        return None


def is_unique_name(path: str) -> bool:
    """Whether the last part of a path is a name that we give to one file alone. A file of this name is that file.

    Any other name, by a caller or another program, says nothing of the file's content.
    """
    return _NAME_OF_ONE_FILE.fullmatch(path.rpartition("/")[2]) is not None


def parse_hint(data: bytes) -> int | None:
    """Return the version in a hint file, or None when it holds no usable number (L10)."""
    text = data[:64].strip()
    if not text.isdigit() or len(text) > len(str(MAX_VERSION)):
        return None
    version = int(text)
    return version if version <= MAX_VERSION else None


def new_lakehouse_def_path(identifier: uuid.UUID | None = None) -> str:
    """Return a fresh path for a lakehouse definition, or the one of a uuid (L11)."""
    return f"{LAKEHOUSE_DEF_PREFIX}{identifier or uuid.uuid4()}.binpb"


def new_export_root_path() -> str:
    """Return a fresh path for the root node of an export within its own lakehouse."""
    return f"_export_{uuid.uuid4()}.arrow"


def new_manifest_path() -> str:
    """Return a fresh path for the manifest of an export."""
    return manifest_path(str(uuid.uuid4()))


def manifest_path(export_id: str) -> str:
    """Return the path of the manifest of an export with this id."""
    return f"{OPERATIONS_PREFIX}export-{export_id}.json"


def new_plan_path() -> str:
    """Return a fresh path for the plan of an operation that deletes."""
    return f"{OPERATIONS_PREFIX}plan-{uuid.uuid4()}.json"


def new_verified_path() -> str:
    """Return a fresh path for a record of verified files."""
    return f"{VERIFIED_PREFIX}{uuid.uuid4()}.arrow"


def is_verified_path(path: str) -> bool:
    """Whether a path is that of a record of verified files."""
    return _VERIFIED_NAME.fullmatch(path) is not None


def lease_path(number: int) -> str:
    """Return the path of the lease of this number."""
    return f"{LEASE_PREFIX}{number}.json"


def parse_lease_path(path: str) -> int | None:
    """Return the number of a lease, None for another path."""
    match = _LEASE_NAME.fullmatch(path)
    return int(match[1]) if match else None


def is_operation_path(path: str) -> bool:
    """Whether our operations give such a path: to plans, manifests, exports' roots, transactions, requests, ..."""
    return _OPERATION_NAME.fullmatch(path) is not None or parse_slot_request_path(path) is not None


def saved_transaction_path(transaction_id: str) -> str:
    """Return the path of the saved transaction of this id."""
    return f"{OPERATIONS_PREFIX}txn-{transaction_id}.binpb"


def new_slot_request_path(attempt_ms: int) -> str:
    """Return a fresh path for a writer's request for a turn. It names how long the writer's attempts take."""
    return f"{SLOT_REQUEST_PREFIX}{attempt_ms}-{uuid.uuid4()}"


def parse_slot_request_path(path: str) -> int | None:
    """Return the milliseconds that an attempt takes, from the path of a writer's request. None for another path."""
    match = _SLOT_REQUEST_NAME.fullmatch(path)
    return int(match[1]) if match else None


def table_prefix(table_id: str) -> str:
    """Return the prefix under which all files of a MANAGED table lie.

    Raises InvalidDefinitionError for an id that could reach beyond its own prefix.
    """
    if not table_id or "/" in table_id or table_id in (".", ".."):
        raise InvalidDefinitionError(f"table id {table_id!r} cannot name a folder")
    return f"{TABLES_PREFIX}{table_id}/"


def owner_path(table_id: str) -> str:
    """Return the path of a table's owner file. Raises InvalidDefinitionError for an id that names no folder."""
    return f"{table_prefix(table_id)}{OWNER_NAME}"


def is_immutable_path(path: str) -> bool:
    """Whether a file of this name never changes: a node or a definition, with a uuid in its name (L6, L7, L11).

    Roots are not among them, since sealing overwrites them. Names without a uuid are not either, as another engine
    could give one a second time.
    """
    return _IMMUTABLE_NAME.fullmatch(path) is not None


def is_table_metadata_path(path: str) -> bool:
    """Whether a name is that of a metadata file, manifest list or manifest below a table's place, with a uuid in it.

    Whoever wrote such a file chose its name at random, so that it never changes.
    """
    return _TABLE_METADATA_NAME.fullmatch(path) is not None


def root_of(uri: str) -> str | None:
    """Return the root URI of a lakehouse from the URI of a node or definition in it, None for another name."""
    match = _DISTANT_NAME.fullmatch(uri)
    return match[1] if match else None
