"""Verify complete table files, list them, and relocate the metadata of copied tables.

Metadata in an export of nodes or definitions, or in a lakehouse whose files were copied or moved, contains the previous
location, to which only the owner of that root may write. The location is therefore replaced by the table's current
managed location when the table is loaded. New files are written to this location, and existing files are read at their
current locations.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from pyiceberg.io import InputStream
from pyiceberg.table.metadata import TableMetadata

from trinitylake_ops.errors import CorruptFileError, InvalidDefinitionError
from trinitylake_ops.format.definitions import TableDef
from trinitylake_ops.format.file_names import table_prefix
from trinitylake_ops.format.locations import to_uri
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.io.input_file import StorageInputFile, reading_table_file
from trinitylake_ops.iceberg.managed import metadata_uri, table_id_of
from trinitylake_ops.iceberg.validation.checksums import PieceCheck, SealedKind, check_table_file
from trinitylake_ops.iceberg.validation.files import check_parquet_claims, end_with_claims, footer_bytes, read_footer
from trinitylake_ops.storage.interface import FileInfo

#: Files up to this size are read in one request and kept in memory.
WHOLE_READ_BYTES = 256 << 20
_PIECE_BYTES = 8 << 20
_END_BYTES = 256 << 10


class CheckedFileIO(StorageFileIO):
    """A FileIO that verifies whole files when they are opened, including the page headers of Parquet files."""

    _sizes_bytes: Mapping[str, int] = MappingProxyType({})

    @classmethod
    def like(cls, file_io: StorageFileIO, sizes_bytes: Mapping[str, int]) -> CheckedFileIO:
        """Return a verifying FileIO with the same access as another FileIO.

        Args:
            file_io: The FileIO to resolve files with.
            sizes_bytes: Sizes recorded in the manifests, by location. A larger file is rejected before it is read
                completely, because a client might replace a small file with one of terabytes.
        """
        checked = cls.__new__(cls)
        checked.__setstate__(file_io.__getstate__())
        checked._sizes_bytes = sizes_bytes
        return checked

    def new_input(self, location: str) -> StorageInputFile:
        """Return a file to read. Raises InvalidLocationError."""
        storage, path = self.resolve(location)
        file = _CheckedFile(location, storage, path, shown=self.location(location))
        file.listed_bytes = self._sizes_bytes.get(location)
        return file


class _CheckedFile(StorageInputFile):
    #: Size recorded in the manifest, or None if it is not known.
    listed_bytes: int | None = None

    def open(self, seekable: bool = True) -> InputStream:
        """Return the verified file.

        Raises StorageError, and CorruptFileError for a file that is larger than recorded in its manifest or that does
        not match its checksums.
        """
        limit_bytes = WHOLE_READ_BYTES if self.listed_bytes is None else min(WHOLE_READ_BYTES, self.listed_bytes + 1)
        with reading_table_file():
            head = self._storage.read(self._path, offset=0, length=limit_bytes)
        is_larger = self.listed_bytes is not None and self.listed_bytes < (
            len(self) if len(head) == WHOLE_READ_BYTES else len(head)
        )
        if is_larger:
            raise CorruptFileError(
                f"{self.shown!r} is larger than the {self.listed_bytes} bytes in its manifest; restore it",
                path=self.shown,
            )
        if len(head) < WHOLE_READ_BYTES:
            check_table_file(head, self.shown)
            if SealedKind.of(self.shown) is SealedKind.PARQUET or footer_bytes(head):
                check_parquet_pages(len(head), _reader_of(head), self.shown)
            return io.BytesIO(head)
        check = PieceCheck(self.shown)
        check.add(head)
        del head
        for offset in range(WHOLE_READ_BYTES, len(self), _PIECE_BYTES):
            check.add(self.read_range(offset, min(_PIECE_BYTES, len(self) - offset)))
        check.finish(lambda n_bytes: self.read_range(len(self) - n_bytes, n_bytes))
        check_parquet_pages(len(self), self.read_range, self.shown)
        return super().open()


def check_whole(data: bytes, path: str) -> bool:
    """Verify a table file against its checksums, or the pages of a Parquet file without checksums.

    Args:
        data: Contents of the file.
        path: Path of the file.

    Returns:
        Whether it has checksums.

    Raises:
        CorruptFileError: The file is damaged.
    """
    has_seals = check_table_file(data, path)
    if not has_seals and SealedKind.of(path) is SealedKind.PARQUET:
        check_parquet_pages(len(data), _reader_of(data), path)
    return has_seals


def check_parquet_pages(size_bytes: int, read: Callable[[int, int], bytes], path: str) -> None:
    """Verify a Parquet file's footer and pages: page checksums, if there are any, and declared sizes.

    Args:
        size_bytes: Size of the file.
        read: Returns the bytes at an offset, of a length.
        path: Path of the file, for errors.

    Raises:
        CorruptFileError: The file is damaged.
    """
    from trinitylake_ops.iceberg.validation.files import check_pages

    end = parquet_end(size_bytes, read, path)
    check_parquet_claims(read_footer(end, path), size_bytes, path)
    check_pages(end, read, path)


def parquet_end(size_bytes: int, read: Callable[[int, int], bytes], path: str) -> bytes:
    """Return the last bytes of a Parquet file, including its whole footer.

    Args:
        size_bytes: Size of the file.
        read: Returns the bytes at an offset, of a length.
        path: Path of the file, for errors.

    Raises:
        CorruptFileError: The declared size of the footer is not valid.
    """
    end_bytes = min(size_bytes, _END_BYTES)
    end = read(size_bytes - end_bytes, end_bytes)
    return end_with_claims(end, size_bytes, lambda n_bytes: read(size_bytes - n_bytes, n_bytes), path)


def _reader_of(data: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, length: data[offset : offset + length]


def files_below(io: StorageFileIO, folder: str) -> Iterator[FileInfo]:
    """Yield the files below a folder, with their paths in the folder's storage.

    Args:
        io: File IO of the lakehouse.
        folder: A URI that ends with ``/``.

    Raises:
        InvalidLocationError: The URI is not valid.
        LocationNotAllowedError: The folder may not be read.
        StorageError: The storage cannot list it.
    """
    storage, path = io.resolve(f"{folder}any")
    yield from storage.list(path.removesuffix("any"))


def at_managed_location(metadata: TableMetadata, definition: TableDef, io: StorageFileIO) -> TableMetadata:
    """Return metadata with the managed location of a MANAGED table, if it contains the location of another lakehouse.

    Args:
        metadata: The metadata.
        definition: Definition of the table.
        io: File IO of the lakehouse.
    """
    if not definition.is_managed or is_managed_location(metadata.location, definition, io):
        return metadata
    if table_id_of(metadata.location) != definition.id:
        return metadata
    home = io.home_of(definition.id)
    read_at = to_uri(io.root, io.location(metadata_uri(definition, io.root)))
    if read_at.startswith(home):  # otherwise not this lakehouse but the source of this copy was moved
        io.note_former_location(metadata.location)
    return metadata.model_copy(update={"location": own_location(definition, home)})


def is_managed_location(location: str, definition: TableDef, io: StorageFileIO) -> bool:
    """Whether a location is the managed location of a table under the root or a table root of the lakehouse.

    Args:
        location: A URI.
        definition: Definition of the table.
        io: File IO of the lakehouse.
    """
    try:
        if location == own_location(definition, io.root):
            return True
        is_under_table_root = any(location == own_location(definition, root) for root in io.table_roots)
        return is_under_table_root and not io.note_former_location(location)
    except InvalidDefinitionError:  # the id is not a valid folder name
        return False


def own_location(definition: TableDef, root: str) -> str:
    """Return a MANAGED table's location under a root. Raises InvalidDefinitionError for an invalid id."""
    return f"{root}{table_prefix(definition.id)}".rstrip("/")
