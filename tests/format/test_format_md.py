"""FORMAT.md: each example is encoded and decoded, and each table of fields is compared with the code."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf import text_format

from trinitylake_ops.errors import (
    CorruptFileError,
    InvalidDefinitionError,
    InvalidLocationError,
    InvalidNameError,
    UnreadablePolicyError,
    VersionNotFoundError,
)
from trinitylake_ops.format import definitions
from trinitylake_ops.format import definitions_pb2 as pb
from trinitylake_ops.format.definitions import DataType, LakehouseDef
from trinitylake_ops.format.file_names import (
    ROOT_NAMING,
    ROOT_NAMINGS,
    min_path_limit_bytes,
    new_namespace_path,
    optimize_path,
    owner_path,
    parse_hint,
    parse_root_path,
    root_naming,
    root_path,
)
from trinitylake_ops.format.keys import KeyCodec, ObjectName, encode_schema_id
from trinitylake_ops.format.limits import smallest_node_file_limit_bytes, validate_lakehouse_def
from trinitylake_ops.format.locations import normalize_root_uri, validate_location, validate_path
from trinitylake_ops.format.node_file import (
    NODE_COMPRESSIONS,
    check_node_compression,
    decode_node,
    decode_system_rows,
    encode_node,
)
from trinitylake_ops.format.sealed_files import check_file, decode_sealed_json, encode_sealed_json
from trinitylake_ops.iceberg.managed import owner_file, read_owner
from trinitylake_ops.operations.policy.document import MaintenancePolicy
from trinitylake_ops.operations.policy.stored import policy_of, with_policy

TEXT = (Path(definitions.__file__).parent / "FORMAT.md").read_text(encoding="utf-8")
BLOCKS = {
    (language, name): body for language, name, body in re.findall(r"^```(\S+) (\S+)\n(.*?)^```$", TEXT, re.M | re.S)
}
Rows = list[tuple[str | None, ...]]


def example(name: str) -> Any:
    return json.loads(BLOCKS["json", name])


def table_after(start: str) -> Rows:
    """Return the rows of the table after a line. Empty cells are None, and ``␣`` stands for a space."""
    lines = TEXT[TEXT.index(f"{start}\n") + len(start) :].lstrip("\n").splitlines()
    rows: Rows = []
    for line in lines[2:]:
        if not line.startswith("|"):
            break
        cells = [cell.strip().strip("`").replace("␣", " ") for cell in line.strip().removesuffix("|")[1:].split("|")]
        rows.append(tuple(cell or None for cell in cells))
    assert rows
    return rows


def test_every_example_is_tested() -> None:
    assert len(BLOCKS) == TEXT.count("\n```") / 2, "every fenced block has a language and a name"
    checks: set[tuple[str, str]] = {("json", name) for name in CHECKS}
    for kind in DEFINITIONS:
        checks |= {("textproto", kind), ("hex", kind)}
    checks.add(("hex", "sealed-NamespaceDef"))
    assert set(BLOCKS) == checks
    assert set(re.findall(r"<!-- node: (.*) -->", TEXT)) == {
        "root, order 4",
        "leaf, order 3",
        "sealed",
        "flat, columns key and value",
        "flat in our form, order 3",
        "refused, columns key and value",
    }
    assert set(re.findall(r"^### (\w+)$", TEXT, re.M)) == {message.name for message in MESSAGES}


def check_node_compressions(meanings: dict[str, str | None]) -> None:
    for name, codec in meanings.items():
        if codec == "refused":
            with pytest.raises(InvalidDefinitionError, match=f"node_compression is '{name}'"):
                check_node_compression(name)
        else:
            check_node_compression(name)
    assert {name for name, codec in meanings.items() if codec != "refused"} == set(NODE_COMPRESSIONS)


def check_roots(roots: dict[str, str]) -> None:
    assert {root: normalize_root_uri(root) for root in roots} == roots


def check_invalid_locations(locations: list[str]) -> None:
    for location in locations:
        with pytest.raises(InvalidLocationError):
            validate_location(location)


def check_literal_paths(paths: list[str]) -> None:
    assert [validate_path(path) for path in paths] == paths


def check_optimized_paths(paths: dict[str, str]) -> None:
    assert {path: optimize_path(path) for path in paths} == paths


def check_readable_names(names: dict[str, str]) -> None:
    readable_names = {
        name: new_namespace_path(name, 250).partition("-namespace-")[2][: -len("-.binpb") - 36] for name in names
    }
    assert readable_names == names


def check_root_names(names: dict[str, str]) -> None:
    assert {version: root_path(int(version)) for version in names} == names
    assert {str(parse_root_path(name)): name for name in names.values()} == names


def check_other_root_names(names: dict[str, int | str | None]) -> None:
    for name, version in names.items():
        if version == "refused":
            with pytest.raises(VersionNotFoundError):
                parse_root_path(name)
            continue
        assert parse_root_path(name) == version
        naming = root_naming(name)
        assert (naming in ROOT_NAMINGS) == isinstance(version, int)
        if naming is not None and isinstance(version, int):
            assert naming.path(version) == name
    assert {root_naming(name) for name in names} >= set(ROOT_NAMINGS) - {ROOT_NAMING}


def check_hints(hints: dict[str, int | None]) -> None:
    assert {hint: parse_hint(hint.encode()) for hint in hints} == hints


def check_invalid_names(names: list[str]) -> None:
    for name in names:
        with pytest.raises(InvalidNameError):
            KeyCodec(8, 8).namespace_key(name)


def check_schema_ids(ids: dict[str, str]) -> None:
    assert {number: encode_schema_id(int(number)) for number in ids} == ids


def check_sealed_json(examples: dict[str, str]) -> None:
    for path, text in examples.items():
        assert check_file(text.encode(), path)
        content = decode_sealed_json(text.encode(), path)
        assert encode_sealed_json(content, path) == text.encode()


def check_smallest_limits(limits: dict[str, int]) -> None:
    default = LakehouseDef(id="x", order=limits["order"])
    assert smallest_node_file_limit_bytes(default) == limits["node_file_max_size_bytes"]
    assert min_path_limit_bytes() == limits["file_path_max_size_bytes"]
    with pytest.raises(InvalidDefinitionError, match=str(limits["node_file_max_size_bytes"])):
        validate_lakehouse_def(LakehouseDef(id="x", node_file_max_size_bytes=limits["node_file_max_size_bytes"] - 1))


def check_data_types(names: list[str]) -> None:
    assert names == [kind.name for kind in DataType] == pb.DataType.keys()
    assert [DataType[name].value for name in names] == list(range(len(names)))


def check_maintenance_policy(document: dict[str, Any]) -> None:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    assert policy_of(LakehouseDef(id="a", maintenance_policy=text)) == policy_of(LakehouseDef(id="a"))
    assert with_policy(LakehouseDef(id="a"), MaintenancePolicy()).maintenance_policy == text
    with pytest.raises(UnreadablePolicyError):
        policy_of(LakehouseDef(id="a", maintenance_policy=text.replace("skip", "stop")))


def check_owner_files(owners: dict[str, str]) -> None:
    for text, owner in owners.items():
        if owner == "refused":
            with pytest.raises(CorruptFileError):
                read_owner(text.encode(), owner_path("t"))
        else:
            assert read_owner(text.encode(), owner_path("t")) == owner
            assert read_owner(owner_file(LakehouseDef(id=owner)), "o/_owner.json") == owner
    assert owner_path("t") == "tables/t/_owner.json"


CHECKS: dict[str, Callable[[Any], None]] = {
    "roots": check_roots,
    "refused-locations": check_invalid_locations,
    "literal-paths": check_literal_paths,
    "optimized-paths": check_optimized_paths,
    "readable-names": check_readable_names,
    "root-names": check_root_names,
    "other-root-names": check_other_root_names,
    "hints": check_hints,
    "refused-names": check_invalid_names,
    "schema-ids": check_schema_ids,
    "node-compressions": check_node_compressions,
    "smallest-limits": check_smallest_limits,
    "sealed-json": check_sealed_json,
    "data-types": check_data_types,
    "owner-files": check_owner_files,
    "maintenance-policy": check_maintenance_policy,
}


@pytest.mark.parametrize("name", CHECKS)
def test_example_matches_code(name: str) -> None:
    CHECKS[name](example(name))


def test_key_examples_match_code() -> None:
    rows = table_after("their UTF-8 bytes. In the examples `␣` stands for a space.")
    assert len(rows) == 3
    for namespace_size, table_size, namespace, table, key in rows:
        assert namespace_size and table_size and namespace and key
        codec = KeyCodec(int(namespace_size), int(table_size))
        assert (codec.namespace_key(namespace) if table is None else codec.table_key(namespace, table)) == key
        assert codec.decode(key) == ObjectName(namespace, table)


# Node files


def arrow_rows(data: bytes) -> Rows:
    return [tuple(row.values()) for row in pa.ipc.open_file(data).read_all().to_pylist()]


def arrow_file(rows: Rows, names: Sequence[str] = ("key", "pvalue", "pnode")) -> bytes:
    columns = [pa.array(list(column), pa.utf8()) for column in zip(*rows, strict=True)]
    batch = pa.record_batch(columns, names=list(names))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


@pytest.mark.parametrize(("name", "order"), [("root, order 4", 4), ("leaf, order 3", 3)])
def test_node_example_matches_code(name: str, order: int) -> None:
    rows = table_after(f"<!-- node: {name} -->")
    node = decode_node(arrow_file(rows), name)
    assert node.is_leaf == name.startswith("leaf")
    assert arrow_rows(encode_node(node, order)) == rows
    assert encode_node(node, order) == arrow_file(rows), "the bytes are equal"
    for compression in NODE_COMPRESSIONS:
        assert arrow_rows(encode_node(node, order, compression)) == rows
    codec = KeyCodec(4, 4)
    assert all(codec.decode(key) for key in [*node.keys, *node.buffer])


def test_sealed_root_example_matches_code() -> None:
    rows = table_after("<!-- node: sealed -->")
    assert decode_node(arrow_file(rows), "sealed").is_sealed
    assert decode_system_rows(arrow_file(rows), "sealed") == {key: value for key, value, _ in rows}


def test_earlier_layout_example_is_readable() -> None:
    flat = arrow_file(table_after("<!-- node: flat, columns key and value -->"), ("key", "value"))
    ours = arrow_file(table_after("<!-- node: flat in our form, order 3 -->"))
    node = decode_node(flat, "flat")
    assert node == decode_node(ours, "ours")
    assert encode_node(node, 3) == ours, "the bytes are equal"
    assert (len(node.keys), node.buffer) == (2, {node.keys[1]: None})
    with pytest.raises(CorruptFileError, match="'retention'"):
        decode_node(
            arrow_file(table_after("<!-- node: refused, columns key and value -->"), ("key", "value")), "refused"
        )


# Definitions

DEFINITIONS = ("LakehouseDef", "NamespaceDef", "TableDef")
MESSAGES = list(pb.DESCRIPTOR.message_types_by_name.values())


@pytest.mark.parametrize("kind", DEFINITIONS)
def test_definition_example_matches_code(kind: str) -> None:
    message = text_format.Parse(BLOCKS["textproto", kind], getattr(pb, kind)())
    data = bytes.fromhex(BLOCKS["hex", kind])
    assert message.SerializeToString(deterministic=True) == data
    definition = getattr(definitions, kind).from_bytes(data, kind)
    assert definition.unknown_fields == b""
    assert definition.to_bytes() == data


def test_definition_example_with_checksums_matches_code() -> None:
    data = bytes.fromhex(BLOCKS["hex", "sealed-NamespaceDef"])
    path = re.findall(r"at `(a/namespace-n.binpb)`", TEXT)[0]
    assert definitions.NamespaceDef(id="n").to_bytes(path) == data
    assert check_file(data, path)
    assert definitions.NamespaceDef.from_bytes(data, path) == definitions.NamespaceDef(id="n")


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.name)
def test_field_tables_match_code(message: Any) -> None:
    rows = table_after(f"### {message.name}")
    seals = {(f.number, f.name) for f in pb.Seals.DESCRIPTOR.fields}
    fields = [f for f in message.fields if message.name == "Seals" or (f.number, f.name) not in seals]
    assert [(int(number or 0), name) for number, name, _ in rows] == [(f.number, f.name) for f in fields]
    if message.name != "Seals":
        kind = getattr(definitions, message.name)
        assert [name for _, name, _ in rows] == [name for name in kind.__dataclass_fields__ if name != "unknown_fields"]
        assert (len(fields) < len(message.fields)) == hasattr(kind, "to_bytes"), (
            "only messages with a separate file have checksums"
        )
    for (_, name, description), spec in zip(rows, fields, strict=True):
        assert description is not None
        if default := re.match(r"optional (?:uint32|uint64|enum) \[(\w+)\]", description):
            value = getattr(LakehouseDef(id=""), name or "")
            assert default[1] == (value.name if hasattr(value, "name") else str(value))
        is_map = spec.message_type is not None and spec.message_type.GetOptions().map_entry
        assert description.startswith("optional ") == (spec.has_presence and spec.message_type is None)
        assert description.startswith("repeated ") == (spec.is_repeated and not is_map)
        assert description.startswith("map<") == is_map
        if spec.enum_type is not None and spec.enum_type.name != "DataType":
            assert re.findall(r"([A-Z]{3,}) (\d)", description) == [
                (value.name, str(value.number)) for value in spec.enum_type.values
            ]
        elif spec.message_type is None:
            type_name = re.sub(r"^(optional|repeated) ", "", description)
            expected_type = {13: "uint32", 4: "uint64", 9: "string", 8: "bool", 12: "bytes", 14: "enum"}[spec.type]
            assert type_name.startswith(expected_type)
