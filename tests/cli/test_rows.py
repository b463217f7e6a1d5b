"""The commands head and count, which apply deletes and escape values for the terminal."""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Iterator
from decimal import Decimal
from uuid import UUID

import pyarrow as pa
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import DecimalType, ListType, LongType, MapType, NestedField, StringType, StructType, UUIDType

from tests.cli.test_commands import ROOT, Cli, assert_error, cli, restore_logging
from tests.cli.test_hostile_text import HOSTILE, is_harmless
from tests.engine_tables import EQUALITY, POSITIONS, make_table, rows, with_equality, with_positions
from tests.operations.changes import append_rows, drop
from trinitylake_ops import Lakehouse
from trinitylake_ops.cli.rows import fitted_widths
from trinitylake_ops.format.definitions import TableDef
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.read import count_rows, first_rows
from trinitylake_ops.storage import drop_memory_root
from trinitylake_ops.storage.meter import MeteredStorage

pytestmark = pytest.mark.usefixtures("fixed_requests")

__all__ = ["cli", "restore_logging"]


@pytest.fixture
def lake() -> Iterator[Lakehouse]:
    yield Lakehouse.create(ROOT)
    drop_memory_root(ROOT)


def append(lake: Lakehouse, name: str, rows: pa.Table) -> None:
    catalog = catalog_at(lake)
    catalog.create_namespace_if_not_exists(name.partition(".")[0])
    catalog.create_table_if_not_exists(name, rows.schema).append(rows)


def simulate_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Simulate a terminal with a width."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))


def test_head_and_count_at_version(cli: Cli, lake: Lakehouse) -> None:
    for number in range(3):
        append(lake, "ns.t", pa.table({"id": [number * 2, number * 2 + 1], "name": [f"a{number}", None]}))
    first = lake.latest_version() - 2
    assert cli("head", "ns.t").out.splitlines()[:3] == ["id  name", " 0  a0", " 1  NULL"]
    assert [row["id"] for row in cli("head", "ns.t", "--json").json["rows"]] == list(range(6))
    output = cli("head", "ns.t", "--limit", 3, "--columns", "name,id", "--json").json
    assert [list(row.items()) for row in output["rows"]][2] == [("name", "a1"), ("id", 2)]
    assert len(output["rows"]) == 3
    old = cli("head", "ns.t", "--version", first, "--json").json
    assert (old["version"], old["namespace"], old["table"], len(old["rows"])) == (first, "ns", "t", 2)
    assert (cli("count", "ns.t").out, cli("count", "ns.t", "--version", first).out) == ("6\n", "2\n")
    expected = {"version": lake.latest_version(), "namespace": "ns", "table": "t", "rows": 6}
    assert cli("count", "ns.t", "--json").json == expected


def test_head_and_count_apply_deletes(cli: Cli, lake: Lakehouse) -> None:
    for table, expected in ((with_positions(lake), POSITIONS), (with_equality(lake), EQUALITY)):
        name, ids = f"ns.{table.name}", [number for number, _ in expected]
        assert sorted(row["id"] for row in cli("head", name, "--json").json["rows"]) == sorted(ids)
        assert int(cli("count", name).out) == len(ids)
        for limit in range(1, len(ids)):
            assert len(cli("head", name, "--limit", limit, "--json").json["rows"]) == limit


def test_head_reads_large_file_partially(lake: Lakehouse) -> None:
    """An Arrow scan would prefetch in the background, and abort the process at its exit."""
    large = pa.table({"id": range(400_000), "text": [f"{number**7 % 2**61:x}" for number in range(400_000)]})
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    table = catalog.create_table("ns.t", large.schema, properties={"write.parquet.row-group-limit": "5000"})
    table.append(large)
    (task,) = table.scan().plan_files()
    assert task.file.file_size_in_bytes > 4 << 20
    metered = MeteredStorage(lake.storage)
    io = StorageFileIO.on(metered, lake.storage_options, read_only=True)
    metadata = catalog.load_table("ns.t").metadata
    for columns in (None, ["text"]):
        before = metered.snapshot()
        rows = first_rows(metadata, io, 1_500, columns)
        assert rows.to_pylist() == large.slice(0, 1_500).select(columns or ["id", "text"]).to_pylist()
        assert (metered.snapshot() - before).bytes_read < 2 << 20


def test_head_continues_after_deleted_rows(lake: Lakehouse) -> None:
    table = make_table(lake, "t")
    path = table.append(rows(*range(100)))
    table.delete_positions({path: list(range(95))})
    table.delete_equal(pa.table({"id": pa.array([96], pa.int64())}))
    loaded = table.loaded
    assert isinstance(loaded.io, StorageFileIO)
    for limit, expected in ((1, [95]), (2, [95, 97]), (100, [95, 97, 98, 99])):
        assert first_rows(loaded.metadata, loaded.io, limit)["id"].to_pylist() == expected
        assert first_rows(loaded.metadata, loaded.io, limit, ["place"])["place"].to_pylist() == ["a"] * len(expected)
    assert count_rows(loaded.metadata, loaded.io) == 4


def test_head_shows_missing_columns_as_null(cli: Cli, lake: Lakehouse) -> None:
    append_rows(lake)
    with catalog_at(lake).load_table("ns.t").update_schema() as update:
        update.add_column("n", LongType())
        update.rename_column("id", "key")
    assert cli("head", "ns.t", "--columns", "n", "--json").json["rows"] == [{"n": None}] * 3
    assert cli("head", "ns.t", "--json", "--limit", 1).json["rows"] == [{"key": 1, "n": None}]


def test_head_of_empty_table_prints_header(cli: Cli, lake: Lakehouse) -> None:
    catalog_at(lake).create_namespace("ns")
    catalog_at(lake).create_table("ns.t", pa.schema([("id", pa.int64()), ("name", pa.string())]))
    output = cli("head", "ns.t", "--columns", "name")
    assert (output.code, output.out, output.err) == (0, "name\n", "No rows.\n")
    assert cli("head", "ns.t", "--json").json["rows"] == []
    assert cli("count", "ns.t").out == "0\n"


def test_head_shows_values_of_each_type(cli: Cli, lake: Lakehouse) -> None:
    nested = StructType(NestedField(11, "x", LongType()), NestedField(12, "y", ListType(13, StringType())))
    schema = Schema(
        NestedField(1, "id", UUIDType()),
        NestedField(2, "price", DecimalType(9, 2)),
        NestedField(3, "part", nested),
        NestedField(4, "counts", MapType(14, StringType(), 15, LongType())),
    )
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    table = catalog.create_table("ns.nested", schema)
    number = UUID(int=7)
    row = {"id": number.bytes, "price": Decimal("1.50"), "part": {"x": 1, "y": ["a"]}, "counts": [("k", 2)]}
    table.append(pa.Table.from_pylist([row], schema=table.schema().as_arrow()))
    (output,) = cli("head", "ns.nested", "--json").json["rows"]
    assert output["id"] in (str(number), number.hex)
    assert (output["price"], output["part"], output["counts"]) == ("1.50", {"x": 1, "y": ["a"]}, [["k", 2]])
    assert '{"x": 1, "y": ["a"]}' in cli("head", "ns.nested").out
    plain = pa.table(
        {
            "f": [float("nan"), float("-inf")],
            "b": pa.array([b"\x00\xff", None]),
            "d": [dt.date(2026, 1, 31), None],
            "t": pa.array([dt.datetime(2026, 1, 31, 1, 2, 3, 4, dt.UTC), None], pa.timestamp("us", "UTC")),
        }
    )
    append(lake, "ns.plain", plain)
    first, second = cli("head", "ns.plain", "--json").json["rows"]
    assert first == {"f": "NaN", "b": "00ff", "d": "2026-01-31", "t": "2026-01-31T01:02:03.000004+00:00"}
    assert second == {"f": "-Infinity", "b": None, "d": None, "t": None}


def test_head_shows_unrepresentable_times_as_numbers(cli: Cli, lake: Lakehouse) -> None:
    days, micros = pa.array([2**31 - 1], pa.int32()).cast(pa.date32()), pa.array([2**62], pa.timestamp("us"))
    far = pa.table({"d": days, "t": micros})
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    properties = {"write.metadata.metrics.default": "none"}  # pyiceberg cannot write bounds of these columns
    catalog.create_table("ns.t", far.schema, properties=properties).append(far)
    assert cli("head", "ns.t", "--json").json["rows"] == [{"d": 2**31 - 1, "t": 2**62}]
    assert str(2**62) in cli("head", "ns.t").out


def test_head_escapes_values(cli: Cli, lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    append(lake, "ns.t", pa.table({HOSTILE: [HOSTILE, HOSTILE * 1_000], "part": [{"a": HOSTILE}, {"a": None}]}))
    for _ in range(2):
        for arguments in (("head", "ns.t"), ("head", "ns.t", "--json"), ("head", "ns.t", "--columns", HOSTILE)):
            result = cli(*arguments)
            assert result.code == 0
            assert is_harmless(result.out + result.err)
        assert is_harmless(cli("head", "ns.t", "--columns", f"{HOSTILE}x").err)
        simulate_terminal(monkeypatch, 40)
    assert cli("head", "ns.t", "--json").json["rows"][0][HOSTILE] == HOSTILE


def test_head_fits_lines_to_terminal(cli: Cli, lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = {f"column{number}": ["x" * 100_000 if number else "\u6f22" * 50] for number in range(20)}
    append(lake, "ns.t", pa.table({"id": [7], **wide}))
    assert max(map(len, cli("head", "ns.t").out.splitlines())) < 22_000, "values are limited to 1,000 characters"
    for width in (5, 30, 100):
        simulate_terminal(monkeypatch, width)
        output = cli("head", "ns.t")
        lines = output.out.splitlines()
        assert len(lines) == 2
        assert all(len(line) + line.count("\u6f22") <= width for line in lines)
        assert lines[1].lstrip().startswith("7")
        assert "--columns" in output.err
    assert "--columns" not in cli("head", "ns.t", "--columns", "id,column3").err


def test_fitted_widths_fill_line() -> None:
    for requested, total in itertools.product([(3, 5), (100, 3, 100), (200,) * 30, (1,), (9, 9, 9)], [1, 10, 29, 80]):
        widths = fitted_widths(requested, total)
        used = sum(widths) + 2 * (len(widths) - 1)
        assert 1 <= len(widths) <= len(requested)
        assert used <= total or len(widths) == 1
        assert all(1 <= width <= requested_width for width, requested_width in zip(widths, requested, strict=False))
        is_complete = widths == list(requested)
        assert is_complete or total - used < max(requested)
    assert fitted_widths((100, 3, 100), 80) == [36, 3, 37]


def test_head_rejects_unreadable_tables(cli: Cli, lake: Lakehouse) -> None:
    append_rows(lake)
    with lake.transaction() as txn:
        txn.create_table("ns", "other", TableDef(table_format="LANCE"))
    for command in ("head", "count"):
        assert_error(cli(command, "ns.none"), 4, "ns.none")
        assert_error(cli(command, "none"), 2, "NAMESPACE.TABLE")
        assert_error(cli(command, "ns.other"), 2, "LANCE")
        assert_error(cli(command, "ns.t", "--version", 99), 4)
    assert_error(cli("head", "ns.t", "--columns", "id,none"), 2, "none", "id")
    assert_error(cli("head", "ns.t", "--columns", "id,id"), 2)
    for limit in (0, 10_001):
        assert_error(cli("head", "ns.t", "--limit", limit), 2)


def test_log_of_table(cli: Cli, lake: Lakehouse) -> None:
    append_rows(lake)
    append_rows(lake, "ns.u")
    append_rows(lake)
    with catalog_at(lake).load_table("ns.t").update_schema() as update:
        update.add_column("n", LongType())
    output = cli("log", "ns.t", "--json").json
    kinds = {entry["version"]: entry["change"]["kind"] for entry in output}
    assert list(kinds.items()) == [(7, "changed"), (6, "changed"), (3, "changed"), (2, "added")]
    assert [entry["change"]["delta"]["rows_added"] for entry in output] == [0, 3, 3, 0]
    assert [entry["version"] for entry in cli("log", "ns.t", "--limit", 2, "--json").json] == [7, 6]
    text = cli("log", "ns.t").out.splitlines()
    assert text[0].split()[-5:] == ["change", "rows", "files", "bytes", "columns"]
    assert "+3" in text[2]
    assert cli("rollback", 3, "--table", "ns.t", "--yes").code == 0
    undone_by = {entry["version"]: entry["undone_by"] for entry in cli("log", "ns.t", "--json").json}
    assert undone_by == {8: None, 7: 8, 6: 8, 3: None, 2: None}
    assert sum("undone by 8" in line for line in cli("log").out.splitlines()) >= 2
    drop(lake, "ns", "t")
    assert cli("log", "ns.t", "--json").json[0]["change"]["kind"] == "removed"
    assert_error(cli("log", "ns.none"), 4, "ns.none")
    assert_error(cli("log", "none"), 2, "NAMESPACE.TABLE")
    assert_error(cli("log", "ns.t", "--html", "page.html"), 2, "--html")
