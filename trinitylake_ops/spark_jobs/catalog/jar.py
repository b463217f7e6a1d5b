"""The jar that is the catalog in Spark, and the settings by which a session has it.

``scripts/build_catalog_jar.py`` makes it of the sources beside it, and it tells their digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

#: The class that Spark loads.
CATALOG_CLASS = "trinitylake.spark.TrinityLakeCatalog"
CATALOG_JAR = Path(__file__).with_name("trinitylake-spark-catalog.jar")
SOURCES = Path(__file__).with_name("java")
MANIFEST = "META-INF/MANIFEST.MF"

_DIGEST = "Sources-SHA256"
#: Spark's setting of jars that come with a session.
JARS = "spark.jars"


def catalog_settings(name: str, root: str, storage: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the settings of a session that make a lakehouse the catalog ``name`` of its SQL.

    ``storage`` are options of the storage without credentials, such as ``{"endpoint": "http://..."}``.
    """
    prefix = f"spark.sql.catalog.{name}"
    given = {f"{prefix}.storage.{option}": value for option, value in (storage or {}).items()}
    return {prefix: CATALOG_CLASS, f"{prefix}.root": root, **given}


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
