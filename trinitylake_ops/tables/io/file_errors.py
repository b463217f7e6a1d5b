"""The storage's errors, as pyiceberg's FileIO contract names them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trinitylake_ops.errors import (
    FileExistsAlreadyError,
    FileMissingError,
    LocationNotAllowedError,
    StorageError,
    StoragePermissionError,
)


class TableFileMissingError(FileMissingError, FileNotFoundError):
    """A FileMissingError that pyiceberg recognises."""


class TableFileExistsError(FileExistsAlreadyError, FileExistsError):
    """A FileExistsAlreadyError that pyiceberg recognises."""


class TableFilePermissionError(StoragePermissionError, PermissionError):
    """A StoragePermissionError that pyiceberg recognises."""


class TableFileUnreadableError(StorageError):
    """The storage does not return a table file, for example an archived object or a link that leads to itself."""


@contextmanager
def reading_table_file() -> Iterator[None]:
    """Raise TableFileUnreadableError for a StorageError that no other class describes: it concerns this file only."""
    try:
        yield
    except StorageError as error:
        if type(error) is not StorageError:
            raise
        raise TableFileUnreadableError(error.message, path=error.path) from error


@contextmanager
def as_pyiceberg_expects(location: str) -> Iterator[None]:
    """Raise the storage's errors also as the built-in ones that pyiceberg's FileIO contract names."""
    try:
        yield
    except FileMissingError as error:
        raise TableFileMissingError(f"table file {location!r} is missing", path=location) from error
    except FileExistsAlreadyError as error:
        raise TableFileExistsError(f"table file {location!r} exists already", path=location) from error
    except StoragePermissionError as error:
        # The message says why, and names the path below its storage's root.
        message = error.message.replace(repr(error.path), repr(location)) if error.path else error.message
        if isinstance(error, LocationNotAllowedError):  # a built-in PermissionError already
            raise LocationNotAllowedError(message, path=location) from error
        raise TableFilePermissionError(message, path=location) from error
