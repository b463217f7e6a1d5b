"""Cache downloads that test servers need in the user's cache folder."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def cached_folder(name: str, fetch: Callable[[Path], None]) -> Path:
    """Return a folder that ``fetch`` filled in this or an earlier run.

    The name identifies the content, including versions. Concurrent runs fetch it once. Errors of ``fetch`` are raised.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trinitylake-tests"
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / name
    with (cache / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=cache) as temporary:
                content = Path(temporary) / "content"
                content.mkdir()
                fetch(content)
                content.rename(folder)
    return folder
