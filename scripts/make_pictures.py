"""Take the screenshots in docs/images that show reports and the output of commands.

``.venv/bin/python -m scripts.make_pictures ROOT`` takes screenshots of an HTML report and of commands, where ROOT is
the lakehouse of ``make demo``. Without ROOT, it draws the timeline of one month, for a lakehouse in memory with an
advanced clock; this has no other requirements. With ``compare`` instead of ROOT, it takes a screenshot of the
comparison report that a soak test of a pull request writes.

The expiration is planned for eight days later, when the versions of the demo are old enough, by advancing the clock of
the storage. The plan is not executed. In the screenshots, the root is replaced by the root that all examples use. The
script needs Chromium, and Pillow from the dependency group ``bench``.
"""

from __future__ import annotations

import html
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
from PIL import Image, ImageChops

from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.iceberg import catalog_for
from trinitylake_ops.reports import expiration_chart, expiration_page, write_page
from trinitylake_ops.storage import StorageWrapper, drop_memory_root, open_storage

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
DAY_MS = 24 * 3_600_000
EIGHT_DAYS_MS = 8 * DAY_MS
MARGIN = 24
#: The commands in each screenshot of the command line.
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
    """A storage whose clock is ahead, by eight days unless ``ahead_ms`` is set."""

    ahead_ms = EIGHT_DAYS_MS

    def now_ms(self) -> int:
        return super().now_ms() + self.ahead_ms


def month_timeline() -> str:
    """Return the timeline of a month with daily publishing, an export, a rollback of a bad day, and a purge."""
    root = "memory://month/"
    storage = LaterStorage(open_storage(root))
    storage.ahead_ms = 0
    lake = Lakehouse.create(root, storage=storage)
    rows = pa.table({"id": pa.array(range(500), pa.int64())})
    for day in range(1, 31):
        storage.ahead_ms += DAY_MS
        with lake.transaction(message=f"publish day {day}") as txn:
            if day == 1:
                txn.create_namespace("sales")
                catalog_for(txn).create_table("sales.orders", rows.schema)
            catalog_for(txn).load_table("sales.orders").append(rows.slice(0, 50 + 37 * day % 400))
        if day == 16:
            operations.plan_expiration(lake).execute()
        if day == 17:
            operations.plan_export(lake, "before-migration").execute()
        if day == 19:
            operations.plan_purge(lake).execute()
            operations.plan_trim_tables(lake).execute()
            operations.plan_expiration(
                lake, operations.RetentionPolicy(maximum_age_ms=6 * DAY_MS, minimum_versions=1, protected_ms=DAY_MS)
            ).execute()
        if day == 25:
            operations.plan_rollback(lake, lake.latest_version() - 1).execute()
    chart = expiration_chart(operations.plan_expiration(lake))
    drop_memory_root(root)
    return chart


def take_screenshot(page: str, name: str, height: int, width: int = 1300) -> None:
    """Save a screenshot of the upper part of a page as docs/images/NAME.png.

    Args:
        page: The HTML of the page.
        name: The name of the screenshot.
        height: The maximum height in pixels.
        width: The width in pixels.
    """
    chromium = shutil.which("chromium") or sys.exit("chromium is not installed")
    with tempfile.TemporaryDirectory() as folder:
        source, screenshot = Path(folder) / "page.html", Path(folder) / "page.png"
        write_page(source, page)
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        options += ["--disable-component-update", "--disable-sync", "--disable-quic", "--hide-scrollbars"]
        options += [
            f"--user-data-dir={folder}/profile",
            f"--screenshot={screenshot}",
            f"--window-size={width},{height}",
        ]
        subprocess.run([chromium, *options, source.as_uri()], check=True, capture_output=True, timeout=120)
        with Image.open(screenshot) as image:
            picture = image.convert("RGB")
        box = ImageChops.difference(picture, Image.new("RGB", picture.size, picture.getpixel((0, 0)))).getbbox()
        bottom = min(picture.height, box[3] + MARGIN) if box else picture.height
        picture.crop((0, 0, picture.width, bottom)).save(IMAGES / f"{name}.png", optimize=True)


def terminal_page(root: str, *commands: str) -> str:
    """Return a page that shows commands and their output, with the root that all examples use."""
    lines = []
    for command in commands:
        environment = {**os.environ, "TRINITYLAKE_ROOT": root, "COLUMNS": "150"}
        output = subprocess.run(
            [sys.executable, "-m", "trinitylake_ops.cli", *shlex.split(command)],
            check=False, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
        ).stdout  # fmt: skip
        lines += [f"<b>$ trinitylake {html.escape(command)}</b>", html.escape(output)]
    style = "body{margin:0;background:#1b1f24} pre{margin:24px;color:#d6dbe0;font:15px/1.4 monospace} b{color:#7ec699}"
    text = "\n".join(lines).replace(Lakehouse.open(root).root, "file:///data/lake/")
    return f"<!doctype html><meta charset=utf-8><style>{style}</style><pre>{text}</pre>"


def take_pull_request_screenshot() -> None:
    """Take a screenshot of the comparison report of a pull request. Raise CalledProcessError if the test fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "soak"]
        command += [f"--basetemp={folder}/tests", "tests/e2e/test_pull_request.py"]
        subprocess.run(command, check=True, cwd=IMAGES.parent.parent)
        # Resolve the paths, because pytest also creates a link to the folder.
        (page,) = {page.resolve() for page in Path(folder).glob("tests/*/compare.html")}
        html_text = re.sub(r"file:///[^\s<\"]*/clones/", "file:///data/clones/", page.read_text())
        take_screenshot(html_text, "compare-page", 900)


def main() -> None:
    """Draw the timeline of a month, or take screenshots of a pull request, or of an expiration and commands."""
    if not sys.argv[1:]:
        (IMAGES / "timeline.svg").write_text(month_timeline())
        return
    if sys.argv[1] == "compare":
        take_pull_request_screenshot()
        return
    root = sys.argv[1]
    lake = Lakehouse.open(root)
    plan = operations.plan_expiration(Lakehouse(LaterStorage(lake.storage)))
    take_screenshot(expiration_page(plan).replace(lake.root, "file:///data/lake/"), "expire-page", 875)
    for name, commands in COMMANDS.items():
        take_screenshot(terminal_page(root, *commands), name, 1400)


if __name__ == "__main__":
    main()
