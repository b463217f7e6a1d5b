"""Build the documentation site: ``make docs``, or ``.venv/bin/python -m scripts.docs_site``.

Assembles the pages in ``.site/pages``, from which Zensical builds ``.site/html``. The build fails if the target of a
link or anchor does not exist. Neither the build nor the site sends requests to other hosts.
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
#: Pages to which links to the options of their operations are added.
OPERATIONS = "docs/operations/"

#: A script from another host that enables search without a web server. It is removed, so search needs a web server.
_SHIM = re.compile(r'<script src="https://unpkg\.com/[^"]*"[^>]*></script>')
_EXTERNAL_REQUEST = re.compile(r'<(?:script|img|iframe|link)\b[^>]*(?:src|href)="(?P<address>(?:https?:)?//[^"]*)"')


def main() -> None:
    """Build the site and check the result."""
    shutil.rmtree(SITE, ignore_errors=True)
    option_tables.write()
    assemble()
    command = [Path(sys.executable).with_name("zensical"), "build", "--strict", "--clean"]
    subprocess.run([*command, "--config-file", PROJECT / "zensical.toml"], check=True)
    remove_external_requests()
    print(f"==> {HTML}/index.html: {len(list(HTML.rglob('*.html')))} pages")


def assemble() -> None:
    """Write all pages and images into ``PAGES``."""
    names = site_map.sources()
    texts = {}
    for name in names:
        if name.endswith(".md"):
            text = (PROJECT / name).read_text()
            option_links = reference.option_links(text) if name.startswith(OPERATIONS) else ""
            page = site_map.to_python_markdown(site_map.with_site_links(name, text))
            texts[site_map.site_path(name)] = page + option_links
            targets = [target for link in site_map.links(text) if (target := site_map.link_target(name, link))]
            for target in set(targets) - set(names):
                texts[site_map.site_path(target)] = site_map.text_page(target)
        else:
            _write(site_map.site_path(name), (PROJECT / name).read_bytes())
    for path, text in {**texts, **reference.pages(), **api.pages()}.items():
        _write(path, text.encode())


def _write(site_path: str, content: bytes) -> None:
    path = PAGES / site_path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def remove_external_requests() -> None:
    """Remove requests to other hosts from the pages. Exit with an error if a page still contains one."""
    requests = []
    for path in HTML.rglob("*.html"):
        text = _SHIM.sub("", path.read_text())
        path.write_text(text)
        requests += [f"{path.relative_to(HTML)}: {match['address']}" for match in _EXTERNAL_REQUEST.finditer(text)]
    if requests:
        sys.exit("pages send requests to other hosts:\n" + "\n".join(requests))


if __name__ == "__main__":
    main()
