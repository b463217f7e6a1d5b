"""Hypothesis strategies for values of the format."""

from __future__ import annotations

from hypothesis import strategies as st

from trinitylake_ops.format.definitions import (
    Column,
    DataType,
    ExpirationBatch,
    ExpirationState,
    ExportLevel,
    ExportRecord,
    ExportState,
    IsolationLevel,
    LakehouseDef,
    NamespaceDef,
    RetentionRules,
    Schema,
    TableDef,
)
from trinitylake_ops.format.node_file import NodeFile

#: Any Unicode string that UTF-8 can encode.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
#: Characters that are allowed in names.
name_chars = st.characters(
    exclude_categories=["Cs"], exclude_characters=[*map(chr, range(0x21)), "\x7f"], max_codepoint=0x10FFFF
)
names = st.text(name_chars, min_size=1, max_size=8)
keys = st.text(name_chars, min_size=1, max_size=8).map("C===".__add__)
locations = st.text(name_chars, min_size=1, max_size=20)

_uint32 = st.integers(0, 2**32 - 1)
_uint64 = st.integers(0, 2**64 - 1)
_maps = st.dictionaries(texts, texts, max_size=3)
#: The fields 5000 to 5002, which no definition has, as a newer writer might add them.
unknown_fields = st.lists(
    st.tuples(st.sampled_from([b"\xc0\xb8\x02", b"\xc8\xb8\x02", b"\xd0\xb8\x02"]), st.integers(0, 127)), max_size=2
).map(lambda fields: b"".join(tag + bytes([value]) for tag, value in fields))


def _enum(kind: type[DataType | IsolationLevel | ExportLevel | ExportState | ExpirationState]) -> st.SearchStrategy:
    return st.integers(0, 100).map(kind)


exports = st.builds(
    ExportRecord,
    name=texts,
    version=_uint64,
    level=_enum(ExportLevel),
    target_uri=texts,
    root_location=texts,
    state=_enum(ExportState),
    created_at_millis=_uint64,
    retain_until_millis=st.none() | _uint64,
    namespaces=st.lists(texts, max_size=2).map(tuple),
    manifest_path=texts,
    unknown_fields=unknown_fields,
)
expirations = st.builds(
    ExpirationBatch,
    id=texts,
    versions=texts,
    expired_at_version=_uint64,
    expired_at_millis=_uint64,
    plan_path=texts,
    digest=texts,
    state=_enum(ExpirationState),
    unknown_fields=unknown_fields,
)
retention_rules = st.builds(
    RetentionRules,
    keep_last=_uint32,
    keep_hourly=_uint32,
    keep_daily=_uint32,
    keep_weekly=_uint32,
    keep_monthly=_uint32,
    unknown_fields=unknown_fields,
)
lakehouse_defs = st.builds(
    LakehouseDef,
    id=texts.filter(bool),
    order=_uint32,
    namespace_name_max_size_bytes=_uint32,
    table_name_max_size_bytes=_uint32,
    file_path_max_size_bytes=_uint32,
    node_file_max_size_bytes=_uint64,
    properties=_maps,
    maximum_version_age_millis=_uint64,
    minimum_versions_to_keep=_uint32,
    maximum_version_age_millis_overrides=st.dictionaries(_uint64, _uint64, max_size=3),
    exported_snapshots=_maps,
    txn_ttl_millis=_uint64,
    isolation_level=_enum(IsolationLevel),
    exports=st.lists(exports, max_size=2).map(tuple),
    expirations=st.lists(expirations, max_size=2).map(tuple),
    retention_rules=st.none() | retention_rules,
    table_root=texts,
    node_compression=texts,
    maintenance_policy=texts,
    unknown_fields=unknown_fields,
)
namespace_defs = st.builds(NamespaceDef, id=texts.filter(bool), properties=_maps, unknown_fields=unknown_fields)
_flat_columns = st.builds(
    Column,
    id=_uint32,
    name=texts,
    type=_enum(DataType),
    nullable=st.booleans(),
    properties=_maps,
    unknown_fields=unknown_fields,
)
columns = st.recursive(
    _flat_columns,
    lambda nested_columns: st.builds(
        Column,
        id=_uint32,
        name=texts,
        type=_enum(DataType),
        struct_fields=st.lists(nested_columns, max_size=2).map(tuple),
        map_key=st.none() | nested_columns,
        map_value=st.none() | nested_columns,
        list_element=st.none() | nested_columns,
        unknown_fields=unknown_fields,
    ),
    max_leaves=4,
)
_ids = st.lists(_uint32, max_size=3).map(tuple)
table_defs = st.builds(
    TableDef,
    id=texts.filter(bool),
    schema=st.builds(Schema, columns=st.lists(columns, max_size=3).map(tuple), unknown_fields=unknown_fields),
    distribution_keys=_ids,
    primary_keys=_ids,
    sort_keys=_ids,
    unique_columns=_ids,
    table_type=texts,
    table_format=texts,
    format_properties=_maps,
    properties=_maps,
    unknown_fields=unknown_fields,
)


@st.composite
def node_files(draw: st.DrawFn) -> NodeFile:
    """Generate leaves and inner nodes with up to 6 keys, messages and system rows."""
    entries = sorted(draw(st.dictionaries(keys, locations, max_size=6)).items())
    children = [] if draw(st.booleans()) else [f"child-{position}" for position in range(len(entries) + 1)]
    system = draw(st.dictionaries(texts.filter(bool).map("x".__add__), texts, max_size=2))
    return NodeFile(
        keys=[key for key, _ in entries],
        values=[value for _, value in entries],
        children=children,
        buffer=draw(st.dictionaries(keys, st.none() | locations, max_size=6)),
        system={**system, "created_at_millis": str(draw(st.integers(0, 10**14)))},
    )
