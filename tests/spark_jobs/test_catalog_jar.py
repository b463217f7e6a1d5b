"""The jar of the catalog is that of its sources: by their digest, and in the long run byte for byte."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from trinitylake_ops.spark_jobs.catalog.jar import CATALOG_CLASS, CATALOG_JAR, MANIFEST, manifest, source_files

ROOT = Path(__file__).parents[2]
AGAIN = "run scripts/build_catalog_jar.py"


def test_the_jar_is_of_the_present_sources() -> None:
    with zipfile.ZipFile(CATALOG_JAR) as jar:
        names = jar.namelist()
        assert jar.read(MANIFEST).decode() == manifest(), f"the jar is stale: {AGAIN}"
    classes = {name.partition("$")[0].removesuffix(".class") for name in names if name != MANIFEST}
    assert classes == {name.removesuffix(".java") for name in source_files()}
    assert CATALOG_CLASS.replace(".", "/") in classes


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
