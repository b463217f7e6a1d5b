"""Warehouses: a lakehouse at its latest version, or at a version that is selected by number, time or export.

The name of a warehouse is also the prefix in the paths of its requests: ``main``, ``v12``, ``at-<time>`` or
``export-<name>``. ``clone-<name>`` is a clone at its latest version. On a server with several lakehouses, the
name is prefixed with the name of the lakehouse and a dot.
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
from trinitylake_ops.operations.clones.clone_records import clone_record, open_clone
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
_MAX_CHARS = 1_000
_FORMS = f"write {MAIN}, v12, {_TIME}2030-01-31T12:00:00Z, {_EXPORT}NAME or {_CLONE}NAME"
#: The cache sizes for parsed metadata, measured by its JSON size (it takes several times as much memory), and for
#: encoded metadata.
_PARSED_BYTES, _ENCODED_BYTES = 8 << 20, 16 << 20
#: The cache size for large encoded metadata. Parsed metadata has a separate limit for it.
_LARGE_ENCODED_BYTES = 32 << 20
#: The cache size for hashes of the files that old versions of tables refer to, 8 bytes each.
_REACHED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Served:
    """A served lakehouse, with caches that all requests share."""

    #: The name in the server's settings.
    name: str
    #: The lakehouse.
    lake: Lakehouse
    #: A catalog at the latest version.
    catalog: TrinityLakeCatalog
    #: Encoded metadata of tables, by the ETags of their responses.
    encoded: ByteLru[str, bytes]
    #: Gives clients access to table files. None if clients need their own credentials.
    delegate: Delegate | None = None
    #: For a clone, its parent, whose tables have the same ids.
    parent: Served | None = None
    #: The names of tables by id, for versions that were read.
    names: TableNames = field(default_factory=TableNames)
    #: The files that old versions of tables refer to, by the URIs of their metadata files.
    reached: ByteLru[str, ReachedFiles] = field(default_factory=lambda: ByteLru(_REACHED_BYTES))

    @classmethod
    def of(cls, name: str, lake: Lakehouse, delegate: Delegate | None = None, parent: Served | None = None) -> Self:
        """Return a served lakehouse with empty caches.

        Args:
            name: The name of the lakehouse in the server's settings.
            lake: The lakehouse.
            delegate: Gives clients access to table files, or None for no access.
            parent: The parent of a clone, or None for other lakehouses.
        """
        catalog = catalog_at(lake)
        catalog.parsed = ParsedMetadata(_PARSED_BYTES)
        catalog.io.metadata_limit_bytes = MAX_METADATA_BYTES
        return cls(name, lake, catalog, ByteLru(_ENCODED_BYTES, _LARGE_ENCODED_BYTES), delegate, parent)

    @property
    def shown(self) -> str:
        """The name for operators, which is never empty."""
        return self.name or MAIN

    def catalog_on(self, target: CatalogTarget) -> TrinityLakeCatalog:
        """Return a catalog that reads and changes a target. It shares the cache if the target is at the same root."""
        if target.storage.root != self.lake.root:
            other = TrinityLakeCatalog.on(target)
            other.io.metadata_limit_bytes = MAX_METADATA_BYTES
            return other
        catalog = copy.copy(self.catalog)
        catalog.target = target
        return catalog


@dataclass(frozen=True, slots=True)
class Warehouse:
    """A lakehouse at one version."""

    #: The lakehouse.
    served: Served
    #: The name, without the name of the lakehouse.
    name: str
    #: The version, or None for the latest version. Only the latest version is writable.
    version: Snapshot | None = None

    @property
    def prefix(self) -> str:
        """The prefix of the paths, percent-encoded."""
        return quote(f"{self.served.name}.{self.name}" if self.served.name else self.name, safe="")

    @property
    def root(self) -> str:
        """The root of the version: the root of the lakehouse, unless the version is an export with another root."""
        return self.served.lake.root if self.version is None else self.version.files.storage.root

    @property
    def is_by_time(self) -> bool:
        """Whether the version was selected by time. The same time may select another version after a later commit."""
        return self.name.startswith(_TIME)

    def catalog(self) -> TrinityLakeCatalog:
        """Return a catalog that reads the version."""
        if self.version is None:
            return self.served.catalog
        return self.served.catalog_on(SnapshotTarget(self.version, self.served.lake.storage_options))

    def pinned(self) -> tuple[TrinityLakeCatalog, Snapshot | None]:
        """Return a catalog pinned for one request, and the latest version if the catalog reads that version."""
        if self.version is not None:
            return self.catalog(), None
        latest = self.served.lake.snapshot()
        return self.served.catalog_on(SnapshotTarget(latest, self.served.lake.storage_options)), latest

    def current_namespaces(self, table_id: str, latest: Snapshot | None = None) -> frozenset[str]:
        """Return the namespaces that contain a table in the latest version, regardless of its name in older versions.

        Empty for a dropped table. For a table of a clone, the namespaces in the parent are included.

        Args:
            table_id: The id of the table.
            latest: The latest version, if the caller has just read it.

        Raises:
            StorageError: If the latest version cannot be read at the moment.
        """
        served = self.served
        names = served.names.names_of(latest or served.lake.snapshot(), table_id)
        if served.parent is not None:
            names += served.parent.names.names_of(served.parent.lake.snapshot(), table_id)
        return frozenset(name.namespace for name in names)

    def has_now(self, name: Name, table_id: str) -> bool:
        """Whether the latest version of this lakehouse contains the table with an id, under any name.

        Args:
            name: The name of the table in this warehouse, which is checked first.
            table_id: The id of the table.

        Raises:
            StorageError: If the latest version cannot be read at the moment.
        """
        if self.version is None:
            return True
        latest = self.served.lake.snapshot()
        key = latest.keys.table_key(*name)
        is_there = table_ids(latest, {key: latest.entry(key)}).get(key) == table_id
        return is_there or bool(self.served.names.keys_of(latest, table_id))

    def check_writable(self) -> None:
        """Raise RejectedError (403) if the warehouse is read-only."""
        if self.name.startswith(_CLONE):
            raise forbidden(
                f"warehouse {self.name} is a clone, which this server serves read-only; serve the clone's own root to"
                " write to it, or promote it"
            )
        if self.version is not None:
            main = f"{self.served.name}.{MAIN}" if self.served.name else MAIN
            raise forbidden(
                f"warehouse {self.name} is version {self.version.version}, and versions are read-only; connect to"
                f" warehouse {main} to write"
            )


class Warehouses:
    """The lakehouses of a server, by name."""

    def __init__(self, lakes: Mapping[str, Lakehouse], delegates: Mapping[str, Delegate | None] | None = None):
        delegates_by_name = delegates or {}
        self._served = {name: Served.of(name, lake, delegates_by_name.get(name)) for name, lake in lakes.items()}
        self._clones: dict[tuple[str, str], tuple[str, Served]] = {}

    @classmethod
    def opened(cls, settings: Mapping[str, LakehouseSettings]) -> Self:
        """Open lakehouses. Raises InvalidInputError, and the errors of ``Lakehouse.open``."""
        delegates = {name: _delegate(lakehouse) for name, lakehouse in settings.items()}
        return cls({name: _opened(lakehouse) for name, lakehouse in settings.items()}, delegates)

    @property
    def served(self) -> tuple[Served, ...]:
        """All lakehouses."""
        return tuple(self._served.values())

    def named(self, name: str) -> Warehouse:
        """Return a warehouse by name. Raises RejectedError (404) if it does not exist, or StorageError."""
        lakehouse, version_name = self._split(name)
        if lakehouse not in self._served:
            raise unknown_warehouse(name, "names begin with a lakehouse, for example LAKEHOUSE.main")
        served = self._served[lakehouse]
        if version_name.startswith(_CLONE):
            return self._clone_warehouse(served, version_name)
        return Warehouse(served, version_name, _snapshot(served.lake, version_name))

    def lakehouse_of(self, name: str) -> str:
        """Return the lakehouse part of a warehouse name, whether or not it exists."""
        return self._split(name)[0]

    def _split(self, name: str) -> tuple[str, str]:
        """Split a warehouse name into the lakehouse's name and the rest."""
        name = name[:_MAX_CHARS]
        lakehouse, _, version_name = (ONLY, "", name) if ONLY in self._served else name.partition(".")
        return lakehouse, version_name or MAIN

    def _clone_warehouse(self, parent: Served, name: str) -> Warehouse:
        """Return the warehouse of a clone. Errors do not reveal the clone's root."""
        try:
            clone = self._clone(parent, name.removeprefix(_CLONE))
            return Warehouse(clone, name, clone.lake.snapshot())
        except (errors.NotFoundError, errors.LocationNotAllowedError) as error:
            raise unknown_warehouse(name, _FORMS, str(error)) from error
        except errors.StorageError as error:
            raise _unreadable(name, error) from error

    def _clone(self, parent: Served, name: str) -> Served:
        """Return a clone, which is opened only once. Raises NotFoundError, LocationNotAllowedError, or StorageError.

        The parent's record must match the clone's own definition, as for every operation on clones.
        """
        record = clone_record(parent.lake.snapshot().definition, name)
        clone_id, served = self._clones.get((parent.name, name), ("", parent))
        if clone_id != record.clone_id:
            opened = open_clone(MeteredLakehouse(parent.lake), record).lake
            lake = Lakehouse(opened.storage, opened.storage_options, cache="shared")
            lake.external_storages.register_storage(parent.lake.storage)
            open_latest(lake.files)
            served = Served.of(parent.name, lake, parent=parent)
            self._clones[parent.name, name] = (record.clone_id, served)
        return served


def _opened(settings: LakehouseSettings) -> Lakehouse:
    """Open a lakehouse with a storage that counts its requests."""
    storage = MeteredStorage(open_storage(normalize_root_uri(settings.root), settings.storage_options))
    lake = Lakehouse(storage, settings.storage_options, cache="shared")
    open_latest(lake.files)
    return lake


def _delegate(settings: LakehouseSettings) -> Delegate | None:
    """Return the delegate that gives clients access to files of tables, or None if that is not configured."""
    files = settings.files
    if not files.is_on:
        return None
    scheme = normalize_root_uri(settings.root).partition("://")[0]
    options = StorageOptions(settings.storage_options).of_scheme(scheme)
    if files.downscope:
        if scheme != "gs":
            raise errors.InvalidInputError(
                "files.downscope: supported on Google Cloud Storage only; remove it for other roots"
            )
        with needs("gcs"):
            from trinitylake_ops.storage.gcs.delegation import GcsDelegate

        return GcsDelegate(options, files)
    if scheme != "s3":
        raise errors.InvalidInputError("files.role and files.sign: supported on S3 only; remove them for other roots")
    with needs("s3"):
        from trinitylake_ops.storage.s3.delegation import S3Delegate

    return S3Delegate(options, files)


def unknown_warehouse(name: str, advice: str, detail: str | None = None) -> RejectedError:
    """Return the error for a warehouse that does not exist.

    Args:
        name: The name in the request.
        advice: What the client can do. It must not reveal other exports, clones or roots.
        detail: The cause, for the log only.
    """
    message = f"Warehouse does not exist: {name[:200]}; {advice}"
    return RejectedError(404, "NoSuchWarehouseException", message, detail=detail)


def _unreadable(name: str, error: errors.StorageError) -> RejectedError:
    """Return the error for an export or a clone whose storage fails. Its root appears only in the log."""
    message = f"warehouse {name[:200]} cannot be read at the moment; the server log contains the cause"
    return RejectedError(503, UNAVAILABLE, message, headers={"Retry-After": "1"}, detail=str(error))


def _snapshot(lake: Lakehouse, name: str) -> Snapshot | None:
    """Return the version that a warehouse name selects, or None for the latest."""
    if name == MAIN:
        return None
    try:
        if match := _VERSION.fullmatch(name):
            return lake.snapshot(int(match[1]))
        if name.startswith(_TIME):
            snapshot = lake.snapshot(timestamp=_version_or_time(name.removeprefix(_TIME)))
            # In a clone, a time before its creation selects a version of the parent, which is another lakehouse.
            if snapshot.files.storage.root == lake.storage.root:
                return snapshot
        if name.startswith(_EXPORT):
            export = name.removeprefix(_EXPORT)
            # Otherwise the name would select a version, of this lakehouse or of a clone's parent.
            if not export.isdecimal() and not export.startswith(PARENT_VERSION):
                return lake.snapshot(export)
    except (errors.NotFoundError, errors.LocationNotAllowedError) as error:
        # Errors for versions and times mention only versions and times; errors for exports mention other exports.
        advice = _FORMS if name.startswith(_EXPORT) or error.path is not None else error.message
        raise unknown_warehouse(name, advice, str(error)) from error
    except errors.StorageError as error:
        if name.startswith(_EXPORT):
            raise _unreadable(name, error) from error
        raise
    raise unknown_warehouse(name, _FORMS)


def _version_or_time(text: str) -> datetime | int:
    if text.isascii() and text.isdecimal() and len(text) < 16:
        return int(text)
    try:
        timestamp = datetime.fromisoformat(text)
    except ValueError:
        raise bad_request(
            f"{text[:64]!r} is not a time; use ISO 8601 such as 2030-01-31T12:00:00Z, or milliseconds since the epoch"
        ) from None
    return timestamp if timestamp.tzinfo is not None else timestamp.replace(tzinfo=UTC)
