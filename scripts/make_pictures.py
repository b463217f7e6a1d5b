"""Draws docs/images/expire-page.png: ``.venv/bin/python -m scripts.make_pictures ROOT``, ROOT as of ``make demo``.

The plan of an expiry is that of eight days later, when the demo's versions are old enough: the storage's clock is
set forward, and nothing is changed. The root is shown as that of all examples. Needs Chromium, and Pillow, which
comes with the extra ``bench``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageChops

from trinitylake_ops import Lakehouse, maintenance
from trinitylake_ops.maintenance.page import expiration_page, write_page
from trinitylake_ops.storage import StorageWrapper

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
EIGHT_DAYS_MS = 8 * 24 * 3_600_000
MARGIN = 24


class LaterStorage(StorageWrapper):
    """A storage as it will be in eight days, if nobody touches it."""

    def now_ms(self) -> int:
        return super().now_ms() + EIGHT_DAYS_MS


def draw(page: str, name: str, height: int) -> None:
    """Draw the upper part of a page as docs/images/NAME.png."""
    chromium = shutil.which("chromium") or sys.exit("chromium is not installed")
    with tempfile.TemporaryDirectory() as folder:
        source, drawn = Path(folder) / "page.html", Path(folder) / "page.png"
        write_page(source, page)
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        options += ["--disable-component-update", "--disable-sync", "--disable-quic", "--hide-scrollbars"]
        options += [f"--user-data-dir={folder}/profile", f"--screenshot={drawn}", f"--window-size=1300,{height}"]
        subprocess.run([chromium, *options, source.as_uri()], check=True, capture_output=True, timeout=120)
        with Image.open(drawn) as image:
            shown = image.convert("RGB")
        box = ImageChops.difference(shown, Image.new("RGB", shown.size, shown.getpixel((0, 0)))).getbbox()
        bottom = min(shown.height, box[3] + MARGIN) if box else shown.height
        shown.crop((0, 0, shown.width, bottom)).save(IMAGES / f"{name}.png", optimize=True)


def main() -> None:
    """Draw the plan of an expiry."""
    lake = Lakehouse.open(sys.argv[1])
    plan = maintenance.plan_expiration(Lakehouse(LaterStorage(lake.storage)))
    draw(expiration_page(plan).replace(lake.root, "file:///data/lake/"), "expire-page", 875)


if __name__ == "__main__":
    main()
