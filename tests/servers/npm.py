"""Install JavaScript servers with npm, from a lock file with pinned versions and hashes."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from tests.servers.daemons import run
from tests.servers.downloads import cached_folder

#: Command that starts a JavaScript server without timeouts for idle connections and long requests.
NODE_WITHOUT_TIMEOUTS = ("node", "--require", str(Path(__file__).resolve().parent / "no_timeouts.cjs"))

_FILES = ("package.json", "package-lock.json")


def installed(package: Path, log: Path) -> Path:
    """Return a folder whose ``node_modules`` has the packages of a lock file.

    The first run installs them. Raises ServerStartError.
    """
    content_hash = hashlib.sha256(b"".join((package / name).read_bytes() for name in _FILES)).hexdigest()

    def install(folder: Path) -> None:
        for name in _FILES:
            shutil.copy(package / name, folder)
        run(["npm", "ci", "--prefix", str(folder), "--ignore-scripts", "--no-audit", "--no-fund"], log)

    return cached_folder(f"{package.name}-{content_hash[:16]}", install)
