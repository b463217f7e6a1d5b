"""Register the catalog in a session: the jar, the data source and a name for each lakehouse.

``scripts/build_catalog_jar.py`` makes it of the sources beside it, and it tells their digest.
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
        replace_file(copy, lambda file: file.write(data))
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


_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_CREDENTIALS = "credentials come from the environment of the driver"
_OF_SPARK = ("spark_catalog", "system", "session")


def catalog_settings(name: str, root: str, storage: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the settings by which a session's SQL knows a lakehouse as the catalog ``name``.

    ``storage`` are options of the storage, such as ``{"endpoint": "http://..."}``, without credentials. Raises
    InvalidInputError for a name that SQL would have to quote, and for a credential.
    """
    if _NAME.fullmatch(name) is None or name.lower() in _OF_SPARK:
        raise InvalidInputError(f"{name!r} cannot be the name of a catalog: take letters, digits and underscores")
    given = dict(storage or {})
    if secret := next(filter(is_secret, given), None):
        raise InvalidInputError(f"the option {secret!r} would be seen in Spark's settings; {_CREDENTIALS}")
    prefix = f"spark.sql.catalog.{name}"
    options = {f"{prefix}.storage.{option}": value for option, value in given.items()}
    return {prefix: CATALOG_CLASS, f"{prefix}.root": root, **options}


def register_catalog(spark: SparkSession, name: str, root: str, storage: Mapping[str, str] | None = None) -> None:
    """Make a lakehouse known to the SQL of a running session as the catalog ``name``.

    ``SELECT * FROM name.namespace.table VERSION AS OF 3``. Sessions that ``build_session`` did not make get the jar
    here. The lakehouse is looked for when the name is used. Arguments and errors as in :func:`catalog_settings`.
    """
    settings = catalog_settings(name, root, storage)
    # Spark keeps a catalog that was used once, whatever its settings become.
    known = {key: spark.conf.get(key, None) for key in settings}
    if known[f"spark.sql.catalog.{name}"] is not None and known != settings:
        raise InvalidInputError(f"this session has another catalog {name!r} already: take another name")
    register_catalog_source(spark)
    _add_jar(spark)
    for key, value in settings.items():
        spark.conf.set(key, value)
    if not is_remote(spark):
        # Made now, by this thread, which has the jar. Threads of a program use what is made.
        spark._jsparkSession.sessionState().catalogManager().catalog(name)


def register_catalog_source(spark: SparkSession) -> None:
    """Make the data sources that the catalog asks known to a session, also the one of rows."""
    register_data_source(spark)
    spark.dataSource.register(CatalogSource)


def _add_jar(spark: SparkSession) -> None:
    """Give the session the jar, unless its JVM has the catalog already."""
    if is_remote(spark):
        spark.addArtifacts(str(jar_file()))  # nothing happens if the session has the same file
        return
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    loader = jvm.Thread.currentThread().getContextClassLoader()
    if loader.getResource(CATALOG_CLASS.replace(".", "/") + ".class") is None:
        spark._jsparkSession.sessionState().resourceLoader().addJar(jar_file().as_uri())
