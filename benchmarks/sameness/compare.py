"""Compare the results of two trees, and locate each difference."""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: The compared parts. Differences in wording are shown, but they are not failures.
EXIT_CODES, JSON_FIELDS, DIGESTS, NUMBERS, FILES, REQUESTS, ROUNDS, COUNTS, WORDS = (
    *("exit codes", "JSON fields", "digests", "numbers in texts", "files written", "requests", "round trips"),
    *("request_counts", "wording"),
)
PARTS = (EXIT_CODES, JSON_FIELDS, DIGESTS, NUMBERS, FILES, REQUESTS, ROUNDS, COUNTS, WORDS)
_MAX_SHOWN_CHARS = 200
_MISSING = "nothing"
_DIGEST = re.compile(r"-[0-9a-f]{64}\b")
_NUMBER = re.compile(r"[0-9][0-9,.]*")


#: JSON keys that were renamed since the revision before the layout of packages changed, with their current names.
RENAMED_KEYS = {"mend": "fix", "not_mended": "remaining", "not_looked_at": "not_checked"}
_MIN_SPACES = 2


@dataclass(frozen=True)
class Difference:
    """A difference between two trees."""

    part: str
    #: The step or operation.
    step: str
    #: The path of the field.
    path: str
    before: object
    after: object

    def __str__(self) -> str:
        before, after = (str(value)[:_MAX_SHOWN_CHARS] for value in (self.before, self.after))
        return f"{self.part}: {self.step}: {self.path}: {before} -> {after}"


@dataclass
class Comparison:
    """The number of equal values of each part, and the differences."""

    equal: Counter[str] = field(default_factory=Counter)
    differences: list[Difference] = field(default_factory=list)

    def add(self, part: str, step: str, path: str, before: object, after: object) -> None:
        """Count an equal value, or record a difference.

        Args:
            part: The compared part.
            step: The step or operation.
            path: The path of the field.
            before: The value in the earlier revision.
            after: The value in this tree.
        """
        if before == after:
            self.equal[part] += 1
        else:
            self.differences.append(Difference(part, step, path, before, after))

    def add_mapping(self, part: str, step: str, before: Mapping[str, object], after: Mapping[str, object]) -> None:
        """Compare two mappings by key. A key that only one of them contains is a difference.

        Args:
            part: The compared part.
            step: The step or operation.
            before: The values in the earlier revision.
            after: The values in this tree.
        """
        for key in sorted({*before, *after}):
            self.add(part, step, key, before.get(key, _MISSING), after.get(key, _MISSING))


def flat(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield each scalar and empty container of a JSON document with its path, such as ``.changes[2].name``."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flat(inner, f"{path}.{key}")
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from flat(inner, f"{path}[{index}]")
    else:
        yield path or ".", value


def compare_steps(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> Comparison:
    """Compare the results of the same steps in two trees. Raise ValueError if the steps differ."""
    if [(step["action"], step["arguments"]) for step in before] != [
        (step["action"], step["arguments"]) for step in after
    ]:
        raise ValueError("the trees did not run the same steps")
    comparison = Comparison()
    for old, new in zip(before, after, strict=True):
        _compare_step(comparison, old, new)
    return comparison


def _compare_step(comparison: Comparison, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    name = f"{old['number']} {' '.join(map(str, [old['action'], *old['arguments']]))}"[:_MAX_SHOWN_CHARS]
    comparison.add(EXIT_CODES, name, "code", old["code"], new["code"])
    documents = [document(step["out"]) for step in (old, new)]
    if documents[0] is None or documents[1] is None:
        _compare_texts(comparison, name, "out", old["out"], new["out"], is_help=_is_help(old))
    else:
        fields = [dict(flat(renamed_keys(value))) for value in documents]
        for path in [path for path in fields[0] if is_wording(fields[0][path]) and is_wording(fields[1].get(path))]:
            _compare_texts(comparison, name, path, *(scalars.pop(path) for scalars in fields), is_help=False)
        for part, is_digest in ((DIGESTS, True), (JSON_FIELDS, False)):
            values_of_part = [
                {path: value for path, value in scalars.items() if is_digest_path(path) == is_digest}
                for scalars in fields
            ]
            comparison.add_mapping(part, name, *values_of_part)
    _compare_texts(comparison, name, "err", old["err"], new["err"], is_help=_is_help(old))
    comparison.add_mapping(FILES, name, _written(old), _written(new))
    comparison.add_mapping(REQUESTS, name, old["requests"], new["requests"])
    comparison.add(ROUNDS, name, "rounds", old["rounds"], new["rounds"])


def renamed_keys(value: Any) -> Any:
    """Return a JSON document in which renamed keys have their current names."""
    if isinstance(value, dict):
        return {RENAMED_KEYS.get(key, key): renamed_keys(inner) for key, inner in value.items()}
    return [renamed_keys(inner) for inner in value] if isinstance(value, list) else value


def is_wording(value: object) -> bool:
    """Whether a scalar is text for users, such as a message or advice."""
    return isinstance(value, str) and value.count(" ") >= _MIN_SPACES


def document(text: str) -> Any:
    """Parse the JSON object or array that a command printed. Return None if it printed something else."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict | list) else None


def is_digest_path(path: str) -> bool:
    """Whether a path is that of the digest of a plan."""
    return path.rpartition(".")[2].endswith("digest")


def _is_help(step: Mapping[str, Any]) -> bool:
    return "--help" in step["arguments"] or step["code"] == 2


def _compare_texts(comparison: Comparison, step: str, path: str, old: str, new: str, *, is_help: bool) -> None:
    """Compare the wording of two texts and, unless they are help texts, the numbers in them."""
    comparison.add(WORDS, step, path, old, new)
    if not is_help:
        comparison.add(NUMBERS, step, path, numbers(old), numbers(new))


def numbers(text: str) -> list[str]:
    """Return the numbers in a text except in digests, sorted because their order depends on the wording."""
    return sorted(number.rstrip(".,") for number in _NUMBER.findall(_DIGEST.sub("", text)))


def _written(step: Mapping[str, Any]) -> dict[str, object]:
    """Return the checksums of all files that a step wrote, by verb and path."""
    contents: dict[str, list[object]] = {}
    for path, digest, size in step["written"]:
        contents.setdefault(path, []).append((digest, size))
    return {path: sorted(map(str, digests)) for path, digests in contents.items()}


def compare_files(before: Mapping[str, object], after: Mapping[str, object]) -> Comparison:
    """Compare the checksums of the files after all steps. Differences in HTML reports count as wording."""
    comparison = Comparison()
    for part in (FILES, WORDS):
        files_of_part = [
            {path: files[path] for path in files if path.endswith(".html") == (part == WORDS)}
            for files in (before, after)
        ]
        comparison.add_mapping(part, "after all steps", *files_of_part)
    return comparison


def compare_counts(before: Mapping[str, Any], after: Mapping[str, Any]) -> Comparison:
    """Compare the results of `request_counts`, value by value."""
    comparison = Comparison()
    comparison.add_mapping(COUNTS, "request_counts", dict(flat(dict(before))), dict(flat(dict(after))))
    return comparison


def merged(comparisons: Sequence[Comparison]) -> Comparison:
    """Merge comparisons into one."""
    result = Comparison()
    for comparison in comparisons:
        result.equal.update(comparison.equal)
        result.differences.extend(comparison.differences)
    return result


def short_diff(difference: Difference) -> list[str]:
    """Return up to six lines of a diff between two texts."""
    old, new = (str(value).splitlines() for value in (difference.before, difference.after))
    lines = [line for line in difflib.unified_diff(old, new, lineterm="", n=0) if line[:3] not in ("---", "+++")]
    return [line[:_MAX_SHOWN_CHARS] for line in lines if not line.startswith("@@")][:6]
