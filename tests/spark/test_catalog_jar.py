"""The jar of the catalog is that of its sources: by their digest, and in the long run byte for byte."""

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
AGAIN = "run scripts/build_catalog_jar.py"


def test_the_jar_is_of_the_present_sources() -> None:
    with zipfile.ZipFile(CATALOG_JAR) as packed:
        names = packed.namelist()
        assert packed.read(MANIFEST).decode() == manifest(), f"the jar is stale: {AGAIN}"
    classes = {name.partition("$")[0].removesuffix(".class") for name in names if name != MANIFEST}
    assert classes == {name.removesuffix(".java") for name in source_files()}
    assert CATALOG_CLASS.replace(".", "/") in classes


def test_a_package_in_a_zip_file_has_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_the_jar_is_made_again_with_the_same_bytes(tmp_path: Path) -> None:
    (compiler,) = Path("/usr/lib/jvm").glob("java-17-openjdk-*/bin/javac")
    for name in ("first.jar", "second.jar"):
        words = [sys.executable, str(ROOT / "scripts/build_catalog_jar.py"), str(tmp_path / name)]
        environment = {**os.environ, "JAVAC": str(compiler), "PYTHONPATH": str(ROOT)}
        made = subprocess.run(words, env=environment, text=True, capture_output=True)
        assert made.returncode == 0, made.stderr
    assert (tmp_path / "first.jar").read_bytes() == (tmp_path / "second.jar").read_bytes()
    assert (tmp_path / "first.jar").read_bytes() == CATALOG_JAR.read_bytes(), AGAIN
