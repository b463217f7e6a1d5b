"""Views: their metadata, and their storage as properties of a namespace.

The models are defined here because the oldest supported PyIceberg version has no view models. Schemas are PyIceberg's.

The lakehouse format has no view objects, but all its readers preserve properties. A view is a property whose value is
the view's metadata in Iceberg's JSON. A view therefore needs no file, and is versioned with its namespace.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, ValidationError
from pyiceberg.exceptions import CommitFailedException, NoSuchNamespaceError, NoSuchViewError, TableAlreadyExistsError
from pyiceberg.schema import Schema
from pyiceberg.typedef import IcebergBaseModel

from trinitylake_ops import errors
from trinitylake_ops.errors import InvalidDefinitionError
from trinitylake_ops.format.keys import check_new_name
from trinitylake_ops.iceberg.properties import check_settable, settable_properties
from trinitylake_ops.transaction.change_set import VIEW_PREFIX
from trinitylake_ops.transaction.transaction import Transaction
from trinitylake_ops.versions.snapshot import CatalogReader

LAST_ADDED = -1
_KEPT_VERSIONS = 10
_MAX_DIALECTS = 20


class Representation(IcebergBaseModel):
    """The SQL of a view in one dialect."""

    type: Literal["sql"]
    sql: str
    dialect: str


class ViewVersion(IcebergBaseModel):
    """A version of a view: its queries, and the default namespace of unqualified names."""

    version_id: int = Field(alias="version-id", default=1)
    schema_id: int = Field(alias="schema-id")
    timestamp_ms: int = Field(alias="timestamp-ms")
    summary: dict[str, str] = Field(default_factory=dict)
    representations: list[Representation] = Field(min_length=1, max_length=_MAX_DIALECTS)
    default_catalog: str | None = Field(alias="default-catalog", default=None)
    default_namespace: list[str] = Field(alias="default-namespace")


class ViewHistoryEntry(IcebergBaseModel):
    """The time at which a version became current."""

    timestamp_ms: int = Field(alias="timestamp-ms")
    version_id: int = Field(alias="version-id")


class ViewMetadata(IcebergBaseModel):
    """The metadata of a view."""

    view_uuid: str = Field(alias="view-uuid")
    format_version: Literal[1] = Field(alias="format-version", default=1)
    location: str
    schemas: list[Schema] = Field(alias="schemas")
    current_version_id: int = Field(alias="current-version-id")
    versions: list[ViewVersion]
    version_log: list[ViewHistoryEntry] = Field(alias="version-log")
    properties: dict[str, str] = Field(default_factory=dict)


class AssignUuid(IcebergBaseModel):
    """Asserts the view's UUID, which never changes."""

    action: Literal["assign-uuid"]
    uuid: str


class UpgradeFormat(IcebergBaseModel):
    """Sets the format version. Only version 1 exists."""

    action: Literal["upgrade-format-version"]
    format_version: Literal[1] = Field(alias="format-version")


class AddSchema(IcebergBaseModel):
    """Adds a schema, or reuses an equal existing one."""

    action: Literal["add-schema"]
    schema_: Schema = Field(alias="schema")


class SetLocation(IcebergBaseModel):
    """Sets the location. It is ignored because a view has no files."""

    action: Literal["set-location"]
    location: str


class SetProperties(IcebergBaseModel):
    """Sets properties."""

    action: Literal["set-properties"]
    updates: dict[str, str]


class RemoveProperties(IcebergBaseModel):
    """Removes properties."""

    action: Literal["remove-properties"]
    removals: list[str]


class AddVersion(IcebergBaseModel):
    """Adds a version, or reuses an equal existing one."""

    action: Literal["add-view-version"]
    view_version: ViewVersion = Field(alias="view-version")


class SetCurrentVersion(IcebergBaseModel):
    """Sets the current version; -1 is the last added one."""

    action: Literal["set-current-view-version"]
    view_version_id: int = Field(alias="view-version-id")


ViewUpdate: TypeAlias = Annotated[
    AssignUuid
    | UpgradeFormat
    | AddSchema
    | SetLocation
    | SetProperties
    | RemoveProperties
    | AddVersion
    | SetCurrentVersion,
    Field(discriminator="action"),
]


class AssertUuid(IcebergBaseModel):
    """Requires that the view still has the UUID that the client read."""

    type: Literal["assert-view-uuid"]
    uuid: str


class ReplaceViewRequest(IcebergBaseModel):
    """A client's request to change an existing view."""

    requirements: list[AssertUuid] = Field(default_factory=list)
    updates: list[ViewUpdate]


class NewViewRequest(IcebergBaseModel):
    """A client's request to create a view."""

    name: str
    schema_: Schema = Field(alias="schema")
    view_version: ViewVersion = Field(alias="view-version")
    properties: dict[str, str] = Field(default_factory=dict)


def new_view(schema: Schema, version: ViewVersion, properties: Mapping[str, str], root: str) -> ViewMetadata:
    """Return the metadata of a new view.

    Args:
        schema: Schema of the view.
        version: First version of the view.
        properties: Properties of the view.
        root: Root of the lakehouse.

    Raises:
        InvalidDefinitionError: A property is not allowed, or a dialect occurs twice.
    """
    check_settable(properties)
    _check_dialects(version)
    view_uuid = str(uuid.uuid4())
    first = version.model_copy(update={"version_id": 1, "schema_id": 0})
    return ViewMetadata.model_validate(
        {
            "view-uuid": view_uuid,
            "format-version": 1,
            "location": f"{root}views/{view_uuid}",  # required by the specification; no file is written there
            "schemas": [schema.model_copy(update={"schema_id": 0})],
            "current-version-id": 1,
            "versions": [first],
            "version-log": [_entry(first)],
            "properties": dict(properties),
        }
    )


def replaced_view(metadata: ViewMetadata, request: ReplaceViewRequest) -> ViewMetadata:
    """Apply a client's updates to the metadata of a view.

    Args:
        metadata: The current metadata.
        request: The requirements and updates.

    Raises:
        CommitFailedException: A requirement is not satisfied.
        InvalidDefinitionError: An update is not valid.
    """
    for requirement in request.requirements:
        if requirement.uuid != metadata.view_uuid:
            raise CommitFailedException(f"Requirement failed: view UUID does not match: {requirement.uuid[:64]}")
    change = _ViewChange(metadata)
    for update in request.updates:
        change.apply(update)
    return change.result()


class _ViewChange:
    """Applies updates to a view."""

    def __init__(self, metadata: ViewMetadata):
        self._metadata = metadata
        self._schemas = list(metadata.schemas)
        self._versions = list(metadata.versions)
        self._log = list(metadata.version_log)
        self._properties = dict(metadata.properties)
        self._current = metadata.current_version_id
        self._schema_ids: dict[int, int] = {}
        self._version_ids: dict[int, int] = {}

    def apply(self, update: ViewUpdate) -> None:
        match update:
            case AssignUuid() if update.uuid != self._metadata.view_uuid:
                raise InvalidDefinitionError("Cannot reassign uuid: the view has another UUID")
            case AddSchema():
                self._add_schema(update.schema_)
            case SetProperties():
                check_settable(update.updates)
                self._properties |= update.updates
            case RemoveProperties():
                for name in update.removals:
                    self._properties.pop(name, None)
            case AddVersion():
                self._add_version(update.view_version)
            case SetCurrentVersion():
                self._set_current(update.view_version_id)

    def result(self) -> ViewMetadata:
        """Return the metadata with the current version and the newest other versions."""
        kept = self._versions[-_KEPT_VERSIONS:]
        if all(version.version_id != self._current for version in kept):
            kept = [*(version for version in self._versions if version.version_id == self._current), *kept[1:]]
        numbers = {version.version_id for version in kept}
        used = {version.schema_id for version in kept}
        return self._metadata.model_copy(
            update={
                "schemas": [schema for schema in self._schemas if schema.schema_id in used],
                "versions": kept,
                "version_log": [entry for entry in self._log if entry.version_id in numbers][-_KEPT_VERSIONS:],
                "current_version_id": self._current,
                "properties": self._properties,
            }
        )

    def _add_schema(self, schema: Schema) -> None:
        same = next((existing for existing in self._schemas if existing == schema), None)
        number = (
            max((existing.schema_id for existing in self._schemas), default=-1) + 1 if same is None else same.schema_id
        )
        self._schema_ids[schema.schema_id] = self._schema_ids[LAST_ADDED] = number
        if same is None:
            self._schemas.append(schema.model_copy(update={"schema_id": number}))

    def _add_version(self, version: ViewVersion) -> None:
        _check_dialects(version)
        schema_id = self._schema_ids.get(version.schema_id, version.schema_id)
        if all(schema.schema_id != schema_id for schema in self._schemas):
            raise InvalidDefinitionError(f"Cannot add version with unknown schema: {version.schema_id}")
        added = version.model_copy(update={"schema_id": schema_id})
        same = next((existing for existing in self._versions if _is_same(existing, added)), None)
        number = max(existing.version_id for existing in self._versions) + 1 if same is None else same.version_id
        self._version_ids[version.version_id] = self._version_ids[LAST_ADDED] = number
        if same is None:
            self._versions.append(added.model_copy(update={"version_id": number}))

    def _set_current(self, requested_id: int) -> None:
        number = self._version_ids.get(requested_id, requested_id)
        current = next((version for version in self._versions if version.version_id == number), None)
        if current is None:
            raise InvalidDefinitionError(f"Cannot set current version to unknown version: {requested_id}")
        if number != self._current:
            self._current = number
            self._log.append(_entry(current))


def _entry(version: ViewVersion) -> ViewHistoryEntry:
    return ViewHistoryEntry.model_validate({"timestamp-ms": version.timestamp_ms, "version-id": version.version_id})


def _is_same(version: ViewVersion, other: ViewVersion) -> bool:
    def comparable(compared: ViewVersion) -> tuple[object, ...]:
        return (
            compared.summary, compared.representations, compared.default_catalog, compared.default_namespace,
            compared.schema_id,
        )  # fmt: skip

    return comparable(version) == comparable(other)


def _check_dialects(version: ViewVersion) -> None:
    dialects: Sequence[str] = [representation.dialect.lower() for representation in version.representations]
    if len(set(dialects)) < len(dialects):
        raise InvalidDefinitionError("Invalid view version: Cannot add multiple queries for a dialect")


#: Maximum size of the metadata of one view. All properties of a namespace, including its views, share a common limit.
MAX_VIEW_BYTES = 256 << 10


def without_views(properties: Mapping[str, str]) -> dict[str, str]:
    """Return the properties of a namespace that are not views."""
    return {name: value for name, value in properties.items() if not name.startswith(VIEW_PREFIX)}


def views_of(properties: Mapping[str, str]) -> dict[str, str]:
    """Return the properties of a namespace that are views."""
    return {name: value for name, value in properties.items() if name.startswith(VIEW_PREFIX)}


def check_no_view(names: Mapping[str, str]) -> None:
    """Raise InvalidDefinitionError for a property name that is reserved for views."""
    if any(name.startswith(VIEW_PREFIX) for name in names):
        raise errors.InvalidDefinitionError(f"property names with the prefix {VIEW_PREFIX!r} are reserved; rename it")


def view_in(reader: CatalogReader, namespace: str, view: str) -> ViewMetadata:
    """Return the metadata of a view, with the properties that clients may set.

    Args:
        reader: The version or transaction to read.
        namespace: Namespace of the view.
        view: Name of the view.

    Raises:
        NoSuchViewError: The view does not exist.
        CorruptFileError: The metadata is not valid.
    """
    text = _properties(reader, namespace, NoSuchViewError).get(VIEW_PREFIX + view)
    if text is None:
        raise NoSuchViewError(f"View does not exist: {namespace}.{view}")
    try:
        if len(text) > MAX_VIEW_BYTES:
            raise ValueError("too large")
        metadata = ViewMetadata.model_validate_json(text)
    except (ValidationError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise errors.CorruptFileError(
            f"metadata of view {namespace}.{view} is not valid; drop the view and create it again"
        ) from error
    return metadata.model_copy(update={"properties": settable_properties(metadata.properties)})


def put_view(writer: Transaction, namespace: str, view: str, metadata: ViewMetadata, *, is_new: bool) -> None:
    """Create or replace a view in a transaction.

    Args:
        writer: The transaction.
        namespace: Namespace of the view.
        view: Name of the view.
        metadata: New metadata of the view.
        is_new: Whether the view is created.

    Raises:
        TableAlreadyExistsError: A table or view with the new name exists.
        NoSuchNamespaceError: The namespace does not exist.
        NoSuchViewError: The view to replace does not exist.
        InvalidNameError: The name is not allowed.
        InvalidDefinitionError: The metadata is too large.
    """
    writer.keys.table_key(namespace, view)
    properties = _properties(writer, namespace, NoSuchNamespaceError)
    if is_new:
        if VIEW_PREFIX + view in properties:
            raise TableAlreadyExistsError(f"View already exists: {namespace}.{view}")
        check_new_name(view, "view")
        if writer.has_table(namespace, view):
            raise TableAlreadyExistsError(f"Table with same name already exists: {namespace}.{view}")
    elif VIEW_PREFIX + view not in properties:
        raise NoSuchViewError(f"View does not exist: {namespace}.{view}")
    text = metadata.model_dump_json()
    if len(text.encode()) > MAX_VIEW_BYTES:
        raise errors.InvalidDefinitionError(
            f"metadata of view {namespace}.{view} has {len(text.encode())} bytes, more than {MAX_VIEW_BYTES}; drop"
            " versions of the view"
        )
    writer.alter_namespace(namespace, {**properties, VIEW_PREFIX + view: text})


def remove_view(writer: Transaction, namespace: str, view: str) -> None:
    """Drop a view in a transaction. Raises NoSuchViewError."""
    properties = _properties(writer, namespace, NoSuchViewError)
    if VIEW_PREFIX + view not in properties:
        raise NoSuchViewError(f"View does not exist: {namespace}.{view}")
    writer.alter_namespace(namespace, {name: value for name, value in properties.items() if name != VIEW_PREFIX + view})


def _properties(reader: CatalogReader, namespace: str, missing: type[Exception]) -> Mapping[str, str]:
    try:
        return reader.namespace(namespace).properties
    except errors.NamespaceNotFoundError as error:
        kind = "View" if missing is NoSuchViewError else "Namespace"
        raise missing(f"{kind} does not exist: {namespace}") from error
