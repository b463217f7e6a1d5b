"""Provide the flights samples, lakehouses and fast Dagster databases to all tests in this folder."""

import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from alembic.config import Config as AlembicConfig
from alembic.script import ScriptDirectory
from dagster import Config
from dagster._config.field import Field
from dagster._config.pythonic_config import resource
from dagster._core.execution import compute_logs
from dagster._core.storage.event_log.sqlite import sqlite_event_log
from dagster._core.storage.event_log.sqlite.sqlite_event_log import SqliteEventLogStorage
from dagster._core.storage.runs.sqlite import sqlite_run_storage
from dagster._core.storage.schedules.sqlite import sqlite_schedule_storage
from dagster._core.storage.sqlite_storage import DagsterSqliteStorage
from dagster._serdes import ConfigurableClassData
from sqlalchemy import Engine, QueuePool, create_engine, event

from tests.flights import flights_csv, sample, sample_folder, spark
from tests.lakes import Lakes, lakes
from trinitylake_ops import Lakehouse

__all__ = ["flights_csv", "lakes", "sample", "sample_folder", "spark"]


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.instance_for_test() as test_instance:
        yield test_instance


@pytest.fixture
def lake(lakes: Lakes) -> Lakehouse:
    return lakes.local()


@event.listens_for(Engine, "connect")
def _disable_sync(connection: object, _record: object) -> None:
    """Disable syncing of Dagster's SQLite databases. They need not survive a crash of the machine."""
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous = OFF")


_MAX_ENGINES = 64
_engines: dict[str, Engine] = {}
_empty_log: list[sqlite3.Connection] = []
_initdb = SqliteEventLogStorage._initdb


def _engine(url: str, **options: Any) -> Engine:
    """Return the cached engine of a database, which stays connected. Dagster would create an engine for each event."""
    if url not in _engines:
        while len(_engines) >= _MAX_ENGINES:
            Engine.dispose(_engines.pop(next(iter(_engines))))
        engine = create_engine(url, **{**options, "poolclass": QueuePool})
        engine.dispose = lambda: None  # keep the connections for the next event
        _engines[url] = engine
    return _engines[url]


def _copy_log(storage: SqliteEventLogStorage, engine: Engine, for_index_shard: bool = False) -> None:
    """Copy an empty event log instead of creating the database of a run from scratch."""
    path = Path(str(engine.url.database))
    if for_index_shard or path.exists():
        _initdb(storage, engine, for_index_shard)
        return
    if not _empty_log:
        _initdb(storage, engine)
        with closing(sqlite3.connect(path)) as database:
            _empty_log.append(sqlite3.connect(":memory:", check_same_thread=False))
            database.backup(_empty_log[0])
        return
    with closing(sqlite3.connect(path)) as copy:
        _empty_log[0].backup(copy)
        copy.execute("PRAGMA journal_mode = WAL")


_empty_databases: dict[Path, bytes] = {}
_init_storage = DagsterSqliteStorage.__init__


def _cache_empty_databases() -> None:
    """Create and cache the databases of an empty instance."""
    with tempfile.TemporaryDirectory() as folder:
        DagsterSqliteStorage(folder)
        for path in Path(folder).rglob("*.db"):
            with closing(sqlite3.connect(path)) as database:
                _empty_databases[path.relative_to(folder)] = database.serialize()


def _copy_storage(storage: DagsterSqliteStorage, base_dir: str, inst_data: ConfigurableClassData | None = None) -> None:
    """Copy the three databases of an empty instance."""
    for name, data in _empty_databases.items():
        path = Path(base_dir, name)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    _init_storage(storage, base_dir, inst_data)


_load_migrations = ScriptDirectory.from_config


@lru_cache
def _migrations(location: str) -> ScriptDirectory:
    config = AlembicConfig()
    config.set_main_option("script_location", location)
    return _load_migrations(config)


def _cached_migrations(config: AlembicConfig) -> ScriptDirectory:
    """Return the cached migrations, which Dagster would load again for each database."""
    location = config.get_main_option("script_location")
    assert location is not None
    return _migrations(location)


_infer_schema = resource.infer_schema_from_config_class


@lru_cache(maxsize=256)
def _schema_of(model_cls: type[Config], omitted: frozenset[str]) -> Field:
    return _infer_schema(model_cls, fields_to_omit=set(omitted))


def _schema(model_cls: type[Config], fields_to_omit: set[str], default: object = None) -> Field:
    """Return the cached schema of a resource class, which Dagster would derive again for each object and each run."""
    if default is not None:
        return _infer_schema(model_cls, fields_to_omit=fields_to_omit, default=default)
    return _schema_of(model_cls, frozenset(fields_to_omit))


@pytest.fixture(autouse=True)
def _cached_dagster_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run Dagster's own code on prepared databases with cached engines, migrations and schemas.

    Dagster captures the output of runs in files, but starts no processes that copy these files to the terminal, because
    starting four of them takes as long as a small run.
    """
    if not _empty_databases:
        _cache_empty_databases()
    monkeypatch.setattr(compute_logs, "tail_to_stream", lambda _path, _stream: nullcontext((None, None)))
    for module in (sqlite_event_log, sqlite_run_storage, sqlite_schedule_storage):
        monkeypatch.setattr(module, "create_engine", _engine)
    monkeypatch.setattr(SqliteEventLogStorage, "_initdb", _copy_log)
    monkeypatch.setattr(DagsterSqliteStorage, "__init__", _copy_storage)
    monkeypatch.setattr(ScriptDirectory, "from_config", _cached_migrations)
    monkeypatch.setattr(resource, "infer_schema_from_config_class", _schema)
