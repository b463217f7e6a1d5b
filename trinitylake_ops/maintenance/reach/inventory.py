"""What stands under a root by an inventory: a list of all files that a storage writes by itself, every day or week.

An inventory spares the listing of millions of files (docs/engines.md, "Inventories"), and nothing in it is believed.
Each file in it that nothing reaches is asked for, and counts as the storage shows it now. It lacks later files.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any, ClassVar
from urllib.parse import unquote_plus

import pyarrow as pa
import pyarrow.parquet as pq

from trinitylake_ops.errors import (
    CorruptFileError,
    FileMissingError,
    InvalidInputError,
    InvalidLocationError,
    TrinityLakeError,
)
from trinitylake_ops.format.file_names import ROOT_PREFIX, TABLES_PREFIX, is_immutable_path, owner_path
from trinitylake_ops.format.locations import as_uri, is_uri, normalize_root_uri
from trinitylake_ops.maintenance.plans.budget import counted_with
from trinitylake_ops.maintenance.plans.executor import Executor, Weight
from trinitylake_ops.maintenance.reach.listing import list_folders
from trinitylake_ops.maintenance.reach.mark import Mark
from trinitylake_ops.maintenance.reach.survey import Progress, no_progress
from trinitylake_ops.maintenance.reach.table_files import is_below_tables, table_id_in
from trinitylake_ops.storage import TEMPORARY_PREFIX, FileInfo, Storage, open_storage
from trinitylake_ops.storage.parallel import in_one_round, run_parallel
from trinitylake_ops.storage.paths import check_path
from trinitylake_ops.tables.claims.file_claims import read_footer
from trinitylake_ops.tables.claims.orc_process import column_in_process
from trinitylake_ops.tables.claims.parquet_pages import CheckedPages
from trinitylake_ops.tables.io.checked_files import parquet_end
from trinitylake_ops.tables.io.file_io import StorageFileIO, reading_io
from trinitylake_ops.transaction.lakehouse import Lakehouse, options_for

_ROWS_AT_ONCE = 8_192
#: What a file may name: so many keys and characters of them always, and more by its bytes. Keys shrink, not to nothing.
_ALWAYS_ALLOWED_KEYS, _ALWAYS_ALLOWED_CHARS = 1 << 20, 64 << 20
_CHARS_PER_BYTE = 64
_LONGEST_KEY_BYTES = 4096
_PIECE_BYTES = 8 << 20
_MAX_LINE_CHARS = 1 << 20  # keys have 1024 bytes at most
_KEY = "key"


@dataclass(frozen=True, slots=True)
class Inventory:
    """An inventory as its ``manifest.json`` describes it, in the form of Amazon S3's.

    ``created_at_ms`` is when it was begun, in milliseconds since the epoch. ``columns`` are the names of a CSV file's
    columns, in lower case. Keys of the lakehouse's files begin with ``key_prefix``. ``files`` are URIs.
    """

    location: str
    created_at_ms: int
    file_format: str
    columns: tuple[str, ...]
    key_prefix: str
    files: tuple[str, ...]


def read_inventory(lake: Lakehouse, location: str) -> Inventory:
    """Read the manifest of an inventory, ``manifest.json``, by its URI or absolute path.

    Its files are found in the bucket of the manifest, or in its folder where it is a local file. Raises
    FileMissingError, CorruptFileError for what is no such manifest, InvalidInputError for that of another bucket,
    StorageError.
    """
    uri = as_uri(location)
    if not is_uri(uri) or uri.endswith("/"):
        raise InvalidLocationError(
            f"inventory {location!r} is neither a URI nor an absolute path of its manifest.json", path=location
        )
    try:
        data = _inventory_io(lake, uri).read_whole(uri)
    except FileMissingError as error:
        raise FileMissingError(f"there is no inventory {uri!r}: give the URI of its manifest.json", path=uri) from error
    try:
        content = json.loads(data)
        source, file_format = str(content["sourceBucket"]), str(content["fileFormat"])
        created_at_ms, keys = int(content["creationTimestamp"]), [str(file["key"]) for file in content["files"]]
        columns = tuple(name.strip().lower() for name in str(content["fileSchema"]).split(","))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise CorruptFileError(f"{uri!r} is no manifest of an inventory", path=uri) from error
    if file_format not in _FORMATS or (file_format == "CSV" and _KEY not in columns):
        raise CorruptFileError(
            f"the files of inventory {uri!r} are of format {file_format!r} with columns {', '.join(columns)}; known are"
            f" {', '.join(_FORMATS)}, with a column 'Key'",
            path=uri,
        )
    try:
        source_uri = normalize_root_uri(source if is_uri(source) else f"s3://{source}/")
    except InvalidLocationError as error:
        raise CorruptFileError(f"{uri!r} is no manifest of an inventory: {error.message}", path=uri) from error
    if not lake.root.startswith(source_uri):
        raise InvalidInputError(f"inventory {uri!r} is one of {source_uri!r}, where {lake.root} is not", path=uri)
    files = tuple(_folder_of(uri) + key for key in keys)
    return Inventory(uri, created_at_ms, file_format, columns, lake.root.removeprefix(source_uri), files)


def _folder_of(uri: str) -> str:
    """Return the root of an inventory's files: the bucket of its manifest, or its folder where it is a local file."""
    scheme, _, rest = uri.partition("://")
    return f"{uri.rpartition('/')[0]}/" if scheme == "file" else f"{scheme}://{rest.partition('/')[0]}/"


def _inventory_io(lake: Lakehouse, uri: str) -> StorageFileIO:
    """Return what reads an inventory that the caller named by the URI of its manifest. Raises InvalidLocationError."""
    root = normalize_root_uri(_folder_of(uri))
    return reading_io(lake, [counted_with(lake.storage, open_storage(root, options_for(lake, root)))])


def list_by_inventory(
    lake: Lakehouse, executor: Executor, inventory: Inventory, mark: Mark, progress: Progress = no_progress
) -> Iterator[FileInfo]:
    """Yield the files in an inventory that a mark does not reach and that stand, and all with names of operations.

    Of a table that may go altogether all files are yielded, also those that came since the inventory. Extends the
    mark to the files of tables. Raises what marking raises, InvalidInputError for an inventory that has no file of
    the lakehouse, CorruptFileError, StorageError.
    """
    mark.add_tables()
    for prefix in (ROOT_PREFIX, TEMPORARY_PREFIX):
        yield from lake.storage.list(prefix)
    reached = array("Q", sorted(map(_digest, chain(*mark.catalog.paths, mark.tables.files))))
    search = InventorySearch(_inventory_io(lake, inventory.location), inventory, reached.tobytes())
    unreached: dict[str, None] = {}
    n_reached = 0
    for done, found in enumerate(executor.map(search, inventory.files), 1):
        left = [path for path in found.unreached if path not in mark]
        n_reached += found.n_reached + len(found.unreached) - len(left)
        unreached |= dict.fromkeys(left)
        progress("files of the inventory", done, len(inventory.files))
    if not n_reached:
        raise InvalidInputError(
            f"inventory {inventory.location!r} has none of the files that {lake.root} reaches: it is of another prefix,"
            " or older than the lakehouse",
            path=inventory.location,
        )
    going = sorted({table_id for path in unreached if (table_id := table_id_in(path)) and path == owner_path(table_id)})
    yield from list_folders(lake.storage, executor, [f"{TABLES_PREFIX}{table_id}/" for table_id in going])
    known = frozenset(going)
    asked = [path for path in unreached if table_id_in(path) not in known]
    for info in executor.map(Standing(lake.storage), asked):
        if info is not None:
            yield info


@dataclass(frozen=True, slots=True)
class InventoryMatches:
    """How many of a file's keys are reached, and the others with names that the lakehouse gives, as paths."""

    n_reached: int
    unreached: list[str]


@dataclass(frozen=True, slots=True)
class InventorySearch:
    """Work: reads files of an inventory, by their URIs; ``reached`` are digests of what is reached, ascending."""

    weight: ClassVar[Weight] = Weight.INVENTORY

    io: StorageFileIO
    inventory: Inventory
    reached: bytes

    @property
    def storages(self) -> Sequence[Storage]:
        """That of the lakehouse; those of inventories are not counted."""
        return (self.io.storage,)

    def __call__(self, files: Sequence[str]) -> list[InventoryMatches]:
        """Return what is in each file. Raises CorruptFileError, FileMissingError, StorageError."""
        reached = array("Q")
        reached.frombytes(self.reached)
        return [self._matches(uri, reached) for uri in files]

    def _matches(self, uri: str, reached: array[int]) -> InventoryMatches:
        n_reached, unreached = 0, []
        prefix = self.inventory.key_prefix
        for key in self._keys(uri):
            if not key.startswith(prefix):
                continue
            path = key.removeprefix(prefix)
            digest = _digest(path)
            place = bisect_left(reached, digest)
            if place < len(reached) and reached[place] == digest:
                n_reached += 1
            elif _is_name_of_ours(path):
                unreached.append(path)
        return InventoryMatches(n_reached, unreached)

    def _keys(self, uri: str) -> Iterator[str]:
        try:
            file = self.io.new_input(uri)
            with file.open() as stream:
                keys = _FORMATS[self.inventory.file_format](stream, self.inventory, uri)
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


@dataclass(frozen=True, slots=True)
class Standing:
    """Work: asks whether files stand, by their paths."""

    weight: ClassVar[Weight] = Weight.ANSWER

    storage: Storage

    @property
    def storages(self) -> Sequence[Storage]:
        """The one that is asked."""
        return (self.storage,)

    def __call__(self, paths: Sequence[str]) -> list[FileInfo | None]:
        """Return size and time of each file, None where a listing would tell none. Raises StorageError."""
        return run_parallel(in_one_round(self._seen), paths, self.storage.concurrency)

    def _seen(self, path: str) -> FileInfo | None:
        try:
            found = self.storage.stat(path)
        except (FileMissingError, InvalidLocationError):  # the latter of names that are too long for a file
            return None
        # A link would give another name to a file that is needed.
        return None if self.storage.is_linked(path) else found


def _is_name_of_ours(path: str) -> bool:
    """Whether a file of this path may be an orphan; those with names of operations are listed instead."""
    if path.startswith(ROOT_PREFIX) or not (is_immutable_path(path) or is_below_tables(path)):
        return False
    try:
        check_path(path)
    except InvalidLocationError:
        return False
    return True


def _digest(path: str) -> int:
    return int.from_bytes(hashlib.blake2b(path.encode(errors="surrogatepass"), digest_size=8).digest())


def _csv_keys(stream: Any, inventory: Inventory, _uri: str) -> Iterator[str]:
    column = inventory.columns.index(_KEY)
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
    if not pa.types.is_string(metadata.schema.to_arrow_schema().field(_KEY).type):
        raise ValueError(f"its column {_KEY!r} is no text")
    pages = pa.PythonFile(CheckedPages(stream, end, uri), mode="r")
    # As a dictionary: one long text that all rows name is decoded once.
    file = pq.ParquetFile(pages, metadata=metadata, read_dictionary=[_KEY])
    return _texts(file.iter_batches(_ROWS_AT_ONCE, columns=[_KEY]))


def _range(stream: Any, offset: int, length: int) -> bytes:
    stream.seek(offset)
    return bytes(stream.read(length))


def _orc_keys(stream: Any, _inventory: Inventory, _uri: str) -> Iterator[str]:
    return _texts(column_in_process(stream, _KEY))


def _texts(batches: Iterable[pa.RecordBatch]) -> Iterator[str]:
    for batch in batches:
        column = batch.column(_KEY)
        texts = column.dictionary if isinstance(column, pa.DictionaryArray) else column
        if texts.nbytes > _LONGEST_KEY_BYTES * max(1, len(texts)):
            raise ValueError(f"its column {_KEY!r} has texts that are longer than any key")
        keys = column.to_pylist()
        if not all(isinstance(key, str) for key in keys):
            raise ValueError(f"its column {_KEY!r} is no text, or has rows without one")
        yield from keys


_FORMATS: Mapping[str, Callable[[Any, Inventory, str], Iterator[str]]] = MappingProxyType(
    {"CSV": _csv_keys, "ORC": _orc_keys, "Parquet": _parquet_keys}
)
