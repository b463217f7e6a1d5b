"""Parse HTML reports like a browser, and create plans with thousands of versions."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser

from trinitylake_ops.operations import ExpirationPlan
from trinitylake_ops.operations.gc.unreached import ReclaimedFiles
from trinitylake_ops.operations.retention import Verdict
from trinitylake_ops.operations.version_records import VersionRecord

VOID_ELEMENTS = {"meta", "br", "link", "img", "input", "hr"}
#: Attributes that refer to other resources, which reports must not contain.
RESOURCE_ATTRIBUTES = {
    "src",
    "href",
    "xlink:href",
    "srcset",
    "action",
    "formaction",
    "poster",
    "data",
    "background",
    "ping",
}


@dataclass
class ParsedPage:
    """The content of a page: texts, elements with their attributes, and tables."""

    texts: list[str] = field(default_factory=list)
    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    headline: str = ""
    tables: list[list[list[str]]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def bars(self) -> Counter[str]:
        """Count the segments of bars by state, except those of legends."""
        is_drawing = False
        counts: Counter[str] = Counter()
        for tag, attributes in self.elements:
            if tag == "svg":
                is_drawing = "swatch" not in (attributes.get("class") or "")
            elif tag == "rect" and is_drawing:
                counts[attributes["class"] or ""] += 1
        del counts["ground-expiring"], counts["ground-expired"]  # elements of fill patterns
        return counts

    def rows(self, *header: str) -> list[list[str]]:
        """Return the rows of the table whose header starts with these cells."""
        (table,) = (table for table in self.tables if tuple(table[0][: len(header)]) == header)
        return table[1:]


class _PageParser(HTMLParser):
    """A parser that checks that elements are closed in order and that the page refers to no other resource."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parsed = ParsedPage()
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        assert len(attributes) == len(attrs), f"duplicate attribute: {attrs}"
        assert not RESOURCE_ATTRIBUTES & attributes.keys(), attrs
        assert not any(name.startswith("on") for name in attributes), attrs
        assert tag not in {"script", "iframe", "object", "embed", "link", "base", "form", "img", "a"}
        self.parsed.elements.append((tag, attributes))
        if tag not in VOID_ELEMENTS:
            self._open.append(tag)
        if tag == "table":
            self.parsed.tables.append([])
        elif tag == "tr":
            self.parsed.tables[-1].append([])
        elif tag in {"td", "th"}:
            self.parsed.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"unexpected </{tag}>"
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "style":
            return
        self.parsed.texts.append(data)
        if self._open and self._open[-1] == "h1":
            self.parsed.headline += data
        if {"td", "th"} & set(self._open):
            self.parsed.tables[-1][-1][-1] += data

    def finish(self) -> ParsedPage:
        self.close()
        assert self._open == []
        return self.parsed


def parse_page(page: str) -> ParsedPage:
    """Parse a page, which must be well-formed and self-contained."""
    assert page.startswith("<!DOCTYPE html>\n")
    styles = "".join(re.findall(r"<style>(.*?)</style>", page, re.DOTALL))
    assert "@import" not in styles
    assert set(re.findall(r"url\(([^)]*)\)", styles)) in (set(), {"#hatch-expiring", "#hatch-expired"})
    assert "http:" not in page
    assert "https:" not in page
    parser = _PageParser()
    parser.feed(page)
    return parser.finish()


def enlarge(plan: ExpirationPlan, versions: int) -> ExpirationPlan:
    """Return a plan with many versions over 90 days, of which the first fifth is purged and the first half expires.

    Some versions are rollbacks or were committed by other programs. Each expiring version reclaims some bytes.
    """
    rng = random.Random(versions)
    spacing_ms = 90 * 86_400_000 // versions
    records, verdicts = [], []
    sizes_bytes: dict[str, int] = {}
    writers: dict[str, int] = {}
    for version in range(versions):
        is_purged = version < versions // 5
        rollback_from = version - 1 if version and version % max(2, versions // 3) == 1 else None
        records.append(
            VersionRecord(
                version=version,
                created_at_ms=plan.now_ms - (versions - version) * spacing_ms,
                operation="rollback" if rollback_from is not None else "publish",
                message=f"publish {version:,}",
                commit_id=None if version % max(3, versions // 7) == 2 else f"commit {version}",
                rollback_from=rollback_from,
                rollback_to=None if rollback_from is None else rng.randrange(version),
                is_sealed=is_purged,
            )
        )
        if not is_purged:
            is_expiring = version < versions // 2
            verdicts.append(Verdict(version=version, expires=is_expiring, reason="superseded 9 d 2 h ago, and so on"))
            if is_expiring:
                sizes_bytes[f"file-{version}"] = rng.randrange(1, 10_000)
                writers[f"file-{version}"] = version
    freed = ReclaimedFiles(sizes_bytes, dict.fromkeys(sizes_bytes, "data"), writers)
    return replace(
        plan,
        base_version=versions - 1,
        versions="1",
        verdicts=tuple(verdicts),
        bytes=freed.bytes,
        freed=freed,
        records=tuple(records),
    )
