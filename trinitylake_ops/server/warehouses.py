"""Warehouses: a lakehouse at its latest version, or at one that a name, a number or a time chooses.

The name of a warehouse is also the prefix in the paths of its requests: ``main``, ``v12``, ``at-<time>`` or
``export-<name>``. ``clone-<name>`` is a clone at its latest version. Where a server has several lakehouses, the
name of the lakehouse and a dot stand before it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Self
from urllib.parse import quote

from trinitylake_ops import errors
from trinitylake_ops.extras import needs
from trinitylake_ops.format.locations import normalize_root_uri
from trinitylake_ops.iceberg.catalog import TrinityLakeCatalog, catalog_at
from trinitylake_ops.iceberg.metadata import ParsedMetadata
from trinitylake_ops.iceberg.reach import ReachedFiles
from trinitylake_ops.iceberg.table_change import CatalogTarget, SnapshotTarget
from trinitylake_ops.iceberg.validation.metadata_size import MAX_METADATA_BYTES
from trinitylake_ops.operations.base import MeteredLakehouse
from trinitylake_ops.operations.clones.records import clone_record, opened_clone
from trinitylake_ops.server.responses import UNAVAILABLE, RejectedError, bad_request, forbidden
from trinitylake_ops.server.settings import ONLY, LakehouseSettings
from trinitylake_ops.storage import MeteredStorage, open_storage
from trinitylake_ops.storage.cache.memory import ByteLru
from trinitylake_ops.storage.delegation import Delegate
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.latest import open_latest
from trinitylake_ops.versions.lookup import PARENT_VERSION
from trinitylake_ops.versions.snapshot import Snapshot
from trinitylake_ops.versions.table_names import TableNames, table_ids

#: A namespace and a table.
Name = tuple[str, str]

MAIN = "main"
_VERSION = re.compile(r"v([0-9]{1,18})")
_TIME = "at-"
_EXPORT = "export-"
_CLONE = "clone-"
_LONGEST_CHARS = 1_000
_FORMS = f"write {MAIN}, v12, {_TIME}2030-01-31T12:00:00Z, {_EXPORT}NAME or {_CLONE}NAME"
#: JSON of tables' metadata that is kept parsed, which takes several times as much, and that is kept as it is sent.
_PARSED_BYTES, _ENCODED_BYTES = 8 << 20, 16 << 20
#: JSON of large metadata that is kept as it is sent. Parsed metadata has a bound of its own for it.
_LARGE_ENCODED_BYTES = 32 << 20
#: Hashes of the files that old versions of tables reach: 8 bytes each.
_REACHED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Served:
    """A lakehouse that is served, with a catalog that keeps the metadata of tables for all requests."""

    name: str
    lake: Lakehouse
    catalog: TrinityLakeCatalog
    #: Encoded metadata of tables, by the ETags of the answers that it went into.
    encoded: ByteLru[str, bytes]
    #: Gives clients access to files of tables; None where they have credentials of their own.
    delegate: Delegate | None = None
    #: The lakehouse of which this one is a clone, whose tables have the same ids.
    parent: Served | None = None
    names: TableNames = field(default_factory=TableNames)
    #: The files that old versions of tables reach, by the URIs of their metadata files.
    reached: ByteLru[str, ReachedFiles] = field(default_factory=lambda: ByteLru(_REACHED_BYTES))

    @classmethod
    def of(cls, name: str, lake: Lakehouse, delegate: Delegate | None = None, parent: Served | None = None) -> Self:
        """Return a lakehouse that is served. What is parsed and encoded once is kept for the next requests.

        Args:
            name: The name of the lakehouse in the server's settings.
            lake: The lakehouse.
            delegate: Gives clients access to files of tables, None for no access.
            parent: The lakehouse of which it is a clone, None for any other.
        """
        catalog = catalog_at(lake)
        catalog.parsed = ParsedMetadata(_PARSED_BYTES)
        catalog.io.metadata_limit_bytes = MAX_METADATA_BYTES
        return cls(name, lake, catalog, ByteLru(_ENCODED_BYTES, _LARGE_ENCODED_BYTES), delegate, parent)

    @property
    def shown(self) -> str:
        """Its name for operators. One that is alone has none by itself."""
        return self.name or MAIN

    def catalog_on(self, target: CatalogTarget) -> TrinityLakeCatalog:
        """Return a catalog that reads and changes a target, with the same cache if it is at the same root."""
        if target.storage.root != self.lake.root:
            other = TrinityLakeCatalog.on(target)
            other.io.metadata_limit_bytes = MAX_METADATA_BYTES
            return other
        made = copy.copy(self.catalog)
        made.target = target
        return made


@dataclass(frozen=True, slots=True)
class Warehouse:
    """What a prefix names. ``version`` is None for the latest version, and the only one that can be written."""

    served: Served
    name: str
    version: Snapshot | None = None

    @property
    def prefix(self) -> str:
        """The prefix of its paths, as it stands in an URL."""
        return quote(f"{self.served.name}.{self.name}" if self.served.name else self.name, safe="")

    @property
    def root(self) -> str:
        """The root at which the version is: that of the lakehouse, unless an export has another one."""
        return self.served.lake.root if self.version is None else self.version.files.storage.root

    @property
    def is_by_time(self) -> bool:
        """Whether a time chose the version. Later commits may be no younger, so another version may be chosen then."""
        return self.name.startswith(_TIME)

    def catalog(self) -> TrinityLakeCatalog:
        """Return a catalog that reads it."""
        if self.version is None:
            return self.served.catalog
        return self.served.catalog_on(SnapshotTarget(self.version, self.served.lake.storage_options))

    def pinned(self) -> tuple[TrinityLakeCatalog, Snapshot | None]:
        """Return a catalog for one request, and the latest version of the lakehouse if the catalog reads that one."""
        if self.version is not None:
            return self.catalog(), None
        latest = self.served.lake.snapshot()
        return self.served.catalog_on(SnapshotTarget(latest, self.served.lake.storage_options)), latest

    def current_namespaces(self, table_id: str, latest: Snapshot | None = None) -> frozenset[str]:
        """Return the namespaces in which a table is now, by its id: whatever an older version calls it.

        There are none for a table that was dropped. A table of a clone is also where its parent has it.

        Args:
            table_id: The id of the table.
            latest: The latest version, if the caller has just read it.

        Raises:
            StorageError: If the latest version cannot be read for now.
        """
        served = self.served
        names = served.names.names_of(latest or served.lake.snapshot(), table_id)
        if served.parent is not None:
            names += served.parent.names.names_of(served.parent.lake.snapshot(), table_id)
        return frozenset(name.namespace for name in names)

    def has_now(self, name: Name, table_id: str) -> bool:
        """Whether the latest version of this lakehouse has a table, by its id, under any name.

        Args:
            name: The name under which this warehouse has the table, which is checked first.
            table_id: The id of the table.

        Raises:
            StorageError: If the latest version cannot be read for now.
        """
        if self.version is None:
            return True
        latest = self.served.lake.snapshot()
        key = latest.keys.table_key(*name)
        is_there = table_ids(latest, {key: latest.entry(key)}).get(key) == table_id
        return is_there or bool(self.served.names.keys_of(latest, table_id))

    def check_writable(self) -> None:
        """Raise RejectedError, 403, for a version that can only be read."""
        if self.name.startswith(_CLONE):
            raise forbidden(
                f"warehouse {self.name} is a clone, which is only read here; serve the clone's own root to write to it,"
                " or promote it"
            )
        if self.version is not None:
            main = f"{self.served.name}.{MAIN}" if self.served.name else MAIN
            raise forbidden(
                f"warehouse {self.name} is version {self.version.version}, which nothing changes any more;"
                f" connect to the warehouse {main} to write"
            )


class Warehouses:
    """The lakehouses of a server, by their names."""

    def __init__(self, lakes: Mapping[str, Lakehouse], delegates: Mapping[str, Delegate | None] | None = None):
        given = delegates or {}
        self._served = {name: Served.of(name, lake, given.get(name)) for name, lake in lakes.items()}
        self._clones: dict[tuple[str, str], tuple[str, Served]] = {}

    @classmethod
    def opened(cls, settings: Mapping[str, LakehouseSettings]) -> Self:
        """Open lakehouses. Raises what ``Lakehouse.open`` raises, and InvalidInputError."""
        delegates = {name: _delegate(one) for name, one in settings.items()}
        return cls({name: _opened(one) for name, one in settings.items()}, delegates)

    @property
    def served(self) -> tuple[Served, ...]:
        """All lakehouses."""
        return tuple(self._served.values())

    def named(self, name: str) -> Warehouse:
        """Return the warehouse of a name. Raises RejectedError, 404 where nothing has that name, and StorageError."""
        lakehouse, rest = self._split(name)
        if lakehouse not in self._served:
            raise unknown_warehouse(name, "it begins with the name of a lakehouse, such as LAKEHOUSE.main")
        served = self._served[lakehouse]
        if rest.startswith(_CLONE):
            return self._clone_warehouse(served, rest)
        return Warehouse(served, rest, _snapshot(served.lake, rest))

    def lakehouse_of(self, name: str) -> str:
        """Return the name of the lakehouse in the name of a warehouse, whether or not it exists."""
        return self._split(name)[0]

    def _split(self, name: str) -> tuple[str, str]:
        """Return the names of the lakehouse and of the warehouse in it."""
        name = name[:_LONGEST_CHARS]
        lakehouse, _, rest = (ONLY, "", name) if ONLY in self._served else name.partition(".")
        return lakehouse, rest or MAIN

    def _clone_warehouse(self, parent: Served, name: str) -> Warehouse:
        """Return the warehouse of a clone. Its errors contain no root, because a clone is located elsewhere."""
        try:
            clone = self._clone(parent, name.removeprefix(_CLONE))
            return Warehouse(clone, name, clone.lake.snapshot())
        except (errors.NotFoundError, errors.LocationNotAllowedError) as error:
            raise unknown_warehouse(name, _FORMS, str(error)) from error
        except errors.StorageError as error:
            raise _unreadable(name, error) from error

    def _clone(self, parent: Served, name: str) -> Served:
        """Return a clone, opened once. Raises NotFoundError, LocationNotAllowedError, StorageError.

        The parent's record and the clone's own definition have to agree, as for every operation on clones.
        """
        record = clone_record(parent.lake.snapshot().definition, name)
        clone_id, served = self._clones.get((parent.name, name), ("", parent))
        if clone_id != record.clone_id:
            opened = opened_clone(MeteredLakehouse(parent.lake), record).lake
            lake = Lakehouse(opened.storage, opened.storage_options, cache="shared")
            lake.external_storages.register_storage(parent.lake.storage)
            open_latest(lake.files)
            served = Served.of(parent.name, lake, parent=parent)
            self._clones[parent.name, name] = (record.clone_id, served)
        return served


def _opened(settings: LakehouseSettings) -> Lakehouse:
    """Open a lakehouse whose requests to its storage are counted."""
    storage = MeteredStorage(open_storage(normalize_root_uri(settings.root), settings.storage_options))
    lake = Lakehouse(storage, settings.storage_options, cache="shared")
    open_latest(lake.files)
    return lake


def _delegate(settings: LakehouseSettings) -> Delegate | None:
    """Return what gives clients access to files of tables, None for nothing."""
    files = settings.files
    if not files.is_on:
        return None
    scheme = normalize_root_uri(settings.root).partition("://")[0]
    options = StorageOptions(settings.storage_options).of_scheme(scheme)
    if files.downscope:
        if scheme != "gs":
            raise errors.InvalidInputError(
                "downscoped tokens are for lakehouses on Google Cloud Storage; leave them out for other roots"
            )
        with needs("gcs"):
            from trinitylake_ops.storage.gcs.delegation import GcsDelegate

        return GcsDelegate(options, files)
    if scheme != "s3":
        raise errors.InvalidInputError("a role and signatures are for lakehouses on S3; leave them out for other roots")
    with needs("s3"):
        from trinitylake_ops.storage.s3.delegation import S3Delegate

    return S3Delegate(options, files)


def unknown_warehouse(name: str, how: str, detail: str | None = None) -> RejectedError:
    """Return the error for a name that no warehouse has.

    Args:
        name: The name in the request.
        how: What the client can do. It must not name other exports, clones or roots.
        detail: The cause, for the log only.
    """
    message = f"Warehouse does not exist: {name[:200]}; {how}"
    return RejectedError(404, "NoSuchWarehouseException", message, detail=detail)


def _unreadable(name: str, error: errors.StorageError) -> RejectedError:
    """Return the error for a warehouse at another root whose storage fails. The root is for the log only."""
    message = f"warehouse {name[:200]} cannot be read now; its operator finds the cause in the log of the server"
    return RejectedError(503, UNAVAILABLE, message, headers={"Retry-After": "1"}, detail=str(error))


def _snapshot(lake: Lakehouse, name: str) -> Snapshot | None:
    """Return the version that a name chooses, None for the latest."""
    if name == MAIN:
        return None
    try:
        if match := _VERSION.fullmatch(name):
            return lake.snapshot(int(match[1]))
        if name.startswith(_TIME):
            found = lake.snapshot(timestamp=_version_or_time(name.removeprefix(_TIME)))
            # In a clone, a time before its beginning chooses a version of the parent, which is another lakehouse.
            if found.files.storage.root == lake.storage.root:
                return found
        if name.startswith(_EXPORT):
            export = name.removeprefix(_EXPORT)
            # Otherwise it would be taken for a version, of this lakehouse or of a clone's parent.
            if not export.isdecimal() and not export.startswith(PARENT_VERSION):
                return lake.snapshot(export)
    except (errors.NotFoundError, errors.LocationNotAllowedError) as error:
        # The errors about versions and times name nothing but these; those about exports name others.
        how = _FORMS if name.startswith(_EXPORT) or error.path is not None else error.message
        raise unknown_warehouse(name, how, str(error)) from error
    except errors.StorageError as error:
        if name.startswith(_EXPORT):
            raise _unreadable(name, error) from error
        raise
    raise unknown_warehouse(name, _FORMS)


def _version_or_time(text: str) -> datetime | int:
    if text.isascii() and text.isdecimal() and len(text) < 16:
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise bad_request(
            f"{text[:64]!r} is neither ISO 8601, such as 2030-01-31T12:00:00Z, nor milliseconds"
        ) from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
