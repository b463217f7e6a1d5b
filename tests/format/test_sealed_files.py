"""Checksums of nodes, definitions and JSON files: damage is detected, and files of other programs are accepted."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa
import pytest

from trinitylake_ops.errors import CorruptFileError
from trinitylake_ops.format.definitions import LakehouseDef, NamespaceDef, TableDef, reseal
from trinitylake_ops.format.file_names import (
    new_export_root_path,
    new_namespace_path,
    new_node_path,
    new_plan_path,
    root_path,
)
from trinitylake_ops.format.limits import smallest_node_file_limit_bytes
from trinitylake_ops.format.node_file import (
    NodeFile,
    decode_node,
    decode_system_rows,
    encode_node,
    encode_sealed_root,
    seal_room_bytes,
)
from trinitylake_ops.format.sealed_files import check_file, decode_sealed_json, encode_sealed_json
from trinitylake_ops.tree.node import TreeLimits

NODE = NodeFile(
    ["B===a   ", "C===a   t       "], ["v", "w"], system={"created_at_millis": "1700000000000", "commit_id": "é"}
)
PATH, OTHER = new_node_path(), new_node_path()
DEFINITION = NamespaceDef(id="n", properties={"a": "b"})
DEFINITION_PATH = new_namespace_path("n", 200)
JSON_PATH = new_plan_path()

#: A file of each kind, its path, and its decoder.
SAMPLES: dict[str, tuple[bytes, str, Callable[[bytes, str], object]]] = {
    "node": (encode_node(NODE, 3, "", PATH), PATH, decode_node),
    "lz4": (encode_node(replace(NODE, values=["v" * 500, "w"]), 3, "lz4", PATH), PATH, decode_node),
    "system rows": (encode_node(NODE, 3, "", PATH), PATH, decode_system_rows),
    "sealed root": (encode_sealed_root(NODE.system, 5, root_path(3)), root_path(3), decode_node),
    "definition": (DEFINITION.to_bytes(DEFINITION_PATH), DEFINITION_PATH, NamespaceDef.from_bytes),
    "json": (encode_sealed_json({"a": 1, "b": ["é"]}, JSON_PATH), JSON_PATH, decode_sealed_json),
}
samples = pytest.mark.parametrize("kind", SAMPLES)


@samples
def test_every_flipped_bit_and_truncation_is_detected(kind: str) -> None:
    data, path, decode = SAMPLES[kind]
    decode(data, path)
    assert check_file(data, path)
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << random.Random(position).randrange(8)
        with pytest.raises(CorruptFileError):
            decode(bytes(damaged), path)
        with pytest.raises(CorruptFileError):
            check_file(bytes(damaged), path)
    for size_bytes in range(1, len(data)):
        with pytest.raises(CorruptFileError):
            decode(data[:size_bytes], path)


@samples
def test_swapped_file_is_rejected(kind: str) -> None:
    data, path, decode = SAMPLES[kind]
    letter = path[-8]
    other = {"0": "1", "1": "0"}.get(letter, "0")
    other_path = f"{path[:-8]}{other}{path[-7:]}"
    with pytest.raises(CorruptFileError):
        decode(data, other_path)
    decode(data, f"memory://elsewhere/{path}")


OTHER_PATHS = ["x", "node", "root", "a/b.arrow", "/srv/copies/node.arrow", "s3://b/x.json", "n.binpb"]


@pytest.mark.parametrize("kind", [kind for kind in SAMPLES if kind != "sealed root"])
@pytest.mark.parametrize("path", OTHER_PATHS)
def test_file_under_other_name_is_accepted(kind: str, path: str) -> None:
    """Callers and other programs may use any name for a valid file."""
    data, original_path, decode = SAMPLES[kind]
    assert decode(data, path) == decode(data, original_path)
    if path.endswith(original_path[-6:]):
        assert check_file(data, path), "the file has a valid checksum"


@pytest.mark.parametrize("compression", ["", "lz4"])
def test_copied_root_is_valid_only_as_later_version_or_export(compression: str) -> None:
    """Programs that implement only the published format copy roots, and these files are valid."""
    node = replace(NODE, values=["v" * 500, "w"])
    data = encode_node(node, 3, compression, root_path(5))
    for path in (root_path(6), root_path(99), new_export_root_path(), "exports/monthly", f"s3://b/{root_path(7)}"):
        assert decode_node(data, path).values == node.values
        assert check_file(data, path if path.endswith(".arrow") else f"{path}.arrow")
    for path in (root_path(4), root_path(0), new_node_path()):
        with pytest.raises(CorruptFileError):
            decode_node(data, path)
    sealed_root = encode_sealed_root(NODE.system, 5, root_path(5))
    with pytest.raises(CorruptFileError):
        decode_system_rows(sealed_root, root_path(6))


@pytest.mark.parametrize("digits", ["0" * 33, "1" * 64, "2" * 32])
def test_checksum_without_version_raises_only_typed_errors(digits: str) -> None:
    data = encode_node(NODE, 3, "", f"_{digits}.arrow")
    with pytest.raises(CorruptFileError):
        decode_node(data, root_path(2))


def test_node_decodes_equally_with_and_without_checksums() -> None:
    assert decode_node(encode_node(NODE, 3), PATH) == decode_node(SAMPLES["node"][0], PATH) == NODE
    assert not check_file(encode_node(NODE, 3), PATH)
    table = pa.ipc.open_file(SAMPLES["node"][0]).read_all()
    assert table.equals(pa.ipc.open_file(encode_node(NODE, 3)).read_all()), "other programs read the same rows"


def test_metadata_copied_by_another_program_is_ignored() -> None:
    table = pa.ipc.open_file(SAMPLES["node"][0]).read_all()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table.slice(0, 2))
        writer.write_table(table.slice(2))
    data = bytes(sink.getvalue())
    assert not check_file(data, OTHER)
    assert decode_node(data, OTHER) == NODE


def test_copied_checksum_fields_are_ignored_and_removed_on_next_write() -> None:
    data = SAMPLES["definition"][0].replace(b"n\x12", b"m\x12")
    path = new_namespace_path("m", 200)
    decoded = NamespaceDef.from_bytes(data, path)
    assert decoded == replace(DEFINITION, id="m")
    assert decoded.unknown_fields == b""
    assert b"seal" not in decoded.to_bytes()
    assert decoded.to_bytes(path).count(path.rpartition("/")[2].encode()) == 2


@pytest.mark.parametrize("kind", [LakehouseDef, NamespaceDef, TableDef])
def test_copied_definition_gets_new_checksums(kind: type[LakehouseDef | NamespaceDef | TableDef]) -> None:
    definition = kind(id="x", properties={"a": "b"})
    source, target = new_namespace_path("n", 200), new_namespace_path("longer", 200)
    copy = reseal(definition.to_bytes(source), source, target)
    assert copy == definition.to_bytes(target)
    assert reseal(definition.to_bytes(), source, target) == definition.to_bytes(), (
        "a definition without checksums is copied unchanged"
    )


def test_lakehouse_with_small_size_limit_has_nodes_without_checksums() -> None:
    """Such a lakehouse may have been created when the minimum limit left no room for checksums."""
    definition = LakehouseDef(id="x", order=4, namespace_name_max_size_bytes=8, table_name_max_size_bytes=8)
    smallest_bytes = smallest_node_file_limit_bytes(definition)
    old = TreeLimits.of(replace(definition, node_file_max_size_bytes=smallest_bytes - seal_room_bytes()))
    assert old.rows_max_size_bytes == old.node_file_max_size_bytes
    new = TreeLimits.of(replace(definition, node_file_max_size_bytes=smallest_bytes))
    assert new.rows_max_size_bytes == old.rows_max_size_bytes, "both fit the largest possible root"
    size_bytes = len(encode_node(NODE, 3))
    tight_limits = TreeLimits(3, size_bytes)
    assert tight_limits.encoded(NODE, PATH) == encode_node(NODE, 3)
    large_limits = TreeLimits(3, size_bytes + seal_room_bytes())
    assert check_file(large_limits.encoded(NODE, root_path(1)), root_path(1))
