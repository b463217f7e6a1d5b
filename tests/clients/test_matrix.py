"""Every engine writes a table, and every other engine reads, alters and writes it. Then maintenance runs.

After each step, and after all maintenance, every engine must read the same rows. A model in Python computes the
expected rows. ``UNSUPPORTED`` lists the commands that an engine does not support, with the class of the error, so that
the test fails when an engine starts to support one.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.clients.matrix.driver import decode_rows, encode_value
from tests.clients.matrix.engines import HERE, Engine, EngineError
from tests.clients.test_clients import python_of, s3_client_jars, serving, spark_runtime_jars
from tests.clock import ClockStorage
from tests.lakes import Lakes, lakes
from tests.server.live_server import duckdb_extensions
from tests.servers.radosgw import ROLE_ARN
from tests.servers.s3_server import S3Server
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.operations import RetentionPolicy
from trinitylake_ops.storage.options import OPTIONS_VARIABLE

__all__ = ["lakes"]

Row = dict[str, Any]

#: Engines that are installed in the test environment, and those with a separate environment.
QUICK_ENGINES = ("pyiceberg", "duckdb", "polars")
ALL_ENGINES = (*QUICK_ENGINES, "daft", "spark", "sail", "clickhouse")

COLUMNS = (
    ("id", "long"),
    ("n", "int"),
    ("x", "double"),
    ("s", "string"),
    ("d", "date"),
    ("t", "timestamp"),
    ("price", "decimal"),
    ("tags", "list"),
    ("address", "struct"),
)
#: Engines truncate bounds after 16 bytes, which is within a character of this text.
LONG_TEXT = "A" * 15 + "\u2022 bullet, \u00fcber \U0001f986"
FIRST_ROWS: tuple[Row, ...] = (
    {
        "id": 1,
        "n": 2**31 - 1,
        "x": 0.1,
        "s": LONG_TEXT,
        "d": "2026-02-28",
        "t": "2026-02-28T23:59:59.123456",
        "price": "1234567.89",
        "tags": ["\u00e9", None, ""],
        "address": {"city": "Z\u00fcrich", "zip": 8001},
    },
    {"id": 2, **dict.fromkeys((name for name, _ in COLUMNS[1:]), None)},
    {
        "id": 3,
        "n": -(2**31),
        "x": -1.5e300,
        "s": "",
        "d": "1969-12-31",
        "t": "1969-12-31T23:59:59.999999",
        "price": "-0.01",
        "tags": [],
        "address": {"city": None, "zip": None},
    },
)
SECOND_ROWS = tuple({**row, "id": row["id"] + 10, "note": "later"} for row in FIRST_ROWS)
THIRD_ROWS = tuple({**row, "id": row["id"] + 20, "note": None} for row in FIRST_ROWS)
FOURTH_ROWS = ({**FIRST_ROWS[0], "id": 31},)

#: For each engine and command, the class of the error and the reason. ``NoCommand`` is the error of a program without
#: a function for the command, because the engine's API has no such call.
UNSUPPORTED: Mapping[tuple[str, str], tuple[str, str]] = {
    ("clickhouse", "create"): ("INCORRECT_FILE_NAME", "the table engine needs a location and keys"),
    ("polars", "create"): ("NoCommand", "the API has no such call"),
    **{
        (engine, step): ("NoCommand", "the API has no such call")
        for engine in ("polars", "daft")
        for step in ("add_column", "rename", "widen", "drop_column", "update", "delete")
    },
    **{
        ("sail", step): ("UnsupportedOperationException", "unsupported ALTER TABLE operation")
        for step in ("add_column", "rename", "drop_column")
    },
    ("sail", "widen"): ("AnalysisException", "ALTER TABLE is not yet supported for catalog-managed Iceberg tables"),
}

#: For each reader and writer of data files, the class of the error and the reason.
UNREADABLE: Mapping[tuple[str, str], tuple[str, str]] = {
    ("daft", "duckdb"): ("DaftCoreException", "CorruptFile: list type must have a single child, found 0"),
}


@dataclass
class Model:
    """The expected content of a table."""

    columns: list[tuple[str, str]] = field(default_factory=lambda: list(COLUMNS))
    rows: list[Row] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    #: The engines that wrote the data files of the table.
    writers: set[str] = field(default_factory=set)

    def adapted(self, rows: tuple[Row, ...]) -> list[Row]:
        """Return rows of the first schema, adapted to the current columns. Values of a widened column are large."""
        original_names = {new_name: old_name for old_name, new_name in self.renamed.items()}
        adapted_rows = [
            {name: copy.deepcopy(row.get(original_names.get(name, name))) for name, _ in self.columns} for row in rows
        ]
        for row in adapted_rows:
            if ("n", "long") in self.columns and row["n"] is not None:
                row["n"] *= 2**10
        return adapted_rows

    def expected_types(self) -> dict[str, str]:
        """Return the expected Iceberg type of each column, as the name of pyiceberg's class in lower case."""
        return {name: f"{'integer' if type_ == 'int' else type_}type" for name, type_ in self.columns}

    def add(self, name: str, type_: str) -> None:
        self.columns.append((name, type_))
        for row in self.rows:
            row[name] = None

    def rename(self, name: str, to: str) -> None:
        self.renamed[name] = to
        self.columns = [(to if column == name else column, type_) for column, type_ in self.columns]
        self.rows = [{to if column == name else column: value for column, value in row.items()} for row in self.rows]

    def widen(self, name: str, type_: str) -> None:
        self.columns = [(column, type_ if column == name else column_type) for column, column_type in self.columns]

    def drop(self, name: str) -> None:
        self.columns = [(column, type_) for column, type_ in self.columns if column != name]
        for row in self.rows:
            del row[name]


def as_stored_by(engine: str, rows: list[Row]) -> list[Row]:
    """Return rows as an engine reads and writes them. ClickHouse has no null lists and no null structs."""
    if engine != "clickhouse":
        return copy.deepcopy(rows)
    rows = copy.deepcopy(rows)
    for row in rows:
        row["tags"] = row["tags"] or []
        row["address"] = row["address"] or {"city": None, "zip": None}
    return rows


def sorted_fields(row: Row) -> Row:
    """Return a row whose string does not depend on the order of columns."""
    return dict(sorted(row.items()))


@dataclass
class Matrix:
    """A lakehouse, its server, the engines, and the expected content of each table."""

    lake: Lakehouse
    engines: dict[str, Engine]
    models: dict[str, Model] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def attempt(self, engine: str, command: str, table: str, **fields: Any) -> bool:
        """Run a command and return whether it succeeded. An unexpected outcome is recorded as a problem."""
        error, _ = UNSUPPORTED.get((engine, command), ("", ""))
        try:
            self.engines[engine].run(command, table=table, **fields)
        except EngineError as engine_error:
            if engine_error.kind != error:
                self.problems.append(f"{table}: {engine} failed to {command}: {str(engine_error)[:700]}")
            return False
        if error:
            self.problems.append(f"{table}: {engine} supports {command}, which is declared unsupported")
        return True

    def check_read(self, engine: str, table: str, when: str) -> None:
        model = self.models[table]
        errors = {UNREADABLE[engine, writer][0] for writer in model.writers if (engine, writer) in UNREADABLE}
        try:
            rows = self.engines[engine].run("read", table=table)
        except EngineError as error:
            if error.kind not in errors:
                self.problems.append(f"{table}, {when}: {engine} failed to read: {str(error)[:700]}")
            return
        if errors:
            self.problems.append(f"{table}, {when}: {engine} can read a table that is declared unreadable")
        self.compare(rows, as_stored_by(engine, model.rows), f"{table}, {when}, by {engine}")

    def compare(self, rows: list[Row], expected: list[Row], where: str) -> None:
        actual_texts, expected_texts = (sorted(map(repr, map(sorted_fields, part))) for part in (rows, expected))
        if actual_texts != expected_texts:
            missing = [text for text in expected_texts if text not in actual_texts]
            unexpected = [text for text in actual_texts if text not in expected_texts]
            self.problems.append(f"{where}: missing rows {missing}, unexpected rows {unexpected}")

    def write(self, engine: str, table: str, rows: tuple[Row, ...]) -> None:
        model = self.models[table]
        adapted_rows = as_stored_by(engine, model.adapted(rows))
        if self.attempt(engine, "insert", table, columns=model.columns, rows=adapted_rows):
            model.rows += adapted_rows
            model.writers.add(engine)

    def alter(self, engine: str, table: str) -> None:
        model = self.models[table]
        changes: tuple[tuple[str, dict[str, str], Callable[..., None]], ...] = (
            ("add_column", {"name": "note", "type_": "string"}, model.add),
            ("rename", {"name": "x", "to": "amount"}, model.rename),
            ("widen", {"name": "n", "type_": "long"}, model.widen),
            ("drop_column", {"name": "d"}, model.drop),
        )
        for name, fields, change in changes:
            if self.attempt(engine, name, table, **fields):
                change(**fields)

    def change_rows(self, engine: str, table: str) -> None:
        model = self.models[table]
        (first,) = (row for row in model.rows if row["id"] == 1)
        changed = {**copy.deepcopy(first), "s": "changed: \u00df"}
        columns = model.columns
        if self.attempt(engine, "update", table, row=changed, name="s", type_="string", columns=columns):
            model.rows = [changed if row["id"] == 1 else row for row in model.rows]
        if self.attempt(engine, "delete", table, id_=3):
            model.rows = [row for row in model.rows if row["id"] != 3]

    def run_pair(self, writer: str, changer: str) -> None:
        """One engine creates a table, another one alters and writes it, the first one writes again, and all read it."""
        table = f"matrix.{writer}_{changer}"
        self.models[table] = Model()
        if not self.attempt(writer, "create", table, columns=COLUMNS):
            self.attempt("pyiceberg", "create", table, columns=COLUMNS)
        self.write(writer, table, FIRST_ROWS)
        self.check_read(changer, table, "after the first write")
        self.alter(changer, table)
        self.write(changer, table, SECOND_ROWS)
        self.change_rows(changer, table)
        self.write(writer, table, THIRD_ROWS)
        fields = catalog_at(self.lake).load_table(table).schema().fields
        types = {field.name: type(field.field_type).__name__.lower() for field in fields}
        if types != self.models[table].expected_types():
            self.problems.append(f"{table}: unexpected types {types}")
        for reader in self.engines:
            self.check_read(reader, table, "after all writes")

    def check_lakehouse(self, lake: Lakehouse, when: str) -> None:
        """Read a lakehouse without an engine and without the server, and compare it with the models."""
        catalog = catalog_at(lake)
        for table, model in self.models.items():
            rows = [encode_value(row) for row in catalog.load_table(table).scan().to_arrow().to_pylist()]
            self.compare(rows, model.rows, f"{table}, {when}")

    def append(self, lake: Lakehouse, table: str, rows: tuple[Row, ...]) -> None:
        """Append rows to a table of the lakehouse, or of a clone that will be promoted."""
        model = self.models[table]
        adapted_rows, loaded = model.adapted(rows), catalog_at(lake).load_table(table)
        loaded.append(pa.Table.from_pylist(decode_rows(model.columns, adapted_rows), loaded.schema().as_arrow()))
        model.rows += adapted_rows

    def forget_writers(self) -> None:
        """Expect every engine to read every table, because compaction has rewritten all files."""
        for model in self.models.values():
            model.writers.clear()

    def check_all(self, when: str) -> None:
        for table in self.models:
            for reader in self.engines:
                self.check_read(reader, table, when)


def start_engine(name: str, url: str, folder: Path, s3_server: S3Server | None) -> Engine:
    """Start an engine with the settings that it needs."""
    program, python, environment = f"with_{name}", Path(sys.executable), {}
    arguments: list[str] = [url]
    match name:
        case "pyiceberg" | "polars" | "daft":
            program, arguments = "with_pyiceberg_tables", [name, url]
            if name == "daft":
                python = python_of("with_daft")
        case "duckdb":
            arguments += duckdb_extensions()
        case "spark":
            python, jars = python_of(program), spark_runtime_jars(folder)
            arguments += [jars if s3_server is None else f"{jars},{s3_client_jars()}", str(folder / "warehouse")]
            if s3_server is not None:
                arguments.append("header.X-Iceberg-Access-Delegation=vended-credentials")
        case _:
            python = python_of(program)
    if name == "sail" and s3_server is not None:  # Sail cannot use vended credentials
        keys = s3_server.environment
        environment = {**keys, "AWS_ALLOW_HTTP": "true", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false"}
    command = [str(python), str(HERE / f"{program}.py"), *arguments]
    return Engine.start(name, command, environment, folder / f"{name}.log")


@contextmanager
def running_matrix(
    names: tuple[str, ...], lake: Lakehouse, folder: Path, s3_server: S3Server | None = None, *arguments: str
) -> Iterator[Matrix]:
    """Serve a lakehouse and start the engines."""
    with ExitStack() as stack:
        url = stack.enter_context(contextmanager(serving)(lake, *arguments))
        engines = {}
        for name in names:
            engines[name] = start_engine(name, url, folder, s3_server)
            stack.callback(engines[name].stop)
        for engine in engines.values():
            engine.wait_until_ready()
        catalog_at(lake).create_namespace("matrix")
        yield Matrix(lake, engines)


def run_pairs(matrix: Matrix) -> None:
    for writer, changer in itertools.permutations(matrix.engines, 2):
        matrix.run_pair(writer, changer)
    assert matrix.problems == []
    assert operations.verify(matrix.lake, deep=True).findings == ()


def days_later(lake: Lakehouse, days: int) -> Lakehouse:
    """Return the lakehouse on a storage whose clock is ``days`` ahead."""
    return Lakehouse(ClockStorage(lake.storage, lake.storage.now_ms() + days * 86_400_000), lake.storage_options)


def maintain(matrix: Matrix, root_of: Callable[[str], str]) -> None:
    """Run all maintenance. Rows change only where a clone with additional rows is promoted."""
    lake = matrix.lake
    operations.plan_export(lake, "full", "full", target=root_of("full")).execute()
    check = operations.verify_export(lake, "full", deep=True)
    assert (check.missing, check.changed) == ((), ())
    matrix.check_lakehouse(Lakehouse.open(root_of("full"), lake.storage_options), "in a full export")

    assert operations.plan_compact_tables(lake, min_input_files=2).execute().left == {}
    matrix.forget_writers()
    operations.compact(lake)

    operations.plan_clone(lake, root_of("clone"), "clone").execute()
    clone = Lakehouse.open(root_of("clone"), lake.storage_options)
    before = lake.latest_version()
    first, second = itertools.islice(matrix.models, 2)
    matrix.append(clone, first, FOURTH_ROWS)
    operations.plan_promotion(lake, "clone").execute()
    matrix.append(lake, second, FOURTH_ROWS)
    operations.plan_refresh(lake, "clone").execute()
    matrix.check_lakehouse(clone, "in a refreshed clone")
    operations.plan_drop_clone(lake, "clone").execute()

    after = lake.latest_version()
    operations.rollback(lake, before, tables=[first])
    assert catalog_at(lake).load_table(first).scan().to_arrow().num_rows == len(matrix.models[first].rows) - len(
        FOURTH_ROWS
    )
    operations.rollback(lake, after, tables=[first])

    newest_only = RetentionPolicy(maximum_age_ms=0, minimum_versions=1, protected_ms=0)
    assert operations.plan_trim_tables(days_later(lake, 2), newest_only).execute().left == ()
    assert operations.plan_expiration(days_later(lake, 4), newest_only).execute().damaged == {}
    purge = operations.plan_purge(days_later(lake, 6)).execute()
    assert purge.files > 0
    assert (purge.failures, purge.damaged) == ({}, {})
    orphans = operations.plan_orphan_removal(days_later(lake, 8)).execute()
    assert (orphans.failures, orphans.damaged) == ({}, {})
    assert operations.verify(days_later(lake, 10), deep=True).findings == ()
    matrix.check_all("after all maintenance")


def test_engines_of_test_environment_agree(lakes: Lakes, tmp_path: Path) -> None:
    with running_matrix(QUICK_ENGINES, lakes.local(), tmp_path) as matrix:
        run_pairs(matrix)
        maintain(matrix, lakes.root)
        assert matrix.problems == []


@pytest.mark.soak
@pytest.mark.timeout(5_400)  # about a thousand steps
def test_all_engines_agree_on_local_disk(lakes: Lakes, tmp_path: Path) -> None:
    names = tuple(
        name for name in ALL_ENGINES if name != "clickhouse"
    )  # on a local disk ClickHouse reads only files in its own folder
    with running_matrix(names, lakes.local(), tmp_path) as matrix:
        run_pairs(matrix)
        maintain(matrix, lakes.root)
        assert matrix.problems == []


@pytest.mark.soak
@pytest.mark.timeout(5_400)  # about a thousand steps
def test_all_engines_agree_on_s3(radosgw: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in radosgw.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(OPTIONS_VARIABLE, "addressing_style=path")
    lake = Lakehouse.create(radosgw.fresh_root(), {"addressing_style": "path"})
    roots = {name: radosgw.fresh_root(name) for name in ("full", "clone")}
    with running_matrix(ALL_ENGINES, lake, tmp_path, radosgw, "--vend-role", ROLE_ARN) as matrix:
        run_pairs(matrix)
        maintain(matrix, roots.__getitem__)
        assert matrix.problems == []
