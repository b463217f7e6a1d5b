"""Map files of the repository to pages of the site, and links between files to links between pages.

Pages refer to files by their paths in the repository, so that links also work there. A linked file that is not a page,
for example an example program, becomes a page with its text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

PROJECT = Path(__file__).resolve().parents[2]

#: Paths on the site of pages outside of the folder ``docs``.
_SITE_PATHS: Mapping[str, str] = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "about.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
    "trinitylake_ops/format/FORMAT.md": "internals/format.md",
}
_RESULTS = "benchmarks/results/"
_FOLDERS = ("docs/", _RESULTS)
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "bash"}

#: Code is matched first, so that links in code are ignored.
_CODE_OR_LINK = re.compile(
    r"^(?P<indent> *)```.*?^(?P=indent)```|(?P<ticks>`+).+?(?P=ticks)|\]\((?P<link>[^)\s]+)\)",
    re.MULTILINE | re.DOTALL,
)


def sources() -> list[str]:
    """Return the paths in the repository of the pages and images of the site."""
    paths = [path for folder in _FOLDERS for path in sorted((PROJECT / folder).rglob("*")) if path.is_file()]
    names = [path.relative_to(PROJECT).as_posix() for path in paths if path.suffix in (".md", ".png", ".svg")]
    return [*_SITE_PATHS, *(name for name in names if name not in _SITE_PATHS)]


def site_path(source: str) -> str:
    """Return the path on the site of a file in the repository."""
    if source in _SITE_PATHS:
        return _SITE_PATHS[source]
    path = PurePosixPath(source)
    if source.startswith("docs/"):
        path = path.relative_to("docs")
    elif source.startswith(_RESULTS):
        path = "measurements" / path.relative_to(_RESULTS)
    else:
        return f"source/{source}.md"
    return str(path.with_name("index.md") if path.name == "README.md" else path)


def links(text: str) -> Iterator[str]:
    """Yield the targets of the links of a page, except links in code."""
    return (match["link"] for match in _CODE_OR_LINK.finditer(text) if match["link"])


def link_target(source: str, link: str) -> str | None:
    """Return the file in the repository that a link points to, which for a folder is its README.

    Args:
        source: The path in the repository of the page that contains the link.
        link: The target of the link.

    Returns:
        A path in the repository, or None for a URL or an anchor of the same page.

    Raises:
        FileNotFoundError: If the file does not exist.
    """
    path = link.partition("#")[0]
    if not path or re.match(r"[a-z]+:", link):
        return None
    target = (PROJECT / source).parent.joinpath(path).resolve()
    target = target / "README.md" if target.is_dir() else target
    if not target.is_file():
        raise FileNotFoundError(f"{source} links to {link}, which does not exist")
    return target.relative_to(PROJECT).as_posix()


def with_site_links(source: str, text: str) -> str:
    """Replace links between files of the repository by links between pages of the site.

    Args:
        source: The path of the page in the repository.
        text: The Markdown of the page.
    """
    folder = PurePosixPath(site_path(source)).parent

    def site_link(match: re.Match[str]) -> str:
        link = match["link"]
        target = link_target(source, link) if link else None
        if target is None:
            return match[0]
        page = PurePosixPath(site_path(target))
        up = next(n for n in range(len(folder.parts) + 1) if page.is_relative_to(_ancestor(folder, n)))
        _, hash_sign, anchor = link.partition("#")
        return f"]({'../' * up}{page.relative_to(_ancestor(folder, up))}{hash_sign}{anchor})"

    return _CODE_OR_LINK.sub(site_link, text)


def _ancestor(path: PurePosixPath, n_levels: int) -> PurePosixPath:
    return PurePosixPath(*path.parts[: len(path.parts) - n_levels])


def text_page(source: str) -> str:
    """Return a page with the text of a file in the repository."""
    path = PROJECT / source
    return f"# {path.name}\n\n`{source}`\n\n````{_LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}````\n"


def to_python_markdown(text: str) -> str:
    """Convert Markdown of the repository to the dialect of Python-Markdown.

    Lists need an empty line before them and an indentation of four spaces. In tables, a bar in code must not be
    escaped. A word after the language of a fence becomes its title.
    """
    lines: list[str] = []
    in_code, in_list, steps = False, False, [0]
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            in_code = not in_code
            line = re.sub(r"^(```\w+) ([\w-]+)$", r'\1 title="\2"', line)  # noqa: PLW2901
        item = None if in_code else re.match(r"( *)([-*]|\d+\.) +\S", line)
        if item:
            if not in_list and lines and lines[-1].strip():
                lines.append("")
            in_list, steps = True, _steps(steps, len(item[1]))
            lines.append(" " * (4 * (len(steps) - 1)) + line.lstrip())
        else:
            if line.strip() and not line.startswith(" ") and not (lines and lines[-1].strip()):
                in_list, steps = False, [0]
            is_row = line.startswith("|") and not in_code
            lines.append(re.sub(r"`[^`]*`", lambda match: match[0].replace("\\|", "|"), line) if is_row else line)
    return "\n".join(lines) + "\n"


def _steps(steps: list[int], indent: int) -> list[int]:
    """Return the indentations of the enclosing lists of an item, outermost first, and of the item itself."""
    return [*(step for step in steps if step < indent), indent]
