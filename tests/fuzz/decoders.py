"""The decoders of all lakehouse files, as functions of the bytes of one file.

Each decoder also uses the decoded value as its callers do, so that a value of the wrong type is detected.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io.pyarrow import ArrowScan
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat, ManifestFile
from pyiceberg.table import FileScanTask, Table
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.typedef import Record

from tests.fuzz import mutations
from tests.fuzz.mutations import Mutator
from tests.fuzz.reseal import reseal_file, reseal_saved_transaction, reseal_verified_record
from trinitylake_ops import Lakehouse
from trinitylake_ops.access.table_owners import TableUser
from trinitylake_ops.declarations.policy_yaml import policy_of_yaml, policy_yaml
from trinitylake_ops.errors import FileMissingError, TrinityLakeError
from trinitylake_ops.format.definitions import ExpirationBatch, LakehouseDef, NamespaceDef, SavedTransaction, TableDef
from trinitylake_ops.format.file_names import (
    HINT_PATH,
    MAINTENANCE_STATE_PATH,
    ORPHAN_BARRIER_PATH,
    is_immutable_path,
    is_operation_path,
    is_space_path,
    is_verified_path,
    lease_path,
    named_kind,
    parse_hint,
    parse_lease_path,
    parse_root_path,
    parse_slot_request_path,
    root_of,
    root_path,
    table_prefix,
)
from trinitylake_ops.format.keys import COMMIT_INFO, KeyCodec
from trinitylake_ops.format.limits import check_readable_sizes, validate_changed_settings, validate_table_def
from trinitylake_ops.format.locations import as_uri, normalize_root_uri, to_location, to_uri, validate_location
from trinitylake_ops.format.node_file import decode_node, decode_system_rows, encode_node
from trinitylake_ops.format.sealed_files import decode_sealed_json
from trinitylake_ops.format.version_ranges import VersionRanges
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.copy import FileCopy, TableFileMap, rewrite_file
from trinitylake_ops.iceberg.delete_files import RemainingRows
from trinitylake_ops.iceberg.io.checked_files import CheckedFileIO
from trinitylake_ops.iceberg.io.file_io import StorageFileIO, reading_io
from trinitylake_ops.iceberg.managed import read_owner, table_definition
from trinitylake_ops.iceberg.metadata import read_table_metadata
from trinitylake_ops.iceberg.reach import FileKind, content_file, entries_in, files_of, manifests_in, statistics_of
from trinitylake_ops.iceberg.read import file_batches
from trinitylake_ops.iceberg.validation.avro import SNAPSHOT_ID, decompress
from trinitylake_ops.operations.export_records import manifest_targets, read_manifest
from trinitylake_ops.operations.gc.inventory import Inventory, InventoryQuery, InventorySearch, read_inventory
from trinitylake_ops.operations.gc.plan_files import PlanFile, read_plan_file
from trinitylake_ops.operations.gc.table_files import iceberg_metadata
from trinitylake_ops.operations.lease import lease
from trinitylake_ops.operations.maintenance.state_file import MaintenanceState
from trinitylake_ops.operations.policy.document import MaintenancePolicy, Step
from trinitylake_ops.operations.policy.explanation import policy_changes, policy_sentences
from trinitylake_ops.operations.policy.stored import policy_of, with_policy
from trinitylake_ops.operations.space.stored import (
    decode_catalog,
    decode_index,
    decode_objects,
    decode_sums,
    encode_catalog,
    encode_index,
    encode_objects,
    encode_sums,
)
from trinitylake_ops.operations.space.tables import sums_of
from trinitylake_ops.operations.verified_files import RecordedPart, decode_names, read_records
from trinitylake_ops.storage import drop_memory_root
from trinitylake_ops.transaction.time_to_live import removed_before_ms
from trinitylake_ops.versions.history import version_infos
from trinitylake_ops.versions.snapshot import utc_of

T = TypeVar("T")

CORPUS = Path(__file__).parent / "corpus"
REGRESSIONS = Path(__file__).parent / "regressions"
#: Parts of the paths of samples whose content or checksum includes their name.
UUID = "6fcb514b-b878-4c9d-95b7-8dc3a7ce6fd8"
TABLE_ID = "0b9d3a5e-7c1f-4f7e-9a53-3b1f0c6f2d11"
FUZZ_ROOT = "memory://fuzz/"
#: The rows of the data files in the samples.
ROWS = pa.table({"id": [1, 2], "place": ["a", "a"], "score": [0.5, None]})


@functools.cache
def _lake() -> Lakehouse:
    drop_memory_root(FUZZ_ROOT)
    return Lakehouse.create(FUZZ_ROOT, id="fuzz")


@functools.cache
def _io() -> StorageFileIO:
    return reading_io(_lake())


def _uri(path: str) -> str:
    return FUZZ_ROOT + path


def _node(data: bytes, path: str) -> None:
    node = decode_node(data, path)
    keys = KeyCodec(8, 8)
    for key in (*node.keys, *node.buffer):
        _decode_or_reject(keys.decode, key)
    assert len(list(node.values)) == len(list(node.keys))
    assert not node.children or len(list(node.children)) == len(node.keys) + 1
    assert node.created_at_ms >= 0
    if not node.is_sealed:
        decoded = decode_node(encode_node(node, order=max(3, len(node.keys) + 1)), path)
        assert list(decoded.keys) == list(node.keys) and dict(decoded.buffer) == dict(node.buffer)
    decode_system_rows(data, path)


def _commit_info(data: bytes, path: str) -> None:
    """Decode the ``commit_info`` of a root, and use it as the log does."""
    del path
    lake = _lake()
    latest = lake.snapshot()
    text = data.decode("utf-8", "replace")
    root = latest.root
    system = {**root.system, COMMIT_INFO: text}
    root_data = encode_node(type(root)(list(root.keys), list(root.values), [], {}, system), order=128)
    lake.storage.write(root_path(0), root_data)
    for info in version_infos(lake.files, [0], latest):
        json.dumps([info.operation, info.message, dict(info.counts), dict(info.properties), info.members])
        assert info.bytes_written >= 0


def _lakehouse_def(data: bytes, path: str) -> None:
    definition = check_readable_sizes(LakehouseDef.from_bytes(data, path), path)
    for batch in definition.expirations:
        batch.contains(7)
    assert LakehouseDef.from_bytes(definition.to_bytes(), path).id == definition.id
    validate_changed_settings(definition, definition)


def _policy(data: bytes, path: str) -> None:
    """Decode a stored policy, and explain it as the command line does."""
    del path
    policy = policy_of(LakehouseDef(id="a", maintenance_policy=data.decode("utf-8", "replace")))
    _use_policy(policy)


def _policy_yaml(data: bytes, path: str) -> None:
    del path
    policy = policy_of_yaml(data.decode("utf-8", "replace"))
    assert policy_of_yaml(policy_yaml(policy)) == policy
    _use_policy(policy)


def _maintenance_state(data: bytes, path: str) -> None:
    """Read what maintenance remembers, and write it again."""
    storage = _lake().storage
    state = MaintenanceState.of(decode_sealed_json(data, path))
    state.write(storage)
    assert MaintenanceState.read(storage) == state
    for tables in (state.compaction, state.trim):
        assert {*tables.ordered(["n.a", "n.b"])} >= tables.remembered
    state.end_turns()
    assert len(state.ordered(Step)) == len(Step)


def _use_policy(policy: MaintenancePolicy) -> None:
    assert all(policy_sentences(policy))
    json.dumps(policy_changes(MaintenancePolicy(), policy))
    policy.closed(utc_of(1_700_000_000_000))
    policy.table_rule("ns", "t")
    stored = with_policy(LakehouseDef(id="a"), policy).maintenance_policy
    assert policy_of(LakehouseDef(id="a", maintenance_policy=stored)).limits == policy.limits


def _namespace_def(data: bytes, path: str) -> None:
    NamespaceDef.from_bytes(data, path).to_bytes()


def _table_def(data: bytes, path: str) -> None:
    definition = TableDef.from_bytes(data, path)
    iceberg_metadata(definition)
    definition.rebased(FUZZ_ROOT)
    definition.to_bytes()
    table_prefix(definition.id)
    validate_table_def(definition)


def _hint(data: bytes, path: str) -> None:
    del path
    parse_hint(data)
    _lake().storage.write(HINT_PATH, data)
    _lake().latest_version()


def _names(data: bytes, path: str) -> None:
    """Parse file names, one per line, as every kind of name."""
    del path
    for name in data.decode("utf-8", "surrogateescape").splitlines():
        for classify in (
            named_kind,
            parse_lease_path,
            parse_slot_request_path,
            is_operation_path,
            is_verified_path,
            is_space_path,
        ):
            classify(name)
        is_immutable_path(name)
        root_of(name)
        for parse in (
            parse_root_path,
            validate_location,
            as_uri,
            normalize_root_uri,
            table_prefix,
            lambda location: to_uri(FUZZ_ROOT, location),
            lambda location: to_location(FUZZ_ROOT, location),
            lambda location: _io().location(location),
            VersionRanges.parse,
        ):
            _decode_or_reject(parse, name)


def _decode_or_reject(decode: Callable[[T], object], text: T) -> None:
    """Decode one of several items of a file. It may be rejected."""
    try:
        decode(text)
    except TrinityLakeError:
        return


def _plan(data: bytes, path: str) -> None:
    plan = PlanFile.from_bytes(data, path)
    assert all(type(path) is str and type(size) is int for path, size in plan.sizes_bytes.items())
    _lake().storage.write(path, data)
    read_plan_file(_lake().storage, ExpirationBatch(id="b", versions="1", plan_path=path, digest=plan.digest))
    assert PlanFile.from_bytes(plan.to_bytes(path), path) == plan


def _export_manifest(data: bytes, path: str) -> None:
    storage = _lake().storage
    storage.write(path, data)
    assert all(isinstance(target, str) for target in manifest_targets(storage, path))
    for file in read_manifest(storage, path):
        assert file.size_bytes >= 0 and (file.source is None or isinstance(file.source, str))


def _inventory_manifest(data: bytes, path: str) -> None:
    _lake().storage.write(path, data)
    utc_of(read_inventory(_lake(), _uri(path)).created_at_ms)


def _inventory(file_format: str) -> Callable[[bytes, str], None]:
    def decode(data: bytes, path: str) -> None:
        _lake().storage.write(path, data)
        uri = _uri(path)
        columns = ("bucket", "key", "versionid", "islatest", "isdeletemarker", "size", "lastmodifieddate")
        InventorySearch(_io(), Inventory(uri, 0, file_format, columns, "", (uri,)), (InventoryQuery.beyond("", []),))(
            [uri]
        )

    return decode


def _owner(data: bytes, path: str) -> None:
    assert read_owner(data, path)


def _table_user(data: bytes, path: str) -> None:
    user = TableUser.from_bytes(data, path)
    assert TableUser.from_bytes(user.to_bytes(), user.path) == user


def _lease(data: bytes, path: str) -> None:
    storage = _lake().storage
    try:
        storage.write(path, data)
        with lease(storage, "expire"):
            pass
    finally:
        storage.delete_many([info.path for info in storage.list("_ops/lease-")])


def _orphan_barrier(data: bytes, path: str) -> None:
    _lake().storage.write(path, data)
    try:
        assert 0 <= removed_before_ms(_lake().storage, LakehouseDef(id=""), 0) <= _lake().storage.now_ms()
    finally:
        _lake().storage.delete(path)


def _verified_record(data: bytes, path: str) -> None:
    storage = _lake().storage
    try:
        storage.write(path, data)
        for file in read_records(storage, [storage.stat(path)]).files.values():
            content = None if file.content is None else file.content.unpacked()
            assert min(file.size_bytes, file.modified_ms) >= 0
            assert len(file.sha256) == 32
            if file.kept == RecordedPart.NAMES and content is not None:
                _decode_or_reject(decode_names, content)
    finally:
        storage.delete(path)


def _space_index(data: bytes, path: str) -> None:
    stored = decode_index(data, path)
    assert all(is_space_path(part) for part in stored.paths())
    decode_index(encode_index(stored, path), path)


def _space_catalog(data: bytes, path: str) -> None:
    files = decode_catalog(data, path)
    assert decode_catalog(encode_catalog(files.items()), path) == files


def _space_sums(data: bytes, path: str) -> None:
    tables = decode_sums(data, path)
    assert decode_sums(encode_sums(tables.values()), path) == tables


def _space_objects(data: bytes, path: str) -> None:
    tables = decode_objects(data, path)
    for objects in tables.values():
        sums_of(dict.fromkeys(objects, ((1, 7),)), objects, next(iter(objects)), 1 << 27)
    assert decode_objects(encode_objects(tables), path) == tables


def _saved_transaction(data: bytes, path: str) -> None:
    saved = SavedTransaction.from_bytes(data, path)
    for write in saved.writes:
        if write.definition is not None:
            TableDef.from_bytes(write.definition, path)
    if saved.lakehouse_def is not None:
        LakehouseDef.from_bytes(saved.lakehouse_def, path)
    saved.to_bytes()


def _file_map() -> TableFileMap:
    return TableFileMap(TABLE_ID, FUZZ_ROOT, "memory://copy/")


def _table_metadata(data: bytes, path: str) -> None:
    _lake().storage.write(path, data)
    metadata = read_table_metadata(_io(), _uri(path))
    table_definition(metadata, _uri(path), FUZZ_ROOT, table_id=TABLE_ID)
    statistics_of(metadata, _io())
    definition = TableDef(id=TABLE_ID, format_properties={"metadata_location": path})
    try:
        list(files_of(definition, _io()))
    except FileMissingError:
        return
    finally:
        rewrite_file(FileCopy(FileKind.METADATA, path, path, None), data, _io(), _file_map(), {})


def _manifest_list(data: bytes, path: str) -> None:
    _lake().storage.write(path, data)
    snapshot_id = decompress(data, path).meta_int(SNAPSHOT_ID) or 1
    manifests = manifests_in(Snapshot(snapshot_id=snapshot_id, timestamp_ms=0, manifest_list=_uri(path)), _io())
    sizes = {}
    for manifest in manifests:
        sizes[_file_map().path(_io().location(manifest.manifest_path))] = manifest.manifest_length
    rewrite_file(FileCopy(FileKind.MANIFEST_LIST, path, path, None), data, _io(), _file_map(), sizes)


def _manifest(data: bytes, path: str) -> None:
    _lake().storage.write(path, data)
    listed = ManifestFile.from_args(
        _table_format_version=2,
        manifest_path=_uri(path),
        manifest_length=len(data),
        partition_spec_id=0,
        content=0,
        sequence_number=1,
        min_sequence_number=1,
        added_snapshot_id=None,
    )
    for entry in entries_in(listed, _io()):
        content_file(entry, _io(), live=True)
    rewrite_file(FileCopy(FileKind.MANIFEST, path, path, None), data, _io(), _file_map(), {})


@functools.cache
def _table() -> Table:
    """Return a table with one data file and the columns of the samples."""
    catalog = catalog_at(_lake())
    catalog.create_namespace("ns")
    table = catalog.create_table("ns.t", ROWS.schema)
    table.append(ROWS)
    return table


def _data_file(path: str, content: DataFileContent, file_format: FileFormat) -> DataFile:
    data_file = DataFile.from_args(
        content=content,
        file_path=_uri(path),
        file_format=file_format,
        partition=Record(),
        record_count=len(ROWS),
        file_size_in_bytes=1,
    )
    data_file.spec_id = 0
    return data_file


def _data_parquet(data: bytes, path: str) -> None:
    """Read rows as a scan does, and as compaction does."""
    _lake().storage.write(path, data)
    task = FileScanTask(_data_file(path, DataFileContent.DATA, FileFormat.PARQUET))
    metadata = _table().metadata
    for io in (_io(), CheckedFileIO.like(_io(), {})):
        for batch in file_batches(RemainingRows(ArrowScan(metadata, io, metadata.schema(), AlwaysTrue())), task, io):
            batch.validate()


def _data_orc(data: bytes, path: str) -> None:
    """Read the file with its declared sizes. Apache ORC decodes the streams (docs/internals/threat-model.md)."""
    _lake().storage.write(path, data)
    for io in (_io(), CheckedFileIO.like(_io(), {})):
        with io.new_input(_uri(path)).open() as stream:
            stream.read()


def _deletes(data: bytes, path: str) -> None:
    _lake().storage.write(path, data)
    scan = _table().scan()
    (task,) = scan.plan_files()
    vectors = _data_file(path, DataFileContent.POSITION_DELETES, FileFormat.PUFFIN)
    reader = ArrowScan(scan.table_metadata, _io(), scan.table_metadata.schema(), AlwaysTrue())
    for batch in file_batches(RemainingRows(reader), FileScanTask(task.file, {vectors}), _io()):
        batch.validate()


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder, the path of its file, its mutator, and the function that recomputes the file's checksums."""

    decode: Callable[[bytes, str], None]
    path: str
    mutate: Mutator
    reseal: Callable[[bytes, str], bytes] = reseal_file


_METADATA = f"tables/{TABLE_ID}/metadata/"
_DATA = f"tables/{TABLE_ID}/data/"
_INVENTORY = f"tables/{TABLE_ID}/inventory"

DECODERS: dict[str, Decoder] = {
    "node": Decoder(_node, f"0110/0000/1011/01111000-node-{UUID}.arrow", mutations.mutate_arrow_file),
    "commit_info": Decoder(_commit_info, root_path(0), mutations.mutate_json),
    "lakehouse_def": Decoder(_lakehouse_def, f"_lakehouse_def_{UUID}.binpb", mutations.mutate_protobuf),
    "policy": Decoder(_policy, "policy.json", mutations.mutate_json),
    "policy_yaml": Decoder(_policy_yaml, "policy.yaml", mutations.mutate_text),
    "maintenance_state": Decoder(_maintenance_state, MAINTENANCE_STATE_PATH, mutations.mutate_json),
    "namespace_def": Decoder(_namespace_def, f"namespace-n-{UUID}.binpb", mutations.mutate_protobuf),
    "table_def": Decoder(_table_def, f"table-t-n-{UUID}.binpb", mutations.mutate_protobuf),
    "hint": Decoder(_hint, HINT_PATH, mutations.mutate_text),
    "names": Decoder(_names, "names", mutations.mutate_text),
    "plan": Decoder(_plan, f"_ops/plan-{UUID}.json", mutations.mutate_json),
    "export_manifest": Decoder(_export_manifest, f"_ops/export-{UUID}.json", mutations.mutate_json),
    "inventory_manifest": Decoder(_inventory_manifest, f"{_INVENTORY}/manifest.json", mutations.mutate_json),
    "inventory_csv": Decoder(_inventory("CSV"), f"{_INVENTORY}/data.csv.gz", mutations.mutate_gzip_text),
    "inventory_orc": Decoder(_inventory("ORC"), f"{_INVENTORY}/data.orc", mutations.mutate_orc),
    "inventory_parquet": Decoder(_inventory("Parquet"), f"{_INVENTORY}/data.parquet", mutations.mutate_parquet),
    "owner": Decoder(_owner, f"tables/{TABLE_ID}/_owner.json", mutations.mutate_json),
    "table_user": Decoder(_table_user, TableUser("a", "s3://bucket/lake/").path, mutations.mutate_json),
    "lease": Decoder(_lease, lease_path(7), mutations.mutate_json),
    "orphan_barrier": Decoder(_orphan_barrier, ORPHAN_BARRIER_PATH, mutations.mutate_json),
    "verified_record": Decoder(
        _verified_record, f"_ops/verified-{UUID}.arrow", mutations.mutate_arrow_stream, reseal_verified_record
    ),
    "space_index": Decoder(_space_index, f"_ops/space-7-{UUID}.json", mutations.mutate_json),
    "space_catalog": Decoder(
        _space_catalog, f"_ops/space-{UUID}.arrow", mutations.mutate_arrow_stream, reseal_verified_record
    ),
    "space_sums": Decoder(
        _space_sums, f"_ops/space-{UUID}.arrow", mutations.mutate_arrow_stream, reseal_verified_record
    ),
    "space_objects": Decoder(
        _space_objects, f"_ops/space-{UUID}.arrow", mutations.mutate_arrow_stream, reseal_verified_record
    ),
    "saved_transaction": Decoder(
        _saved_transaction, f"_ops/txn-{UUID}.binpb", mutations.mutate_protobuf, reseal_saved_transaction
    ),
    "table_metadata": Decoder(_table_metadata, f"{_METADATA}00001-{UUID}.metadata.json", mutations.mutate_json),
    "table_metadata_gzip": Decoder(
        _table_metadata, f"{_METADATA}00001-{UUID}.gz.metadata.json", mutations.mutate_gzip_json
    ),
    "manifest_list": Decoder(_manifest_list, f"{_METADATA}snap-1-0-{UUID}.avro", mutations.mutate_avro),
    "manifest": Decoder(_manifest, f"{_METADATA}{UUID}-m0.avro", mutations.mutate_avro),
    "data_parquet": Decoder(_data_parquet, f"{_DATA}{UUID}.parquet", mutations.mutate_parquet),
    "data_orc": Decoder(_data_orc, f"{_DATA}{UUID}.orc", mutations.mutate_orc),
    "puffin": Decoder(_deletes, f"{_DATA}{UUID}.puffin", mutations.mutate_puffin),
}


def corpus(name: str) -> list[bytes]:
    """Return the valid samples for a decoder, sorted by name."""
    return [file.read_bytes() for file in sorted((CORPUS / name).iterdir())]


def regressions(name: str) -> dict[str, bytes]:
    """Return inputs on which a decoder once failed, by file name."""
    folder = REGRESSIONS / name
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())} if folder.is_dir() else {}
