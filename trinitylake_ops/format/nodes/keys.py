"""Names and keys of objects (FORMAT.md, K1-K3)."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from trinitylake_ops.errors import CorruptFileError, InvalidNameError
from trinitylake_ops.format.nodes.text_column import is_large_text, joined_texts, text_array

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
