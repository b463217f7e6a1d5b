"""Run tests with the oldest library versions that pyproject.toml allows, each in a new environment."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import SUMMARY_PROPERTY
from tests.environments import PROJECT, declared_requirements, make_environment

_TIMEOUT_MINUTES = 20


@dataclass(frozen=True)
class OldVersion:
    """An old version of a library, and the tests that run with it."""

    #: The pinned version, for example ``pyspark==4.0.0``.
    version: str
    #: Test files and tests to run.
    tests: tuple[str, ...]
    #: Name parts of tests that the version cannot pass.
    deselected: tuple[str, ...] = ()
    #: Requirements of the version that conflict with the pins of the project.
    requirements: tuple[str, ...] = ()


#: PyIceberg 0.11 does not retry a commit after a conflict; callers must call `Table.refresh()` and try again.
_CONFLICT_TESTS = (
    "test_concurrent_appends_of_two_catalogs_are_all_committed",
    "test_two_handles_of_a_table_share_a_transaction",
    "test_compact_tables_commits_once_per_run",
)
#: Spark before 4.2 cannot read streams from this source, and Spark 4.0 cannot write them and has no TIME type.
_STREAM_TESTS = ("stream",)
_SPARK_TESTS = (
    "tests/spark/test_data_source.py",
    "tests/spark/test_engines.py::test_verify_expiry_purge_and_orphans",
    "tests/spark/test_table_reader.py",
    "tests/spark/test_table_writer.py",
)
MATRIX = (
    OldVersion(
        "pyiceberg==0.11.0",
        ("tests/iceberg", "tests/operations/test_compact_tables.py", "tests/operations/test_trim.py"),
        _CONFLICT_TESTS,
        ("cachetools<7", "rich<15"),
    ),
    OldVersion("pyspark==4.0.0", _SPARK_TESTS, (*_STREAM_TESTS, "test_all_types_are_read_as_written")),
    OldVersion("pyspark==4.1.0", _SPARK_TESTS, _STREAM_TESTS),
)


@pytest.mark.soak
@pytest.mark.timeout((_TIMEOUT_MINUTES + 20) * 60)
@pytest.mark.parametrize("old", MATRIX, ids=lambda old: old.version)
def test_old_version_passes_tests(old: OldVersion, tmp_path: Path, record_property: pytest.RecordProperty) -> None:
    environment = make_environment(tmp_path / "environment", ("all", "test"), (old.version, *old.requirements))
    variables = {**os.environ, "PYTHONPATH": str(PROJECT)}
    process = subprocess.run(
        [
            *(environment.folder / "bin" / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            # Older versions of Spark leave sockets open until they are garbage-collected.
            *("-W", "ignore::ResourceWarning", "-W", "ignore::pytest.PytestUnraisableExceptionWarning"),
            *("--basetemp", tmp_path / "tests", "-k", " and ".join(f"not {name}" for name in old.deselected)),
            *old.tests,
        ],
        cwd=PROJECT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_MINUTES * 60,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-8_000:]
    record_property(SUMMARY_PROPERTY, f"{old.version}: {process.stdout.splitlines()[-1].strip('= ')}")


def test_deselected_tests_exist() -> None:
    for old in MATRIX:
        paths = [PROJECT / test.partition("::")[0] for test in old.tests]
        files = [file for path in paths for file in (path.rglob("test_*.py") if path.is_dir() else [path])]
        text = "".join(file.read_text() for file in files)
        assert [name for name in old.deselected if name.startswith("test_") and f"def {name}(" not in text] == []


def test_matrix_contains_lowest_allowed_versions() -> None:
    specifiers = {
        requirement.name: requirement.specifier
        for extra in ("", "spark")
        for requirement in declared_requirements()[extra]
    }
    for old in MATRIX:
        name, _, version = old.version.partition("==")
        assert version in specifiers[name]
    for name, lowest in (("pyiceberg", "0.11.0"), ("pyspark", "4.0.0")):
        assert f"{name}=={lowest}" in {old.version for old in MATRIX}
        assert any(
            specifier.operator == ">=" and lowest.startswith(specifier.version) for specifier in specifiers[name]
        )
