"""The namespaces and views of the catalog."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pyiceberg.catalog import MetastoreCatalog, PropertiesUpdateSummary
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NamespaceNotEmptyError,
    NoSuchNamespaceError,
    NoSuchViewError,
)
from pyiceberg.schema import Schema
from pyiceberg.typedef import EMPTY_DICT, Identifier, Properties

from trinitylake_ops import errors
from trinitylake_ops.format.definitions import NamespaceDef
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.properties import check_settable, settable_properties
from trinitylake_ops.iceberg.table_change import CatalogTarget, changing
from trinitylake_ops.iceberg.views import (
    ViewMetadata,
    check_no_view,
    new_view,
    put_view,
    remove_view,
    view_in,
    views_of,
    without_views,
)
from trinitylake_ops.iceberg.views import ViewVersion as OurViewVersion
from trinitylake_ops.transaction.change_set import views_in

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.view import View
    from pyiceberg.view.metadata import ViewVersion


class NamespaceCatalog(MetastoreCatalog):
    """The part of the catalog that manages namespaces and views. Subclasses set the target."""

    target: CatalogTarget
    io: StorageFileIO

    def list_tables(self, namespace: str | Identifier) -> list[Identifier]:
        """Return the tables of a namespace, in all formats. Raises NoSuchNamespaceError."""
        name = self.identifier_to_database(namespace, NoSuchNamespaceError)
        try:
            return [(name, table) for table in self.target.reader().tables(name)]
        except errors.NamespaceNotFoundError as error:
            raise NoSuchNamespaceError(f"Namespace does not exist: {name}") from error

    def create_namespace(self, namespace: str | Identifier, properties: Properties = EMPTY_DICT) -> None:
        """Create a namespace.

        Args:
            namespace: Name of the namespace.
            properties: Properties of the namespace.

        Raises:
            NamespaceAlreadyExistsError: The namespace exists.
            InvalidNameError: The name is not allowed.
            InvalidDefinitionError: A property is not allowed.
        """
        name = self.identifier_to_database(namespace)
        check_no_view(properties)
        check_settable(properties)
        try:
            with changing(self.target, self.io, f"create namespace {name}") as change:
                if change.writer.has_namespace(name):
                    raise NamespaceAlreadyExistsError(f"Namespace already exists: {name}")
                change.writer.create_namespace(name, properties)
        except CommitFailedException as error:
            if self.target.reader().has_namespace(name):
                raise NamespaceAlreadyExistsError(f"Namespace already exists: {name}") from error
            raise

    def namespace_exists(self, namespace: str | Identifier) -> bool:
        """Whether a namespace exists."""
        return self.target.reader().has_namespace(self.identifier_to_database(namespace, NoSuchNamespaceError))

    def drop_namespace(self, namespace: str | Identifier) -> None:
        """Drop an empty namespace. Raises NoSuchNamespaceError, NamespaceNotEmptyError."""
        name = self.identifier_to_database(namespace, NoSuchNamespaceError)
        with changing(self.target, self.io, f"drop namespace {name}") as change:
            if views := views_in(change.writer.namespace(name).properties):
                raise NamespaceNotEmptyError(f"Namespace {name} is not empty: it contains {len(views)} views")
            change.writer.drop_namespace(name)

    def list_namespaces(self, namespace: str | Identifier = ()) -> list[Identifier]:
        """Return all namespaces. Namespaces are not nested. Raises NoSuchNamespaceError."""
        if namespace:
            self.load_namespace_properties(namespace)
            return []
        return [(name,) for name in self.target.reader().namespaces()]

    def load_namespace_properties(self, namespace: str | Identifier) -> Properties:
        """Return the properties of a namespace that clients may set. Raises NoSuchNamespaceError."""
        name = self.identifier_to_database(namespace, NoSuchNamespaceError)
        return settable_properties(without_views(self._namespace(name).properties))

    def update_namespace_properties(
        self, namespace: str | Identifier, removals: set[str] | None = None, updates: Properties = EMPTY_DICT
    ) -> PropertiesUpdateSummary:
        """Change the properties of a namespace.

        Args:
            namespace: Name of the namespace.
            removals: Names of properties to remove.
            updates: Properties to set.

        Returns:
            The names of removed, updated and missing properties.

        Raises:
            NoSuchNamespaceError: The namespace does not exist.
            ValueError: A property is in both ``removals`` and ``updates``.
            InvalidDefinitionError: A property is not allowed.
        """
        name = self.identifier_to_database(namespace, NoSuchNamespaceError)
        check_no_view(updates)
        check_settable(updates)
        with changing(self.target, self.io, f"alter namespace {name}") as change:
            stored = change.writer.namespace(name).properties
            current = without_views(stored)
            summary, changed = self._get_updated_props_and_update_summary(current, removals, updates)
            change.writer.alter_namespace(name, {**changed, **views_of(stored)})
        return summary

    # Views, which PyIceberg supports since version 0.12.

    def list_views(self, namespace: str | Identifier) -> list[Identifier]:
        """Return the views of a namespace. Raises NoSuchNamespaceError."""
        name = self.identifier_to_database(namespace, NoSuchNamespaceError)
        return [(name, view) for view in views_in(self._namespace(name).properties)]

    def view_exists(self, identifier: str | Identifier) -> bool:
        """Whether a view exists. Raises NoSuchViewError if the identifier is not a namespace and a name."""
        namespace, view = self._view_name(identifier)
        reader = self.target.reader()
        return reader.has_namespace(namespace) and view in views_in(reader.namespace(namespace).properties)

    def load_view(self, identifier: str | Identifier) -> View:
        """Return a view. Raises NoSuchViewError, and CorruptFileError if it cannot be decoded."""
        from pyiceberg.view import View
        from pyiceberg.view.metadata import ViewMetadata

        namespace, view = self._view_name(identifier)
        metadata = view_in(self.target.reader(), namespace, view)
        return View((namespace, view), ViewMetadata.model_validate_json(metadata.model_dump_json()))

    def create_view(
        self,
        identifier: str | Identifier,
        schema: Schema | pa.Schema,
        view_version: ViewVersion,
        location: str | None = None,
        properties: Properties = EMPTY_DICT,
    ) -> View:
        """Create a view.

        Args:
            identifier: Namespace and name.
            schema: Iceberg schema or Arrow schema.
            view_version: SQL and default namespace of the view.
            location: Must be omitted, because a view has no files.
            properties: Properties of the view.

        Raises:
            TableAlreadyExistsError: A table or view with that name exists.
            NoSuchNamespaceError: The namespace does not exist.
            InvalidDefinitionError: The view is not valid, or ``location`` is set.
        """
        if location is not None:
            raise errors.InvalidDefinitionError("location of a view cannot be set: views have no files; leave it out")
        version = OurViewVersion.model_validate_json(view_version.model_dump_json())
        metadata = new_view(self._convert_schema_if_needed(schema), version, properties, self.io.root)
        namespace, view = self.identifier_to_database_and_table(identifier)
        self.put_view((namespace, view), lambda _: metadata, is_new=True)
        return self.load_view((namespace, view))

    def put_view(
        self,
        identifier: tuple[str, str],
        change: Callable[[ViewMetadata | None], ViewMetadata],
        *,
        is_new: bool = False,
    ) -> ViewMetadata:
        """Create or replace a view.

        Args:
            identifier: Namespace and name.
            change: Computes the new metadata from the current metadata, which is None for a new view.
            is_new: Whether the view is created.

        Returns:
            The new metadata.

        Raises:
            NoSuchViewError: The view to replace does not exist.
            TableAlreadyExistsError: A table or view with the new name exists.
            NoSuchNamespaceError: The namespace does not exist.
            InvalidDefinitionError: The view is not valid.
        """
        namespace, view = identifier
        verb = "create" if is_new else "replace"
        with changing(self.target, self.io, f"{verb} view {namespace}.{view}") as table_change:
            metadata = change(None if is_new else view_in(table_change.writer, namespace, view))
            put_view(table_change.writer, namespace, view, metadata, is_new=is_new)
        return metadata

    def move_view(self, source: tuple[str, str], target: tuple[str, str]) -> None:
        """Rename a view, possibly into another namespace.

        Args:
            source: Current namespace and name.
            target: New namespace and name.

        Raises:
            NoSuchViewError: The view does not exist.
            TableAlreadyExistsError: The new name is in use.
            NoSuchNamespaceError: The new namespace does not exist.
        """
        with changing(self.target, self.io, f"rename view {'.'.join(source)} to {'.'.join(target)}") as change:
            metadata = view_in(change.writer, *source)
            put_view(change.writer, *target, metadata, is_new=True)
            remove_view(change.writer, *source)

    def register_view(self, identifier: str | Identifier, metadata_location: str) -> View:
        """Raise NotImplementedError, because views have no metadata files."""
        raise NotImplementedError("views have no metadata files and cannot be registered; create the view")

    def drop_view(self, identifier: str | Identifier) -> None:
        """Drop a view. Raises NoSuchViewError."""
        namespace, view = self._view_name(identifier)
        with changing(self.target, self.io, f"drop view {namespace}.{view}") as change:
            remove_view(change.writer, namespace, view)

    def _view_name(self, identifier: str | Identifier) -> tuple[str, str]:
        name = self.identifier_to_tuple(identifier)
        if len(name) != 2:
            raise NoSuchViewError(f"View does not exist: {'.'.join(name)}")
        return name[0], name[1]

    def _namespace(self, name: str) -> NamespaceDef:
        try:
            return self.target.reader().namespace(name)
        except errors.NamespaceNotFoundError as error:
            raise NoSuchNamespaceError(f"Namespace does not exist: {name}") from error
