"""Test streams of commits: which versions they read, and at which version they begin."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from tests.lakes import Lakes
from tests.operations.changes import create, expire
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import InvalidInputError, VersionExpiredError
from trinitylake_ops.spark.source.opened_table import open_metadata
from trinitylake_ops.spark.source.options import SourceOptions, StreamOptions, TableRequest
from trinitylake_ops.spark.source.stream_reader import FollowedHistory, StreamReader
from trinitylake_ops.spark.source.streams import LakehouseAt, stream_reader

pytestmark = pytest.mark.local_only("the reader opens the lakehouse by its folder")


@pytest.fixture
def lake(lakes: Lakes) -> Lakehouse:
    created = lakes.local()
    for number in range(5):
        create(created, f"n{number}")
    return created


def history(lake: Lakehouse, name: str = "changes", row_filter: str | None = None) -> FollowedHistory:
    return FollowedHistory(open_metadata(lake, TableRequest(table=name, row_filter=row_filter)), 2)


def versions(lake: Lakehouse, name: str, start: int, end: int, options: StreamOptions, **request: str) -> list[int]:
    followed = history(lake, name, **request)
    parts = followed.parts(lake, {"version": start}, {"version": end}, options)
    schema = followed.opened.schema
    copies = [pickle.loads(pickle.dumps(part)) for part in parts]
    return [row for part in copies for batch in part.batches(schema) for row in batch["version"].to_pylist()]


def test_each_version_is_in_one_batch(lake: Lakehouse) -> None:
    fail = StreamOptions()
    assert history(lake).before(lake, 0) == {"version": 0}
    assert history(lake, "versions").before(lake, 0) == {"version": -1}
    assert history(lake).before(lake, 3) == {"version": 2}
    assert versions(lake, "changes", 0, 2, fail) + versions(lake, "changes", 2, 5, fail) == [1, 2, 3, 4, 5]
    assert versions(lake, "versions", -1, 5, fail) == [0, 1, 2, 3, 4, 5]
    assert versions(lake, "changes", 0, 5, fail, row_filter="namespace = 'n3'") == [4]


def test_expired_versions_are_gap_or_skipped(lake: Lakehouse) -> None:
    expire(lake, "2-3")
    assert history(lake).before(lake, 0) == {"version": 3}, "versions that expired before the stream began are no gap"
    with pytest.raises(VersionExpiredError):
        versions(lake, "changes", 1, 5, StreamOptions())
    # The changes of the expired versions are reported with version 4.
    assert versions(lake, "changes", 1, 5, StreamOptions(on_gap="skip")) == [4, 4, 4, 5]
    assert versions(lake, "versions", 1, 5, StreamOptions()) == [2, 3, 4, 5]


def reader(lake: Lakehouse, **options: str) -> StreamReader:
    source = {"root": lake.root, "path": "changes", **options}
    opened = history(lake).opened
    return stream_reader(source, opened, opened.schema)


def test_offsets_and_limits(lake: Lakehouse) -> None:
    no_limit, limit = ReadAllAvailable(), ReadMaxRows(2)
    stream_ids = {"lakehouse": lake.snapshot().definition.id, "of": "changes"}

    def at(version: int) -> dict[str, object]:
        return {"version": version, **stream_ids}

    limited_reader = reader(lake, max_versions="2")
    assert limited_reader.initialOffset() == at(0)
    assert limited_reader.getDefaultReadLimit() == limit
    assert reader(lake).getDefaultReadLimit() == no_limit
    assert limited_reader.latestOffset(at(0), limit) == at(2)
    assert limited_reader.latestOffset(at(4), limit) == at(5)
    assert limited_reader.latestOffset(at(5), no_limit) == at(5)
    assert limited_reader.latestOffset({"version": 5}, no_limit) == {"version": 5}, "an offset of an earlier release"
    limited_reader.prepareForTriggerAvailableNow()
    create(lake, "later")
    assert limited_reader.latestOffset(at(0), no_limit) == at(5), "later versions are left for the next run"
    assert reader(lake, starting_version="latest").initialOffset() == at(6)
    assert limited_reader.partitions(at(5), at(5)) == []
    with pytest.raises(InvalidInputError):
        reader(lake).latestOffset(at(9), no_limit)
    expire(lake, "2-3")
    assert reader(lake).latestOffset(at(1), ReadMaxRows(1)) == at(4), "a batch ends at a live version"


@pytest.mark.parametrize(
    "offset",
    [
        {"version": 1, "lakehouse": "another"},
        {"version": 1, "of": "versions"},
        {"version": "1"},
        {"version": -2},
        {"version": True},
        {},
        [],
    ],
    ids=["lakehouse", "table", "text", "negative", "bool", "empty", "list"],
)
def test_foreign_checkpoints_are_rejected(lake: Lakehouse, offset: Any) -> None:
    limited_reader = reader(lake)
    for call in (
        lambda: limited_reader.latestOffset(offset, ReadAllAvailable()),
        lambda: limited_reader.partitions({"version": 0}, offset),
    ):
        with pytest.raises(InvalidInputError):
            call()


@pytest.mark.parametrize("option", ["version", "timestamp", "from", "to"])
def test_version_options_are_rejected_for_streams(lake: Lakehouse, option: str) -> None:
    with pytest.raises(InvalidInputError, match="'starting_version'"):
        reader(lake, **{option: "1"})


def test_pickled_reader_contains_no_root_or_options(lake: Lakehouse) -> None:
    options = SourceOptions.parse({"root": lake.root, "path": "changes", "storage.region": "somewhere"})
    history_reader = StreamReader(LakehouseAt(options), history(lake), StreamOptions(), history(lake).opened.schema)
    assert b"somewhere" not in pickle.dumps(history_reader) and lake.root.encode() not in pickle.dumps(history_reader)
