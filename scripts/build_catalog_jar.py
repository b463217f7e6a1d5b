"""Build the jar of the Spark SQL catalog reproducibly, against PySpark's jars.

    python scripts/build_catalog_jar.py [TARGET]

It needs javac from Debian's openjdk-17-jdk-headless, on the PATH or in ``JAVAC``. Nothing else needs javac, because the
jar is part of the repository.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pyspark

from trinitylake_ops.spark.catalog.registration import CATALOG_JAR, MANIFEST, SOURCES, manifest, source_files

_JARS = Path(pyspark.__file__).parent / "jars"
_RELEASE = "17"
#: The earliest time that a zip file can contain.
_TIME = (1980, 1, 1, 0, 0, 0)
_MODE = 0o644 << 16


def main(target: Path) -> int:
    """Write the jar and return the exit code of javac."""
    with tempfile.TemporaryDirectory() as folder:
        command = [os.environ.get("JAVAC", "javac"), "--release", _RELEASE, "-proc:none"]
        command += ["-Xlint:all,-path,-deprecation", "-XDsuppressNotes", "-Werror"]
        command += ["-classpath", f"{_JARS}/*", "-d", folder, *(str(SOURCES / name) for name in source_files())]
        process = subprocess.run(command, check=False)
        if process.returncode:
            return process.returncode
        # Do not compress, because the result would depend on the version of zlib.
        with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as jar:
            _add(jar, MANIFEST, manifest().encode())
            for path in sorted(Path(folder).rglob("*.class")):
                _add(jar, path.relative_to(folder).as_posix(), path.read_bytes())
    return 0


def _add(jar: zipfile.ZipFile, name: str, data: bytes) -> None:
    entry = zipfile.ZipInfo(name, _TIME)
    entry.create_system = 3
    entry.external_attr = _MODE
    jar.writestr(entry, data)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else CATALOG_JAR))
