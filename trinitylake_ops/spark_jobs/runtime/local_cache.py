"""Files that this machine may keep between runs, and may lose at any time: one folder per user."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import platformdirs

_APPLICATION = "trinitylake-ops"


def cache_folder() -> Path:
    """Return the user's cache folder, created, or a private temporary one if none can be written.

    The temporary folder (for users without a home) lives as long as this process.
    """
    folder = platformdirs.user_cache_path(_APPLICATION)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return temporary_folder(_APPLICATION)
    return folder if os.access(folder, os.W_OK | os.X_OK) else temporary_folder(_APPLICATION)


@functools.cache
def temporary_folder(purpose: str) -> Path:
    """Return a private folder for ``purpose`` that is removed when this process ends. There is one per purpose."""
    folder = Path(tempfile.mkdtemp(prefix=f"{purpose}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def place_file(path: Path, write: Callable[[BinaryIO], object], *, mode: int = 0o644) -> None:
    """Create or replace ``path`` atomically. A reader sees all that ``write`` wrote, or the old file."""
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
