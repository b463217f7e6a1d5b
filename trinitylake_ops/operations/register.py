"""Registers existing Iceberg tables, one by its metadata file or all of a catalog, as tables of a lakehouse.

Nothing of a table is copied or changed. A registered table is EXTERNAL, so the lakehouse never deletes a file of it.
Its former writers may go on; their commits are not seen before it is registered again.
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
_LONGEST_MESSAGE_CHARS = 500
_LISTED = 10
_BATCH = 64
_PUBLIC_PROPERTIES = ("type", "py-catalog-impl", "warehouse")
_SHORTEST_SECRET_CHARS = 6

#: A namespace and a table in it, as the lakehouse names them.
_Name = tuple[str, str]


def register_table(
    lake: Lakehouse, namespace: str, table: str, metadata_location: str, *, table_type: str = EXTERNAL
) -> int:
    """Add an existing Iceberg table by its current metadata file, in one commit. Returns the version.

    ``metadata_location`` is a URI, an absolute path or a path under the root. The definition mirrors the schema. A
    managed table of this lakehouse that was dropped is MANAGED again. Any other is of ``table_type``, EXTERNAL or
    FEDERATED, and none of its files is ever deleted. Raises ObjectExistsError, NamespaceNotFoundError,
    FileMissingError, InvalidNameError. Raises CorruptFileError for a file that is no Iceberg metadata, and
    UnsupportedTypeError for a schema that our columns cannot hold. Raises InvalidInputError for a file in a table's
    folder of this lakehouse that no kept version names. For such a folder, raises MaintenanceBlockedError while another
    operation deletes files. Raises the errors of a commit.
    """
    uri = registered_uri(lake.root, metadata_location)
    io = registering_io(reading_io(lake), [uri])
    message = f"{namespace}.{table}"[:_LONGEST_MESSAGE_CHARS]
    with (
        _undisturbed(lake, [uri]) as still_undisturbed,
        lake.transaction(message=message, operation=_OPERATION) as txn,
    ):
        _check_free(txn, namespace, table)
        _, definition = registered_table(io, uri, txn.base.definition, table_type)
        txn.create_table(namespace, table, definition)
        txn.require(still_undisturbed)
    assert txn.committed_version is not None
    return txn.committed_version


@contextmanager
def _undisturbed(lake: Lakehouse, uris: Iterable[str]) -> Iterator[Callable[[Snapshot], None]]:
    """Keep operations from deleting files while tables are registered that lie in this lakehouse's table folders.

    Purges and removals of orphans may be about to delete files of a dropped table. Its writer may delete those of a
    failed commit. Yields a precondition of the commit: that this is so still. Raises MaintenanceBlockedError while an
    operation deletes files, InvalidInputError for a file that no kept version names.
    """
    io = reading_io(lake)
    own = {io.location(uri) for uri in uris if io.folders.is_own_file(uri)}
    if not own:
        yield lambda _base: None
        return
    with lease(lake.storage, _OPERATION) as held:
        _check_committed(lake, own)
        yield lambda _base: held.check()


def _check_committed(lake: Lakehouse, metadata_paths: Collection[str]) -> None:
    """Raise InvalidInputError unless kept versions define tables by all of these metadata files.

    Reads the definitions that the latest version lacks first, as most often a dropped table is brought back.
    """
    survey = survey_versions(uncached(lake))
    reach, missing = CatalogReach(survey.lake.files), set(metadata_paths)
    reach.add([survey.roots[survey.base.version]])
    latest = sorted(reach.tables)
    reach.add(retained_roots(survey).roots)
    locations = [*sorted(reach.tables.difference(latest)), *latest]
    for start in range(0, len(locations), _BATCH):
        for definition in survey.lake.files.definitions.tables(locations[start : start + _BATCH]):
            missing.discard(to_location(lake.root, iceberg_metadata(definition) or "none"))
        if not missing:
            return
    raise InvalidInputError(
        f"{min(missing)!r} is of a table of this lakehouse and no kept version names it: its commit failed, or it was"
        " purged; register the metadata file of a kept version, or roll back"
    )


@dataclass(frozen=True, kw_only=True)
class RegistrationReport(Document):
    """The tables taken over from a catalog.

    ``version`` holds all of ``tables``, and the missing ``namespaces``. It is ``base_version`` when there were none.
    ``known`` were registered before with the same metadata. ``not_iceberg`` have another format.
    """

    catalog: str
    base_version: int
    version: int
    namespaces: tuple[str, ...]
    tables: tuple[str, ...]
    known: tuple[str, ...]
    not_iceberg: tuple[str, ...]
    cost: Cost

    def table(self) -> Table:
        """Return one row for each namespace and table."""
        rows = [
            *(("namespace created", name) for name in self.namespaces),
            *(("registered", name) for name in self.tables),
            *(("known", name) for name in self.known),
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
    """Add all tables of a pyiceberg catalog, or those of some of its namespaces, in one commit.

    ``catalog`` is an open one, or a name that pyiceberg looks up in its configuration, with ``properties`` on top. A
    namespace within others is named by all of them, joined by dots. ``namespaces`` are such names, with all within
    them. Missing namespaces are created. A table that exists with the same metadata file is passed over.

    Nothing is written unless all tables can be registered. Raises ObjectExistsError with every table that exists with
    other metadata, or that two tables of the catalog would become. Raises InvalidInputError for a catalog that cannot
    be opened, StorageError for one that fails. Raises the errors of :func:`register_table`, naming the table.
    """
    metered = MeteredLakehouse(lake)
    source = _Source.opened(catalog, properties or {})
    found, not_iceberg = source.tables(namespaces)
    uris = [uri for _, uri in found]
    with (
        _undisturbed(metered.lake, uris) as still_undisturbed,
        metered.lake.transaction(message=f"catalog {source.name}", operation=_OPERATION) as txn,
    ):
        check_no_gap(metered.lake.files.roots, txn.base.version)
        fresh, known = _fresh(txn, metered.lake.root, found)
        definitions = _definitions(metered.lake, txn, fresh)
        created = [name for name in dict.fromkeys(name for name, _ in fresh) if not txn.has_namespace(name)]
        for namespace in created:
            txn.create_namespace(namespace)
        for (namespace, table), definition in definitions.items():
            txn.create_table(namespace, table, definition)
        txn.require(still_undisturbed)
    assert txn.committed_version is not None
    return RegistrationReport(
        catalog=source.name,
        base_version=txn.base.version,
        version=txn.committed_version,
        namespaces=tuple(created),
        tables=tuple(".".join(name) for name in fresh),
        known=tuple(".".join(name) for name in known),
        not_iceberg=tuple(".".join(name) for name in not_iceberg),
        cost=metered.cost(),
    )


def _check_free(txn: Transaction, namespace: str, table: str) -> None:
    txn.namespace(namespace)
    if txn.has_table(namespace, table):
        raise ObjectExistsError(f"table {namespace}.{table} exists; drop it first, or register under another name")


@dataclass(frozen=True)
class _Source:
    """A pyiceberg catalog. Only one thread asks it, as not all catalogs can take more."""

    name: str
    catalog: Catalog

    @classmethod
    def opened(cls, catalog: str | Catalog, properties: Mapping[str, str]) -> _Source:
        if isinstance(catalog, Catalog):
            return cls(catalog.name, catalog)
        try:
            return cls(catalog, load_catalog(catalog, **properties))
        except TrinityLakeError:
            raise
        except Exception as error:
            # Its message may repeat all properties, credentials too.
            raise InvalidInputError(
                f"catalog {catalog!r} cannot be opened ({type(error).__name__}); give its type, uri and other"
                " properties, or configure it in .pyiceberg.yaml"
            ) from error

    def tables(self, namespaces: Sequence[str] | None) -> tuple[list[tuple[_Name, str]], list[_Name]]:
        """Return all tables with their metadata files, and the names of those of other formats."""
        found: list[tuple[_Name, str]] = []
        others: list[_Name] = []
        for namespace in self._chosen(namespaces):
            with self._naming_failures(f"list the tables of {'.'.join(namespace)}"):
                identifiers = self.catalog.list_tables(namespace)
            for identifier in sorted(identifiers):
                name = (".".join(namespace), identifier[-1])
                with self._naming_failures(f"load table {'.'.join(name)}"):
                    try:
                        found.append((name, self.catalog.load_table(identifier).metadata_location))
                    except NoSuchIcebergTableError:
                        others.append(name)
        return found, others

    def _chosen(self, namespaces: Sequence[str] | None) -> list[Identifier]:
        everything = list(self._within(()))
        if namespaces is None:
            return everything
        chosen = []
        for wanted in namespaces:
            below = [name for name in everything if f"{'.'.join(name)}.".startswith(f"{wanted}.")]
            if not below:
                raise InvalidInputError(f"catalog {self.name!r} has no namespace {wanted!r}")
            chosen += below
        return list(dict.fromkeys(chosen))

    def _within(self, namespace: Identifier) -> Iterator[Identifier]:
        with self._naming_failures("list its namespaces"):
            try:
                inner = sorted(self.catalog.list_namespaces(namespace))
            except NoSuchNamespaceError:  # for a catalog without nested namespaces
                inner = []
        for name in inner:
            if len(name) > len(namespace):
                yield name
                yield from self._within(name)

    @contextmanager
    def _naming_failures(self, what: str) -> Iterator[None]:
        """Name the catalog that failed, and its operation: each raises exceptions of its own clients."""
        try:
            yield
        except TrinityLakeError:
            raise
        except Exception as error:
            reason = self._public((str(error).splitlines() or [""])[0])
            raise StorageError(f"catalog {self.name!r} cannot {what}: {type(error).__name__}: {reason}") from error

    def _public(self, text: str) -> str:
        """Return a text without values of the catalog's properties: any of them may be a credential, or hold one."""
        values = {str(value) for name, value in self.catalog.properties.items() if name not in _PUBLIC_PROPERTIES}
        for value in sorted(values, key=len, reverse=True):
            if len(value) >= _SHORTEST_SECRET_CHARS:
                text = text.replace(value, "***")
        return redact_assignments(text)


def _fresh(txn: Transaction, root: str, found: Sequence[tuple[_Name, str]]) -> tuple[dict[_Name, str], list[_Name]]:
    """Return the tables to register, with the URIs of their metadata, and the tables already registered.

    Raises ObjectExistsError, naming all tables that are there with other metadata.
    """
    fresh: dict[_Name, str] = {}
    conflicts: list[str] = []
    existing: dict[_Name, str] = {}
    for name, location in found:
        uri = registered_uri(root, location)
        if name in fresh or name in existing:
            conflicts.append(f"{'.'.join(name)} (two tables of the catalog)")
        elif txn.has_namespace(name[0]) and txn.has_table(*name):
            existing[name] = to_location(root, uri)
        else:
            fresh[name] = uri
    known = [name for name, location in existing.items() if _metadata_location(txn, name) == location]
    conflicts += [".".join(name) for name in existing.keys() - set(known)]
    if conflicts:
        shown = ", ".join(sorted(conflicts)[:_LISTED]) + (
            f" and {len(conflicts) - _LISTED} more" * (len(conflicts) > _LISTED)
        )
        raise ObjectExistsError(
            f"{len(conflicts)} tables exist with other metadata: {shown}; drop them first, or choose namespaces;"
            " nothing was registered"
        )
    return fresh, known


def _metadata_location(txn: Transaction, name: _Name) -> str | None:
    return txn.table(*name).format_properties.get(METADATA_LOCATION)


def _definitions(lake: Lakehouse, txn: Transaction, fresh: Mapping[_Name, str]) -> dict[_Name, TableDef]:
    io = registering_io(reading_io(lake), fresh.values())
    lakehouse = txn.base.definition

    def definition(name: _Name) -> TableDef:
        txn.keys.table_key(*name)
        try:
            return registered_table(io, fresh[name], lakehouse)[1]
        except TrinityLakeError as error:
            error.message = f"table {'.'.join(name)} cannot be registered: {error.message}; nothing was registered"
            raise

    found = run_parallel(in_one_round_trip(definition), list(fresh), lake.storage.concurrency)
    return dict(zip(fresh, found, strict=True))
