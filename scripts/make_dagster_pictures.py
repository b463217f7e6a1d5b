"""Take the screenshots of Dagster in docs/images with the browser tests.

``.venv/bin/python -m scripts.make_dagster_pictures`` runs these tests, which run the deployment as processes. It needs
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
#: Number of colors in a screenshot: sufficient for web pages, at a third of the size.
COLORS = 128


def take_screenshots(*tests: str, pattern: str) -> None:
    """Run tests and save the screenshots that match a pattern. Raise CalledProcessError if a test fails."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["-q", "-p", "no:cacheprovider", f"--basetemp={folder}/tests", "-m", "soak or not soak"]
        command = [sys.executable, "-m", "pytest", *options, *tests]
        subprocess.run(command, check=True, cwd=REPOSITORY)
        for screenshot in sorted(Path(folder).glob(f"tests/{pattern}")):
            if not screenshot.parent.is_symlink():  # pytest links to its newest folder
                save(screenshot)


def save(screenshot: Path) -> None:
    """Save a screenshot in docs/images with a reduced palette."""
    target = IMAGES / screenshot.name
    with Image.open(screenshot) as image:
        image.convert("RGB").quantize(COLORS).save(target, optimize=True)
    print(f"{target.relative_to(REPOSITORY)}: {target.stat().st_size // 1000} kB")


if __name__ == "__main__":
    take_screenshots(*TESTS, pattern="pages*/dagster-*.png")
