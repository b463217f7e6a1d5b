"""The header of an Avro object container file: its metadata, and the marker between its blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_MAGIC = b"Obj\x01"
_SYNC_BYTES = 16
_MOST_VARINT_BYTES = 10


@dataclass(frozen=True, slots=True)
class AvroHeader:
    """What a file begins with; ``size_bytes`` is where its first block begins."""

    metadata: Mapping[bytes, bytes]
    sync: bytes
    size_bytes: int

    @classmethod
    def of(cls, data: bytes) -> AvroHeader | None:
        """Return the header of a file, None where it has none that can be read."""
        if not data.startswith(_MAGIC):
            return None
        reader = _Reader(data, len(_MAGIC))
        metadata: dict[bytes, bytes] = {}
        try:
            while count := reader.number():
                if count < 0:  # the size of the block follows
                    count = -count
                    reader.number()
                for _ in range(count):
                    key = reader.take(reader.number())
                    metadata[key] = reader.take(reader.number())
            sync = reader.take(_SYNC_BYTES)
        except EOFError:
            return None
        return cls(metadata, sync, reader.at)

    def with_metadata(self, more: Mapping[bytes, bytes]) -> bytes:
        """Return the bytes of this header with more metadata, in front and in place of what has these keys."""
        kept = {key: value for key, value in self.metadata.items() if key not in more}
        pairs = {**more, **kept}
        body = b"".join(_counted(key) + _counted(value) for key, value in pairs.items())
        return b"".join((_MAGIC, _number(len(pairs)), body, _number(0), self.sync))


@dataclass
class _Reader:
    data: bytes
    at: int

    def number(self) -> int:
        """Read a zigzag number. Raises EOFError for what is none."""
        value = 0
        for n in range(_MOST_VARINT_BYTES):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << (7 * n)
            if byte < 0x80:
                return (value >> 1) ^ -(value & 1)
        raise EOFError

    def take(self, length: int) -> bytes:
        """Read so many bytes. Raises EOFError where there are fewer."""
        if not 0 <= length <= len(self.data) - self.at:
            raise EOFError
        self.at += length
        return self.data[self.at - length : self.at]


def _counted(value: bytes) -> bytes:
    return _number(len(value)) + value


def _number(value: int) -> bytes:
    """Return a non-negative number as Avro writes it."""
    rest = value << 1
    found = bytearray()
    while rest >= 0x80:
        found.append(rest & 0x7F | 0x80)
        rest >>= 7
    found.append(rest)
    return bytes(found)
