"""Small and read-only file systems for tests, which work with and without permission to mount."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY_UID = 65534


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[bool]:
    """Mount a disk of this size at ``folder``, or limit the size of files if mounting is not allowed."""
    folder.mkdir()
    if _mount("-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)):
        try:
            yield True
        finally:
            subprocess.run(["umount", str(folder)], check=True)
    else:
        with file_size_limit(size_bytes):
            yield False


@contextmanager
def file_size_limit(size_bytes: int) -> Iterator[None]:
    """Make writes beyond this file size fail in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def mounted_read_only(folder: Path) -> Iterator[bool]:
    """Make ``folder`` read-only with a mount, or with file modes if mounting is not allowed."""
    if _mount("--bind", str(folder), str(folder)):
        try:
            subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
            yield True
        finally:
            subprocess.run(["umount", str(folder)], check=True)
    else:
        with read_only_modes(folder):
            yield False


@contextmanager
def read_only_modes(folder: Path) -> Iterator[None]:
    """Remove write permission from all folders. Root ignores modes, so switch from root to another user."""
    for name, _, _ in os.walk(folder):
        os.chmod(name, 0o555)
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(NOBODY_UID)
    try:
        yield
    finally:
        if was_root:
            os.seteuid(0)
        for name, _, _ in os.walk(folder):
            os.chmod(name, 0o755)


def _mount(*arguments: str) -> bool:
    return os.geteuid() == 0 and subprocess.run(["mount", *arguments], capture_output=True).returncode == 0
