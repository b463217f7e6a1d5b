"""Test errors of this package that Spark processes return as text."""

from __future__ import annotations

import traceback

import pytest
from pyspark.errors import PySparkException

from tests.lakes import Lakes
from trinitylake_ops.errors import CommitOutcomeUnknownError, TrinityLakeError
from trinitylake_ops.spark.runtime.errors import spark_failures
from trinitylake_ops.transaction.publish import outcome_unknown_error


def error_from_spark(error: TrinityLakeError) -> TrinityLakeError:
    """Raise an error in Spark, which returns it as a traceback, and return the error that the caller receives."""
    try:
        raise error
    except TrinityLakeError:
        text = traceback.format_exc()
    with pytest.raises(TrinityLakeError) as raised, spark_failures("write"):
        raise PySparkException(f"[PYTHON_DATA_SOURCE_ERROR] Failed: {text}")
    return raised.value


def test_unknown_commit_outcome_keeps_version_and_id(lakes: Lakes) -> None:
    roots = lakes.memory().files.roots
    received = error_from_spark(outcome_unknown_error(roots, 7, "some-id", "no response"))
    assert isinstance(received, CommitOutcomeUnknownError)
    assert (received.version, received.commit_id) == (7, "some-id")
    assert "trinitylake resolve-commit 7 some-id" in str(received)
