"""Register existing Iceberg tables in a lakehouse: a single table by its metadata file, or all tables of a catalog.

No file of a table is copied or changed. A registered table is EXTERNAL, so the lakehouse never deletes its files. Other
programs can continue to write to it; their commits are not visible until it is registered again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import NoSuchIcebergTableError, NoSuchNamespaceError
from pyiceberg.typedef import Identifier

from trinitylake_ops.errors import InvalidInputError, ObjectExistsError, StorageError, TrinityLakeError
from trinitylake_ops.format.definitions import METADATA_LOCATION, TableDef
from trinitylake_ops.format.locations import to_location
from trinitylake_ops.iceberg.io.file_io import reading_io
from trinitylake_ops.iceberg.managed import EXTERNAL
from trinitylake_ops.iceberg.table_change import registered_table, registered_uri, registering_io
from trinitylake_ops.operations.base import Cost, MeteredLakehouse, uncached
from trinitylake_ops.operations.gc.mark import CatalogReach, retained_roots
from trinitylake_ops.operations.gc.survey import survey_versions
from trinitylake_ops.operations.gc.table_files import iceberg_metadata
from trinitylake_ops.operations.lease import lease
from trinitylake_ops.operations.rendering import Document, Table, new_table
from trinitylake_ops.storage.options import redact_assignments
from trinitylake_ops.storage.parallel import in_one_round_trip, run_parallel
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.transaction.transaction import Transaction
from trinitylake_ops.versions.roots import check_no_gap
from trinitylake_ops.versions.snapshot import Snapshot

_OPERATION = "register-table"
_MAX_MESSAGE_CHARS = 500
_MAX_NAMES = 10
_BATCH_DEFINITIONS = 64
_PUBLIC_PROPERTIES = ("type", "py-catalog-impl", "warehouse")
_MIN_SECRET_CHARS = 6

#: A namespace of the lakehouse and a table in it.
_Name = tuple[str, str]


def register_table(
    lake: Lakehouse, namespace: str, table: str, metadata_location: str, *, table_type: str = EXTERNAL
) -> int:
    """Add an existing Iceberg table, identified by its current metadata file, in one commit, and return the version.

    A managed table of this lakehouse that was dropped becomes MANAGED again. No file of any other table is ever
    deleted.

    Args:
        lake: The lakehouse.
        namespace: The namespace.
        table: The name of the new table.
        metadata_location: The metadata file, as a URI, an absolute path, or a path under the root.
        table_type: EXTERNAL or FEDERATED, for a table that does not belong to this lakehouse.

    Raises:
        ObjectExistsError: The table exists.
        NamespaceNotFoundError: The namespace does not exist.
        InvalidNameError: A name is not valid.
        FileMissingError: The metadata file does not exist.
        CorruptFileError: The file is not Iceberg metadata.
        UnsupportedTypeError: The schema has a type that a lakehouse column cannot have.
        InvalidInputError: The file is in a table folder of this lakehouse, but no kept version refers to it.
        MaintenanceBlockedError: The file is in such a folder, and another operation is deleting files.
        TrinityLakeError: The commit failed.
    """
    uri = registered_uri(lake.root, metadata_location)
    io = registering_io(reading_io(lake), [uri])
    message = f"{namespace}.{table}"[:_MAX_MESSAGE_CHARS]
    with (
        _deletions_blocked(lake, [uri]) as check_blocked,
        lake.transaction(message=message, operation=_OPERATION) as txn,
    ):
        _check_free(txn, namespace, table)
        _, definition = registered_table(io, uri, txn.base.definition, table_type)
        txn.create_table(namespace, table, definition)
        txn.require(check_blocked)
    assert txn.committed_version is not None
    return txn.committed_version


@contextmanager
def _deletions_blocked(lake: Lakehouse, uris: Iterable[str]) -> Iterator[Callable[[Snapshot], None]]:
    """Keep operations from deleting files while tables in this lakehouse's table folders are registered.

    Otherwise, a purge or an orphan removal could delete files of a dropped table, and a writer could delete files of a
    failed commit. Yields a precondition of the commit, which checks that deletions are still blocked.

    Raises:
        MaintenanceBlockedError: Another operation is deleting files.
        InvalidInputError: No kept version refers to a file.
    """
    io = reading_io(lake)
    own_locations = {io.location(uri) for uri in uris if io.folders.is_own_file(uri)}
    if not own_locations:
        yield lambda _base: None
        return
    with lease(lake.storage, _OPERATION) as held_lease:
        _check_committed(lake, own_locations)
        yield lambda _base: held_lease.check()


def _check_committed(lake: Lakehouse, metadata_paths: Collection[str]) -> None:
    """Raise InvalidInputError unless tables of kept versions refer to all of these metadata files.

    Definitions that exist only in older versions are read first, because usually a dropped table is registered again.
    """
    survey = survey_versions(uncached(lake))
    reach, missing = CatalogReach(survey.lake.files), set(metadata_paths)
    reach.add([survey.roots[survey.base.version]])
    latest = sorted(reach.tables)
    reach.add(retained_roots(survey).roots)
    locations = [*sorted(reach.tables.difference(latest)), *latest]
    for start in range(0, len(locations), _BATCH_DEFINITIONS):
        for definition in survey.lake.files.definitions.tables(locations[start : start + _BATCH_DEFINITIONS]):
            missing.discard(to_location(lake.root, iceberg_metadata(definition) or "none"))
        if not missing:
            return
    raise InvalidInputError(
        f"{min(missing)!r} cannot be registered: it is in a table folder of this lakehouse, but no kept version refers"
        " to it, because its commit failed or it was purged; register the metadata file of a kept version, or roll back"
    )


@dataclass(frozen=True, kw_only=True)
class RegistrationReport(Document):
    """The tables registered from a catalog."""

    #: The name of the catalog.
    catalog: str
    #: The latest version before the registration.
    base_version: int
    #: The version that contains all tables; ``base_version`` if there were no tables to register.
    version: int
    #: The created namespaces.
    namespaces: tuple[str, ...]
    #: The registered tables.
    tables: tuple[str, ...]
    #: Tables that were already registered with the same metadata.
    known: tuple[str, ...]
    #: Tables of other formats, which were skipped.
    not_iceberg: tuple[str, ...]
    #: The requests and time that the registration took.
    cost: Cost

    def table(self) -> Table:
        """Return one row for each namespace and table."""
        rows = [
            *(("namespace created", name) for name in self.namespaces),
            *(("registered", name) for name in self.tables),
            *(("already registered", name) for name in self.known),
            *(("not Iceberg", name) for name in self.not_iceberg),
        ]
        title = f"Catalog {self.catalog}: {len(self.tables)} tables registered, version {self.version}"
        return new_table(title, "", "object", rows=rows)


def register_catalog(
    lake: Lakehouse,
    catalog: str | Catalog,
    properties: Mapping[str, str] | None = None,
    *,
    namespaces: Sequence[str] | None = None,
) -> RegistrationReport:
    """Add all tables of a pyiceberg catalog, or the tables of some of its namespaces, in one commit.

    Missing namespaces are created. A table that already exists with the same metadata file is skipped. Nothing is
    written unless all tables can be registered.

    Args:
        lake: The lakehouse.
        catalog: An open catalog, or the name of a catalog in the pyiceberg configuration.
        properties: Properties of the catalog, which override its configuration.
        namespaces: Register only these namespaces and the namespaces within them. The levels of a nested namespace are
            joined by dots.

    Raises:
        ObjectExistsError: Tables exist with different metadata, or two tables of the catalog would get the same name.
            The message lists them.
        InvalidInputError: The catalog cannot be opened, or lacks a namespace.
        StorageError: A request to the catalog or the storage failed.
        TrinityLakeError: A table cannot be registered; see :func:`register_table`.
    """
    metered = MeteredLakehouse(lake)
    source = _Source.open(catalog, properties or {})
    tables, not_iceberg = source.tables(namespaces)
    uris = [uri for _, uri in tables]
    with (
        _deletions_blocked(metered.lake, uris) as check_blocked,
        metered.lake.transaction(message=f"catalog {source.name}", operation=_OPERATION) as txn,
    ):
        check_no_gap(metered.lake.files.roots, txn.base.version)
        new, registered = _new_tables(txn, metered.lake.root, tables)
        definitions = _definitions(metered.lake, txn, new)
        created = [name for name in dict.fromkeys(name for name, _ in new) if not txn.has_namespace(name)]
        for namespace in created:
            txn.create_namespace(namespace)
        for (namespace, table), definition in definitions.items():
            txn.create_table(namespace, table, definition)
        txn.require(check_blocked)
    assert txn.committed_version is not None
    return RegistrationReport(
        catalog=source.name,
        base_version=txn.base.version,
        version=txn.committed_version,
        namespaces=tuple(created),
        tables=tuple(".".join(name) for name in new),
        known=tuple(".".join(name) for name in registered),
        not_iceberg=tuple(".".join(name) for name in not_iceberg),
        cost=metered.cost(),
    )


def _check_free(txn: Transaction, namespace: str, table: str) -> None:
    txn.namespace(namespace)
    if txn.has_table(namespace, table):
        raise ObjectExistsError(
            f"table {namespace}.{table} already exists; drop it first, or register under another name"
        )


@dataclass(frozen=True)
class _Source:
    """A pyiceberg catalog. It is used by one thread only, because not all catalogs are thread-safe."""

    name: str
    catalog: Catalog

    @classmethod
    def open(cls, catalog: str | Catalog, properties: Mapping[str, str]) -> _Source:
        if isinstance(catalog, Catalog):
            return cls(catalog.name, catalog)
        try:
            return cls(catalog, load_catalog(catalog, **properties))
        except TrinityLakeError:
            raise
        except Exception as error:
            # The message of the error can contain all properties, including credentials.
            raise InvalidInputError(
                f"catalog {catalog!r} cannot be opened ({type(error).__name__}); pass its type, uri and other"
                " properties, or configure it in .pyiceberg.yaml"
            ) from error

    def tables(self, namespaces: Sequence[str] | None) -> tuple[list[tuple[_Name, str]], list[_Name]]:
        """Return all tables with their metadata files, and the names of tables of other formats."""
        tables: list[tuple[_Name, str]] = []
        other_formats: list[_Name] = []
        for namespace in self._selected_namespaces(namespaces):
            with self._describing_failures(f"list the tables of {'.'.join(namespace)}"):
                identifiers = self.catalog.list_tables(namespace)
            for identifier in sorted(identifiers):
                name = (".".join(namespace), identifier[-1])
                with self._describing_failures(f"load table {'.'.join(name)}"):
                    try:
                        tables.append((name, self.catalog.load_table(identifier).metadata_location))
                    except NoSuchIcebergTableError:
                        other_formats.append(name)
        return tables, other_formats

    def _selected_namespaces(self, namespaces: Sequence[str] | None) -> list[Identifier]:
        all_namespaces = list(self._descendants(()))
        if namespaces is None:
            return all_namespaces
        selected = []
        for namespace in namespaces:
            nested = [name for name in all_namespaces if f"{'.'.join(name)}.".startswith(f"{namespace}.")]
            if not nested:
                raise InvalidInputError(f"catalog {self.name!r} has no namespace {namespace!r}")
            selected += nested
        return list(dict.fromkeys(selected))

    def _descendants(self, namespace: Identifier) -> Iterator[Identifier]:
        with self._describing_failures("list its namespaces"):
            try:
                children = sorted(self.catalog.list_namespaces(namespace))
            except NoSuchNamespaceError:  # for a catalog without nested namespaces
                children = []
        for name in children:
            if len(name) > len(namespace):
                yield name
                yield from self._descendants(name)

    @contextmanager
    def _describing_failures(self, operation: str) -> Iterator[None]:
        """Convert failures to StorageError with catalog and operation, because clients raise different errors."""
        try:
            yield
        except TrinityLakeError:
            raise
        except Exception as error:
            reason = self._public((str(error).splitlines() or [""])[0])
            raise StorageError(f"catalog {self.name!r} cannot {operation}: {type(error).__name__}: {reason}") from error

    def _public(self, text: str) -> str:
        """Remove the values of the catalog properties from a text, because any of them can contain a credential."""
        values = {str(value) for name, value in self.catalog.properties.items() if name not in _PUBLIC_PROPERTIES}
        for value in sorted(values, key=len, reverse=True):
            if len(value) >= _MIN_SECRET_CHARS:
                text = text.replace(value, "***")
        return redact_assignments(text)


def _new_tables(
    txn: Transaction, root: str, tables: Sequence[tuple[_Name, str]]
) -> tuple[dict[_Name, str], list[_Name]]:
    """Return the metadata URIs of the tables to register, by name, and the tables already registered.

    Raises ObjectExistsError with the names of all tables that exist with different metadata.
    """
    new: dict[_Name, str] = {}
    conflicts: list[str] = []
    existing: dict[_Name, str] = {}
    for name, location in tables:
        uri = registered_uri(root, location)
        if name in new or name in existing:
            conflicts.append(f"{'.'.join(name)} (two tables of the catalog)")
        elif txn.has_namespace(name[0]) and txn.has_table(*name):
            existing[name] = to_location(root, uri)
        else:
            new[name] = uri
    registered = [name for name, location in existing.items() if _metadata_location(txn, name) == location]
    conflicts += [".".join(name) for name in existing.keys() - set(registered)]
    if conflicts:
        text = ", ".join(sorted(conflicts)[:_MAX_NAMES]) + (
            f" and {len(conflicts) - _MAX_NAMES} more" * (len(conflicts) > _MAX_NAMES)
        )
        raise ObjectExistsError(
            f"nothing was registered: {len(conflicts)} tables already exist with other metadata ({text}); drop them"
            " first, or select other namespaces"
        )
    return new, registered


def _metadata_location(txn: Transaction, name: _Name) -> str | None:
    return txn.table(*name).format_properties.get(METADATA_LOCATION)


def _definitions(lake: Lakehouse, txn: Transaction, tables: Mapping[_Name, str]) -> dict[_Name, TableDef]:
    io = registering_io(reading_io(lake), tables.values())
    lakehouse = txn.base.definition

    def definition(name: _Name) -> TableDef:
        txn.keys.table_key(*name)
        try:
            return registered_table(io, tables[name], lakehouse)[1]
        except TrinityLakeError as error:
            error.message = f"nothing was registered: table {'.'.join(name)} cannot be registered: {error.message}"
            raise

    definitions = run_parallel(in_one_round_trip(definition), list(tables), lake.storage.concurrency)
    return dict(zip(tables, definitions, strict=True))
