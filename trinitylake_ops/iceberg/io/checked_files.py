"""Find and list the files of tables, and check them before their rows are rewritten or they are copied.

An export of nodes or definitions, and a lakehouse whose files were copied or moved, have metadata with the former
place. Only the owner of that root may write there. So the table's own place replaces the location as the table is
loaded. New files go there, and existing files are read where they are.
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

#: A file up to this size is read in one request and held.
HELD_BYTES = 256 << 20
_PIECE_BYTES = 8 << 20
_END_BYTES = 256 << 10


class CheckedFileIO(StorageFileIO):
    """A FileIO whose files are checked as a whole when they are opened.

    For Parquet, the claims of pages are checked, too.
    """

    _sizes_bytes: Mapping[str, int] = MappingProxyType({})

    @classmethod
    def like(cls, file_io: StorageFileIO, sizes_bytes: Mapping[str, int]) -> CheckedFileIO:
        """Return a checked FileIO over another.

        Args:
            file_io: The FileIO that finds the files.
            sizes_bytes: The sizes in the manifests, by location. A file that is larger is rejected before it is read
                whole, because a client may replace a small file by one of terabytes.
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
    #: The size in the manifest, None if it is not known.
    listed_bytes: int | None = None

    def open(self, seekable: bool = True) -> InputStream:
        """Return the file.

        Raises CorruptFileError for a file that is larger than its manifest lists, or that does not match its checksums.
        Raises StorageError.
        """
        limit_bytes = HELD_BYTES if self.listed_bytes is None else min(HELD_BYTES, self.listed_bytes + 1)
        with reading_table_file():
            head = self._storage.read(self._path, offset=0, length=limit_bytes)
        is_larger = self.listed_bytes is not None and self.listed_bytes < (
            len(self) if len(head) == HELD_BYTES else len(head)
        )
        if is_larger:
            raise CorruptFileError(
                f"the file is larger than the {self.listed_bytes} bytes in its manifest", path=self.shown
            )
        if len(head) < HELD_BYTES:
            check_table_file(head, self.shown)
            if SealedKind.of(self.shown) is SealedKind.PARQUET or footer_bytes(head):
                check_parquet_pages(len(head), _slices(head), self.shown)
            return io.BytesIO(head)
        check = PieceCheck(self.shown)
        check.add(head)
        del head
        for offset in range(HELD_BYTES, len(self), _PIECE_BYTES):
            check.add(self.read_range(offset, min(_PIECE_BYTES, len(self) - offset)))
        check.finish(lambda n_bytes: self.read_range(len(self) - n_bytes, n_bytes))
        check_parquet_pages(len(self), self.read_range, self.shown)
        return super().open()


def check_whole(data: bytes, path: str) -> bool:
    """Check a file of a table by its seals, or a Parquet file without seals by its pages. Returns whether it has seals.

    Raises CorruptFileError.
    """
    has_seals = check_table_file(data, path)
    if not has_seals and SealedKind.of(path) is SealedKind.PARQUET:
        check_parquet_pages(len(data), _slices(data), path)
    return has_seals


def check_parquet_pages(size_bytes: int, read: Callable[[int, int], bytes], path: str) -> None:
    """Check a Parquet file's footer and pages: their checksums, if there are any, and their claims.

    ``read`` returns the bytes at an offset, of a length. Raises CorruptFileError, and what ``read`` raises.
    """
    from trinitylake_ops.iceberg.validation.files import check_pages

    end = parquet_end(size_bytes, read, path)
    check_parquet_claims(read_footer(end, path), size_bytes, path)
    check_pages(end, read, path)


def parquet_end(size_bytes: int, read: Callable[[int, int], bytes], path: str) -> bytes:
    """Return a Parquet file's last bytes, all of its footer among them.

    Raises CorruptFileError, and what ``read`` raises.
    """
    end_bytes = min(size_bytes, _END_BYTES)
    end = read(size_bytes - end_bytes, end_bytes)
    return end_with_claims(end, size_bytes, lambda n_bytes: read(size_bytes - n_bytes, n_bytes), path)


def _slices(data: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, length: data[offset : offset + length]


def files_below(io: StorageFileIO, folder: str) -> Iterator[FileInfo]:
    """Yield the files below a folder, a URI that ends with ``/``. Their paths are those of its storage.

    Raises InvalidLocationError, LocationNotAllowedError, StorageError.
    """
    storage, path = io.resolve(f"{folder}any")
    yield from storage.list(path.removesuffix("any"))


def at_managed_location(metadata: TableMetadata, definition: TableDef, io: StorageFileIO) -> TableMetadata:
    """Return metadata with the place of a MANAGED table as its location, if it names that of another lakehouse."""
    if not definition.is_managed or is_managed_location(metadata.location, definition, io):
        return metadata
    if table_id_of(metadata.location) != definition.id:
        return metadata
    home = io.home_of(definition.id)
    read_at = to_uri(io.root, io.location(metadata_uri(definition, io.root)))
    if read_at.startswith(home):  # otherwise the source of this copy was moved
        io.note_former_location(metadata.location)
    return metadata.model_copy(update={"location": own_location(definition, home)})


def is_managed_location(location: str, definition: TableDef, io: StorageFileIO) -> bool:
    """Whether a location, a URI, is a MANAGED table's place: under the root, or under a table root of its lakehouse."""
    try:
        if location == own_location(definition, io.root):
            return True
        is_under_table_root = any(location == own_location(definition, root) for root in io.table_roots)
        return is_under_table_root and not io.note_former_location(location)
    except InvalidDefinitionError:  # such an id names no folder
        return False


def own_location(definition: TableDef, root: str) -> str:
    """Return a MANAGED table's place under a root. Raises InvalidDefinitionError for an id that names no folder."""
    return f"{root}{table_prefix(definition.id)}".rstrip("/")
