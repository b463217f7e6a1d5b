"""The header of an Avro object container file, and the numbers and counted bytes of which the file consists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MAGIC = b"Obj\x01"
#: The largest header of a file. It contains schemas as JSON, which is parsed whole while all other threads wait. The
#: schema of a table with 20,000 columns takes 1.3 MB.
MAX_HEADER_BYTES = 8 << 20
_SYNC_BYTES = 16
_MAX_VARINT_BYTES = 10


@dataclass(frozen=True, slots=True)
class AvroHeader:
    """The beginning of a file: its metadata, and the marker between blocks. The first block is at ``size_bytes``."""

    metadata: dict[str, bytes]
    sync: bytes
    size_bytes: int

    @classmethod
    def parse(cls, data: bytes, errors: str = "strict") -> AvroHeader:
        """Return the header of a file. ``errors`` is for names that are no UTF-8, as in ``bytes.decode``.

        Raises ValueError, EOFError.
        """
        if not data.startswith(MAGIC):
            raise ValueError("it does not begin as one")
        reader = AvroReader(data, len(MAGIC))
        metadata: dict[str, bytes] = {}
        while count := reader.number():
            if count < 0:  # the size of the entries follows, to skip them
                reader.number()
            for _ in range(abs(count)):
                name, value = reader.counted(), reader.counted()
                if reader.at > MAX_HEADER_BYTES:
                    raise ValueError(f"its header has more than {MAX_HEADER_BYTES} bytes")
                metadata[name.decode(errors=errors)] = value
        sync = data[reader.at : reader.at + _SYNC_BYTES]
        if len(sync) < _SYNC_BYTES:
            raise EOFError("it ends in its header")
        return cls(metadata, sync, reader.at + _SYNC_BYTES)

    @classmethod
    def of(cls, data: bytes) -> AvroHeader | None:
        """Return the header of a file, None if it has none that can be read. Names need not be UTF-8."""
        try:
            return cls.parse(data, "surrogateescape")
        except (ValueError, EOFError):
            return None

    def with_metadata(self, more: Mapping[str, bytes]) -> bytes:
        """Return the bytes of this header with more metadata in front, which replaces entries of the same names."""
        kept = {name: value for name, value in self.metadata.items() if name not in more}
        return header_bytes({**more, **kept}, self.sync)


@dataclass(slots=True)
class AvroReader:
    """Reads numbers and counted bytes of ``data``, one after the other. The next one begins at ``at``."""

    data: bytes
    at: int

    def number(self) -> int:
        """Return a number. Raises EOFError."""
        number = 0
        for place, byte in enumerate(self.data[self.at : self.at + _MAX_VARINT_BYTES]):
            number |= (byte & 0x7F) << (7 * place)
            if byte < 0x80:
                self.at += place + 1
                return (number >> 1) ^ -(number & 1)
        raise EOFError("a number in it does not end")

    def counted(self) -> bytes:
        """Return the bytes that follow their length. Raises EOFError."""
        size_bytes = self.number()
        if not 0 <= size_bytes <= len(self.data) - self.at:
            raise EOFError("a length in it is beyond its end")
        self.at += size_bytes
        return self.data[self.at - size_bytes : self.at]


def header_bytes(metadata: Mapping[str, bytes], sync: bytes) -> bytes:
    """Return the bytes of a header with metadata in this order."""
    entries = [
        piece
        for name, value in metadata.items()
        for text in (name.encode(errors="surrogateescape"), value)
        for piece in (number_bytes(len(text)), text)
    ]
    return b"".join([MAGIC, number_bytes(len(metadata)), *entries, number_bytes(0), sync])


def number_bytes(number: int) -> bytes:
    """Return a count or length as Avro writes it."""
    rest = number << 1
    written = bytearray()
    while rest > 0x7F:
        written.append(rest & 0x7F | 0x80)
        rest >>= 7
    written.append(rest)
    return bytes(written)
