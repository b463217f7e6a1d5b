"""Test that the jar of the catalog is built from its sources: compare their digest, and in the soak run every byte."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from trinitylake_ops.spark.catalog import registration
from trinitylake_ops.spark.catalog.registration import CATALOG_CLASS, CATALOG_JAR, MANIFEST, manifest, source_files

ROOT = Path(__file__).parents[2]
REBUILD = "run scripts/build_catalog_jar.py"


def test_jar_matches_sources() -> None:
    with zipfile.ZipFile(CATALOG_JAR) as jar:
        names = jar.namelist()
        assert jar.read(MANIFEST).decode() == manifest(), f"the jar is stale: {REBUILD}"
    classes = {name.partition("$")[0].removesuffix(".class") for name in names if name != MANIFEST}
    assert classes == {name.removesuffix(".java") for name in source_files()}
    assert CATALOG_CLASS.replace(".", "/") in classes


def test_jar_of_zipped_package_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert registration.jar_file() == CATALOG_JAR
    monkeypatch.setattr(registration, "CATALOG_JAR", tmp_path / "package.zip" / CATALOG_JAR.name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copy = registration.jar_file()
    assert copy.is_relative_to(tmp_path / "cache")
    assert copy.read_bytes() == CATALOG_JAR.read_bytes()
    copy.write_bytes(b"damaged")
    assert registration.jar_file().read_bytes() == CATALOG_JAR.read_bytes()


@pytest.mark.soak
@pytest.mark.debian_packages
def test_jar_build_is_reproducible(tmp_path: Path) -> None:
    (compiler,) = Path("/usr/lib/jvm").glob("java-17-openjdk-*/bin/javac")
    for name in ("first.jar", "second.jar"):
        command = [sys.executable, str(ROOT / "scripts/build_catalog_jar.py"), str(tmp_path / name)]
        environment = {**os.environ, "JAVAC": str(compiler), "PYTHONPATH": str(ROOT)}
        process = subprocess.run(command, env=environment, text=True, capture_output=True)
        assert process.returncode == 0, process.stderr
    assert (tmp_path / "first.jar").read_bytes() == (tmp_path / "second.jar").read_bytes()
    assert (tmp_path / "first.jar").read_bytes() == CATALOG_JAR.read_bytes(), REBUILD
