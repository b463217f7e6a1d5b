"""Object keys and system rows of node files, and text columns without copies (FORMAT.md, K1-K3)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.lib import StringBuilder

from trinitylake_ops.errors import CorruptFileError, InvalidInputError, InvalidNameError
from trinitylake_ops.format.file_names import version_of_root

_FEW_TEXTS = 64  # for more strings, pa.array is faster than the builder
MAX_UTF8_BYTES = 2**31 - 1  # offsets of utf8 are 32-bit numbers


class TextColumn(Sequence[str]):
    """An immutable sequence of strings, backed by an Arrow array of ``utf8`` without nulls.

    Python strings are created on each access and not cached, so only the bytes of the file stay in memory. A column is
    equal to a list or another column that contains the same strings.
    """

    __slots__ = ("array",)

    def __init__(self, array: pa.StringArray):
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        strings: str | list[str] = (
            self.array[index].to_pylist() if isinstance(index, slice) else self.array[index].as_py()
        )
        return strings

    def __iter__(self) -> Iterator[str]:
        return iter(self.array.to_pylist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (list, TextColumn)) and len(self) == len(other) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


def text_array(texts: Sequence[str | None]) -> pa.StringArray:
    """Convert strings to an Arrow array of ``utf8``, without a copy for a TextColumn."""
    if isinstance(texts, TextColumn):
        return texts.array
    return built_texts(texts) if len(texts) <= _FEW_TEXTS else pa.array(texts, pa.utf8())


def built_texts(texts: Iterable[str | None]) -> pa.StringArray:
    """Build an Arrow array of ``utf8`` from strings, without ``pa.array``, which loads pandas if it is installed."""
    builder = StringBuilder()
    builder.append_values(texts)
    return builder.finish()


def joined_texts(arrays: Sequence[pa.StringArray]) -> pa.StringArray:
    """Concatenate arrays, as ``large_utf8`` if their text exceeds the 32-bit offsets of ``utf8``."""
    if not arrays:
        return built_texts([])
    if any(is_large_text(array) for array in arrays) or _is_too_much(pa.chunked_array(arrays, pa.utf8())):
        return pa.concat_arrays([array.cast(pa.large_utf8()) for array in arrays])
    return pa.concat_arrays(arrays)


def _is_too_much(texts: pa.ChunkedArray) -> bool:
    # The total buffer size is an upper bound that is much faster to compute than the size of the slices.
    return bool(texts.get_total_buffer_size() > MAX_UTF8_BYTES and texts.nbytes > MAX_UTF8_BYTES)


def is_large_text(array: pa.StringArray) -> bool:
    """Whether a text column has 64-bit offsets."""
    return bool(pa.types.is_large_string(array.type))


NAMESPACE_SCHEMA_ID = 1
TABLE_SCHEMA_ID = 2

_BASE64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_SCHEMA_ID_CHARS = 4
_PAD = " "
_FEW_KEYS = 32  # up to this number of keys, decoding one by one is faster than vectorized decoding
KEYS_PER_BATCH = 8192  # the text of this many keys fits into the CPU cache


def encode_schema_id(schema_id: int) -> str:
    """Return the four base64 characters of a schema id, most significant digit first (K3)."""
    if not 0 <= schema_id < 64**_SCHEMA_ID_CHARS:
        raise ValueError(f"schema id {schema_id} does not fit into {_SCHEMA_ID_CHARS} base64 digits")
    digits = ""
    while True:
        schema_id, digit = divmod(schema_id, 64)
        digits = _BASE64[digit] + digits
        if schema_id == 0:
            return digits.ljust(_SCHEMA_ID_CHARS, "=")


def has_schema_id(key: str) -> bool:
    """Whether a key starts with a schema id of fewer than four digits, as object keys do (K3)."""
    digits = key[:_SCHEMA_ID_CHARS].rstrip("=")
    return len(key) >= _SCHEMA_ID_CHARS > len(digits) > 0 and all(digit in _BASE64 for digit in digits)


_ASCII_NAME = re.compile("^[!-~]+$")
_ASCII_IN_NAMES = bytes(range(ord("!"), ord("~") + 1))
_DOT_SEGMENTS = (".", "..")
NAMESPACE_KEY_PREFIX = encode_schema_id(NAMESPACE_SCHEMA_ID)
TABLE_KEY_PREFIX = encode_schema_id(TABLE_SCHEMA_ID)


def validate_name(name: str, max_size_bytes: int, kind: str) -> str:
    """Check an object name (K2) and return it unchanged.

    Args:
        name: The name.
        max_size_bytes: Maximum size of the name in UTF-8.
        kind: The kind of the object, for the error message.

    Raises:
        InvalidNameError: The name is invalid.
    """
    if not name:
        raise InvalidNameError(f"{kind} name is empty")
    try:
        size_bytes = len(name.encode("utf-8"))
    except UnicodeEncodeError:
        raise InvalidNameError(f"{kind} name {name!r} is not valid Unicode") from None
    if size_bytes > max_size_bytes:
        shown = name if len(name) <= 40 else name[:37] + "..."
        raise InvalidNameError(
            f"{kind} name {shown!r} is too long: it has {size_bytes} bytes in UTF-8; the limit of this lakehouse is"
            f" {max_size_bytes}"
        )
    for char in name:
        if char <= _PAD or char == "\x7f":
            what = "a space" if char == _PAD else f"the control character U+{ord(char):04X}"
            raise InvalidNameError(
                f"{kind} name {name!r} contains {what}; spaces and control characters are not allowed in names"
            )
    return name


def check_new_name(name: str, kind: str) -> None:
    """Check a name for a new object. Some names that the format allows are rejected.

    Clients and proxies normalize URLs and remove the path segments ``.`` and ``..``, even if they are percent-encoded
    (RFC 3986, 5.2.4; WHATWG URL). A request for such an object would reach another object. Existing objects with such a
    name can still be read, dropped and renamed.

    Args:
        name: The name of a new namespace, table or view.
        kind: The kind of the object, for the error message.

    Raises:
        InvalidNameError: The name must not be used for a new object.
    """
    if name in _DOT_SEGMENTS:
        raise InvalidNameError(
            f"{kind} name {name!r} is not allowed: clients remove this segment from URLs; choose another name"
        )


@dataclass(frozen=True, slots=True, order=True)
class ObjectName:
    """The name of a namespace or table."""

    namespace: str
    #: The name of the table; None for a namespace.
    table: str | None = None

    def __str__(self) -> str:
        return self.namespace if self.table is None else f"{self.namespace}.{self.table}"


@dataclass(frozen=True, slots=True)
class KeyCodec:
    """Encodes and decodes the object keys of one lakehouse (K1, K2)."""

    #: Maximum size of a namespace name in UTF-8, fixed when the lakehouse is created.
    namespace_name_max_size_bytes: int
    #: Maximum size of a table name in UTF-8, fixed when the lakehouse is created.
    table_name_max_size_bytes: int

    def namespace_key(self, namespace: str) -> str:
        """Return the key of a namespace. Raise InvalidNameError for an invalid name."""
        return NAMESPACE_KEY_PREFIX + self._encoded_namespace(namespace)

    def table_key(self, namespace: str, table: str) -> str:
        """Return the key of a table. Raise InvalidNameError for an invalid name."""
        validate_name(table, self.table_name_max_size_bytes, "table")
        return self.tables_prefix(namespace) + _pad(table, self.table_name_max_size_bytes)

    def tables_prefix(self, namespace: str) -> str:
        """Return the prefix of the keys of all tables in a namespace. Raise InvalidNameError for an invalid name."""
        return TABLE_KEY_PREFIX + self._encoded_namespace(namespace)

    def _encoded_namespace(self, namespace: str) -> str:
        validate_name(namespace, self.namespace_name_max_size_bytes, "namespace")
        return _pad(namespace, self.namespace_name_max_size_bytes)

    def decode(self, key: str, path: str | None = None) -> ObjectName | None:
        """Decode the name in a key.

        Args:
            key: The key.
            path: The path of the file that contains the key, for the error.

        Returns:
            The name, or None for a key with an unknown schema id. Such objects are preserved unchanged.

        Raises:
            CorruptFileError: The key has the schema id of a namespace or table, but is not the encoding of a name.
        """
        if not key.startswith((NAMESPACE_KEY_PREFIX, TABLE_KEY_PREFIX)):
            return None
        return self._decode_ascii(key) or self._decode_any(key, path)

    def table_names(self, keys: pa.ChunkedArray) -> pa.StringArray:
        """Decode the table names in a column of keys, all of the same namespace.

        ASCII names, which nearly all names are, are decoded in a vectorized way. Raises CorruptFileError for a key that
        is not the encoding of a name.
        """
        parts = [keys.slice(start, KEYS_PER_BATCH) for start in range(0, len(keys), KEYS_PER_BATCH)]
        return joined_texts([self._names_in(joined_texts(part.chunks)) for part in parts])

    def _names_in(self, keys: pa.StringArray) -> pa.StringArray:
        first_byte = _SCHEMA_ID_CHARS + self.namespace_name_max_size_bytes
        end_byte = first_byte + self.table_name_max_size_bytes
        if len(keys) > _FEW_KEYS and pc.all(pc.equal(pc.binary_length(keys), end_byte)).as_py():
            binary = pa.large_binary() if is_large_text(keys) else pa.binary()
            padded = pc.binary_slice(keys.cast(binary), first_byte, end_byte).cast(keys.type)
            names = pc.ascii_rtrim(padded, _PAD)
            if _are_ascii_names(names):
                return names
        decoded = [self.decode(key) for key in keys.to_pylist()]
        return text_array([name.table for name in decoded if name is not None and name.table is not None])

    def _decode_ascii(self, key: str) -> ObjectName | None:
        """Decode a valid ASCII key, as nearly all keys are. Return None for all other keys, valid or not."""
        table_start = _SCHEMA_ID_CHARS + self.namespace_name_max_size_bytes
        is_table = key.startswith(TABLE_KEY_PREFIX)
        if not key.isascii() or len(key) != table_start + is_table * self.table_name_max_size_bytes:
            return None
        namespace = key[_SCHEMA_ID_CHARS:table_start].rstrip(_PAD)
        table = key[table_start:].rstrip(_PAD) if is_table else None
        if _ASCII_NAME.fullmatch(namespace) and (table is None or _ASCII_NAME.fullmatch(table)):
            return ObjectName(namespace, table)
        return None

    def _decode_any(self, key: str, path: str | None) -> ObjectName:
        encoded = key[_SCHEMA_ID_CHARS:].encode("utf-8")
        try:
            namespace = encoded[: self.namespace_name_max_size_bytes].decode("utf-8").rstrip(_PAD)
            if key.startswith(NAMESPACE_KEY_PREFIX):
                name, expected_key = ObjectName(namespace), self.namespace_key(namespace)
            else:
                table = encoded[self.namespace_name_max_size_bytes :].decode("utf-8").rstrip(_PAD)
                name, expected_key = ObjectName(namespace, table), self.table_key(namespace, table)
        except (UnicodeDecodeError, InvalidNameError) as error:
            raise CorruptFileError(f"key {key!r} is not the encoding of a valid name: {error}", path=path) from error
        if expected_key != key:
            raise CorruptFileError(f"key {key!r} is not padded to the name sizes of the lakehouse", path=path)
        return name


def _are_ascii_names(names: pa.StringArray) -> bool:
    """Whether all strings of a newly created array are ASCII names. The bytes of all strings are checked at once."""
    min_bytes = pc.min(pc.binary_length(names)).as_py()
    return min_bytes > 0 and not names.buffers()[2].to_pybytes().translate(None, _ASCII_IN_NAMES)


def _pad(name: str, size_bytes: int) -> str:
    return name + _PAD * (size_bytes - len(name.encode("utf-8")))


CREATED_AT_MILLIS = "created_at_millis"
N_KEYS = "n_keys"
LAKEHOUSE_DEF = "lakehouse_def"
PREVIOUS_ROOT = "previous_root"
ROLLBACK_FROM_ROOT = "rollback_from_root"
COMMIT_ID = "commit_id"
COMMIT_INFO = "commit_info"
SEALED_AT_MILLIS = "sealed_at_millis"
#: The newest version, up to the version of the root, at which the clock was reset.
CLOCK_RESET = "clock_reset"

#: The entry of ``commit_info`` that contains the version for which the info was written.
STAMPED_VERSION = "version"

MAX_COMMIT_INFO_BYTES = 4096

MAX_TIME_MS = 253_402_300_799_999  # the end of the year 9999, in milliseconds since the epoch

_VERSION_DIGITS = 10

#: The name of ``LAKEHOUSE_DEF`` in the older layout.
OLD_LAKEHOUSE_DEF = "lakehouse"

#: The keys of system rows that this program knows. Unknown system rows are preserved and ignored, if they can be
#: distinguished from objects.
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
    """Return the system rows of a root, but without a stamp (commit id and info) that was written for another version.

    Programs that know only the published format may copy the stamp of an earlier version into a new root. Early stamps
    do not contain their version. They are accepted here, because one file alone does not show whether they were copied.

    Args:
        system: The system rows of the root.
        path: The path of the root.
    """
    if COMMIT_ID not in system and COMMIT_INFO not in system:
        return system
    version = version_of_root(path)
    if version is None:  # an export root, which may be a copy of another program's root: derive its version
        before = version_of_root(system.get(PREVIOUS_ROOT, ""))
        version = 0 if before is None else before + 1
    stamped_version = decode_commit_info(system).get(STAMPED_VERSION, version)
    return system if type(stamped_version) is int and stamped_version == version else _without_stamp(system)


def without_carried_stamp(system: dict[str, str], before: Mapping[str, str]) -> dict[str, str]:
    """Return the system rows of a root, but without a stamp that the previous root also has.

    This detects copied stamps that do not contain their version.

    Args:
        system: The system rows of the root.
        before: The system rows of the previous root.
    """
    commit_id = system.get(COMMIT_ID)
    return _without_stamp(system) if commit_id is not None and commit_id == before.get(COMMIT_ID) else system


def clock_reset(system: Mapping[str, str], version: int) -> int | None:
    """Return the newest version at which the clock was reset, according to the root of a version.

    Args:
        system: The system rows of the root.
        version: The version of the root.

    Returns:
        A version up to ``version``, or None if the row is missing or its value is not such a version.
    """
    text = system.get(CLOCK_RESET, "")
    reset = int(text) if text.isascii() and text.isdecimal() and len(text) <= _VERSION_DIGITS else 0
    return reset if 1 <= reset <= version else None


def is_clock_reset(system: Mapping[str, str], version: int) -> bool:
    """Whether the clock was reset at a version, according to its root, which must have been written by this program.

    Args:
        system: The system rows of the root.
        version: The version of the root.
    """
    return COMMIT_ID in system and clock_reset(system, version) == version


def _without_stamp(system: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in system.items() if name not in (COMMIT_ID, COMMIT_INFO)}


_COMMIT_INFO_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def encode_commit_info(info: dict[str, Any]) -> str:
    """Encode ``commit_info`` as a JSON object. Raise InvalidInputError if it exceeds 4 KiB or is not valid JSON."""
    try:
        text = _COMMIT_INFO_JSON.encode(info)
        size_bytes = len(text.encode("utf-8"))
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"message and properties of a commit must be strings: {error}") from error
    if size_bytes > MAX_COMMIT_INFO_BYTES:
        raise InvalidInputError(
            f"message and properties of this commit are too large: they have {size_bytes} bytes, more than the"
            f" limit of {MAX_COMMIT_INFO_BYTES}; shorten them"
        )
    return text


def decode_commit_info(system: Mapping[str, str]) -> dict[str, Any]:
    """Decode the ``commit_info`` in a root's system rows, an empty dict if it is missing or not a JSON object."""
    text = system.get(COMMIT_INFO, "{}")
    try:
        info = json.loads(text, parse_constant=_refused_constant)
        if "\\u" in text:
            json.dumps(info, ensure_ascii=False).encode()  # reject escapes of unpaired surrogates
    except (ValueError, RecursionError):
        return {}
    return info if isinstance(info, dict) else {}


def _refused_constant(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")
