"""Views of a lakehouse: properties of their namespace (docs/decisions/0062).

The format has no object for a view, and a property is carried along by every reader of the format. The value is the
view's metadata in Iceberg's own JSON. So a view needs no file, and belongs to the version as its namespace does.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError
from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchViewError, TableAlreadyExistsError

from trinitylake_ops import errors
from trinitylake_ops.format.nodes.keys import check_new_name
from trinitylake_ops.tables.catalog.view_metadata import ViewMetadata
from trinitylake_ops.tables.properties import usable
from trinitylake_ops.transaction.object_names import VIEW_PREFIX
from trinitylake_ops.transaction.transaction import Transaction
from trinitylake_ops.versions.snapshot import CatalogReader

#: The largest metadata of one view. All properties of a namespace, and so its views, have a bound together.
MOST_VIEW_BYTES = 256 << 10


def without_views(properties: Mapping[str, str]) -> dict[str, str]:
    """Return properties of a namespace without those that are views."""
    return {name: value for name, value in properties.items() if not name.startswith(VIEW_PREFIX)}


def views_of(properties: Mapping[str, str]) -> dict[str, str]:
    """Return those properties of a namespace that are views."""
    return {name: value for name, value in properties.items() if name.startswith(VIEW_PREFIX)}


def check_no_view(names: Mapping[str, str]) -> None:
    """Raise InvalidDefinitionError for a property that is not free: it would be taken for a view."""
    if any(name.startswith(VIEW_PREFIX) for name in names):
        raise errors.InvalidDefinitionError(f"no property may begin with {VIEW_PREFIX!r}: such are views; rename it")


def view_in(reader: CatalogReader, namespace: str, view: str) -> ViewMetadata:
    """Return the metadata of a view, with the properties that clients may set.

    Raises NoSuchViewError, CorruptFileError for metadata that cannot be read.
    """
    text = _properties(reader, namespace, NoSuchViewError).get(VIEW_PREFIX + view)
    if text is None:
        raise NoSuchViewError(f"View does not exist: {namespace}.{view}")
    try:
        if len(text) > MOST_VIEW_BYTES:
            raise ValueError("too large")
        metadata = ViewMetadata.model_validate_json(text)
    except (ValidationError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise errors.CorruptFileError(
            f"view {namespace}.{view} has metadata that cannot be read; drop it, and create it again"
        ) from error
    return metadata.model_copy(update={"properties": usable(metadata.properties)})


def put_view(writer: Transaction, namespace: str, view: str, metadata: ViewMetadata, *, is_new: bool) -> None:
    """Create a view, or replace it. Raises TableAlreadyExistsError, NoSuchNamespaceError, NoSuchViewError.

    Raises InvalidNameError for a name that no table could have, and InvalidDefinitionError for too much metadata.
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
    if len(text.encode()) > MOST_VIEW_BYTES:
        raise errors.InvalidDefinitionError(
            f"the metadata of view {namespace}.{view} has {len(text.encode())} bytes, more than {MOST_VIEW_BYTES}; drop"
            " versions of the view"
        )
    writer.alter_namespace(namespace, {**properties, VIEW_PREFIX + view: text})


def remove_view(writer: Transaction, namespace: str, view: str) -> None:
    """Drop a view. Raises NoSuchViewError."""
    properties = _properties(writer, namespace, NoSuchViewError)
    if VIEW_PREFIX + view not in properties:
        raise NoSuchViewError(f"View does not exist: {namespace}.{view}")
    writer.alter_namespace(namespace, {name: value for name, value in properties.items() if name != VIEW_PREFIX + view})


def _properties(reader: CatalogReader, namespace: str, missing: type[Exception]) -> Mapping[str, str]:
    try:
        return reader.namespace(namespace).properties
    except errors.NamespaceNotFoundError as error:
        what = "View" if missing is NoSuchViewError else "Namespace"
        raise missing(f"{what} does not exist: {namespace}") from error
