"""Test that a deep verify without a record reports every kind of damage to every kind of table file.

Compaction and copies also detect damage, before the damaged content gets new checksums.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.lakes import Lakes
from tests.operations.changes import flip
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.validation.checksums import check_table_file
from trinitylake_ops.operations import Finding
from trinitylake_ops.storage import Storage

PREDICATES: dict[str, Callable[[str], bool]] = {
    "data": lambda path: path.endswith(".parquet"),
    "manifest": lambda path: path.endswith("-m0.avro"),
    "manifest list": lambda path: "/snap-" in path,
    "metadata": lambda path: path.rpartition("/")[2].startswith("00003-"),
    "former metadata": lambda path: path.rpartition("/")[2].startswith(("00001-", "00002-")),
}
N_FLIPS = 30


def rows(*ids: int) -> pa.Table:
    return pa.table(
        {"id": pa.array(ids, pa.int64()), "text": pa.array([f"text {number}" for number in ids], pa.string())}
    )


@pytest.fixture
def lake(lakes: Lakes) -> Lakehouse:
    """A lakehouse with two tables, with three appends each."""
    lake = lakes.memory()
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    for name in ("t", "u"):
        table = catalog.create_table(f"ns.{name}", rows().schema)
        for number in range(3):
            table.append(rows(number, number + 1))
    return lake


def findings_of(storage: Storage) -> Sequence[Finding]:
    return operations.verify(Lakehouse(storage), deep=True, incremental=False).findings


def paths_of(lake: Lakehouse, kind: str) -> list[str]:
    return sorted(info.path for info in lake.storage.list("tables/") if PREDICATES[kind](info.path))


def assert_reported(lake: Lakehouse, *paths: str) -> None:
    findings = [finding for finding in findings_of(lake.storage) if finding.severity == "error"]
    assert {finding.path for finding in findings} & set(paths), (paths, findings)


def damage(lake: Lakehouse, kind: str, rng: random.Random, n_flips: int) -> None:
    """Damage files of one kind in all ways, one after another."""
    storage, paths = lake.storage, paths_of(lake, kind)
    for _ in range(n_flips):
        path = rng.choice(paths)
        data = storage.read(path)
        flipped = bytearray(data)
        bit = rng.randrange(8 * len(data))
        flipped[bit // 8] ^= 1 << bit % 8
        storage.write(path, bytes(flipped))
        assert_reported(lake, path)
        storage.write(path, data)
    for _ in range(max(2, n_flips // 10)):
        path = rng.choice(paths)
        data = storage.read(path)
        storage.write(path, data[: rng.randrange(len(data))])
        assert_reported(lake, path)
        storage.delete(path)
        assert_reported(lake, path)
        storage.write(path, data)
        first, second = rng.sample(paths, 2)
        contents = storage.read(first), storage.read(second)
        storage.write(first, contents[1])
        storage.write(second, contents[0])
        assert_reported(lake, first, second)
        storage.write(first, contents[0])
        storage.write(second, contents[1])


@pytest.mark.parametrize(
    "kind",
    [kind if kind in ("manifest", "data") else pytest.param(kind, marks=pytest.mark.soak) for kind in PREDICATES],
)
def test_each_damage_is_reported_by_path(lake: Lakehouse, kind: str) -> None:
    assert findings_of(lake.storage) == ()
    damage(lake, kind, random.Random(f"verify {kind}"), N_FLIPS)
    assert findings_of(lake.storage) == ()


@pytest.mark.soak
@pytest.mark.parametrize("kind", PREDICATES)
def test_each_of_many_damages_is_reported_by_path(lake: Lakehouse, kind: str) -> None:
    damage(lake, kind, random.Random(f"soak {kind}"), 1000)


def table_of(lake: Lakehouse, path: str) -> tuple[str, str]:
    """Return the name and the folder of the table that a file belongs to."""
    folder = "/".join(path.split("/")[:2]) + "/"
    (name,) = (name for name in ("t", "u") if lake.snapshot().table("ns", name).id in folder)
    return f"ns.{name}", folder


def rewrite_without_seal(storage: Storage, path: str) -> bytes:
    """Rewrite a data file with page checksums only, as another program does, and return its bytes."""
    buffer = pa.BufferOutputStream()
    table = pq.read_table(pa.BufferReader(storage.read(path)))
    schema = {key: value for key, value in (table.schema.metadata or {}).items() if b"seal" not in key}
    pq.write_table(table.replace_schema_metadata(schema), buffer, write_page_checksum=True, compression="zstd")
    data = buffer.getvalue().to_pybytes()
    storage.write(path, data)
    return data


@pytest.mark.parametrize("is_sealed", [True, False])
def test_rows_of_damaged_file_are_not_rewritten(lake: Lakehouse, is_sealed: bool) -> None:
    plan = operations.plan_compact_tables(lake, min_input_files=2)
    path = paths_of(lake, "data")[0]
    data = lake.storage.read(path) if is_sealed else rewrite_without_seal(lake.storage, path)
    chunk = pq.read_metadata(pa.BufferReader(data)).row_group(0).column(0)
    end = chunk.data_page_offset + chunk.total_compressed_size
    flip(lake.storage, path, end - 2)
    name, folder = table_of(lake, path)
    before = {info.path for info in lake.storage.list(folder)}
    report = plan.execute()
    assert [table.table for table in report.tables] == [item for item in ("ns.t", "ns.u") if item != name]
    assert list(report.left) == [name]
    assert path in report.left[name]
    assert {info.path for info in lake.storage.list(folder)} == before


@pytest.mark.parametrize("kind", ["data", "manifest", "manifest list", "metadata"])
def test_damaged_file_is_not_copied(lake: Lakehouse, lakes: Lakes, kind: str) -> None:
    """Decoding does not detect this damage."""
    path = paths_of(lake, kind)[0]
    data = lake.storage.read(path)
    position = data.index(b"seal") + len("seal") + 6 if kind != "data" else len(data) // 3
    lake.storage.write(path, data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
    name, _ = table_of(lake, path)
    target = lakes.storage("target")
    report = operations.plan_export(Lakehouse(lake.storage), "e", level="full", target=target.root).execute()
    assert list(report.damaged) == [name]
    assert path in report.damaged[name]
    assert path not in [info.path for info in target.list("tables/")]
    assert findings_of(target) == ()


def test_checksums_of_copies_cover_their_names(lake: Lakehouse, lakes: Lakes) -> None:
    target = lakes.storage("target")
    operations.plan_export(lake, "e", target=target.root, level="full").execute()
    copied_paths = [
        info.path for info in target.list("tables/") if any(is_kind(info.path) for is_kind in PREDICATES.values())
    ]
    assert len(copied_paths) >= 14
    assert all(check_table_file(target.read(path), path) for path in copied_paths)
    assert findings_of(target) == ()
