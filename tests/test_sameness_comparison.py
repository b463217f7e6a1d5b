"""The comparison with an earlier tree: whatever differs is told, each by its part, and words apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.same_as_before import unreasoned
from benchmarks.sameness.compare import (
    COUNTS,
    DIGESTS,
    EXIT_CODES,
    FIGURES,
    FILES,
    JSON_FIELDS,
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
    """What a plan of a rollback could have left."""
    document = {"digest": "12-1f3a", "changes": [{"name": "ns.t", "rows": 7}], "empty": []}
    return {
        "number": 3,
        "deed": "command",
        "arguments": ["rollback", "11", "--json"],
        "code": 0,
        "out": json.dumps(document),
        "err": "Nothing was done, of 2 things",
        "requests": {"read": 4},
        "rounds": 3,
        "written": [["create file:///lake/a", "aa", 10], ["write file:///lake/hint", "bb", 1]],
        **changed,
    }


def out(change: Callable[[Any], None]) -> str:
    document = json.loads(step()["out"])
    change(document)
    return json.dumps(document)


def test_equal_steps_are_counted() -> None:
    found = compare_steps([step()], [step()])
    assert found.differences == []
    assert (found.equal[EXIT_CODES], found.equal[DIGESTS], found.equal[JSON_FIELDS]) == (1, 1, 3)
    assert (found.equal[FILES], found.equal[REQUESTS], found.equal[ROUNDS]) == (2, 1, 1)


@pytest.mark.parametrize(
    ("changed", "part", "place"),
    [
        ({"code": 3}, EXIT_CODES, "code"),
        ({"out": out(lambda document: document.update(digest="12-1f3b"))}, DIGESTS, ".digest"),
        ({"out": out(lambda document: document["changes"][0].update(rows=8))}, JSON_FIELDS, ".changes[0].rows"),
        ({"out": out(lambda document: document["changes"][0].update(rows="7"))}, JSON_FIELDS, ".changes[0].rows"),
        ({"out": out(lambda document: document["changes"][0].pop("rows"))}, JSON_FIELDS, ".changes[0].rows"),
        ({"out": out(lambda document: document.pop("empty"))}, JSON_FIELDS, ".empty"),
        ({"out": out(lambda document: document.update(more=None))}, JSON_FIELDS, ".more"),
        ({"written": [["create file:///lake/a", "ab", 10], step()["written"][1]]}, FILES, "create file:///lake/a"),
        ({"written": step()["written"][:1]}, FILES, "write file:///lake/hint"),
        ({"requests": {"read": 5}}, REQUESTS, "read"),
        ({"requests": {"read": 4, "list": 1}}, REQUESTS, "list"),
        ({"rounds": 4}, ROUNDS, "rounds"),
    ],
)
def test_each_difference_is_told(changed: dict[str, Any], part: str, place: str) -> None:
    (difference,) = compare_steps([step()], [step(**changed)]).differences
    assert (difference.part, difference.place) == (part, place)
    assert unreasoned([difference], ()) == [difference]
    assert place in str(difference)


def test_words_are_told_apart_from_figures() -> None:
    (difference,) = compare_steps([step()], [step(err="Of 2 things none was done")]).differences
    assert difference.part == WORDS
    assert short_diff(difference) == ["-Nothing was done, of 2 things", "+Of 2 things none was done"]
    assert unreasoned([difference], ()) == []
    found = compare_steps([step()], [step(err="Nothing was done, of 3 things")]).differences
    assert [one.part for one in found] == [WORDS, FIGURES]


def test_a_document_that_is_none_any_more_is_told() -> None:
    found = compare_steps([step()], [step(out="Rolled back")]).differences
    assert FIGURES in {one.part for one in found}


def test_figures_of_help_are_words() -> None:
    arguments = ["log", "--help"]
    old, new = (step(arguments=arguments, out=text) for text in ("at most 3", "at most 4"))
    assert [one.part for one in compare_steps([old], [new]).differences] == [WORDS]


def test_other_steps_are_not_compared() -> None:
    with pytest.raises(ValueError, match="the same steps"):
        compare_steps([step()], [step(arguments=["log"])])
    with pytest.raises(ValueError, match="the same steps"):
        compare_steps([step()], [])


def test_files_at_the_end_and_counts_are_compared_one_by_one() -> None:
    (difference,) = compare_files({"a": "1", "b": "2"}, {"a": "1", "b": "3"}).differences
    assert (difference.part, difference.place, difference.before, difference.after) == (FILES, "b", "2", "3")
    assert [one.part for one in compare_files({"log.html": "1"}, {"log.html": "2"}).differences] == [WORDS]
    counts = {"100 tables": {"works": {"begin": {"requests": {"read": 3}, "rounds": 2}}}}
    more = {"100 tables": {"works": {"begin": {"requests": {"read": 3}, "rounds": 3}}}}
    (difference,) = compare_counts(counts, more).differences
    assert (difference.part, difference.place) == (COUNTS, ".100 tables.works.begin.rounds")
    assert compare_counts(counts, counts).equal[COUNTS] == 2


def test_a_reason_names_command_part_and_field() -> None:
    changed = step(out=out(lambda document: document["changes"][0].update(rows=8)))
    differences = compare_steps([step()], [changed]).differences
    meant = Reason("rollback", JSON_FIELDS, ".changes[].rows", "rows of deleted files are left out")
    assert unreasoned(differences, [meant]) == []
    for other in (
        Reason("trim", JSON_FIELDS, ".changes[].rows", "-"),
        Reason("rollback", DIGESTS, ".changes[].rows", "-"),
        Reason("rollback", JSON_FIELDS, ".changes[].name", "-"),
    ):
        assert unreasoned(differences, [other]) == differences


def test_the_steps_call_every_command() -> None:
    assert sorted(trinitylake.commands) == sorted([*COMMANDS, "serve", "completion", "status"]), (
        "no lakehouse is looked at, or for ever, or the ages of things are told"
    )
    called = {argument for step in steps(Path("/lakes")) for argument in step["arguments"]}
    assert called >= set(COMMANDS)
