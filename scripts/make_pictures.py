"""Draws the pictures of docs/images that show the demo's lakehouse, but for those of the Dagster UI.

``.venv/bin/python -m scripts.make_pictures ROOT``, ROOT as of ``make demo``: a page, and what the command line prints.

The plan of an expiry is that of eight days later, when the demo's versions are old enough: the storage's clock is
set forward, and nothing is changed. The root is shown as that of all examples. Needs Chromium, and Pillow, which
comes with the extra ``bench``.
"""

from __future__ import annotations

import html
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageChops

from trinitylake_ops import Lakehouse, maintenance
from trinitylake_ops.pages import expiration_page, write_page
from trinitylake_ops.storage import StorageWrapper

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
EIGHT_DAYS_MS = 8 * 24 * 3_600_000
MARGIN = 24
#: What pictures of the command line show.
COMMANDS = {
    "cli-look": ("log --limit 9", "diff 13 14", "show marts.route_performance --version 2"),
    "cli-operate": (
        "rollback 12 --namespace marts",
        "exports",
        "verify-export demo-15",
        "hint",
        "verify",
    ),
}


class LaterStorage(StorageWrapper):
    """A storage as it will be in eight days, if nobody touches it."""

    def now_ms(self) -> int:
        return super().now_ms() + EIGHT_DAYS_MS


def draw(page: str, name: str, height: int, width: int = 1300) -> None:
    """Draw the upper part of a page as docs/images/NAME.png; sizes in pixels."""
    chromium = shutil.which("chromium") or sys.exit("chromium is not installed")
    with tempfile.TemporaryDirectory() as folder:
        source, drawn = Path(folder) / "page.html", Path(folder) / "page.png"
        write_page(source, page)
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        options += ["--disable-component-update", "--disable-sync", "--disable-quic", "--hide-scrollbars"]
        options += [f"--user-data-dir={folder}/profile", f"--screenshot={drawn}", f"--window-size={width},{height}"]
        subprocess.run([chromium, *options, source.as_uri()], check=True, capture_output=True, timeout=120)
        with Image.open(drawn) as image:
            shown = image.convert("RGB")
        box = ImageChops.difference(shown, Image.new("RGB", shown.size, shown.getpixel((0, 0)))).getbbox()
        bottom = min(shown.height, box[3] + MARGIN) if box else shown.height
        shown.crop((0, 0, shown.width, bottom)).save(IMAGES / f"{name}.png", optimize=True)


def terminal(root: str, *commands: str) -> str:
    """Return a page that shows commands and what they print, with the root as that of all examples."""
    lines = []
    for command in commands:
        environment = {**os.environ, "TRINITYLAKE_ROOT": root, "COLUMNS": "150"}
        printed = subprocess.run(
            [sys.executable, "-m", "trinitylake_ops.cli", *shlex.split(command)],
            check=False, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
        ).stdout  # fmt: skip
        lines += [f"<b>$ trinitylake {html.escape(command)}</b>", html.escape(printed)]
    style = "body{margin:0;background:#1b1f24} pre{margin:24px;color:#d6dbe0;font:15px/1.4 monospace} b{color:#7ec699}"
    text = "\n".join(lines).replace(Lakehouse.open(root).root, "file:///data/lake/")
    return f"<!doctype html><meta charset=utf-8><style>{style}</style><pre>{text}</pre>"


def main() -> None:
    """Draw the plan of an expiry, and what the command line prints."""
    root = sys.argv[1]
    lake = Lakehouse.open(root)
    plan = maintenance.plan_expiration(Lakehouse(LaterStorage(lake.storage)))
    draw(expiration_page(plan).replace(lake.root, "file:///data/lake/"), "expire-page", 875)
    for name, commands in COMMANDS.items():
        draw(terminal(root, *commands), name, 1400)


if __name__ == "__main__":
    main()
