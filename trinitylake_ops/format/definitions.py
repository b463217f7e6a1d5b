"""Object definitions as frozen dataclasses, and their protobuf files (FORMAT.md, "Object definitions").

Fields that this program does not know are preserved: every dataclass keeps their bytes in ``unknown_fields``.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, NamedTuple, Self, TypeVar

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, EncodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from trinitylake_ops.errors import CorruptFileError, InvalidDefinitionError, InvalidInputError
from trinitylake_ops.format import definitions_pb2 as pb
from trinitylake_ops.format.checksums import MAX_DEFINITION_BYTES, check_definition_size, check_seals, open_seal, sealed
from trinitylake_ops.format.locations import to_uri
from trinitylake_ops.format.version_ranges import VersionRanges

MAJOR_VERSION = 0
_SEALS_ROOM_BYTES = 4096  # maximum size of both seals

#: Format property of an Iceberg table: the location of its current metadata file, a path under the root or a URI.
METADATA_LOCATION = "metadata_location"
#: Format property of an Iceberg table: the ``table-uuid`` of its metadata, which makes swapped files detectable.
TABLE_UUID = "table_uuid"


class _OpenEnum(IntEnum):
    """An open proto3 enum. An unknown value of a newer writer is preserved with the name ``UNKNOWN_<number>``."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, int):
            return None
        member = int.__new__(cls, value)
        member._name_ = f"UNKNOWN_{value}"
        member._value_ = value
        return member

    def __reduce_ex__(self, protocol: object) -> tuple[type[Self], tuple[int]]:
        # Python versions before 3.11.4 pickle by name, and an unknown number has no name in the class.
        return type(self), (self._value_,)


class IsolationLevel(_OpenEnum):
    """Which reads of a transaction are checked for conflicts with concurrent commits."""

    SNAPSHOT = 0
    SERIALIZABLE = 1


class ExportLevel(_OpenEnum):
    """How much of a version an export copies: the root, the root and nodes, or all files that it refers to."""

    MINIMAL = 0
    PARTIAL = 1
    FULL = 2


class ExportState(_OpenEnum):
    """Whether all files of an export have been copied. While files are being copied, the export pins its version."""

    COPYING = 0
    COMPLETE = 1


class ExpirationState(_OpenEnum):
    """The deletion progress of a batch of expired versions. A batch in state EXPIRED can be undeleted."""

    EXPIRED = 0
    PURGING = 1
    PURGED = 2


class DataType(_OpenEnum):
    """Column types. Sizes, precision and scale are stored in the column's properties."""

    BOOLEAN = 0
    INT2 = 1
    INT4 = 2
    INT8 = 3
    DECIMAL = 4
    FLOAT4 = 5
    FLOAT8 = 6
    CHAR = 7
    VARCHAR = 8
    DATE = 9
    TIME = 10
    TIMETZ = 11
    TIMESTAMP = 12
    TIMESTAMPTZ = 13
    FIXED = 14
    BINARY = 15
    STRUCT = 16
    MAP = 17
    LIST = 18


#: Iceberg's names for types that are named differently in this format. Iceberg has no INT2, CHAR and TIMETZ.
_ICEBERG_NAMES: Mapping[DataType, str] = {
    DataType.INT4: "int",
    DataType.INT8: "long",
    DataType.FLOAT4: "float",
    DataType.FLOAT8: "double",
    DataType.VARCHAR: "string",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRecord:
    """One export, recorded in the lakehouse definition (field 1000).

    If ``clone_id`` is set, the record belongs to a clone, or pins another version that the clone has needed since it
    was refreshed.
    """

    name: str
    version: int
    level: ExportLevel
    target_uri: str = ""
    root_location: str = ""
    state: ExportState = ExportState.COPYING
    created_at_millis: int = 0
    retain_until_millis: int | None = None
    namespaces: tuple[str, ...] = ()
    manifest_path: str = ""
    clone_id: str = ""
    promotions: tuple[PromotionRecord, ...] = ()
    unknown_fields: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromotionRecord:
    """One promotion of a clone."""

    id: str
    #: The version of the clone that was promoted.
    clone_version: int = 0
    #: The version of this lakehouse that contains the promotion.
    version: int = 0
    #: The namespaces and tables to which the promotion was limited; empty if it was not limited.
    only: tuple[str, ...] = ()
    #: The objects that were not changed, because this lakehouse's side of a conflict was chosen.
    kept: tuple[str, ...] = ()
    unknown_fields: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpirationBatch:
    """One batch of expired versions (field 1001); ``versions`` are inclusive ranges such as ``3-90,95``."""

    id: str
    versions: str
    expired_at_version: int = 0
    expired_at_millis: int = 0
    plan_path: str = ""
    digest: str = ""
    state: ExpirationState = ExpirationState.EXPIRED
    unknown_fields: bytes = b""

    def ranges(self) -> VersionRanges:
        """Return the versions of this batch. Raise CorruptFileError if the text is invalid."""
        try:
            return VersionRanges.parse(self.versions)
        except InvalidInputError as error:
            raise CorruptFileError(f"expiration {self.id!r} of the lakehouse definition: {error.message}") from error

    def contains(self, version: int) -> bool:
        """Whether a version is in this batch. Raise CorruptFileError if the text of versions is invalid."""
        return version in self.ranges()


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionRules:
    """How many versions to keep by period (field 1002)."""

    keep_last: int = 0
    keep_hourly: int = 0
    keep_daily: int = 0
    keep_weekly: int = 0
    keep_monthly: int = 0
    unknown_fields: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRecord:
    """Another lakehouse from which this one was created, and whose files it reads (field 1006)."""

    root: str
    lakehouse_id: str = ""
    version: int = 0
    unknown_fields: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentRecord:
    """The lakehouse of which this one is a clone (field 1007).

    ``version`` is the parent's version with which both lakehouses are compared: ``cloned_version``, or the version to
    which the clone was last refreshed. ``name`` is the clone's name in the parent.
    """

    root: str
    lakehouse_id: str = ""
    version: int = 0
    clone_id: str = ""
    name: str = ""
    cloned_version: int = 0
    unknown_fields: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class LakehouseDef:
    """Settings and operational state of a lakehouse. Sizes are in bytes, ages in milliseconds."""

    id: str
    major_version: int = MAJOR_VERSION
    order: int = 128
    namespace_name_max_size_bytes: int = 100
    table_name_max_size_bytes: int = 100
    file_path_max_size_bytes: int = 200
    node_file_max_size_bytes: int = 1_048_576
    properties: Mapping[str, str] = field(default_factory=dict)
    maximum_version_age_millis: int = 604_800_000
    minimum_versions_to_keep: int = 3
    maximum_version_age_millis_overrides: Mapping[int, int] = field(default_factory=dict)
    exported_snapshots: Mapping[str, str] = field(default_factory=dict)
    txn_ttl_millis: int = 86_400_000
    isolation_level: IsolationLevel = IsolationLevel.SNAPSHOT
    exports: tuple[ExportRecord, ...] = ()
    expirations: tuple[ExpirationBatch, ...] = ()
    retention_rules: RetentionRules | None = None
    table_root: str = ""
    node_compression: str = ""
    orphans_removed_before_millis: int = 0
    sources: tuple[SourceRecord, ...] = ()
    parent: ParentRecord | None = None
    #: Canonical JSON; empty for the default policy. Only maintenance code decodes the policy (operations/policy).
    maintenance_policy: str = ""
    unknown_fields: bytes = b""

    def to_bytes(self, path: str = "") -> bytes:
        """Return the protobuf file, sealed for the name of ``path``, if any. Maps are in the order of their keys.

        Raises InvalidDefinitionError.
        """
        return _to_file(self, pb.LakehouseDef, path)

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> LakehouseDef:
        """Read a definition. Raises CorruptFileError if it is not valid, or its major version is not supported."""
        definition = _from_message(cls, _parse(data, pb.LakehouseDef, path))
        if definition.major_version > MAJOR_VERSION:
            raise CorruptFileError(
                f"format version {definition.major_version} of the lakehouse is not supported: this program reads"
                f" versions up to {MAJOR_VERSION}; update trinitylake-ops",
                path=path,
            )
        if not definition.id:
            raise CorruptFileError(f"{path!r}: the definition of the lakehouse has no id", path=path)
        return definition


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceDef:
    """A namespace; ``id`` never changes."""

    id: str
    properties: Mapping[str, str] = field(default_factory=dict)
    unknown_fields: bytes = b""

    def to_bytes(self, path: str = "") -> bytes:
        """Return the protobuf file, sealed for the name of ``path``, if any.

        Raises InvalidDefinitionError for values that no field holds.
        """
        return _to_file(self, pb.NamespaceDef, path)

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> NamespaceDef:
        """Read a definition. Raises CorruptFileError."""
        return _from_message(cls, _parse(data, pb.NamespaceDef, path))


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column. The last four fields (``struct_fields`` to ``list_element``) contain the parts of nested types."""

    id: int
    name: str
    type: DataType
    nullable: bool = True
    properties: Mapping[str, str] = field(default_factory=dict)
    struct_fields: tuple[Column, ...] = ()
    map_key: Column | None = None
    map_value: Column | None = None
    list_element: Column | None = None
    unknown_fields: bytes = b""

    @property
    def type_name(self) -> str:
        """The type in Iceberg's notation, such as ``long``, ``decimal(10, 2)`` or ``list<struct<city: string>>``."""
        if self.type is DataType.STRUCT:
            return f"struct<{', '.join(f'{part.name}: {part.type_name}' for part in self.struct_fields)}>"
        if self.type is DataType.MAP and self.map_key is not None and self.map_value is not None:
            return f"map<{self.map_key.type_name}, {self.map_value.type_name}>"
        if self.type is DataType.LIST and self.list_element is not None:
            return f"list<{self.list_element.type_name}>"
        if self.type is DataType.DECIMAL:
            digits = [self.properties[name] for name in ("precision", "scale") if name in self.properties]
            return f"decimal({', '.join(digits)})" if digits else "decimal"
        if self.type is DataType.FIXED:
            is_uuid = self.properties.get("iceberg.type") == "uuid"
            return "uuid" if is_uuid else f"fixed[{self.properties.get('size', '?')}]"
        return _ICEBERG_NAMES.get(self.type, self.type.name.lower())


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """The columns of a table, in order."""

    columns: tuple[Column, ...] = ()
    unknown_fields: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableDef:
    """A table; an empty ``table_type`` means MANAGED. ``create_table`` replaces an empty ``id``.

    ``distribution_keys``, ``primary_keys``, ``sort_keys`` and ``unique_columns`` hold column ids.
    """

    id: str = ""
    schema: Schema = field(default_factory=Schema)
    distribution_keys: tuple[int, ...] = ()
    primary_keys: tuple[int, ...] = ()
    sort_keys: tuple[int, ...] = ()
    unique_columns: tuple[int, ...] = ()
    table_type: str = "MANAGED"
    table_format: str = "ICEBERG"
    format_properties: Mapping[str, str] = field(default_factory=dict)
    properties: Mapping[str, str] = field(default_factory=dict)
    unknown_fields: bytes = b""

    @property
    def is_managed(self) -> bool:
        return self.table_type in ("", "MANAGED")

    @property
    def is_iceberg(self) -> bool:
        return self.table_format.upper() == "ICEBERG"

    def rebased(self, root: str) -> TableDef:
        """Return the definition in the form in which another lakehouse can read it.

        ``root`` is the root of the lakehouse that contains the definition. If the definition refers to its metadata
        file by a path, the path is relative to this root.
        """
        location = self.format_properties.get(METADATA_LOCATION)
        if not location:
            return self
        return replace(self, format_properties={**self.format_properties, METADATA_LOCATION: to_uri(root, location)})

    def to_bytes(self, path: str = "") -> bytes:
        """Return the protobuf file, sealed for the name of ``path``, if any.

        Raises InvalidDefinitionError for values that no field holds.
        """
        return _to_file(self, pb.TableDef, path)

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> TableDef:
        """Read a definition. Raises CorruptFileError."""
        return _from_message(cls, _parse(data, pb.TableDef, path))


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedWrite:
    """A write of a saved transaction to a key: a definition or a location. With neither, the key is deleted."""

    key: str
    definition: bytes | None = None
    location: str | None = None
    unknown_fields: bytes = field(default=b"", compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTransaction:
    """A transaction that one process passes to another: its base, its reads, and its writes."""

    id: str
    base_version: int
    base_commit_id: str
    begun_at_millis: int
    isolation_level: IsolationLevel
    operation: str = ""
    message: str | None = None
    run_id: str | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    writes: tuple[SavedWrite, ...] = ()
    lakehouse_def: bytes | None = None
    relied_namespaces: tuple[str, ...] = ()
    replaced_namespaces: tuple[str, ...] = ()
    read_keys: tuple[str, ...] = ()
    read_prefixes: tuple[str, ...] = ()
    has_read_definition: bool = False
    checksum: bytes = b""
    unknown_fields: bytes = field(default=b"", compare=False, repr=False)

    def to_bytes(self, path: str = "") -> bytes:
        """Return the protobuf file, with its checksum, and sealed for the name of ``path``, if any."""
        return _to_file(replace(self, checksum=self._checksum()), pb.SavedTransaction, path)

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> SavedTransaction:
        """Decode a saved transaction. Raise CorruptFileError if it is damaged."""
        saved = _from_message(cls, _parse(data, pb.SavedTransaction, path))
        if saved.checksum != saved._checksum():
            raise CorruptFileError(f"the saved transaction {path!r} is damaged: its checksum does not match", path=path)
        return saved

    def _checksum(self) -> bytes:
        return hashlib.sha256(_to_file(replace(self, checksum=b""), pb.SavedTransaction)).digest()


_SEAL_FIELDS = ("seal", "seal_2")

M = TypeVar("M", bound=Message)
D = TypeVar("D")

_NESTED: dict[str, Callable[..., Any]] = {
    "exports": ExportRecord,
    "expirations": ExpirationBatch,
    "retention_rules": RetentionRules,
    "sources": SourceRecord,
    "parent": ParentRecord,
    "promotions": PromotionRecord,
    "schema": Schema,
    "columns": Column,
    "struct_fields": Column,
    "map_key": Column,
    "map_value": Column,
    "list_element": Column,
    "writes": SavedWrite,
}
_ENUMS: dict[str, type[_OpenEnum]] = {
    "IsolationLevel": IsolationLevel,
    "ExportLevel": ExportLevel,
    "ExportState": ExportState,
    "ExpirationState": ExpirationState,
    "DataType": DataType,
}


def _parse(data: bytes, message_type: type[M], path: str) -> M:
    """Decode the message in a file.

    Raises:
        CorruptFileError: The file is empty, is not protobuf, or does not match its seals. An empty file is valid
            protobuf and has no seal that a truncation could damage, but every definition has an id.
    """
    if not data:
        raise CorruptFileError(
            f"{path!r} is empty, so it was truncated; restore the file, or run: trinitylake repair", path=path
        )
    message = _decode(data, message_type, path)
    _check_seals(data, message, path)
    return message


def _decode(data: bytes, message_type: type[M], path: str) -> M:
    if message_type not in (pb.SavedTransaction, pb.Seals):  # both seals are read
        check_definition_size(len(data), path)
    try:
        return message_type.FromString(data)
    except DecodeError as error:
        raise CorruptFileError(f"{path!r} is not a valid {message_type.__name__}", path=path) from error


def _check_seals(data: bytes, message: Any, path: str) -> bool:
    first, second = (getattr(message, name) or None for name in _SEAL_FIELDS)
    return check_seals(data, (first, second), path)


def _to_file(
    value: LakehouseDef | NamespaceDef | TableDef | SavedTransaction, message_type: type[Message], path: str = ""
) -> bytes:
    try:
        data = _to_message(value, message_type).SerializeToString(deterministic=True)
        message_type.FromString(data)  # protobuf writes deeper nesting than it reads
    except (DecodeError, EncodeError) as error:
        raise InvalidDefinitionError(
            f"this {type(value).__name__} cannot be stored: columns are nested too deeply, by about 97 levels"
        ) from error
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidDefinitionError(f"this {type(value).__name__} cannot be stored: {error}") from error
    if len(data) > MAX_DEFINITION_BYTES - _SEALS_ROOM_BYTES and message_type is not pb.SavedTransaction:
        raise InvalidDefinitionError(
            f"this {type(value).__name__} cannot be stored: it has {len(data)} bytes, more than the limit of"
            f" {MAX_DEFINITION_BYTES}"
        )
    return sealed_definition(data, path) if path else data


def sealed_definition(data: bytes, path: str) -> bytes:
    """Enclose a definition in two seals for its path. Any truncation removes or damages one of them."""
    head, tail = _seal_fields(open_seal(path))
    return sealed(head + data + tail, path)


def _seal_fields(seal: str) -> tuple[bytes, bytes]:
    return pb.Seals(seal=seal).SerializeToString(), pb.Seals(seal_2=seal).SerializeToString()


def reseal(data: bytes, source: str, target: str) -> bytes:
    """Replace the seals of a definition so that it can be copied. A file without seals is returned unchanged.

    Args:
        data: The content of the file at ``source``.
        source: The path of the file.
        target: The path of the copy.

    Raises:
        CorruptFileError: The file is damaged.
    """
    if not check_definition_file(data, source):
        return data
    head, tail = _seal_fields(pb.Seals.FromString(data).seal)
    if not data.startswith(head) or not data.endswith(tail):
        raise CorruptFileError(f"{source!r} does not begin and end with its checksums", path=source)
    return sealed_definition(data[len(head) : -len(tail)], target)


def check_definition_file(data: bytes, path: str) -> bool:
    """Check the file of any definition against its seals.

    Args:
        data: The content of the file.
        path: The path of the file.

    Returns:
        Whether the file has valid seals.

    Raises:
        CorruptFileError: The file is damaged, or replaced another file.
    """
    return _check_seals(data, _decode(data, pb.Seals, path), path)


def _to_message(value: Any, message_type: type[M]) -> M:
    """Convert a dataclass to the message with the same field names. None and unset nested fields are omitted."""
    message = message_type.FromString(value.unknown_fields)
    for form in _field_forms(message.DESCRIPTOR):
        content = getattr(value, form.name)
        if content is None:
            continue
        if form.is_map:
            getattr(message, form.name).update(content)
        elif form.is_repeated:
            parts = content if form.message is None else [_to_message(part, form.message) for part in content]
            getattr(message, form.name).extend(parts)
        elif form.message is None:
            setattr(message, form.name, content)
        else:
            getattr(message, form.name).CopyFrom(_to_message(content, form.message))
    return message


class _FieldForm(NamedTuple):
    """How a field of a message is read and written. Cached, because lookups in descriptors are slow."""

    name: str
    is_map: bool
    is_repeated: bool
    has_presence: bool
    part: Callable[..., Any] | None  # the type of a message or enum in the field
    message: type[Message] | None  # of a field that holds one, or several


@functools.cache
def _field_forms(descriptor: Descriptor) -> tuple[_FieldForm, ...]:
    return tuple(
        _FieldForm(
            field.name,
            field.message_type is not None and field.message_type.GetOptions().map_entry,
            field.is_repeated,
            field.has_presence,
            _ENUMS[field.enum_type.name] if field.enum_type is not None else _NESTED.get(field.name),
            None if field.message_type is None else getattr(pb, field.message_type.name, None),
        )
        for field in descriptor.fields
        if field.name not in _SEAL_FIELDS
    )


def _from_message(build: Callable[..., D], message: Message) -> D:
    """Convert a message to the dataclass ``build`` with the same field names. Absent optional fields get defaults."""
    fields: dict[str, Any] = {}
    for name, is_map, is_repeated, has_presence, part, _ in _field_forms(message.DESCRIPTOR):
        content = getattr(message, name)
        if is_map:
            fields[name] = dict(content)
        elif is_repeated:
            fields[name] = tuple(_part_of(part, item) for item in content)
        elif has_presence and not message.HasField(name):
            continue
        else:
            fields[name] = _part_of(part, content)
    return build(**fields, unknown_fields=_unknown_bytes(message))


def _part_of(part: Callable[..., Any] | None, content: Any) -> Any:
    if part is None:
        return content
    return _from_message(part, content) if isinstance(content, Message) else part(content)


def _unknown_bytes(message: Message) -> bytes:
    if not len(UnknownFieldSet(message)):
        return b""
    rest = type(message)()
    rest.CopyFrom(message)
    for descriptor in message.DESCRIPTOR.fields:
        rest.ClearField(descriptor.name)
    return rest.SerializeToString()
