"""The part of the catalog for namespaces, and for views, which a lakehouse does not have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyiceberg.catalog import MetastoreCatalog, PropertiesUpdateSummary
from pyiceberg.exceptions import CommitFailedException, NamespaceAlreadyExistsError, NoSuchNamespaceError
from pyiceberg.typedef import EMPTY_DICT, Identifier, Properties

from trinitylake_ops import errors
from trinitylake_ops.tables.catalog.change import changing
from trinitylake_ops.tables.catalog.target import CatalogTarget
from trinitylake_ops.tables.io.file_io import StorageFileIO

if TYPE_CHECKING:
    from pyiceberg.view import View


class NamespaceCatalog(MetastoreCatalog):
    """The namespaces of a catalog's target. A subclass says what that is."""

    target: CatalogTarget
    io: StorageFileIO

    def list_tables(self, namespace: str | Identifier) -> list[Identifier]:
        """Return the tables of a namespace, of all formats. Raises NoSuchNamespaceError."""
        name = self.identifier_to_database(namespace, NoSuchNamespaceError)
        try:
            return [(name, table) for table in self.target.reader().tables(name)]
        except errors.NamespaceNotFoundError as error:
            raise NoSuchNamespaceError(f"Namespace does not exist: {name}") from error

    def create_namespace(self, namespace: str | Identifier, properties: Properties = EMPTY_DICT) -> None:
        """Create a namespace. Raises NamespaceAlreadyExistsError, InvalidNameError."""
        name = self.identifier_to_database(namespace)
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
            change.writer.drop_namespace(name)

    def list_namespaces(self, namespace: str | Identifier = ()) -> list[Identifier]:
        """Return all namespaces. A namespace contains no others. Raises NoSuchNamespaceError."""
        if namespace:
            self.load_namespace_properties(namespace)
            return []
        return [(name,) for name in self.target.reader().namespaces()]

    def load_namespace_properties(self, namespace: str | Identifier) -> Properties:
        """Return a namespace's properties. Raises NoSuchNamespaceError."""
        name = self.identifier_to_database(namespace, NoSuchNamespaceError)
        try:
            return dict(self.target.reader().namespace(name).properties)
        except errors.NamespaceNotFoundError as error:
            raise NoSuchNamespaceError(f"Namespace does not exist: {name}") from error

    def update_namespace_properties(
        self, namespace: str | Identifier, removals: set[str] | None = None, updates: Properties = EMPTY_DICT
    ) -> PropertiesUpdateSummary:
        """Change a namespace's properties. Raises NoSuchNamespaceError, ValueError when both name a key."""
        name = self.identifier_to_database(namespace, NoSuchNamespaceError)
        with changing(self.target, self.io, f"alter namespace {name}") as change:
            current = dict(change.writer.namespace(name).properties)
            summary, changed = self._get_updated_props_and_update_summary(current, removals, updates)
            change.writer.alter_namespace(name, changed)
        return summary

    # Views: a lakehouse holds none.

    def list_views(self, namespace: str | Identifier) -> list[Identifier]:
        """Raise NotImplementedError: a lakehouse holds no views."""
        raise NotImplementedError("a lakehouse holds no views")

    def view_exists(self, identifier: str | Identifier) -> bool:
        """Raise NotImplementedError: a lakehouse holds no views."""
        raise NotImplementedError("a lakehouse holds no views")

    def load_view(self, identifier: str | Identifier) -> View:
        """Raise NotImplementedError: a lakehouse holds no views."""
        raise NotImplementedError("a lakehouse holds no views")

    def register_view(self, identifier: str | Identifier, metadata_location: str) -> View:
        """Raise NotImplementedError: a lakehouse holds no views."""
        raise NotImplementedError("a lakehouse holds no views")

    def drop_view(self, identifier: str | Identifier) -> None:
        """Raise NotImplementedError: a lakehouse holds no views."""
        raise NotImplementedError("a lakehouse holds no views")
