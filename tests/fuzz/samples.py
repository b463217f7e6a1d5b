"""Write the corpus: small valid files of every kind, created by the writers of this package.

``python -m tests.fuzz.samples`` replaces ``tests/fuzz/corpus``, which the tests use.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import orc
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import DoubleType, LongType, NestedField, StringType

from tests.fuzz.decoders import CORPUS, DECODERS, FUZZ_ROOT, ROWS, TABLE_ID, UUID
from tests.fuzz.reseal import reseal_file
from tests.inventories import inventory_file, manifest
from tests.operations.format_v3_tables import puffin, vector_blob
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.access.table_owners import TableUser
from trinitylake_ops.declarations.policy_yaml import policy_yaml
from trinitylake_ops.format.definitions import (
    Column,
    DataType,
    ExpirationBatch,
    ExportLevel,
    ExportRecord,
    IsolationLevel,
    LakehouseDef,
    NamespaceDef,
    RetentionRules,
    SavedTransaction,
    SavedWrite,
    TableDef,
)
from trinitylake_ops.format.definitions import Schema as Columns
from trinitylake_ops.format.file_names import root_path
from trinitylake_ops.format.node_file import NodeFile, encode_node, encode_sealed_root
from trinitylake_ops.format.sealed_files import encode_sealed_json
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.managed import owner_file
from trinitylake_ops.iceberg.validation.checksums import seal_pairs, sealed_table_file
from trinitylake_ops.operations.gc.plan_files import PlanFile
from trinitylake_ops.operations.maintenance.state_file import MaintenanceState, TablePass
from trinitylake_ops.operations.policy.document import MaintenancePolicy
from trinitylake_ops.operations.policy.stored import with_policy
from trinitylake_ops.operations.space.stored import read_index
from trinitylake_ops.storage import drop_memory_root

_SCHEMA = Schema(
    NestedField(1, "id", LongType(), required=False),
    NestedField(2, "place", StringType(), required=False),
    NestedField(3, "score", DoubleType(), required=False),
)
_ROOT = "memory://fuzz-samples/"


def _rows(place: str) -> pa.Table:
    return pa.table({"id": [1, 2], "place": [place, place], "score": [0.5, None]})


def _path(decoder: str) -> str:
    return DECODERS[decoder].path


def samples() -> Iterator[tuple[str, str, bytes]]:
    """Yield (decoder, sample name, bytes)."""
    yield from _nodes()
    yield from _definitions()
    yield from _policies()
    yield from _operations()
    yield from _inventories()
    yield from _tables()
    yield from _data()


def _nodes() -> Iterator[tuple[str, str, bytes]]:
    keys, values = ["B===ns1 ", "C===ns1 a", "C===ns1 b"], ["namespace-1", "table-1", "table-2"]
    system = {"created_at_millis": "1700000000000"}
    root = {
        **system,
        "lakehouse_def": f"_lakehouse_def_{UUID}.binpb",
        "previous_root": root_path(6),
        "commit_id": UUID,
        "commit_info": '{"operation":"commit","members":["' + UUID + '"]}',
    }
    leaf = NodeFile(keys, values, [], {}, system)
    inner = NodeFile(
        keys, values, [f"node-{number}" for number in range(4)], {"C===ns1 c": "t", "B===ns1 ": None}, root
    )
    yield "node", "leaf.arrow", encode_node(leaf, order=4, path=_path("node"))
    yield "node", "root.arrow", encode_node(inner, order=5, path=_path("node"))
    yield "node", "unsealed.arrow", encode_node(inner, order=5)
    large = NodeFile([f"C===ns1 {number:03}" for number in range(60)], ["table"] * 60, [], {}, system)
    for codec in ("lz4", "zstd"):
        yield "node", f"{codec}.arrow", encode_node(large, order=64, compression=codec, path=_path("node"))
    yield "node", "sealed.arrow", encode_sealed_root(root, 1_700_000_000_001, _path("node"))
    info = {
        "operation": "group",
        "message": "m",
        "user": "u",
        "run_id": "r",
        "counts": {"rows": 7},
        "properties": {"a": "b"},
        "cost": {"attempts": 1, "requests": 3, "bytes": 9},
        "members": ["a", "b"],
        "transactions": [{"operation": "x", "counts": {"n": 1}}, {"operation": "y", "properties": {"k": "v"}}],
    }
    yield "commit_info", "group.json", json.dumps(info).encode()
    yield "commit_info", "small.json", b'{"operation":"create-lakehouse"}'


def _definitions() -> Iterator[tuple[str, str, bytes]]:
    export = ExportRecord(name="nightly", version=7, level=ExportLevel.FULL, target_uri="s3://b/c/", namespaces=("n",))
    lakehouse = LakehouseDef(
        id="a",
        properties={"owner": "me"},
        maximum_version_age_millis_overrides={7: 1000},
        exported_snapshots={"nightly": "_export_x.arrow"},
        isolation_level=IsolationLevel.SERIALIZABLE,
        exports=(export,),
        expirations=(ExpirationBatch(id="b", versions="3-6,9", plan_path=f"_ops/plan-{UUID}.json", digest="0" * 64),),
        retention_rules=RetentionRules(keep_last=5),
        table_root="s3://b/t/",
        node_compression="zstd",
    )
    element = Column(id=3, name="e", type=DataType.DECIMAL, properties={"precision": "10", "scale": "2"})
    columns = (
        Column(id=1, name="x", type=DataType.INT8),
        Column(id=2, name="l", type=DataType.LIST, list_element=element),
    )
    table = TableDef(
        id=TABLE_ID,
        schema=Columns(columns=columns),
        primary_keys=(1,),
        sort_keys=(1,),
        format_properties={"metadata_location": f"tables/{TABLE_ID}/metadata/m.json"},
        properties={"a": "b"},
    )
    namespace = NamespaceDef(id="n", properties={"owner": "me", "é": ""})
    saved = SavedTransaction(
        id=UUID,
        base_version=7,
        base_commit_id=UUID,
        begun_at_millis=1_700_000_000_000,
        isolation_level=IsolationLevel.SERIALIZABLE,
        operation="publish",
        properties={"a": "b"},
        writes=(SavedWrite(key="C===n       t", definition=table.to_bytes()), SavedWrite(key="B===n", location="l")),
        lakehouse_def=lakehouse.to_bytes(),
        read_keys=("C===n       u",),
        has_read_definition=True,
    )
    yield "lakehouse_def", "all.binpb", lakehouse.to_bytes(_path("lakehouse_def"))
    yield "lakehouse_def", "small.binpb", LakehouseDef(id="a").to_bytes()
    yield "namespace_def", "all.binpb", namespace.to_bytes(_path("namespace_def"))
    yield "table_def", "all.binpb", table.to_bytes(_path("table_def"))
    yield "saved_transaction", "all.binpb", saved.to_bytes(_path("saved_transaction"))


def _policies() -> Iterator[tuple[str, str, bytes]]:
    document = MaintenancePolicy.of_document(
        {
            "retention": {
                "versions": {"max_age": "30d", "keep_monthly": 12},
                "tables": [{"pattern": "sales.*", "max_snapshot_age": "5d", "min_snapshots": 3}],
                "exports": [{"pattern": "nightly-*", "keep_daily": 7}],
            },
            "limits": {"max_requests": 10_000, "max_deleted_bytes": "64GiB"},
            "targets": {"export": {"every": "1d", "target": "s3://copies/lake", "retain_for": "30d"}},
            "windows": [{"days": ["sat", "sun"], "start": "22:00", "end": "04:00"}],
            "blackouts": [{"start": "08:00", "end": "09:30"}],
            "approval": ["purge"],
            "skip": ["verify"],
        }
    )
    stored = with_policy(LakehouseDef(id="a"), document).maintenance_policy
    yield "policy", "all.json", stored.encode()
    yield "policy", "default.json", with_policy(LakehouseDef(id="a"), MaintenancePolicy()).maintenance_policy.encode()
    yield "policy_yaml", "all.yaml", policy_yaml(document).encode()
    yield "policy_yaml", "small.yaml", b"limits: {max_requests: 5} # comment\n"


def _operations() -> Iterator[tuple[str, str, bytes]]:
    yield "hint", "hint.txt", b"100"
    names = (
        root_path(7),
        "_0010011000000000000000000000000000000000000000000000000000000000.ipc",
        f"0110/0000/1011/01111000-node-{UUID}.arrow",
        f"tables/{TABLE_ID}/data/a.parquet",
        f"_ops/lease-7.json\n_ops/turn-100-{UUID}\n_ops/verified-{UUID}.arrow",
        "s3://bucket/lake/file",
        "3-90,95",
    )
    yield "names", "names.txt", "\n".join(names).encode()
    plan = PlanFile("purge", 9, 1_700_000_000_000, "1-3", ("e",), {"node-a": 7})
    yield "plan", "purge.json", plan.to_bytes(_path("plan"))
    yield "owner", "owner.json", owner_file(LakehouseDef(id="a"))
    yield "table_user", "user.json", TableUser("a", "s3://bucket/lake/", frees=True).to_bytes()
    holder = {"holder": UUID, "operation": "purge", "run_id": None, "expires_at_ms": 7}
    yield "lease", "lease.json", encode_sealed_json(holder, _path("lease"))
    yield "lease", "unsealed.json", json.dumps(holder).encode()
    state = MaintenanceState(
        turns_ms={"trim": 1_700_000_000_000},
        unfinished={"trim", "verify"},
        orphans_checked_ms=1_700_000_000_000,
        tree_checked_version=7,
        is_verify_unfinished=True,
        compaction=TablePass(checked_version=5, waiting_since_ms={"n.t": 7}, unfinished_since_ms={"n.u": 8}),
        trim=TablePass(begun_version=6, after="n.a", has_forgotten=True),
    )
    path = _path("maintenance_state")
    yield "maintenance_state", "all.json", encode_sealed_json(state.to_json(), path)
    yield "maintenance_state", "empty.json", encode_sealed_json({}, path)
    barrier = {"orphans_removed_before_millis": 1_700_000_000_000}
    yield "orphan_barrier", "barrier.json", encode_sealed_json(barrier, _path("orphan_barrier"))


def _inventories() -> Iterator[tuple[str, str, bytes]]:
    keys = [f"tables/{TABLE_ID}/data/{number}.parquet" for number in range(5)] + [f"node-{UUID}.arrow", "é +%"]
    for file_format in ("CSV", "ORC", "Parquet"):
        yield f"inventory_{file_format.lower()}", "keys", inventory_file(keys, file_format)
    yield "inventory_manifest", "csv.json", manifest("memory://fuzz/", ["data/0.csv.gz"], created_at_ms=7)
    yield "inventory_manifest", "orc.json", manifest("memory://fuzz/", ["data/0.orc"], "ORC")


def _tables() -> Iterator[tuple[str, str, bytes]]:
    """Yield the files of a partitioned table with two snapshots, and of its verification and export."""
    drop_memory_root(_ROOT)
    lake = Lakehouse.create(_ROOT)
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    spec = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "place"))
    table = catalog.create_table("ns.t", _SCHEMA, partition_spec=spec, properties={"owner": "me"})
    table.append(_rows("a"))
    table.append(_rows("b"))
    table.delete("place == 'a'")
    snapshot = table.current_snapshot()
    assert snapshot is not None
    read = lake.storage.read
    metadata = read(table.metadata_location.removeprefix(_ROOT))
    # The decoders read the file at another location.
    location = table.location().encode()
    metadata = metadata.replace(location, f"{FUZZ_ROOT}tables/{TABLE_ID}".encode())
    yield _table_sample("table_metadata", "v2.json", metadata)
    yield _table_sample("table_metadata", "v3.json", _as_v3(metadata))
    yield _table_sample("table_metadata_gzip", "v2.gz", gzip.compress(metadata, mtime=0))
    yield _table_sample("manifest_list", "v2.avro", read(snapshot.manifest_list.removeprefix(_ROOT)))
    for number, entry in enumerate(snapshot.manifests(table.io)):
        yield _table_sample("manifest", f"v2-{number}.avro", read(entry.manifest_path.removeprefix(_ROOT)))
    operations.verify(lake, incremental=True)
    yield "verified_record", "record.arrow", _read_only_file(lake, "_ops/verified-")[:-32]
    yield from _space_summary(lake)
    operations.plan_export(lake, "nightly", level="full").execute()
    manifest_file = re.sub(rb"export-[0-9a-f-]{36}", f"export-{UUID}".encode(), _read_only_file(lake, "_ops/export-"))
    yield "export_manifest", "full.json", reseal_file(manifest_file, _path("export_manifest"))
    drop_memory_root(_ROOT)


def _space_summary(lake: Lakehouse) -> Iterator[tuple[str, str, bytes]]:
    """Yield the files of a space summary. The paths of its parts are random, so only their names are replaced."""
    operations.measure_space(lake)
    for kind, (part,) in read_index(lake.storage, _only_index(lake)).parts.items():
        assert part is not None
        yield f"space_{kind.name.lower()}", "part.arrow", lake.storage.read(part.path)[:-32]
    index = lake.storage.read(_only_index(lake))
    index = re.sub(rb"space-[0-9]+-[0-9a-f-]{36}", f"space-7-{UUID}".encode(), index)
    index = re.sub(rb"_ops/space-[0-9a-f-]{36}", f"_ops/space-{UUID}".encode(), index)
    yield "space_index", "index.json", reseal_file(index, _path("space_index"))


def _only_index(lake: Lakehouse) -> str:
    (path,) = (info.path for info in lake.storage.list("_ops/space-") if info.path.endswith(".json"))
    return path


def _data() -> Iterator[tuple[str, str, bytes]]:
    """Yield data files, including Parquet files with and without checksums, and deletion vectors."""
    fields = [field.with_metadata({"PARQUET:field_id": str(n)}) for n, field in enumerate(ROWS.schema, 1)]
    table = ROWS.cast(pa.schema(fields))
    path = _path("data_parquet")
    for name, pairs in (("sealed.parquet", seal_pairs(path)), ("unsealed.parquet", {})):
        sink = pa.BufferOutputStream()
        with pq.ParquetWriter(sink, table.schema, compression="zstd", write_page_checksum=True) as writer:
            writer.write_table(table)
            writer.add_key_value_metadata(pairs)
        yield "data_parquet", name, reseal_file(sink.getvalue().to_pybytes(), path)
    orc_fields = [field.with_metadata({"iceberg.id": str(n)}) for n, field in enumerate(ROWS.schema, 1)]
    for codec in ("uncompressed", "zlib", "lz4", "zstd"):
        sink = pa.BufferOutputStream()
        orc.write_table(ROWS.cast(pa.schema(orc_fields)), sink, compression=codec)
        yield "data_orc", f"{codec}.orc", sink.getvalue().to_pybytes()
    for name, positions in (("few", [0]), ("run", range(100_000)), ("keys", [1, 70_000, 140_000])):
        yield "puffin", f"{name}.puffin", puffin(("memory://fuzz/a.parquet", vector_blob(*positions)))[0]


def _table_sample(decoder: str, name: str, data: bytes) -> tuple[str, str, bytes]:
    return decoder, name, sealed_table_file(data, _path(decoder))


def _as_v3(metadata: bytes) -> bytes:
    content = json.loads(metadata)
    content |= {"format-version": 3, "next-row-id": 4}
    for number, snapshot in enumerate(content["snapshots"]):
        snapshot |= {"first-row-id": 2 * number, "added-rows": 2}
    return json.dumps(content, separators=(",", ":")).encode()


def _read_only_file(lake: Lakehouse, prefix: str) -> bytes:
    (file,) = list(lake.storage.list(prefix))
    return lake.storage.read(file.path)


def main() -> None:
    """Write all samples."""
    shutil.rmtree(CORPUS, ignore_errors=True)
    for decoder, name, data in samples():
        assert decoder in DECODERS, decoder
        (CORPUS / decoder).mkdir(parents=True, exist_ok=True)
        (CORPUS / decoder / name).write_bytes(data)


if __name__ == "__main__":
    main()
