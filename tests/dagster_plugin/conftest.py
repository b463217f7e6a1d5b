"""Fixtures of the flights samples and of lakehouses, and Dagster's databases, for all tests of this folder."""

import sqlite3

from sqlalchemy import Engine, event

from tests.flights import flights_csv, sample, sample_folder, spark
from tests.lakes import lakes

__all__ = ["flights_csv", "lakes", "sample", "sample_folder", "spark"]


@event.listens_for(Engine, "connect")
def _do_not_wait_for_the_disk(connection: object, _record: object) -> None:
    """What Dagster keeps in SQLite here need not outlive the machine: it still outlives each process that is killed."""
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous = OFF")
