"""Take the screenshots of Dagster in docs/images with the browser tests.

``.venv/bin/python -m scripts.make_dagster_pictures`` runs these tests against the deployment as processes. It needs
the Debian packages in deploy/debian-packages.txt, and Pillow from the dependency group ``bench``.
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
#: Sufficient for screenshots of pages, at a third of the bytes.
COLORS = 128


def draw(*tests: str, pictures: str) -> None:
    """Run tests and keep the screenshots that match a pattern. Raises CalledProcessError if a test fails."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["-q", "-p", "no:cacheprovider", f"--basetemp={folder}/tests", "-m", "soak or not soak"]
        command = [sys.executable, "-m", "pytest", *options, *tests]
        subprocess.run(command, check=True, cwd=REPOSITORY)
        for drawn in sorted(Path(folder).glob(f"tests/{pictures}")):
            if not drawn.parent.is_symlink():  # pytest links to its newest folder
                keep(drawn)


def keep(drawn: Path) -> None:
    """Save a screenshot in docs/images with a reduced palette."""
    kept = IMAGES / drawn.name
    with Image.open(drawn) as image:
        image.convert("RGB").quantize(COLORS).save(kept, optimize=True)
    print(f"{kept.relative_to(REPOSITORY)}: {kept.stat().st_size // 1000} kB")


if __name__ == "__main__":
    draw(*TESTS, pictures="pages*/dagster-*.png")
