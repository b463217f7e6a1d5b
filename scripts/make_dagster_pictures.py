"""Draws the pictures of docs/images that show Dagster's pages: those that the tests in a browser take.

``.venv/bin/python -m scripts.make_dagster_pictures`` runs these tests, against the deployment as processes; their
Debian packages are in deploy/debian-packages.txt. Pillow comes with the extra ``bench``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

REPOSITORY = Path(__file__).resolve().parent.parent
IMAGES = REPOSITORY / "docs" / "images"
TESTS = ("tests/e2e/test_deployed_browser.py", "tests/e2e/test_deployed_incident.py")
#: Enough for pages, which have few, and a third of the bytes.
COLORS = 128


def draw(*tests: str, pictures: str) -> None:
    """Run tests, and keep those pictures that they take. Raises CalledProcessError for tests that fail."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["-q", "-p", "no:cacheprovider", f"--basetemp={folder}/tests", "-m", "soak or not soak"]
        command = [sys.executable, "-m", "pytest", *options, *tests]
        subprocess.run(command, check=True, cwd=REPOSITORY)
        for drawn in sorted(Path(folder).glob(f"tests/{pictures}")):
            if not drawn.parent.is_symlink():  # pytest's link to its newest folder of a name
                keep(drawn)


def keep(drawn: Path) -> None:
    """Put a picture among those of the docs, with few colors."""
    kept = IMAGES / drawn.name
    with Image.open(drawn) as image:
        image.convert("RGB").quantize(COLORS).save(kept, optimize=True)
    print(f"{kept.relative_to(REPOSITORY)}: {kept.stat().st_size // 1000} kB")


if __name__ == "__main__":
    draw(*TESTS, pictures="pages*/dagster-*.png")
