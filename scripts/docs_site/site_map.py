"""Which file of the repository becomes which page of the site, and how links between files become links of pages.

Pages link to each other as files of the repository do, so that they can be read there, too. A file that is linked and
is no page, such as an example, becomes a page with its text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

PROJECT = Path(__file__).resolve().parents[2]

#: Pages that stand elsewhere on the site than in the folder ``docs``.
_PLACES: Mapping[str, str] = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "about.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
    "trinitylake_ops/format/FORMAT.md": "internals/format.md",
}
_MEASURED = "benchmarks/results/"
_FOLDERS = ("docs/", _MEASURED)
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "bash"}

#: Code first, as a link in it is none.
_CODE_OR_LINK = re.compile(
    r"^(?P<indent> *)```.*?^(?P=indent)```|(?P<ticks>`+).+?(?P=ticks)|\]\((?P<link>[^)\s]+)\)",
    re.MULTILINE | re.DOTALL,
)


def sources() -> list[str]:
    """Return the files that are pages and pictures of the site, as paths in the repository."""
    found = [path for folder in _FOLDERS for path in sorted((PROJECT / folder).rglob("*")) if path.is_file()]
    names = [path.relative_to(PROJECT).as_posix() for path in found if path.suffix in (".md", ".png", ".svg")]
    return [*_PLACES, *(name for name in names if name not in _PLACES)]


def place(source: str) -> str:
    """Return where a file of the repository stands on the site. One that is no page becomes a page of its text."""
    if source in _PLACES:
        return _PLACES[source]
    path = PurePosixPath(source)
    if source.startswith("docs/"):
        path = path.relative_to("docs")
    elif source.startswith(_MEASURED):
        path = "measurements" / path.relative_to(_MEASURED)
    else:
        return f"source/{source}.md"
    return str(path.with_name("index.md") if path.name == "README.md" else path)


def links(text: str) -> Iterator[str]:
    """Yield the targets of the links of a page, but for those in code."""
    return (found["link"] for found in _CODE_OR_LINK.finditer(text) if found["link"])


def linked(source: str, link: str) -> str | None:
    """Return the file of the repository that a link of a page leads to, None for an address and for the page itself.

    A folder stands for its README. Raises FileNotFoundError for a link that leads nowhere.
    """
    path = link.partition("#")[0]
    if not path or re.match(r"[a-z]+:", link):
        return None
    target = (PROJECT / source).parent.joinpath(path).resolve()
    target = target / "README.md" if target.is_dir() else target
    if not target.is_file():
        raise FileNotFoundError(f"{source} links to {link}, which is not there")
    return target.relative_to(PROJECT).as_posix()


def placed(source: str, text: str) -> str:
    """Return the text of a page with its links as they are on the site."""
    here = PurePosixPath(place(source)).parent

    def replaced(found: re.Match[str]) -> str:
        link = found["link"]
        target = linked(source, link) if link else None
        if target is None:
            return found[0]
        there = PurePosixPath(place(target))
        up = next(n for n in range(len(here.parts) + 1) if there.is_relative_to(_up(here, n)))
        _, hash_sign, anchor = link.partition("#")
        return f"]({'../' * up}{there.relative_to(_up(here, up))}{hash_sign}{anchor})"

    return _CODE_OR_LINK.sub(replaced, text)


def _up(path: PurePosixPath, n_levels: int) -> PurePosixPath:
    return PurePosixPath(*path.parts[: len(path.parts) - n_levels])


def text_page(source: str) -> str:
    """Return the page for a file of the repository that is no page itself."""
    path = PROJECT / source
    return f"# {path.name}\n\n`{source}`\n\n````{_LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}````\n"


def spaced(text: str) -> str:
    """Return a page with what Python's Markdown needs and others do not: room before lists, and steps of four.

    A bar in code within a table needs no backslash there, and would show it. A word after the language of a fence
    becomes its title.
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
            lines.append(re.sub(r"`[^`]*`", lambda found: found[0].replace("\\|", "|"), line) if is_row else line)
    return "\n".join(lines) + "\n"


def _steps(steps: list[int], indent: int) -> list[int]:
    """Return the indents of the lists around an item, the outermost first, and its own."""
    around = [step for step in steps if step < indent]
    return [*around, indent] if around else [indent]
