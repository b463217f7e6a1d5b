"""The comparison of what two trees noted, part by part, with the place of each difference."""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: What is compared. Words may differ: they are shown, and are no failure.
EXIT_CODES, JSON_FIELDS, DIGESTS, FIGURES, FILES, REQUESTS, ROUNDS, COUNTS, WORDS = (
    *("exit codes", "JSON fields", "digests", "figures in texts", "files written", "requests", "rounds"),
    *("figures of request_counts", "words"),
)
PARTS = (EXIT_CODES, JSON_FIELDS, DIGESTS, FIGURES, FILES, REQUESTS, ROUNDS, COUNTS, WORDS)
_MOST_SHOWN_CHARS = 200
_MISSING = "nothing"
_DIGEST = re.compile(r"-[0-9a-f]{64}\b")
_NUMBER = re.compile(r"[0-9][0-9,.]*")


@dataclass(frozen=True)
class Difference:
    """What differs: the part, the step or operation, the place in it, and both values."""

    part: str
    what: str
    place: str
    before: object
    after: object

    def __str__(self) -> str:
        before, after = (str(value)[:_MOST_SHOWN_CHARS] for value in (self.before, self.after))
        return f"{self.part}: {self.what}: {self.place}: {before} -> {after}"


@dataclass
class Comparison:
    """How many things of each part were equal, and what differs."""

    equal: Counter[str] = field(default_factory=Counter)
    differences: list[Difference] = field(default_factory=list)

    def add(self, part: str, what: str, place: str, before: object, after: object) -> None:
        """Count an equal thing, or keep a difference."""
        if before == after:
            self.equal[part] += 1
        else:
            self.differences.append(Difference(part, what, place, before, after))

    def add_mapping(self, part: str, what: str, before: Mapping[str, object], after: Mapping[str, object]) -> None:
        """Compare two mappings by their keys; one that only one of them has is a difference."""
        for key in sorted({*before, *after}):
            self.add(part, what, key, before.get(key, _MISSING), after.get(key, _MISSING))


def flat(value: object, place: str = "") -> Iterator[tuple[str, object]]:
    """Give each scalar of a JSON document with its place, such as ``.changes[2].name``; empty ones as they are."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flat(inner, f"{place}.{key}")
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from flat(inner, f"{place}[{index}]")
    else:
        yield place or ".", value


def compare_steps(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> Comparison:
    """Compare what two trees noted of the same steps. Raises ValueError where they are not the same."""
    if [(step["deed"], step["arguments"]) for step in before] != [(step["deed"], step["arguments"]) for step in after]:
        raise ValueError("the trees did not do the same steps")
    found = Comparison()
    for old, new in zip(before, after, strict=True):
        _compare_step(found, old, new)
    return found


def _compare_step(found: Comparison, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    what = f"{old['number']} {' '.join(map(str, [old['deed'], *old['arguments']]))}"[:_MOST_SHOWN_CHARS]
    found.add(EXIT_CODES, what, "code", old["code"], new["code"])
    documents = [document(step["out"]) for step in (old, new)]
    if documents[0] is None or documents[1] is None:
        _compare_texts(found, what, "out", old["out"], new["out"], is_help=_is_help(old))
    else:
        fields = [dict(flat(value)) for value in documents]
        for part, is_digest in ((DIGESTS, True), (JSON_FIELDS, False)):
            chosen = [
                {place: value for place, value in one.items() if is_digest_place(place) == is_digest} for one in fields
            ]
            found.add_mapping(part, what, *chosen)
    _compare_texts(found, what, "err", old["err"], new["err"], is_help=_is_help(old))
    found.add_mapping(FILES, what, _written(old), _written(new))
    found.add_mapping(REQUESTS, what, old["requests"], new["requests"])
    found.add(ROUNDS, what, "rounds", old["rounds"], new["rounds"])


def document(text: str) -> Any:
    """Return the JSON document or list that a command printed, None where it printed something else."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict | list) else None


def is_digest_place(place: str) -> bool:
    """Tell whether the last name of a place is that of a plan's digest."""
    return place.rpartition(".")[2].endswith("digest")


def _is_help(step: Mapping[str, Any]) -> bool:
    return "--help" in step["arguments"] or step["code"] == 2


def _compare_texts(found: Comparison, what: str, place: str, old: str, new: str, *, is_help: bool) -> None:
    """Compare a text: as words, and where it is no help, the figures in it as well."""
    found.add(WORDS, what, place, old, new)
    if not is_help:
        found.add(FIGURES, what, place, figures(old), figures(new))


def figures(text: str) -> list[str]:
    """Return the numbers in a text, without those in digests, sorted: sentences may name them in another order."""
    return sorted(number.rstrip(".,") for number in _NUMBER.findall(_DIGEST.sub("", text)))


def _written(step: Mapping[str, Any]) -> dict[str, object]:
    """Return the checksums of what a step wrote, by verb and path; a path that it wrote twice has all of them."""
    found: dict[str, list[object]] = {}
    for place, digest, size in step["written"]:
        found.setdefault(place, []).append((digest, size))
    return {place: sorted(map(str, contents)) for place, contents in found.items()}


def compare_files(before: Mapping[str, object], after: Mapping[str, object]) -> Comparison:
    """Compare the files that stand at the end, checksums by path; those of pages are words."""
    found = Comparison()
    for part in (FILES, WORDS):
        chosen = [
            {path: one[path] for path in one if path.endswith(".html") == (part == WORDS)} for one in (before, after)
        ]
        found.add_mapping(part, "at the end", *chosen)
    return found


def compare_counts(before: Mapping[str, Any], after: Mapping[str, Any]) -> Comparison:
    """Compare the figures of `request_counts`, one by one."""
    found = Comparison()
    found.add_mapping(COUNTS, "request_counts", dict(flat(dict(before))), dict(flat(dict(after))))
    return found


def joined(comparisons: Sequence[Comparison]) -> Comparison:
    """Return one comparison of several."""
    whole = Comparison()
    for comparison in comparisons:
        whole.equal.update(comparison.equal)
        whole.differences.extend(comparison.differences)
    return whole


def short_diff(difference: Difference) -> list[str]:
    """Return the lines that differ between two texts, marked, no more than six."""
    old, new = (str(value).splitlines() for value in (difference.before, difference.after))
    lines = [line for line in difflib.unified_diff(old, new, lineterm="", n=0) if line[:3] not in ("---", "+++")]
    return [line[:_MOST_SHOWN_CHARS] for line in lines if not line.startswith("@@")][:6]
