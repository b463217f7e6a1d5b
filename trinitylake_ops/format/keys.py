"""Keys of objects and system rows of node files, and text that is read in place (FORMAT.md, K1-K3)."""

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
from trinitylake_ops.format.file_names import version_named

_FEW_TEXTS = 64  # for more strings, the builder takes longer than pa.array
_MAX_UTF8_BYTES = 2**31 - 1  # offsets of utf8 are 32-bit numbers


class TextColumn(Sequence[str]):
    """An unchanging list of strings: an Arrow array of ``utf8`` without nulls.

    Taking one string makes only that string, and slices and iterations make theirs anew each time. Only the bytes of
    the file are kept. Equal to a list or column of the same strings.
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
        found: str | list[str] = (
            self.array[index].to_pylist() if isinstance(index, slice) else self.array[index].as_py()
        )
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.array.to_pylist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (list, TextColumn)) and len(self) == len(other) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


def text_array(texts: Sequence[str | None]) -> pa.StringArray:
    """Return strings as an Arrow array of ``utf8``, those of a column without a copy."""
    if isinstance(texts, TextColumn):
        return texts.array
    return built_texts(texts) if len(texts) <= _FEW_TEXTS else pa.array(texts, pa.utf8())


def built_texts(texts: Iterable[str | None]) -> pa.StringArray:
    """Return strings as an Arrow array of ``utf8``. ``pa.array`` would load pandas for any list, if installed."""
    builder = StringBuilder()
    builder.append_values(texts)
    return builder.finish()


def joined_texts(arrays: Sequence[pa.StringArray]) -> pa.StringArray:
    """Return arrays one after the other, as ``large_utf8`` if they hold more text than ``utf8`` can count."""
    if not arrays:
        return built_texts([])
    if any(is_large_text(array) for array in arrays) or _is_too_much(pa.chunked_array(arrays, pa.utf8())):
        return pa.concat_arrays([array.cast(pa.large_utf8()) for array in arrays])
    return pa.concat_arrays(arrays)


def _is_too_much(texts: pa.ChunkedArray) -> bool:
    # Whole buffers are a bound that takes far less time than the parts of them that are shown.
    return bool(texts.get_total_buffer_size() > _MAX_UTF8_BYTES and texts.nbytes > _MAX_UTF8_BYTES)


def is_large_text(array: pa.StringArray) -> bool:
    """Whether a column of text counts it by 64-bit numbers."""
    return bool(pa.types.is_large_string(array.type))


NAMESPACE_SCHEMA_ID = 1
TABLE_SCHEMA_ID = 2

_BASE64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_SCHEMA_ID_CHARS = 4
_PAD = " "
_FEW_KEYS = 32  # fewer keys are decoded faster one by one than together
_DECODED_TOGETHER = 8192  # the text of so many keys fits a processor's cache


def encode_schema_id(schema_id: int) -> str:
    """Return the four base64 characters of a schema id, most significant digit first (K3)."""
    if not 0 <= schema_id < 64**_SCHEMA_ID_CHARS:
        raise ValueError(f"schema id {schema_id} does not fit {_SCHEMA_ID_CHARS} base64 digits")
    digits = ""
    while True:
        schema_id, digit = divmod(schema_id, 64)
        digits = _BASE64[digit] + digits
        if schema_id == 0:
            return digits.ljust(_SCHEMA_ID_CHARS, "=")


def has_schema_id(key: str) -> bool:
    """Whether a key begins like that of an object, with a schema id of fewer than four digits (K3)."""
    digits = key[:_SCHEMA_ID_CHARS].rstrip("=")
    return len(key) >= _SCHEMA_ID_CHARS > len(digits) > 0 and all(digit in _BASE64 for digit in digits)


_ASCII_NAME = re.compile("^[!-~]+$")
_ASCII_IN_NAMES = bytes(range(ord("!"), ord("~") + 1))
_DOT_SEGMENTS = (".", "..")
NAMESPACE_KEY_PREFIX = encode_schema_id(NAMESPACE_SCHEMA_ID)
TABLE_KEY_PREFIX = encode_schema_id(TABLE_SCHEMA_ID)


def validate_name(name: str, max_size_bytes: int, kind: str) -> str:
    """Return an object name unchanged, or raise InvalidNameError (K2). ``kind`` is for the message."""
    if not name:
        raise InvalidNameError(f"{kind} name is empty")
    try:
        size_bytes = len(name.encode("utf-8"))
    except UnicodeEncodeError:
        raise InvalidNameError(f"{kind} name {name!r} is not valid Unicode") from None
    if size_bytes > max_size_bytes:
        shown = name if len(name) <= 40 else name[:37] + "..."
        raise InvalidNameError(
            f"{kind} name {shown!r} has {size_bytes} bytes of UTF-8, more than this lakehouse's {max_size_bytes}"
        )
    for char in name:
        if char <= _PAD or char == "\x7f":
            what = "a space" if char == _PAD else f"the control character U+{ord(char):04X}"
            raise InvalidNameError(f"{kind} name {name!r} contains {what}; names hold neither spaces nor controls")
    return name


def check_new_name(name: str, kind: str) -> None:
    """Raise InvalidNameError for a name that the format allows, but under which nothing new is created.

    Clients and proxies normalize URLs, and remove the path segments ``.`` and ``..`` even if they are percent-encoded
    (RFC 3986, 5.2.4; WHATWG URL). A request for such an object would reach another one. Existing objects of that name
    are read, dropped and renamed.

    Args:
        name: The name of a new namespace, table or view.
        kind: What it is, for the message.
    """
    if name in _DOT_SEGMENTS:
        raise InvalidNameError(
            f"{kind} name {name!r} cannot be created: clients remove it from the path of a URL; choose another name"
        )


@dataclass(frozen=True, slots=True, order=True)
class ObjectName:
    """The name in an object key: a namespace (``table`` is None) or a table in it."""

    namespace: str
    table: str | None = None

    def __str__(self) -> str:
        return self.namespace if self.table is None else f"{self.namespace}.{self.table}"


@dataclass(frozen=True, slots=True)
class KeyCodec:
    """Keys of one lakehouse: sizes in bytes of UTF-8 are fixed when it is created (K1, K2)."""

    namespace_name_max_size_bytes: int
    table_name_max_size_bytes: int

    def namespace_key(self, namespace: str) -> str:
        """Return the key of a namespace. Raises InvalidNameError."""
        return NAMESPACE_KEY_PREFIX + self._encoded_namespace(namespace)

    def table_key(self, namespace: str, table: str) -> str:
        """Return the key of a table. Raises InvalidNameError."""
        validate_name(table, self.table_name_max_size_bytes, "table")
        return self.tables_prefix(namespace) + _padded(table, self.table_name_max_size_bytes)

    def tables_prefix(self, namespace: str) -> str:
        """Return the prefix shared by the keys of all tables of a namespace. Raises InvalidNameError."""
        return TABLE_KEY_PREFIX + self._encoded_namespace(namespace)

    def _encoded_namespace(self, namespace: str) -> str:
        validate_name(namespace, self.namespace_name_max_size_bytes, "namespace")
        return _padded(namespace, self.namespace_name_max_size_bytes)

    def decode(self, key: str, path: str | None = None) -> ObjectName | None:
        """Return the name in a key, or None for an object type of unknown schema id, which is carried untouched.

        Raises CorruptFileError, naming ``path``, for a namespace or table key that no name encodes to.
        """
        if not key.startswith((NAMESPACE_KEY_PREFIX, TABLE_KEY_PREFIX)):
            return None
        return self._decode_ascii(key) or self._decode_any(key, path)

    def table_names(self, keys: pa.ChunkedArray) -> pa.StringArray:
        """Return the names of tables from their keys, both columns of text. All are tables of one namespace.

        Nearly all names are ASCII. These are decoded together, far faster than each for itself. Raises CorruptFileError
        for a key that no name encodes to.
        """
        parts = [keys.slice(start, _DECODED_TOGETHER) for start in range(0, len(keys), _DECODED_TOGETHER)]
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
        """Return the name in a sound key of ASCII, as nearly all are, or None for other keys, sound or not."""
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
                name, again = ObjectName(namespace), self.namespace_key(namespace)
            else:
                table = encoded[self.namespace_name_max_size_bytes :].decode("utf-8").rstrip(_PAD)
                name, again = ObjectName(namespace, table), self.table_key(namespace, table)
        except (UnicodeDecodeError, InvalidNameError) as error:
            raise CorruptFileError(f"key {key!r} encodes no valid name: {error}", path=path) from error
        if again != key:
            raise CorruptFileError(f"key {key!r} is not padded as the lakehouse's name sizes demand", path=path)
        return name


def _are_ascii_names(names: pa.StringArray) -> bool:
    """Whether each text of an array that Arrow made anew is a name of ASCII. All their bytes are looked at together."""
    shortest_bytes = pc.min(pc.binary_length(names)).as_py()
    return shortest_bytes > 0 and not names.buffers()[2].to_pybytes().translate(None, _ASCII_IN_NAMES)


def _padded(name: str, size_bytes: int) -> str:
    return name + _PAD * (size_bytes - len(name.encode("utf-8")))


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
