"""Searching the files of an inventory for files that nothing reaches: only keys are read, and none is believed."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Self
from urllib.parse import unquote_plus

import pyarrow as pa
import pyarrow.parquet as pq

from trinitylake_ops.errors import CorruptFileError, FileMissingError, InvalidLocationError, TrinityLakeError
from trinitylake_ops.format.file_names import ROOT_PREFIX, is_immutable_path
from trinitylake_ops.maintenance.plans.executor import Weight
from trinitylake_ops.maintenance.reach.table_files import is_below_tables
from trinitylake_ops.storage import Storage
from trinitylake_ops.storage.paths import check_path
from trinitylake_ops.tables.claims.file_claims import read_footer
from trinitylake_ops.tables.claims.orc_process import column_in_process
from trinitylake_ops.tables.claims.parquet_pages import CheckedPages
from trinitylake_ops.tables.io.checked_files import parquet_end
from trinitylake_ops.tables.io.file_io import StorageFileIO

_ROWS_AT_ONCE = 8_192
#: What a file may name: so many keys and characters of them always, and more by its bytes. Keys shrink, not to nothing.
_ALWAYS_ALLOWED_KEYS, _ALWAYS_ALLOWED_CHARS = 1 << 20, 64 << 20
_CHARS_PER_BYTE = 64
_LONGEST_KEY_BYTES = 4096
_PIECE_BYTES = 8 << 20
_MAX_LINE_CHARS = 1 << 20  # keys have 1024 bytes at most
#: The column of an inventory that is read.
KEY_COLUMN = "key"


@dataclass(frozen=True, slots=True)
class Inventory:
    """An inventory as its ``manifest.json`` describes it, in the form of Amazon S3's.

    ``created_at_ms`` is when it was begun, in milliseconds since the epoch. ``columns`` are the names of a CSV file's
    columns, in lower case. ``source`` is the root of what it lists, such as a bucket. ``files`` are URIs.
    """

    location: str
    created_at_ms: int
    file_format: str
    columns: tuple[str, ...]
    source: str
    files: tuple[str, ...]

    def key_prefix(self, root: str) -> str | None:
        """Return how the keys of files under a root begin, None for a root that it does not list."""
        return root.removeprefix(self.source) if root.startswith(self.source) else None


@dataclass(frozen=True, slots=True)
class Sought:
    """What is sought: keys that begin with ``key_prefix`` and that nothing reaches, as paths without that.

    ``reached`` are digests of what is reached, ascending. With ``only_tables`` just files of tables are sought.
    """

    key_prefix: str
    reached: bytes
    only_tables: bool = False

    @classmethod
    def beyond(cls, key_prefix: str, reached: Iterable[str], *, only_tables: bool = False) -> Self:
        """Return the search for what is not among reached paths."""
        return cls(key_prefix, array("Q", sorted(map(_digest, reached))).tobytes(), only_tables)


@dataclass(slots=True)
class InventoryMatches:
    """How many of a file's keys are reached, and the others with names that the lakehouse gives, as paths."""

    n_reached: int = 0
    unreached: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class InventorySearch:
    """Work: reads files of an inventory, by their URIs, once for all that is sought."""

    weight: ClassVar[Weight] = Weight.INVENTORY

    io: StorageFileIO
    inventory: Inventory
    sought: tuple[Sought, ...]

    @property
    def storages(self) -> Sequence[Storage]:
        """That of the lakehouse; those of inventories are not counted."""
        return (self.io.storage,)

    def __call__(self, files: Sequence[str]) -> list[list[InventoryMatches]]:
        """Return what is in each file, for each that is sought.

        Raises CorruptFileError, FileMissingError, StorageError.
        """
        reached = []
        for one in self.sought:
            digests = array("Q")
            digests.frombytes(one.reached)
            reached.append(digests)
        return [self._matches(uri, reached) for uri in files]

    def _matches(self, uri: str, reached: Sequence[array[int]]) -> list[InventoryMatches]:
        found = [InventoryMatches() for _ in self.sought]
        searches = list(zip(self.sought, reached, found, strict=True))
        for key in self._keys(uri):
            for sought, digests, matches in searches:
                if not key.startswith(sought.key_prefix):
                    continue
                path = key.removeprefix(sought.key_prefix)
                digest = _digest(path)
                place = bisect_left(digests, digest)
                if place < len(digests) and digests[place] == digest:
                    matches.n_reached += 1
                elif _is_name_of_ours(path, only_tables=sought.only_tables):
                    matches.unreached.append(path)
        return found

    def _keys(self, uri: str) -> Iterator[str]:
        try:
            file = self.io.new_input(uri)
            with file.open() as stream:
                keys = FORMATS[self.inventory.file_format](stream, self.inventory, uri)
                yield from _bounded(keys, len(file))
        except FileMissingError as error:
            message = f"file {uri!r} of inventory {self.inventory.location!r} is missing"
            raise FileMissingError(message, path=uri) from error
        except (CorruptFileError, InvalidLocationError) as error:
            raise self._unreadable(uri, error.message) from error
        except TrinityLakeError:
            raise
        except (pa.ArrowException, OSError, zlib.error, EOFError, csv.Error, ValueError, LookupError) as error:
            raise self._unreadable(uri, str(error).partition("\n")[0]) from error

    def _unreadable(self, uri: str, reason: str) -> CorruptFileError:
        message = f"file {uri!r} of inventory {self.inventory.location!r} cannot be read: {reason}"
        return CorruptFileError(message, path=uri)


def _is_name_of_ours(path: str, *, only_tables: bool) -> bool:
    """Whether a file of this path may be an orphan; those with names of operations are listed instead."""
    is_catalog_file = not only_tables and is_immutable_path(path) and not path.startswith(ROOT_PREFIX)
    if not is_catalog_file and not is_below_tables(path):
        return False
    try:
        check_path(path)
    except InvalidLocationError:
        return False
    return True


def _digest(path: str) -> int:
    return int.from_bytes(hashlib.blake2b(path.encode(errors="surrogatepass"), digest_size=8).digest())


def _csv_keys(stream: Any, inventory: Inventory, _uri: str) -> Iterator[str]:
    column = inventory.columns.index(KEY_COLUMN)
    buffered = io.BufferedReader(stream, _PIECE_BYTES)
    with gzip.open(buffered) as unpacked, io.TextIOWrapper(unpacked, "utf-8", newline="") as text:
        for row in csv.reader(_lines(text)):
            yield unquote_plus(row[column], errors="strict")


def _bounded(keys: Iterable[str], file_bytes: int) -> Iterator[str]:
    """Yield keys. Raises ValueError where there are more than a file of so many bytes holds."""
    left_keys = _ALWAYS_ALLOWED_KEYS + file_bytes
    left_chars = _ALWAYS_ALLOWED_CHARS + _CHARS_PER_BYTE * file_bytes
    for key in keys:
        left_keys -= 1
        left_chars -= len(key)
        if left_keys < 0 or left_chars < 0:
            raise ValueError(f"it names more than a file of {file_bytes} bytes holds")
        yield key


def _lines(text: io.TextIOWrapper) -> Iterator[str]:
    """Yield the lines of a text. Raises ValueError for one that is too long: that of a bomb never ends."""
    while line := text.readline(_MAX_LINE_CHARS):
        if len(line) == _MAX_LINE_CHARS:
            raise ValueError(f"a line of it is longer than {_MAX_LINE_CHARS} characters")
        yield line


def _parquet_keys(stream: Any, _inventory: Inventory, uri: str) -> Iterator[str]:
    end = parquet_end(stream.seek(0, io.SEEK_END), partial(_range, stream), uri)
    metadata = read_footer(end, uri)
    if not pa.types.is_string(metadata.schema.to_arrow_schema().field(KEY_COLUMN).type):
        raise ValueError(f"its column {KEY_COLUMN!r} is no text")
    pages = pa.PythonFile(CheckedPages(stream, end, uri), mode="r")
    # As a dictionary: one long text that all rows name is decoded once.
    file = pq.ParquetFile(pages, metadata=metadata, read_dictionary=[KEY_COLUMN])
    return _texts(file.iter_batches(_ROWS_AT_ONCE, columns=[KEY_COLUMN]))


def _range(stream: Any, offset: int, length: int) -> bytes:
    stream.seek(offset)
    return bytes(stream.read(length))


def _orc_keys(stream: Any, _inventory: Inventory, _uri: str) -> Iterator[str]:
    return _texts(column_in_process(stream, KEY_COLUMN))


def _texts(batches: Iterable[pa.RecordBatch]) -> Iterator[str]:
    for batch in batches:
        column = batch.column(KEY_COLUMN)
        texts = column.dictionary if isinstance(column, pa.DictionaryArray) else column
        if texts.nbytes > _LONGEST_KEY_BYTES * max(1, len(texts)):
            raise ValueError(f"its column {KEY_COLUMN!r} has texts that are longer than any key")
        keys = column.to_pylist()
        if not all(isinstance(key, str) for key in keys):
            raise ValueError(f"its column {KEY_COLUMN!r} is no text, or has rows without one")
        yield from keys


#: Reads the keys of a file, by the format that a manifest names.
FORMATS: Mapping[str, Callable[[Any, Inventory, str], Iterator[str]]] = MappingProxyType(
    {"CSV": _csv_keys, "ORC": _orc_keys, "Parquet": _parquet_keys}
)
