"""Tests of the comparison with an earlier revision: it reports each difference, and wording separately."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.same_as_before import unexpected
from benchmarks.sameness.compare import (
    COUNTS,
    DIGESTS,
    EXIT_CODES,
    FILES,
    JSON_FIELDS,
    NUMBERS,
    REQUESTS,
    ROUNDS,
    WORDS,
    compare_counts,
    compare_files,
    compare_steps,
    short_diff,
)
from benchmarks.sameness.reasons import Reason
from benchmarks.sameness.steps import COMMANDS, steps
from trinitylake_ops.cli.app import trinitylake


def step(**changed: Any) -> dict[str, Any]:
    """Return the recorded result of a rollback plan, with some fields changed."""
    document = {"digest": "12-1f3a", "changes": [{"name": "ns.t", "rows": 7}], "empty": []}
    return {
        "number": 3,
        "action": "command",
        "arguments": ["rollback", "11", "--json"],
        "code": 0,
        "out": json.dumps(document),
        "err": "Nothing was done, of 2 things",
        "requests": {"read": 4},
        "rounds": 3,
        "written": [["create file:///lake/a", "aa", 10], ["write file:///lake/hint", "bb", 1]],
        **changed,
    }


def changed_out(change: Callable[[Any], None]) -> str:
    """Return the output of the step after a change of its JSON document."""
    document = json.loads(step()["out"])
    change(document)
    return json.dumps(document)


def test_equal_steps_are_counted() -> None:
    comparison = compare_steps([step()], [step()])
    assert comparison.differences == []
    assert (comparison.equal[EXIT_CODES], comparison.equal[DIGESTS], comparison.equal[JSON_FIELDS]) == (1, 1, 3)
    assert (comparison.equal[FILES], comparison.equal[REQUESTS], comparison.equal[ROUNDS]) == (2, 1, 1)


@pytest.mark.parametrize(
    ("changed", "part", "path"),
    [
        ({"code": 3}, EXIT_CODES, "code"),
        ({"out": changed_out(lambda document: document.update(digest="12-1f3b"))}, DIGESTS, ".digest"),
        ({"out": changed_out(lambda document: document["changes"][0].update(rows=8))}, JSON_FIELDS, ".changes[0].rows"),
        (
            {"out": changed_out(lambda document: document["changes"][0].update(rows="7"))},
            JSON_FIELDS,
            ".changes[0].rows",
        ),
        ({"out": changed_out(lambda document: document["changes"][0].pop("rows"))}, JSON_FIELDS, ".changes[0].rows"),
        ({"out": changed_out(lambda document: document.pop("empty"))}, JSON_FIELDS, ".empty"),
        ({"out": changed_out(lambda document: document.update(more=None))}, JSON_FIELDS, ".more"),
        ({"written": [["create file:///lake/a", "ab", 10], step()["written"][1]]}, FILES, "create file:///lake/a"),
        ({"written": step()["written"][:1]}, FILES, "write file:///lake/hint"),
        ({"requests": {"read": 5}}, REQUESTS, "read"),
        ({"requests": {"read": 4, "list": 1}}, REQUESTS, "list"),
        ({"rounds": 4}, ROUNDS, "rounds"),
    ],
)
def test_comparison_reports_each_difference(changed: dict[str, Any], part: str, path: str) -> None:
    (difference,) = compare_steps([step()], [step(**changed)]).differences
    assert (difference.part, difference.path) == (part, path)
    assert unexpected([difference], ()) == [difference]
    assert path in str(difference)


def test_comparison_separates_wording_from_numbers() -> None:
    (difference,) = compare_steps([step()], [step(err="Of 2 things none was done")]).differences
    assert difference.part == WORDS
    assert short_diff(difference) == ["-Nothing was done, of 2 things", "+Of 2 things none was done"]
    assert unexpected([difference], ()) == []
    differences = compare_steps([step()], [step(err="Nothing was done, of 3 things")]).differences
    assert [difference.part for difference in differences] == [WORDS, NUMBERS]


def test_comparison_reports_output_that_is_no_longer_json() -> None:
    differences = compare_steps([step()], [step(out="Rolled back")]).differences
    assert NUMBERS in {difference.part for difference in differences}


def test_numbers_in_help_count_as_wording() -> None:
    arguments = ["log", "--help"]
    before, after = (step(arguments=arguments, out=text) for text in ("at most 3", "at most 4"))
    assert [difference.part for difference in compare_steps([before], [after]).differences] == [WORDS]


def test_comparison_rejects_different_steps() -> None:
    with pytest.raises(ValueError, match="the same steps"):
        compare_steps([step()], [step(arguments=["log"])])
    with pytest.raises(ValueError, match="the same steps"):
        compare_steps([step()], [])


def test_comparison_reports_each_changed_file_and_count() -> None:
    (difference,) = compare_files({"a": "1", "b": "2"}, {"a": "1", "b": "3"}).differences
    assert (difference.part, difference.path, difference.before, difference.after) == (FILES, "b", "2", "3")
    assert [difference.part for difference in compare_files({"log.html": "1"}, {"log.html": "2"}).differences] == [
        WORDS
    ]
    counts = {"100 tables": {"works": {"begin": {"requests": {"read": 3}, "rounds": 2}}}}
    more = {"100 tables": {"works": {"begin": {"requests": {"read": 3}, "rounds": 3}}}}
    (difference,) = compare_counts(counts, more).differences
    assert (difference.part, difference.path) == (COUNTS, ".100 tables.works.begin.rounds")
    assert compare_counts(counts, counts).equal[COUNTS] == 2


def test_reason_matches_command_part_and_field() -> None:
    changed = step(out=changed_out(lambda document: document["changes"][0].update(rows=8)))
    differences = compare_steps([step()], [changed]).differences
    expected = Reason("rollback", JSON_FIELDS, ".changes[].rows", "rows of deleted files are left out")
    assert unexpected(differences, [expected]) == []
    for other in (
        Reason("trim", JSON_FIELDS, ".changes[].rows", "-"),
        Reason("rollback", DIGESTS, ".changes[].rows", "-"),
        Reason("rollback", JSON_FIELDS, ".changes[].name", "-"),
    ):
        assert unexpected(differences, [other]) == differences


def test_steps_run_every_command() -> None:
    new = ("policy", "maintain", "space")
    assert sorted(trinitylake.commands) == sorted([*COMMANDS, "serve", "completion", "status", *new]), (
        "serve runs indefinitely, completion reads no lakehouse, and status prints ages"
    )
    called = {argument for step in steps(Path("/lakes")) for argument in step["arguments"]}
    assert called >= set(COMMANDS)
