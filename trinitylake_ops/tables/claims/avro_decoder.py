"""Decodes Avro within its bytes. For manifests, pyiceberg uses this decoder in place of its own compiled one.

The compiled decoder follows lengths and counts out of its memory. So a manifest of a kilobyte ends the process. Or it
takes any bytes behind it, credentials too, for a path. A module of pyiceberg provides the decoder.
:func:`read_bounded_avro` replaces it there, for all Avro that this process reads by pyiceberg (decision 38).
"""

from __future__ import annotations

from pyiceberg.avro import file as avro_file
from pyiceberg.avro.decoder import BinaryDecoder

_MORE, _BITS = 0x80, 0x7F
_MOST_BYTES = 10
_POSITIVE = (1 << 63) - 1


class BoundedDecoder(BinaryDecoder):
    """Decodes values one after the other. Raises EOFError for a length that leads out of the bytes."""

    __slots__ = ("_data", "_end", "_place")

    def __init__(self, data: bytes):
        self._data = data
        self._end = len(data)
        self._place = 0

    def tell(self) -> int:
        return self._place

    def read(self, n: int) -> bytes:
        start = self._place
        self.skip(n)
        return self._data[start : self._place]

    def skip(self, n: int) -> None:
        if not 0 <= n <= self._end - self._place:
            raise self._beyond(n)
        self._place += n

    def read_int(self) -> int:
        place = self._place
        if place < self._end and (byte := self._data[place]) < _MORE:  # most numbers take one byte
            self._place = place + 1
            return (byte >> 1) ^ -(byte & 1)
        return self._read_long_int()

    def _read_long_int(self) -> int:
        number = 0
        for index, byte in enumerate(self._data[self._place : self._place + _MOST_BYTES]):
            number |= (byte & _BITS) << (7 * index)
            if byte < _MORE:
                self._place += index + 1
                return (number >> 1 & _POSITIVE) ^ -(number & 1)
        raise EOFError("a number does not end")

    def read_ints(self, n: int) -> tuple[int, ...]:
        self._check_count(n)
        return super().read_ints(n)

    def read_int_bytes_dict(self, n: int, dest: dict[int, bytes]) -> None:
        self._check_count(n)
        read_int, read_bytes = self.read_int, self.read_bytes
        for _ in range(n):
            key = read_int()
            dest[key] = read_bytes()

    def read_bytes(self) -> bytes:
        size_bytes = self.read_int()
        start = self._place
        end = start + size_bytes
        if not start <= end <= self._end:
            raise self._beyond(size_bytes)
        self._place = end
        return self._data[start:end]

    def skip_int(self) -> None:
        self.read_int()

    def _check_count(self, n: int) -> None:
        if n > self._end - self._place:  # each item takes a byte, or more
            raise self._beyond(n)

    def _beyond(self, wanted: int) -> EOFError:
        return EOFError(f"{wanted} bytes or items are wanted where {self._end - self._place} bytes are left")


def read_bounded_avro() -> None:
    """Let pyiceberg read all Avro by :class:`BoundedDecoder`, in this process."""
    vars(avro_file)["new_decoder"] = BoundedDecoder
