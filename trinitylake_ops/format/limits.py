"""Validate the settings of lakehouses and the definitions of tables (FORMAT.md, "Object definitions")."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from trinitylake_ops.errors import CorruptFileError, InvalidDefinitionError, InvalidLocationError
from trinitylake_ops.format.definitions import MAJOR_VERSION, Column, LakehouseDef, TableDef
from trinitylake_ops.format.file_names import (
    MAX_VERSION,
    min_path_limit_bytes,
    new_lakehouse_def_path,
    new_node_path,
    root_path,
)
from trinitylake_ops.format.keys import (
    CLOCK_RESET,
    COMMIT_ID,
    COMMIT_INFO,
    CREATED_AT_MILLIS,
    LAKEHOUSE_DEF,
    MAX_COMMIT_INFO_BYTES,
    N_KEYS,
    PREVIOUS_ROOT,
    ROLLBACK_FROM_ROOT,
)
from trinitylake_ops.format.locations import normalize_root_uri
from trinitylake_ops.format.node_file import check_node_compression, seal_room_bytes, size_of_rows_bytes, text_bytes

_ANY_UUID = uuid.UUID(int=0)  # all UUIDs have the same length, so any of them gives the path length

MIN_ORDER = 3
MAX_ORDER = 65_536
MAX_NODE_FILE_BYTES = 2**31 - 1  # the largest offset in a text column of one batch
#: Maximum size of the property names and values of one definition, in UTF-8. Views are stored as properties.
MAX_PROPERTIES_BYTES = 4 << 20

#: Settings that are fixed when a lakehouse is created.
IMMUTABLE_SETTINGS = (
    "id",
    "major_version",
    "order",
    "namespace_name_max_size_bytes",
    "table_name_max_size_bytes",
    "file_path_max_size_bytes",
    "node_file_max_size_bytes",
)


def smallest_node_file_limit_bytes(definition: LakehouseDef) -> int:
    """Return the smallest valid ``node_file_max_size_bytes``: the size of the largest root that may be needed.

    This root has the maximum number of pointer rows, one buffered message and seals. Keys and values have their maximum
    sizes, and child pointers have the size of a node path. The system rows are those of a rollback with the largest
    ``commit_info``. Root names have our naming, as in all lakehouses that this program creates. When a tree is edited,
    the actual system rows of its root are used instead.
    """
    key_bytes = 4 + definition.namespace_name_max_size_bytes + definition.table_name_max_size_bytes
    return _largest_root_bytes(definition.order, key_bytes, definition.file_path_max_size_bytes)


@functools.lru_cache(maxsize=256)
def _largest_root_bytes(order: int, key_bytes: int, path_bytes: int) -> int:
    n_keys = order - 1
    system = {
        LAKEHOUSE_DEF: new_lakehouse_def_path(_ANY_UUID),
        PREVIOUS_ROOT: root_path(MAX_VERSION),
        ROLLBACK_FROM_ROOT: root_path(MAX_VERSION),
        CREATED_AT_MILLIS: "9" * 20,
        COMMIT_ID: "0" * 36,
        COMMIT_INFO: "0" * MAX_COMMIT_INFO_BYTES,
        CLOCK_RESET: str(MAX_VERSION),
    }
    return seal_room_bytes() + size_of_rows_bytes(
        len(system) + 1 + order + 1,
        (n_keys + 1) * key_bytes + text_bytes(system) + len(N_KEYS),
        (n_keys + 1) * path_bytes + text_bytes(system.values()) + len(str(n_keys)),
        order * len(new_node_path(_ANY_UUID)),
    )


def validate_lakehouse_def(definition: LakehouseDef) -> LakehouseDef:
    """Return a definition unchanged, or raise InvalidDefinitionError with the nearest valid value."""
    if definition.major_version != MAJOR_VERSION:
        raise InvalidDefinitionError(
            f"major_version is {definition.major_version}, but this program writes {MAJOR_VERSION}; omit it"
        )
    _at_least("order", definition.order, MIN_ORDER)
    _at_most("order", definition.order, MAX_ORDER)
    _at_least("namespace_name_max_size_bytes", definition.namespace_name_max_size_bytes, 1)
    _at_least("table_name_max_size_bytes", definition.table_name_max_size_bytes, 1)
    _at_least("file_path_max_size_bytes", definition.file_path_max_size_bytes, min_path_limit_bytes())
    _at_least(
        "node_file_max_size_bytes", definition.node_file_max_size_bytes, smallest_node_file_limit_bytes(definition)
    )
    _at_most("node_file_max_size_bytes", definition.node_file_max_size_bytes, MAX_NODE_FILE_BYTES)
    validate_properties("the lakehouse", definition.properties)
    return _validate_changeable_settings(definition)


def _validate_changeable_settings(definition: LakehouseDef) -> LakehouseDef:
    _at_least("maximum_version_age_millis", definition.maximum_version_age_millis, 0)
    _at_least("minimum_versions_to_keep", definition.minimum_versions_to_keep, 1)
    _at_least("txn_ttl_millis", definition.txn_ttl_millis, 1)
    check_node_compression(definition.node_compression)
    if definition.table_root:
        try:
            normalize_root_uri(definition.table_root)
        except InvalidLocationError as error:
            raise InvalidDefinitionError(f"table_root is invalid: {error.message}") from error
    return definition


def check_readable_sizes(definition: LakehouseDef, path: str) -> LakehouseDef:
    """Check the sizes in a definition that was read, and return it unchanged.

    The definition is untrusted. If the names in one node cannot fit into a node file, keys must not be padded to the
    name sizes, because these sizes can be gigabytes.

    Args:
        definition: The definition.
        path: The path of its file.

    Raises:
        CorruptFileError: The sizes are impossible.
    """
    names_bytes = definition.namespace_name_max_size_bytes + definition.table_name_max_size_bytes
    limit_bytes = min(definition.node_file_max_size_bytes, MAX_NODE_FILE_BYTES)
    if definition.order < 2 or definition.order * names_bytes > limit_bytes:
        raise CorruptFileError(
            f"the lakehouse definition {path!r} is damaged: order {definition.order}, names of {names_bytes} bytes and"
            f" node files of {definition.node_file_max_size_bytes} bytes are impossible",
            path=path,
        )
    return definition


def validate_changed_settings(before: LakehouseDef, after: LakehouseDef) -> LakehouseDef:
    """Check a changed definition, and return it unchanged.

    Only settings that can change are validated, because another program may have created the lakehouse with sizes that
    this program would reject.

    Args:
        before: The current definition.
        after: The changed definition.

    Raises:
        InvalidDefinitionError: A setting is invalid, or one that is fixed at creation was changed.
    """
    for name in IMMUTABLE_SETTINGS:
        if getattr(before, name) != getattr(after, name):
            raise InvalidDefinitionError(
                f"{name} is fixed when a lakehouse is created ({getattr(before, name)!r}); a change would re-encode"
                " every key"
            )
    if before.properties != after.properties:
        validate_properties("the lakehouse", after.properties, before.properties)
    return _validate_changeable_settings(after)


def _at_least(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise InvalidDefinitionError(f"{name} is {value}; it must be at least {minimum}")


def _at_most(name: str, value: int, maximum: int) -> None:
    if value > maximum:
        raise InvalidDefinitionError(f"{name} is {value}; it must be at most {maximum}")


def validate_properties(what: str, properties: Mapping[str, str], before: Mapping[str, str] | None = None) -> None:
    """Check that the properties of a definition are strings, and that their total size is within the limit.

    Args:
        what: The object that has the properties, for the error message.
        properties: The properties.
        before: The current properties. If another program wrote more than is allowed, they may be reduced to a size
            that still exceeds the limit.

    Raises:
        InvalidDefinitionError: A name or value is not a string, or the properties exceed :data:`MAX_PROPERTIES_BYTES`
            and are not smaller than before.
    """
    untyped_properties: Mapping[Any, Any] = properties  # callers may be untyped
    for name, value in untyped_properties.items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise InvalidDefinitionError(
                f"a property of {what} has a name of type {type(name).__name__} and a value of type"
                f" {type(value).__name__}; both must be strings"
            )
    n_bytes = _properties_bytes(properties)
    if n_bytes > MAX_PROPERTIES_BYTES and (before is None or n_bytes >= _properties_bytes(before)):
        raise InvalidDefinitionError(
            f"the properties of {what} are too large: they have {n_bytes} bytes, more than {MAX_PROPERTIES_BYTES};"
            " remove some, or store large values in files"
        )


def _properties_bytes(properties: Mapping[str, str]) -> int:
    return sum(len(text.encode(errors="surrogatepass")) for item in properties.items() for text in item)


def validate_table_def(definition: TableDef) -> TableDef:
    """Return a table definition unchanged, or raise InvalidDefinitionError if it is invalid.

    Column ids must be positive and unique across all nesting levels. Column names must be non-empty and unique within
    their level. Keys must refer to top-level columns.
    """
    _check_column_names(definition.schema.columns, "")
    ids = [column.id for column in _all_columns(definition.schema.columns)]
    if any(column_id < 1 for column_id in ids):
        raise InvalidDefinitionError("column ids start at 1")
    if len(set(ids)) != len(ids):
        duplicate = next(column_id for column_id in ids if ids.count(column_id) > 1)
        raise InvalidDefinitionError(f"column id {duplicate} is used more than once")
    top_level = {column.id for column in definition.schema.columns}
    for name in ("distribution_keys", "primary_keys", "sort_keys", "unique_columns"):
        if unknown := [column_id for column_id in getattr(definition, name) if column_id not in top_level]:
            raise InvalidDefinitionError(f"{name} refers to column id {unknown[0]}, which is not in the schema")
    return definition


def _all_columns(columns: tuple[Column, ...]) -> Iterator[Column]:
    for column in columns:
        yield column
        yield from _all_columns(_parts(column))


def _parts(column: Column) -> tuple[Column, ...]:
    single = (column.map_key, column.map_value, column.list_element)
    return column.struct_fields + tuple(part for part in single if part is not None)


def _check_column_names(columns: tuple[Column, ...], parent: str) -> None:
    names: set[str] = set()
    for column in columns:
        if not column.name:
            raise InvalidDefinitionError(f"a column{parent} has no name")
        if column.name in names:
            raise InvalidDefinitionError(f"two columns{parent} are named {column.name!r}")
        names.add(column.name)
        _check_part_names(column, f" of {column.name!r}")


def _check_part_names(column: Column, parent: str) -> None:
    """Check the names of struct fields in a column. Map keys, map values and list elements need no names."""
    _check_column_names(column.struct_fields, parent)
    for part in _parts(column)[len(column.struct_fields) :]:
        _check_part_names(part, parent)
