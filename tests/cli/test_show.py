"""The command show prints readable text and JSON, never Python representations."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

import pyarrow as pa
import pytest

from tests.cli.test_commands import Cli, cli, restore_logging
from tests.lakes import lakes
from tests.operations.changes import append_rows, expire
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.format.definitions import IsolationLevel, RetentionRules, SourceRecord
from trinitylake_ops.iceberg.catalog import catalog_at

__all__ = ["cli", "lakes", "restore_logging"]

#: Python representations of values: calls, types, containers, bytes, enum members and constants.
PYTHON_REPRESENTATION = re.compile(
    r"\w\(\w+=|(?<!\w)<[\w.]+|0x[0-9a-f]{6}|[\[({]['\"]|\bb['\"]|\b[A-Z]\w+\.[A-Z_]{3,}|\b(None|True|False)\b"
)
COLUMNS = pa.schema(
    [
        ("n", pa.int64()),
        ("price", pa.decimal128(10, 2)),
        ("at", pa.timestamp("us", "UTC")),
        ("raw", pa.binary()),
        ("tags", pa.list_(pa.string())),
        ("by_name", pa.map_(pa.string(), pa.int32())),
        ("parts", pa.struct([("a", pa.int32()), ("b", pa.list_(pa.float64()))])),
    ]
)
NAMES = ([], ["sales"], ["sales.orders"], ["sales.plain"])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A clone with as many kinds of settings and records as possible."""
    folder = tmp_path_factory.mktemp("show")
    parent = Lakehouse.create(str(folder / "parent"), {"fsync": "false"})
    catalog = catalog_at(parent)
    catalog.create_namespace("sales", {"owner": "ann"})
    catalog.create_table("sales.orders", COLUMNS, properties={"note": "as it is"})
    append_rows(parent, "sales.plain")
    operations.plan_clone(parent, str(folder / "clone"), "trial").execute()
    lake = Lakehouse.open(str(folder / "clone"), {"fsync": "false"})
    operations.plan_export(lake, "kept", "minimal").execute()
    for number in range(6):
        lake.alter_definition(properties={"round": str(number)})
    lake.alter_definition(
        retention_rules=RetentionRules(keep_daily=2, keep_last=5),
        maximum_version_age_millis_overrides={1: 1_000, 2: 2_000},
        isolation_level=IsolationLevel.SERIALIZABLE,
        node_compression="zstd",
    )
    expire(lake, str(lake.latest_version() - 3))
    return lake.root


def test_fixture_has_all_kinds_of_settings(root: str) -> None:
    definition = Lakehouse.open(root).snapshot().definition
    filled = [definition.parent, definition.sources, definition.exports, definition.expirations]
    assert all([*filled, definition.retention_rules, definition.maximum_version_age_millis_overrides])
    assert isinstance(definition.sources[0], SourceRecord)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: " ".join(name) or "lakehouse")
def test_show_prints_no_python_representations(cli: Cli, root: str, name: list[str]) -> None:
    out = cli("show", *name, root=root).out
    assert PYTHON_REPRESENTATION.findall(out) == [], out
    assert "=" not in out or not name, "only settings of the lakehouse are printed as NAME=VALUE"


def test_show_formats_records_as_text(cli: Cli, root: str) -> None:
    output = " ".join(cli("show", root=root).out.split())
    for text in (
        "isolation_level serializable",
        "as trial",
        "kept (version",
        "keep_daily=2, keep_last=5",
        "1=1000, 2=2000",
    ):
        assert text in output


@pytest.mark.parametrize("name", NAMES, ids=lambda name: " ".join(name) or "lakehouse")
def test_show_json_contains_all_settings(cli: Cli, root: str, name: list[str]) -> None:
    def reject(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is not valid JSON")

    content = json.loads(cli("show", *name, "--json", root=root).out, parse_constant=reject)
    assert [text for text in texts(content) if PYTHON_REPRESENTATION.search(text)] == []


def texts(value: Any) -> list[str]:
    """Return all strings in JSON, including field names."""
    if isinstance(value, dict):
        return [*value, *(text for part in value.values() for text in texts(part))]
    if isinstance(value, list):
        return [text for part in value for text in texts(part)]
    return [value] if isinstance(value, str) else []


def test_python_representations_are_detected() -> None:
    values = [RetentionRules(keep_last=5), IsolationLevel.SNAPSHOT, (b"x",), {"a": "b"}, [None], object(), str, ("a",)]
    assert [value for value in values if not PYTHON_REPRESENTATION.search(repr(value))] == []
