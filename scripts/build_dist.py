"""Build the sdist and the wheel reproducibly. Run by `make dist`.

Files under version control are copied with one timestamp and normalized modes. The wheel is built from the sdist, as
users of the sdist build it. ``SOURCE_DATE_EPOCH`` is the timestamp, by default the time of the last commit.
"""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
_FILES = ("pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE", "constraints.txt", "trinitylake_ops")


def build(folder: Path, epoch_s: int) -> tuple[Path, Path]:
    """Build the sdist and the wheel in a folder and return their paths.

    Args:
        folder: The folder to write to.
        epoch_s: The timestamp of all files in the archives, in seconds since the epoch.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        source, built = Path(name) / "source", Path(name) / "built"
        built.mkdir()
        for path in _tracked():
            _write_plain(source / path, (PROJECT / path).read_bytes(), epoch_s)
        sdist = folder / _backend(source, "sdist", built, epoch_s)
        sdist.write_bytes(_plain_archive((built / sdist.name).read_bytes(), epoch_s))
        with tarfile.open(sdist) as archive:
            for member in archive.getmembers():
                if (content := archive.extractfile(member)) is not None:
                    _write_plain(built / member.name, content.read(), epoch_s)
        wheel = _backend(built / sdist.name.removesuffix(".tar.gz"), "wheel", folder, epoch_s)
    return sdist, folder / wheel


def epoch() -> int:
    """Return the timestamp of all files, in seconds since the epoch."""
    return int(os.environ.get("SOURCE_DATE_EPOCH") or _git("log", "-1", "--format=%ct"))


def _tracked() -> Iterator[Path]:
    for name in _git("ls-files", "-z", "--", *_FILES).split("\0"):
        if name and (PROJECT / name).is_file():
            yield Path(name)


def _git(*arguments: str) -> str:
    command = ["git", "-c", "safe.directory=*", *arguments]
    return subprocess.run(command, cwd=PROJECT, check=True, capture_output=True, text=True).stdout


def _write_plain(path: Path, data: bytes, epoch_s: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(0o644)
    os.utime(path, (epoch_s, epoch_s))


def _backend(source: Path, kind: str, folder: Path, epoch_s: int) -> str:
    """Run the build backend on a folder and return the name of the archive that it built."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch_s), "PYTHONHASHSEED": "0", "TZ": "UTC"}
    before = set(folder.iterdir())
    command = [sys.executable, "-W", "ignore", "-c", code, str(folder)]
    result = subprocess.run(
        command, cwd=source, env=environment, umask=0o022, capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise RuntimeError(f"building the {kind} failed: {result.stderr[-4_000:]}")
    suffix = ".whl" if kind == "wheel" else ".tar.gz"
    (archive,) = {path for path in folder.iterdir() if path.name.endswith(suffix)} - before
    return archive.name


def _plain_archive(data: bytes, epoch_s: int) -> bytes:
    """Return an archive with sorted members, without the times, users and modes of this machine."""
    output = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(data)) as archive,
        gzip.GzipFile(filename="", mode="wb", fileobj=output, mtime=epoch_s) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as plain,
    ):
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            entry = tarfile.TarInfo(member.name)
            entry.type, entry.size, entry.mtime = member.type, member.size, epoch_s
            entry.mode = 0o755 if member.isdir() else 0o644
            plain.addfile(entry, archive.extractfile(member))
    return output.getvalue()


def main() -> None:
    """Build into the folder given on the command line, replacing earlier archives."""
    folder = Path(sys.argv[1]).resolve()
    for old in (*folder.glob("trinitylake_ops-*.tar.gz"), *folder.glob("trinitylake_ops-*.whl")):
        old.unlink()
    for path in build(folder, epoch()):
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
