"""Register the catalog in a session: the jar, the data source, and a catalog name for each lakehouse.

``scripts/build_catalog_jar.py`` builds the jar from the Java sources in this folder. The manifest of the jar contains
the digest of the sources.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from pyspark.sql import SparkSession

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.spark.catalog.source import CatalogSource
from trinitylake_ops.spark.runtime.connect import is_remote
from trinitylake_ops.spark.runtime.java import cache_folder, replace_file
from trinitylake_ops.spark.source.data_source import register_data_source
from trinitylake_ops.storage.options import is_secret

#: The catalog class in the jar.
CATALOG_CLASS = "trinitylake.spark.TrinityLakeCatalog"
CATALOG_JAR = Path(__file__).with_name("trinitylake-spark-catalog.jar")
SOURCES = Path(__file__).with_name("java")
MANIFEST = "META-INF/MANIFEST.MF"

_DIGEST = "Sources-SHA256"


def jar_file() -> Path:
    """Return the path of the jar. If the package is in a zip file, the jar is copied to the user's cache folder."""
    if CATALOG_JAR.is_file():
        return CATALOG_JAR
    data = resources.files(__package__).joinpath(CATALOG_JAR.name).read_bytes()
    copy = cache_folder() / f"{CATALOG_JAR.stem}-{hashlib.sha256(data).hexdigest()[:16]}.jar"
    if not (copy.is_file() and copy.read_bytes() == data):
        replace_file(copy, lambda file: file.write(data))
    return copy


def source_files() -> list[str]:
    """Return the Java sources, relative to ``SOURCES``, in a fixed order."""
    return sorted(path.relative_to(SOURCES).as_posix() for path in SOURCES.rglob("*.java"))


def manifest() -> str:
    """Return the manifest of a jar that is built from the current sources."""
    digest = hashlib.sha256()
    for name in source_files():
        data = (SOURCES / name).read_bytes()
        digest.update(f"{name} {len(data)}\n".encode() + data)
    # A line of a manifest has at most 72 bytes, so the digest needs two.
    text = digest.hexdigest()
    return f"Manifest-Version: 1.0\r\n{_DIGEST}: {text[:48]}\r\n {text[48:]}\r\n\r\n"


_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_CREDENTIALS = "pass credentials in the environment of the driver"
_OF_SPARK = ("spark_catalog", "system", "session")


def catalog_settings(name: str, root: str, storage: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the Spark settings that define a lakehouse as a catalog of the session's SQL.

    Args:
        name: The catalog name, an identifier that need not be quoted in SQL.
        root: The root URI of the lakehouse.
        storage: Storage options without credentials, for example ``{"endpoint": "http://..."}``.

    Raises:
        InvalidInputError: If the name is not an identifier or is reserved, or an option is a credential.
    """
    if _NAME.fullmatch(name) is None or name.lower() in _OF_SPARK:
        raise InvalidInputError(f"invalid catalog name {name!r}; use letters, digits and underscores")
    storage_options = dict(storage or {})
    if secret := next(filter(is_secret, storage_options), None):
        raise InvalidInputError(f"option {secret!r} would be visible in Spark's settings; {_CREDENTIALS}")
    prefix = f"spark.sql.catalog.{name}"
    options = {f"{prefix}.storage.{option}": value for option, value in storage_options.items()}
    return {prefix: CATALOG_CLASS, f"{prefix}.root": root, **options}


def register_catalog(spark: SparkSession, name: str, root: str, storage: Mapping[str, str] | None = None) -> None:
    """Register a lakehouse as a catalog in the SQL of a running session.

    Enables ``SELECT * FROM name.namespace.table VERSION AS OF 3``. Also adds the jar to sessions that ``build_session``
    did not create. The lakehouse is opened when the catalog is first used.

    Args:
        spark: The session.
        name: The catalog name.
        root: The root URI of the lakehouse.
        storage: Storage options, without credentials.

    Raises:
        InvalidInputError: If :func:`catalog_settings` raises it, or if the session has a different catalog of this
            name.
    """
    settings = catalog_settings(name, root, storage)
    # Spark caches a catalog at its first use, and ignores later changes to its settings.
    existing = {key: spark.conf.get(key, None) for key in settings}
    if existing[f"spark.sql.catalog.{name}"] is not None and existing != settings:
        raise InvalidInputError(f"this session already has a different catalog {name!r}; choose another name")
    register_catalog_source(spark)
    _add_jar(spark)
    for key, value in settings.items():
        spark.conf.set(key, value)
    if not is_remote(spark):
        # Load the catalog in this thread, which has the jar on its class path. Other threads use the cached catalog.
        spark._jsparkSession.sessionState().catalogManager().catalog(name)


def register_catalog_source(spark: SparkSession) -> None:
    """Register the data source for rows, and the data source to which the catalog sends requests."""
    register_data_source(spark)
    spark.dataSource.register(CatalogSource)


def _add_jar(spark: SparkSession) -> None:
    """Add the jar to the session, unless its JVM already has the catalog class."""
    if is_remote(spark):
        spark.addArtifacts(str(jar_file()))  # does nothing if the session has the same file
        return
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    loader = jvm.Thread.currentThread().getContextClassLoader()
    if loader.getResource(CATALOG_CLASS.replace(".", "/") + ".class") is None:
        spark._jsparkSession.sessionState().resourceLoader().addJar(jar_file().as_uri())
