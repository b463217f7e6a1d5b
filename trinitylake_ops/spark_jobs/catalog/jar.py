"""The jar that is the catalog in Spark.

``scripts/build_catalog_jar.py`` makes it of the sources beside it, and it tells their digest.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from pathlib import Path

from trinitylake_ops.spark_jobs.runtime.local_cache import cache_folder, place_file

#: The class that Spark loads.
CATALOG_CLASS = "trinitylake.spark.TrinityLakeCatalog"
CATALOG_JAR = Path(__file__).with_name("trinitylake-spark-catalog.jar")
SOURCES = Path(__file__).with_name("java")
MANIFEST = "META-INF/MANIFEST.MF"

_DIGEST = "Sources-SHA256"


def jar_file() -> Path:
    """Return the jar as a file. A package in a zip file has it inside, and gets a copy in the user's cache folder."""
    if CATALOG_JAR.is_file():
        return CATALOG_JAR
    data = resources.files(__package__).joinpath(CATALOG_JAR.name).read_bytes()
    copy = cache_folder() / f"{CATALOG_JAR.stem}-{hashlib.sha256(data).hexdigest()[:16]}.jar"
    if not (copy.is_file() and copy.read_bytes() == data):
        place_file(copy, lambda file: file.write(data))
    return copy


def source_files() -> list[str]:
    """Return the Java sources, below ``SOURCES``, in a fixed order."""
    return sorted(path.relative_to(SOURCES).as_posix() for path in SOURCES.rglob("*.java"))


def manifest() -> str:
    """Return the manifest that a jar of the present sources has."""
    digest = hashlib.sha256()
    for name in source_files():
        data = (SOURCES / name).read_bytes()
        digest.update(f"{name} {len(data)}\n".encode() + data)
    # A line has at most 72 bytes, so the digest is in two.
    text = digest.hexdigest()
    return f"Manifest-Version: 1.0\r\n{_DIGEST}: {text[:48]}\r\n {text[48:]}\r\n\r\n"
