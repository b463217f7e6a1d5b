"""Errors of this package that come back from Spark's processes as text."""

from __future__ import annotations

import traceback

import pytest
from pyspark.errors import PySparkException

from tests.lakes import Lakes
from trinitylake_ops.errors import CommitOutcomeUnknownError, TrinityLakeError
from trinitylake_ops.spark.runtime.errors import spark_failures
from trinitylake_ops.transaction.publish import outcome_unknown


def told(error: TrinityLakeError) -> TrinityLakeError:
    """Raise an error where Spark gives its traceback as text, and return what the user gets."""
    try:
        raise error
    except TrinityLakeError:
        text = traceback.format_exc()
    with pytest.raises(TrinityLakeError) as raised, spark_failures("write"):
        raise PySparkException(f"[PYTHON_DATA_SOURCE_ERROR] Failed: {text}")
    return raised.value


def test_a_commit_without_an_answer_can_be_asked_for(lakes: Lakes) -> None:
    roots = lakes.memory().files.roots
    found = told(outcome_unknown(roots, 7, "some-id", "no answer"))
    assert isinstance(found, CommitOutcomeUnknownError)
    assert (found.version, found.commit_id) == (7, "some-id")
    assert "trinitylake resolve-commit 7 some-id" in str(found)
