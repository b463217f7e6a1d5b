"""Fixtures of the flights samples and of lakehouses, and Dagster's databases, for all tests of this folder."""

import sqlite3
from typing import Any

import pytest
from dagster._core.storage.event_log.sqlite import sqlite_event_log
from dagster._core.storage.runs.sqlite import sqlite_run_storage
from dagster._core.storage.schedules.sqlite import sqlite_schedule_storage
from sqlalchemy import Engine, create_engine, event

from tests.flights import flights_csv, sample, sample_folder, spark
from tests.lakes import lakes

__all__ = ["flights_csv", "lakes", "sample", "sample_folder", "spark"]


@event.listens_for(Engine, "connect")
def _do_not_wait_for_the_disk(connection: object, _record: object) -> None:
    """What Dagster keeps in SQLite here need not outlive the machine: it still outlives each process that is killed."""
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous = OFF")


_MOST_ENGINES = 64
_engines: dict[str, Engine] = {}


def _engine(url: str, **options: Any) -> Engine:
    """Return the one engine of a database, which keeps its compiled statements: Dagster makes one for each event."""
    if url not in _engines:
        while len(_engines) >= _MOST_ENGINES:
            _engines.pop(next(iter(_engines)))
        _engines[url] = create_engine(url, **options)
    return _engines[url]


@pytest.fixture(autouse=True)
def _one_engine_for_each_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dagster's own code runs on its own databases, with the statements compiled once."""
    for module in (sqlite_event_log, sqlite_run_storage, sqlite_schedule_storage):
        monkeypatch.setattr(module, "create_engine", _engine)
