"""Older versions of libraries that pyproject.toml allows: each in a fresh environment, with the tests that fit it."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import SHOWN
from tests.environments import PROJECT, declared, make_environment

_MINUTES = 20


@dataclass(frozen=True)
class Older:
    """A version, the files of tests that run on it, and those of them that it cannot pass, for a reason."""

    version: str
    files: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    with_it: tuple[str, ...] = ()  # what it needs older than it is pinned


#: pyiceberg 0.11 does not repeat a commit that met another one: `Table.refresh()` and again is the caller's.
_NO_REPEATS = (
    "test_concurrent_appends_of_two_catalogs_are_all_committed",
    "test_two_handles_of_a_table_share_a_transaction",
    "test_a_run_commits_once",
)
#: Spark before 4.2 reads no streams by this source, and 4.0 writes none; 4.0 has no type for times of a day.
_NO_STREAM_READS = ("stream",)
_SPARK = (
    "tests/spark/test_data_source.py",
    "tests/spark/test_engines.py::test_verify_expiry_purge_and_orphans",
    "tests/spark/test_table_reader.py",
    "tests/spark/test_table_writer.py",
)
MATRIX = (
    Older(
        "pyiceberg==0.11.0",
        ("tests/iceberg", "tests/operations/test_compact_tables.py", "tests/operations/test_trim.py"),
        _NO_REPEATS,
        ("cachetools<7", "rich<15"),
    ),
    Older("pyspark==4.0.0", _SPARK, (*_NO_STREAM_READS, "test_every_type_there_and_back")),
    Older("pyspark==4.1.0", _SPARK, _NO_STREAM_READS),
)


@pytest.mark.soak
@pytest.mark.timeout((_MINUTES + 20) * 60)
@pytest.mark.parametrize("older", MATRIX, ids=lambda older: older.version)
def test_an_older_version(older: Older, tmp_path: Path, record_property: pytest.RecordProperty) -> None:
    made = make_environment(tmp_path / "environment", ("all", "test"), (older.version, *older.with_it))
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    ran = subprocess.run(
        [
            *(made.folder / "bin" / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            # Older Spark leaves sockets to the garbage collector.
            *("-W", "ignore::ResourceWarning", "-W", "ignore::pytest.PytestUnraisableExceptionWarning"),
            *("--basetemp", tmp_path / "tests", "-k", " and ".join(f"not {name}" for name in older.left_out)),
            *older.files,
        ],
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_MINUTES * 60,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-8_000:]
    record_property(SHOWN, f"{older.version}: {ran.stdout.splitlines()[-1].strip('= ')}")


def test_the_matrix_begins_where_the_bounds_do() -> None:
    bounds = {one.name: one.specifier for extra in ("", "spark") for one in declared()[extra]}
    for older in MATRIX:
        name, _, version = older.version.partition("==")
        assert version in bounds[name]
    for name, lower in (("pyiceberg", "0.11.0"), ("pyspark", "4.0.0")):
        assert f"{name}=={lower}" in {older.version for older in MATRIX}
        assert any(one.operator == ">=" and lower.startswith(one.version) for one in bounds[name])
