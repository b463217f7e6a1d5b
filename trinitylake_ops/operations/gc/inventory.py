"""Inventories of object storage, which are read instead of listing millions of files.

The content of an inventory is untrusted and may be out of date (docs/spark/cluster.md, "Inventories"). Each unreached
file listed in an inventory is therefore looked up in the storage.
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
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self
from urllib.parse import unquote_plus

import pyarrow as pa
import pyarrow.parquet as pq

from trinitylake_ops.access.allowed_roots import cut
from trinitylake_ops.errors import (
    CorruptFileError,
    FileMissingError,
    InvalidInputError,
    InvalidLocationError,
    TrinityLakeError,
)
from trinitylake_ops.format.file_names import ROOT_PREFIX, TABLES_PREFIX, is_immutable_path, owner_path
from trinitylake_ops.format.locations import as_uri, is_uri, normalize_root_uri
from trinitylake_ops.iceberg.io.checked_files import parquet_end
from trinitylake_ops.iceberg.io.file_io import StorageFileIO, reading_io
from trinitylake_ops.iceberg.validation.files import CheckedPages, read_footer
from trinitylake_ops.iceberg.validation.orc_process import column_in_process
from trinitylake_ops.operations.budget import counted_with
from trinitylake_ops.operations.executor import Executor, Weight
from trinitylake_ops.operations.gc.listing import list_folders
from trinitylake_ops.operations.gc.mark import Mark
from trinitylake_ops.operations.gc.survey import Progress, no_progress
from trinitylake_ops.operations.gc.table_files import is_below_tables, table_id_in
from trinitylake_ops.storage import TEMPORARY_PREFIX, FileInfo, Storage, open_storage
from trinitylake_ops.storage.parallel import in_one_round_trip, run_parallel
from trinitylake_ops.storage.paths import check_path
from trinitylake_ops.transaction.lakehouse import Lakehouse, options_for

_ROWS_AT_ONCE = 8_192
#: The numbers of keys and characters that an inventory file may always contain. Larger files may contain more.
_ALWAYS_ALLOWED_KEYS, _ALWAYS_ALLOWED_CHARS = 1 << 20, 64 << 20
_CHARS_PER_BYTE = 64
_MAX_KEY_BYTES = 4096
_PIECE_BYTES = 8 << 20
_MAX_LINE_CHARS = 1 << 20  # keys have at most 1024 bytes
#: The column to read.
KEY_COLUMN = "key"


@dataclass(frozen=True, slots=True)
class Inventory:
    """An inventory, as described by its ``manifest.json`` in the format of Amazon S3 Inventory."""

    location: str
    #: When the inventory was started, in milliseconds since the epoch.
    created_at_ms: int
    file_format: str
    #: The names of the columns of CSV files, in lower case.
    columns: tuple[str, ...]
    #: The URI of the listed root, for example a bucket.
    source: str
    #: The URIs of the inventory files.
    files: tuple[str, ...]

    def key_prefix(self, root: str) -> str | None:
        """Return the key prefix of files under a root, or None if the inventory does not cover the root."""
        return root.removeprefix(self.source) if root.startswith(self.source) else None


@dataclass(frozen=True, slots=True)
class InventoryQuery:
    """A search for unreached keys with a prefix."""

    key_prefix: str
    #: The digests of reached paths, in ascending order.
    reached: bytes
    #: Whether to find only files of tables.
    only_tables: bool = False

    @classmethod
    def beyond(cls, key_prefix: str, reached: Iterable[str], *, only_tables: bool = False) -> Self:
        """Return the search for paths that are not reached.

        Args:
            key_prefix: The prefix of the keys.
            reached: The reached paths, without the prefix.
            only_tables: Whether to find only files of tables.
        """
        return cls(key_prefix, array("Q", sorted(map(_digest, reached))).tobytes(), only_tables)


@dataclass(slots=True)
class InventoryMatches:
    """The number of reached keys in a file, and the unreached keys with generated names, as paths."""

    n_reached: int = 0
    unreached: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class InventorySearch:
    """Work that reads inventory files, identified by URI, once for all searches."""

    weight: ClassVar[Weight] = Weight.INVENTORY

    io: StorageFileIO
    inventory: Inventory
    query: tuple[InventoryQuery, ...]

    @property
    def storages(self) -> Sequence[Storage]:
        """The storage of the lakehouse. Requests for the inventory itself are not counted."""
        return (self.io.storage,)

    def __call__(self, files: Sequence[str]) -> list[list[InventoryMatches]]:
        """Return the matches of each search in each file.

        Raises CorruptFileError, FileMissingError, StorageError.
        """
        reached = []
        for one in self.query:
            digests = array("Q")
            digests.frombytes(one.reached)
            reached.append(digests)
        return [self._matches(uri, reached) for uri in files]

    def _matches(self, uri: str, reached: Sequence[array[int]]) -> list[InventoryMatches]:
        all_matches = [InventoryMatches() for _ in self.query]
        searches = list(zip(self.query, reached, all_matches, strict=True))
        for key in self._keys(uri):
            for query, digests, matches in searches:
                if not key.startswith(query.key_prefix):
                    continue
                path = key.removeprefix(query.key_prefix)
                digest = _digest(path)
                place = bisect_left(digests, digest)
                if place < len(digests) and digests[place] == digest:
                    matches.n_reached += 1
                elif _is_generated_name(path, only_tables=query.only_tables):
                    matches.unreached.append(path)
        return all_matches

    def _keys(self, uri: str) -> Iterator[str]:
        try:
            file = self.io.new_input(uri)
            with file.open() as stream:
                keys = FORMATS[self.inventory.file_format](stream, self.inventory, uri)
                yield from _limit_keys(keys, len(file))
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


def _is_generated_name(path: str, *, only_tables: bool) -> bool:
    """Whether a path may be an orphan. Files of operations are found by listing instead."""
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
    reader = io.BufferedReader(stream, _PIECE_BYTES)
    with gzip.open(reader) as decompressed, io.TextIOWrapper(decompressed, "utf-8", newline="") as text:
        for row in csv.reader(_lines(text)):
            yield unquote_plus(row[column], errors="strict")


def _limit_keys(keys: Iterable[str], file_bytes: int) -> Iterator[str]:
    """Yield keys. Raises ValueError if there are more keys than a file of this size can contain."""
    left_keys = _ALWAYS_ALLOWED_KEYS + file_bytes
    left_chars = _ALWAYS_ALLOWED_CHARS + _CHARS_PER_BYTE * file_bytes
    for key in keys:
        left_keys -= 1
        left_chars -= len(key)
        if left_keys < 0 or left_chars < 0:
            raise ValueError(f"it contains more keys than a file of {file_bytes} bytes can")
        yield key


def _lines(text: io.TextIOWrapper) -> Iterator[str]:
    """Yield the lines of a text. Raises ValueError for a line that is too long, as in a decompression bomb."""
    while line := text.readline(_MAX_LINE_CHARS):
        if len(line) == _MAX_LINE_CHARS:
            raise ValueError(f"it has a line longer than {_MAX_LINE_CHARS} characters")
        yield line


def _parquet_keys(stream: Any, _inventory: Inventory, uri: str) -> Iterator[str]:
    end = parquet_end(stream.seek(0, io.SEEK_END), partial(_range, stream), uri)
    metadata = read_footer(end, uri)
    if not pa.types.is_string(metadata.schema.to_arrow_schema().field(KEY_COLUMN).type):
        raise ValueError(f"its column {KEY_COLUMN!r} does not contain text")
    pages = pa.PythonFile(CheckedPages(stream, end, uri), mode="r")
    # Read as a dictionary, so that a long text repeated in all rows is decoded only once.
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
        if texts.nbytes > _MAX_KEY_BYTES * max(1, len(texts)):
            raise ValueError(f"its column {KEY_COLUMN!r} contains texts longer than any key")
        keys = column.to_pylist()
        if not all(isinstance(key, str) for key in keys):
            raise ValueError(f"its column {KEY_COLUMN!r} does not contain text, or has empty rows")
        yield from keys


#: The readers of keys by file format.
FORMATS: Mapping[str, Callable[[Any, Inventory, str], Iterator[str]]] = MappingProxyType(
    {"CSV": _csv_keys, "ORC": _orc_keys, "Parquet": _parquet_keys}
)


def read_inventory(lake: Lakehouse, location: str, table_root: str = "") -> Inventory:
    """Read the manifest of an inventory.

    The inventory files are in the same bucket as the manifest, or in the same folder for a local manifest.

    Args:
        lake: The lakehouse.
        location: The URI or absolute path of ``manifest.json``.
        table_root: The URI of the table root, if any.

    Raises:
        FileMissingError: The manifest does not exist.
        CorruptFileError: The file is not an inventory manifest.
        InvalidInputError: The inventory covers neither the lakehouse nor the table root.
        StorageError: A storage request failed.
    """
    uri = as_uri(location)
    if not is_uri(uri) or uri.endswith("/"):
        raise InvalidLocationError(
            f"inventory {location!r} is not a URI or absolute path of a manifest.json", path=location
        )
    try:
        data = _inventory_io(lake, uri).read_whole(uri)
    except FileMissingError as error:
        raise FileMissingError(f"there is no inventory {uri!r}; pass the URI of its manifest.json", path=uri) from error
    try:
        content = json.loads(data)
        source, file_format = str(content["sourceBucket"]), str(content["fileFormat"])
        created_at_ms, keys = int(content["creationTimestamp"]), [str(file["key"]) for file in content["files"]]
        columns = tuple(name.strip().lower() for name in str(content["fileSchema"]).split(","))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise CorruptFileError(f"{uri!r} is not a manifest of an inventory", path=uri) from error
    if file_format not in FORMATS or (file_format == "CSV" and KEY_COLUMN not in columns):
        raise CorruptFileError(
            f"the files of inventory {uri!r} have format {file_format!r} with columns {', '.join(columns)}; supported"
            f" are {', '.join(FORMATS)}, with a column 'Key'",
            path=uri,
        )
    try:
        source_uri = normalize_root_uri(source if is_uri(source) else f"s3://{source}/")
    except InvalidLocationError as error:
        raise CorruptFileError(f"{uri!r} is not a manifest of an inventory: {error.message}", path=uri) from error
    inventory = Inventory(
        uri, created_at_ms, file_format, columns, source_uri, tuple(_folder_of(uri) + k for k in keys)
    )
    roots = [lake.root, *([normalize_root_uri(table_root)] if table_root else [])]
    if all(inventory.key_prefix(root) is None for root in roots):
        where = " and ".join(map(cut, roots))
        raise InvalidInputError(f"inventory {uri!r} covers {source_uri!r}, which does not contain {where}", path=uri)
    return inventory


def _folder_of(uri: str) -> str:
    """Return the root of an inventory's files: the bucket of its manifest, or the folder of a local manifest."""
    scheme, _, rest = uri.partition("://")
    return f"{uri.rpartition('/')[0]}/" if scheme == "file" else f"{scheme}://{rest.partition('/')[0]}/"


def _inventory_io(lake: Lakehouse, uri: str) -> StorageFileIO:
    """Return the FileIO for an inventory, whose URI the caller passed. Raises InvalidLocationError."""
    root = normalize_root_uri(_folder_of(uri))
    return reading_io(lake, [counted_with(lake.storage, open_storage(root, options_for(lake, root)))])


class ListedByInventory(NamedTuple):
    """The files found by means of an inventory, under the root and under the table root.

    None for a root that the inventory does not cover, because it contains no reached file of that root.
    """

    in_root: Iterator[FileInfo] | None
    in_table_root: Iterator[FileInfo] | None


def list_by_inventory(
    lake: Lakehouse, executor: Executor, inventory: Inventory, mark: Mark, progress: Progress = no_progress
) -> ListedByInventory:
    """Return unreached files of an inventory that still exist, and all files with operation file names.

    For tables that may be deleted as a whole, all files are included, even those newer than the inventory. This extends
    the mark to table files.

    Args:
        lake: The lakehouse.
        executor: Reads the inventory and looks up files.
        inventory: The inventory.
        mark: The mark.
        progress: Called with the unit that is counted, the number done, and the total.

    Raises:
        InvalidInputError: The inventory contains no file of the lakehouse.
        CorruptFileError: An inventory file is damaged.
        StorageError: A storage request failed.
    """
    mark.add_tables()
    in_root, in_table_root = _searches(lake, inventory, mark)
    roots = [root for root in (in_root, in_table_root) if root is not None]
    search = InventorySearch(_inventory_io(lake, inventory.location), inventory, tuple(root.query for root in roots))
    for done, found in enumerate(executor.map(search, inventory.files), 1):
        for root, matches in zip(roots, found, strict=True):
            root.take(matches)
        progress("files of the inventory", done, len(inventory.files))
    if not any(root.n_reached for root in roots):
        raise InvalidInputError(
            f"inventory {inventory.location!r} contains no file that {lake.root} reaches, because it covers another"
            " prefix or is older than the lakehouse",
            path=inventory.location,
        )
    return ListedByInventory(
        in_root.existing(executor, (ROOT_PREFIX, TEMPORARY_PREFIX))
        if in_root is not None and in_root.n_reached
        else None,
        in_table_root.existing(executor) if in_table_root is not None and in_table_root.n_reached else None,
    )


def _searches(lake: Lakehouse, inventory: Inventory, mark: Mark) -> tuple[_RootSearch | None, _RootSearch | None]:
    """Return the searches under the root and the table root, or None for a root that the inventory does not cover."""
    in_root = in_table_root = None
    if (prefix := inventory.key_prefix(lake.root)) is not None:
        reached = chain(*mark.catalog.paths, mark.tables.files)
        in_root = _RootSearch(lake.storage, mark, InventoryQuery.beyond(prefix, reached))
    if mark.table_root is not None and (prefix := inventory.key_prefix(mark.table_root.root)) is not None:
        files = mark.tables.in_table_root
        query = InventoryQuery.beyond(prefix, files.paths, only_tables=True)
        in_table_root = _RootSearch(mark.table_root.storage, files, query)
    return in_root, in_table_root


@dataclass(slots=True)
class _RootSearch:
    """A search under one root."""

    storage: Storage
    reached: Container[str]
    query: InventoryQuery
    n_reached: int = 0
    unreached: dict[str, None] = field(default_factory=dict)

    def take(self, matches: InventoryMatches) -> None:
        """Add the matches of a file. Digests detect most reached files; the mark also detects other name forms."""
        left = [path for path in matches.unreached if path not in self.reached]
        self.n_reached += matches.n_reached + len(matches.unreached) - len(left)
        self.unreached |= dict.fromkeys(left)

    def existing(self, executor: Executor, prefixes: Sequence[str] = ()) -> Iterator[FileInfo]:
        """Yield existing matches, all files of tables whose owner file may be deleted, and all files under prefixes."""
        for prefix in prefixes:
            yield from self.storage.list(prefix)
        ids = ((path, table_id) for path in self.unreached if (table_id := table_id_in(path)) is not None)
        deletable_tables = sorted({table_id for path, table_id in ids if path == owner_path(table_id)})
        yield from list_folders(
            self.storage, executor, [f"{TABLES_PREFIX}{table_id}/" for table_id in deletable_tables]
        )
        whole_tables = frozenset(deletable_tables)
        to_check = [path for path in self.unreached if table_id_in(path) not in whole_tables]
        for info in executor.map(ExistenceCheck(self.storage), to_check):
            if info is not None:
                yield info


@dataclass(frozen=True, slots=True)
class ExistenceCheck:
    """Work that looks up files by path."""

    weight: ClassVar[Weight] = Weight.ANSWER

    storage: Storage

    @property
    def storages(self) -> Sequence[Storage]:
        """The storage of the files."""
        return (self.storage,)

    def __call__(self, paths: Sequence[str]) -> list[FileInfo | None]:
        """Return the size and time of each file, or None if a listing would not contain it. Raises StorageError."""
        return run_parallel(in_one_round_trip(self._existing_file), paths, self.storage.concurrency)

    def _existing_file(self, path: str) -> FileInfo | None:
        try:
            info = self.storage.stat(path)
        except (FileMissingError, InvalidLocationError):  # an invalid location is a name that is too long
            return None
        # A link could be another name for a file that is needed.
        return None if self.storage.is_linked(path) else info
