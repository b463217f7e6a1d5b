"""Builds the documentation site: ``.venv/bin/python -m scripts.docs_site``. ``make docs`` does it.

The pages are put together in ``.site/pages``, and Zensical makes ``.site/html`` of them. It ends with an error for a
link or an anchor that leads nowhere. Nothing is fetched, and the site asks no other host for anything.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from scripts.docs_site import api, option_tables, reference, site_map
from scripts.docs_site.site_map import PROJECT

SITE = PROJECT / ".site"
PAGES = SITE / "pages"
HTML = SITE / "html"
#: Pages that lead to the options of what they run.
OPERATIONS = "docs/operations/"

#: A script that browsers need to search pages without a server. It is on another host, so that search needs a server.
_SHIM = re.compile(r'<script src="https://unpkg\.com/[^"]*"[^>]*></script>')
_ASKED = re.compile(r'<(?:script|img|iframe|link)\b[^>]*(?:src|href)="(?P<address>(?:https?:)?//[^"]*)"')


def main() -> None:
    """Put the pages together, let Zensical draw them, and look at what it made."""
    shutil.rmtree(SITE, ignore_errors=True)
    option_tables.write()
    assemble()
    command = [Path(sys.executable).with_name("zensical"), "build", "--strict", "--clean"]
    subprocess.run([*command, "--config-file", PROJECT / "zensical.toml"], check=True)
    cut_off()
    print(f"==> {HTML}/index.html: {len(list(HTML.rglob('*.html')))} pages")


def assemble() -> None:
    """Write all pages and pictures of the site into its folder."""
    names = site_map.sources()
    texts = {}
    for name in names:
        if name.endswith(".md"):
            text = (PROJECT / name).read_text()
            more = reference.pointers(text) if name.startswith(OPERATIONS) else ""
            texts[site_map.place(name)] = site_map.spaced(site_map.placed(name, text)) + more
            leading = [target for link in site_map.links(text) if (target := site_map.linked(name, link))]
            for target in set(leading) - set(names):
                texts[site_map.place(target)] = site_map.text_page(target)
        else:
            _write(site_map.place(name), (PROJECT / name).read_bytes())
    for place, text in {**texts, **reference.pages(), **api.pages()}.items():
        _write(place, text.encode())


def _write(place: str, content: bytes) -> None:
    path = PAGES / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def cut_off() -> None:
    """Take what leads to other hosts out of the pages. Exits with an error if a page still asks one for something."""
    asking = []
    for path in HTML.rglob("*.html"):
        text = _SHIM.sub("", path.read_text())
        path.write_text(text)
        asking += [f"{path.relative_to(HTML)}: {found['address']}" for found in _ASKED.finditer(text)]
    if asking:
        sys.exit("pages ask other hosts for something:\n" + "\n".join(asking))


if __name__ == "__main__":
    main()
