"""Generate the tables of storage options in manually written pages from the specifications of the options.

``make docs`` writes them between the comments ``<!-- options of NAME -->`` and ``<!-- end of options -->``, where NAME
is a scheme, ``every root`` or ``caches``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from scripts.docs_site.site_map import PROJECT
from scripts.docs_site.tables import code, table
from trinitylake_ops.storage.options import CACHE_OPTIONS, COMMON_OPTIONS, Kind, Option
from trinitylake_ops.storage.registry import OWN_SCHEMES

#: The pages with tables of storage options.
PAGES = ("docs/storages/README.md", *(f"docs/storages/{name}.md" for name in
         ("azure", "dynamodb", "gcs", "hdfs", "local", "redis", "s3")))  # fmt: skip

_BLOCK = re.compile(r"(<!-- options of (?P<name>[^>]+) -->\n)(?P<table>.*?)(<!-- end of options -->)", re.DOTALL)


def updated(text: str) -> str:
    """Return the text of a page with current tables.

    Raises:
        KeyError: If a comment contains an unknown name.
    """
    tables = {name: scheme.options for name, scheme in OWN_SCHEMES.items()} | {
        "every root": tuple(option for option in COMMON_OPTIONS if option not in CACHE_OPTIONS),
        "caches": CACHE_OPTIONS,
    }
    return _BLOCK.sub(lambda match: f"{match[1]}\n{_table(tables[match['name']])}{match[4]}", text)


def write() -> None:
    """Write current tables into all pages."""
    for name in PAGES:
        path = PROJECT / name
        path.write_text(updated(path.read_text()))


def _table(options: Iterable[Option]) -> str:
    return table(
        ("Option", "Values", "Default", "Meaning"),
        ((code(option.name), _values(option), _default(option), _meaning(option)) for option in options),
    )


def _values(option: Option) -> str:
    if option.kind is Kind.CHOICE:
        return ", ".join(map(code, option.choices))
    if option.kind in (Kind.TEXT, Kind.TOKEN) and not option.form:
        return "text"
    return _coded(re.sub(r"(https?://\S+\])", r"'\1'", option.accepted))


def _default(option: Option) -> str:
    if option.kind is Kind.FLAG:
        return code(str(option.default).lower())
    if option.default is None:
        return ", ".join(map(code, option.environment)) or "none"
    default = f"{option.default:g}" if isinstance(option.default, float) else str(option.default)
    is_size = option.name.endswith("_bytes") and isinstance(option.default, int)
    return f"{code(default)} ({int(option.default) >> 20} MiB)" if is_size else code(default)


def _meaning(option: Option) -> str:
    return f"{option.help[0].upper()}{_coded(option.help[1:])}{' (secret)' if option.is_secret else ''}"


def _coded(text: str) -> str:
    """Return a text in which quoted words are formatted as code."""
    return re.sub(r"(?<!\w)'([^']+)'", r"`\1`", text)
