"""Table commits: a request becomes one version of the lakehouse, regardless of how many tables it changes.

Requirements are checked against the version that the commit builds on. After a conflict, the engine rebases. If it
cannot, because the same table has changed, the request is applied to the new latest version from scratch. A client
therefore gets a conflict only if its own requirements are no longer satisfied.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from pyiceberg.exceptions import CommitStateUnknownException, NoSuchNamespaceError, NoSuchTableError
from pyiceberg.manifest import ManifestEntry, ManifestFile
from pyiceberg.table import CommitTableRequest, CommitTableResponse, StagedTable, Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    AssertCreate,
    AssertTableUUID,
    RemovePropertiesUpdate,
    RemoveSnapshotsUpdate,
    SetLocationUpdate,
    SetPropertiesUpdate,
    SetSnapshotRefUpdate,
    TableUpdate,
)

from trinitylake_ops.errors import (
    CommitOutcomeUnknownError,
    CorruptFileError,
    FileMissingError,
    InvalidLocationError,
    LocationNotAllowedError,
)
from trinitylake_ops.format.locations import normalize_root_uri, to_location
from trinitylake_ops.iceberg.catalog import TrinityLakeCatalog
from trinitylake_ops.iceberg.io.checked_files import files_below
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.loaded_table import commit_message, load_time_config, registered_table_error
from trinitylake_ops.iceberg.managed import (
    MANAGED_PROPERTIES,
    check_format_version,
    claim_location,
    is_owner,
    managed_table_id,
    new_table_location,
    table_id_of,
)
from trinitylake_ops.iceberg.metadata import LoadedMetadata, metadata_json, parse_metadata
from trinitylake_ops.iceberg.new_files import (
    ManifestBudget,
    check_new_entries,
    check_new_lists,
    new_files,
    oldest_of,
    repaired_uri,
    with_valid_bounds,
)
from trinitylake_ops.iceberg.reach import files_of, manifests_in
from trinitylake_ops.iceberg.table_change import TransactionTarget
from trinitylake_ops.iceberg.totals import with_totals
from trinitylake_ops.iceberg.updates import (
    adapt_updates,
    as_invalid_input,
    check_snapshot_dependencies,
    location_in,
    named_files,
    spec_ids_after,
)
from trinitylake_ops.iceberg.validation.bounds import has_faulty_bounds
from trinitylake_ops.iceberg.validation.checksums import unsealed_json
from trinitylake_ops.server.calls import Call, retry_on_conflict, single_level, transaction_of
from trinitylake_ops.server.responses import RejectedError, bad_request, encoded, forbidden
from trinitylake_ops.server.tokens import Scope
from trinitylake_ops.server.warehouses import Name
from trinitylake_ops.versions.snapshot import Snapshot

logger = logging.getLogger(__name__)

#: The maximum number of updates and of requirements. Each update processes the whole metadata, so the costs multiply.
_MAX_PARTS = 1_000
#: The entries of large manifests can take gigabytes of memory, so only one commit at a time may load them.
_LARGE_MANIFESTS = threading.Lock()


class _OneCommit(TransactionTarget):
    """An open transaction in which each table changes once, so that its files are written with the commit."""

    commits_changes = True


@dataclass(frozen=True, slots=True)
class TableCommit:
    """A client's request to change one table."""

    #: The namespace and the name of the table.
    name: Name
    #: The requirements and updates.
    request: CommitTableRequest

    @classmethod
    def of(cls, request: CommitTableRequest) -> TableCommit:
        """Return the commit in a request. Raises NoSuchNamespaceError, or RejectedError if it has too many parts."""
        if max(len(request.updates), len(request.requirements)) > _MAX_PARTS:
            raise bad_request(
                f"a table commit may have at most {_MAX_PARTS} updates and as many requirements; split it"
            )
        namespace = single_level(request.identifier.namespace.root)
        return cls((namespace, request.identifier.name), request)

    @property
    def added(self) -> list[AddSnapshotUpdate]:
        """The snapshots that the commit adds."""
        return [update for update in self.request.updates if isinstance(update, AddSnapshotUpdate)]

    @property
    def creates(self) -> bool:
        """Whether the commit requires that the table does not exist."""
        return any(isinstance(requirement, AssertCreate) for requirement in self.request.requirements)


@dataclass(frozen=True, slots=True)
class Committed:
    """A table after a commit."""

    #: The URI of its metadata file.
    metadata_location: str
    #: Its metadata as JSON.
    text: bytes

    @classmethod
    def of(cls, table: Table) -> Committed:
        """Return the result for a loaded table."""
        return cls(table.metadata_location, encoded(table.metadata))


def commit_tables(call: Call, commits: Sequence[TableCommit]) -> Mapping[Name, Committed]:
    """Commit changes to tables as one version.

    Args:
        call: The request.
        commits: The changes, at most one per table.

    Returns:
        Each table after the commit. If the request was already carried out and its response was lost, the tables in
        the latest version.

    Raises:
        CommitFailedException: If a requirement is not satisfied, or after too many conflicts.
        CommitStateUnknownException: If it is unknown whether the request was committed.
        NoSuchTableError: If a table does not exist.
        RejectedError: If the request is invalid or not allowed.
    """
    for commit in commits:
        call.check(Scope.WRITE, commit.name[0])
    if len({commit.name for commit in commits}) < len(commits):
        raise bad_request("a transaction may change each table once")
    committed = _committed_at_once(call, commits)
    if committed is None:
        committed = retry_on_conflict(lambda: _Attempt(call, commits).commit(), call.note_conflict)
    return committed if committed is not None else _present(call.warehouse.served.catalog, commits)


def _committed_at_once(call: Call, commits: Sequence[TableCommit]) -> Mapping[Name, Committed] | None:
    """Commit on the version that this server has just committed, without first reading the latest version.

    Returns None if there is no such version, or if the attempt failed for any reason, because that version may no
    longer be the latest. Raises CommitStateUnknownException.
    """
    base = call.warehouse.served.lake.just_committed()
    if base is None or "idempotency-key" in call.headers or any(commit.creates for commit in commits):
        return None
    attempt = _Attempt(call, commits, base)
    try:
        committed = attempt.commit()
    except (CommitStateUnknownException, CommitOutcomeUnknownError):
        raise
    except Exception as error:  # noqa: BLE001 - the attempt on the latest version reports it
        logger.debug("commit on version %s failed; retrying on the latest version: %s", base.version, error)
        return None
    return committed if attempt.has_changed else None


def _present(catalog: TrinityLakeCatalog, commits: Sequence[TableCommit]) -> dict[Name, Committed]:
    return {commit.name: Committed.of(catalog.load_table(commit.name)) for commit in commits}


class _Attempt:
    """One attempt to commit a request, on ``base`` or, if ``base`` is None, on the latest version."""

    def __init__(self, call: Call, commits: Sequence[TableCommit], base: Snapshot | None = None):
        self._call = call
        self._served = call.warehouse.served
        self._commits = commits
        summary = "; ".join(commit_message(".".join(commit.name), commit.request.updates) for commit in commits)
        self._txn = transaction_of(call, summary or "nothing", base)
        target = _OneCommit(self._txn, self._served.lake.storage_options)
        self._catalog = self._served.catalog_on(target)
        self._io: StorageFileIO = self._catalog.io

    def commit(self) -> Mapping[Name, Committed]:
        """Commit, and return each changed table. Raises CommitConflictError and the errors of :func:`commit_tables`."""
        with self._txn:
            tables = {commit.name: self._load(commit) for commit in self._commits}
            if any(_was_applied(commit, tables[commit.name]) for commit in self._commits):
                self._txn.rollback()
                _check_all_applied(self._commits, tables)
                return _present(self._served.catalog, self._commits)
            changed: dict[Name, Committed] = {}
            for commit in self._commits:
                with ExitStack() as parse_slot:
                    changed[commit.name] = self._change(commit, tables[commit.name], parse_slot)
            return changed

    @property
    def has_changed(self) -> bool:
        """Whether a version was committed."""
        return self._txn.committed_version not in (None, self._txn.base.version)

    def _load(self, commit: TableCommit) -> Table | None:
        namespace, _ = commit.name
        try:
            table = self._catalog.load_table(commit.name)
        except NoSuchTableError:
            if not commit.creates:
                raise
        else:
            self._call.check_table(Scope.WRITE, self._txn.table(*commit.name), self._txn.base)
            return table
        if not self._txn.has_namespace(namespace):
            raise NoSuchNamespaceError(f"Namespace does not exist: {namespace}")
        return None

    def _change(self, commit: TableCommit, table: Table | None, parse_slot: ExitStack) -> Committed:
        """Apply the commit of one table. ``parse_slot`` receives the lock for large manifests, and releases it."""
        current = table.metadata if table is not None else None
        for requirement in commit.request.requirements:
            requirement.validate(current)
        if table is not None and not self._txn.table(*commit.name).is_managed:
            raise forbidden(registered_table_error(".".join(commit.name)).message)
        _check_keeps_snapshots(commit)
        check_snapshot_dependencies(commit.request.updates, current)
        updates = adapt_updates(commit.request.updates, current)
        if table is None or current is None:
            updates = self._with_location(updates)
            table, location = self._new_table(commit.name), location_in(updates)
        else:
            check_format_version(current)
            location = current.location
        read, empty_ids = self._check_files(commit, updates, location, current, parse_slot)
        with as_invalid_input():
            updates = list(with_totals(updates, current, self._io, read, empty_ids))
            faulty = {manifest for manifest, entries in read.items() if has_faulty_bounds(entries)}
            if faulty := {manifest for manifest in faulty if _is_within(manifest.manifest_path, location)}:
                updates = self._with_valid_bounds(updates, faulty)
            response = self._catalog.commit_table(table, commit.request.requirements, tuple(updates))
        return self._read_back(response)

    def _read_back(self, response: CommitTableResponse) -> Committed:
        """Return a table after the commit, from the bytes that the commit writes.

        Raises the errors of :func:`check_readable`. The bytes are parsed only once, and the
        result is cached for the next request for the table.
        """
        uri = response.metadata_location
        data = self._txn.added_file(uri.removeprefix(self._io.root))
        text = encoded(response.metadata) if data is None else unsealed_json(metadata_json(data, uri))
        loaded = check_readable(text, uri)
        if self._catalog.parsed is not None:
            self._catalog.parsed.put(self._io.root, uri, loaded)
        return Committed(uri, text)

    def _new_table(self, name: Name) -> StagedTable:
        config = load_time_config(self._io.storage)
        return StagedTable(name, self._catalog._empty_table_metadata(), "", self._io, self._catalog, config)

    def _with_location(self, updates: list[TableUpdate]) -> list[TableUpdate]:
        """Return the updates of a new table with its location, which must be in this lakehouse and unused."""
        lakehouse = self._txn.base.definition
        location = location_in(updates)
        if not location:
            location = new_table_location(self._io.root, lakehouse)
            claim_location(self._io.storage, location, lakehouse)
            return [*updates, SetLocationUpdate(location=location)]
        roots = [self._io.root, *([normalize_root_uri(lakehouse.table_root)] if lakehouse.table_root else [])]
        if all(managed_table_id(location, root) is None for root in roots):
            raise forbidden(
                "a new table must be in a location that this server staged; stage the create first, or send no location"
            )
        table_id = managed_table_id(location, self._io.root)
        is_ours = table_id is None or is_owner(self._io.storage, table_id, lakehouse)
        if not is_ours or _has_metadata(self._io, location):
            raise forbidden(
                "the new table's location was not staged by this server, or is already in use; stage the create first"
            )
        other_updates = [update for update in updates if not isinstance(update, SetLocationUpdate)]
        return [*other_updates, SetLocationUpdate(location=location)]

    def _with_valid_bounds(self, updates: Sequence[TableUpdate], faulty: set[ManifestFile]) -> list[TableUpdate]:
        """Return the updates with new copies of manifests that have invalid bounds."""
        repaired: list[TableUpdate] = []
        new_paths: set[str] = set()
        for update in updates:
            if isinstance(update, AddSnapshotUpdate):
                faulty_manifests = faulty.intersection(manifests_in(update.snapshot, self._io))
                if faulty_manifests:
                    snapshot = with_valid_bounds(update.snapshot, faulty_manifests, self._io)
                    new_paths.add(snapshot.manifest_list)
                    new_paths |= {repaired_uri(manifest.manifest_path) for manifest in faulty_manifests}
                    repaired.append(update.model_copy(update={"snapshot": snapshot}))
                    continue
            repaired.append(update)
        self._txn.backdate(oldest_of(lambda: new_paths, self._io))  # copies of an earlier attempt may be old
        return repaired

    def _check_files(
        self,
        commit: TableCommit,
        updates: Sequence[TableUpdate],
        location: str,
        current: TableMetadata | None,
        parse_slot: ExitStack,
    ) -> tuple[Mapping[ManifestFile, list[ManifestEntry]], set[int]]:
        """Check that each file of new snapshots is in the table's folder or already in the table, and is listed once.

        The transaction is backdated to the oldest file that the snapshots add.

        Returns:
            The entries of manifests that are new to the table, and the ids of snapshots with an empty manifest list.

        Raises:
            RejectedError: If a file is outside the table, cannot be read, or is invalid.
            LocationNotAllowedError: If an existing file of the table is in a location that is not allowed.
            InvalidDefinitionError: If the id of the table is not valid.
        """
        files = set(named_files(updates))
        _check_within(files, location)
        if not files:
            return {}, set()
        io = self._io.for_managed(table_id_of(location) or "")
        try:
            budget = ManifestBudget(lambda: parse_slot.enter_context(_LARGE_MANIFESTS))
            new = new_files([update.snapshot for update in commit.added], current, io, budget)
        except (FileMissingError, CorruptFileError) as error:
            raise bad_request(f"cannot read a file that the commit refers to: {error}") from error
        except (
            LocationNotAllowedError
        ) as error:  # the error's advice to allow a root only helps if the table already has such files
            if current is not None:
                self._reached_locations(commit, io)
            raise _outside(error.path or "the file", location) from error
        beyond = {file for file in new.named if not _is_within(file, location)}
        if beyond and current is not None:  # for example external files that the operator allowed
            reached = self._reached_locations(commit, io)
            beyond = {file for file in beyond if io.location(file) not in reached}
        _check_within(beyond, location)
        snapshots = [update.snapshot for update in commit.added]
        check_new_lists(new, snapshots, spec_ids_after(updates, current))
        check_new_entries(new.entries, snapshots, io)
        self._txn.backdate(oldest_of(lambda: files | new.added, io))
        return new.entries, {snapshot_id for snapshot_id, manifests in new.listed.items() if not manifests}

    def _reached_locations(self, commit: TableCommit, io: StorageFileIO) -> set[str]:
        """Return the locations of all files of the table. Raises LocationNotAllowedError for an external file."""
        return {file.location for file in files_of(self._txn.table(*commit.name), io)}


def _check_keeps_snapshots(commit: TableCommit) -> None:
    """Raise RejectedError for a commit that removes snapshots, because the client may delete their files next."""
    if any(isinstance(update, RemoveSnapshotsUpdate) for update in commit.request.updates):
        raise bad_request(
            f"engines may not remove snapshots of {'.'.join(commit.name)}: versions of the lakehouse still use them,"
            " and an engine would delete their files next; use 'trinitylake trim' to drop unneeded snapshots, then"
            " 'trinitylake expire' and 'trinitylake purge' to reclaim their files, and 'trinitylake orphans' for"
            " unreferenced files"
        )


def _check_within(files: set[str], location: str) -> None:
    for file in sorted(files):
        if not _is_within(file, location):
            raise _outside(file, location)


def _outside(file: str, location: str) -> RejectedError:
    return forbidden(
        f"cannot add {file[:200]!r}: it is not in the table's folder '{location}/'; append its rows, or copy data files"
        f" to '{location}/data/' and add the copies"
    )


def _is_within(file: str, location: str) -> bool:
    try:
        return to_location(f"{location}/", file) != file  # Hadoop-based engines write some URIs in another form
    except InvalidLocationError:
        return False


def _has_metadata(io: StorageFileIO, location: str) -> bool:
    return any(file.path.endswith(".metadata.json") for file in files_below(io, f"{location}/metadata/"))


def _was_applied(commit: TableCommit, table: Table | None) -> bool:
    """Whether a table has exactly the snapshots of a commit. Snapshot ids are random, so this commit added them."""
    if table is None or not commit.added:
        return False
    manifest_lists = {snapshot.snapshot_id: snapshot.manifest_list for snapshot in table.metadata.snapshots}
    return all(
        (uri := update.snapshot.manifest_list) != ""
        and manifest_lists.get(update.snapshot.snapshot_id) in (uri, repaired_uri(uri))
        for update in commit.added
    )


def _check_all_applied(commits: Sequence[TableCommit], tables: Mapping[Name, Table | None]) -> None:
    """Raise CommitStateUnknownException if tables have the snapshots of a request, but not all of its other changes.

    Either a later commit undid them, or another request used the same snapshots. This must not be reported as a
    conflict, because a client would then delete the files of its snapshots.
    """
    incomplete = [".".join(commit.name) for commit in commits if not _holds(commit, tables[commit.name])]
    if incomplete:
        raise CommitStateUnknownException(
            f"snapshots of this request were already committed, but {', '.join(incomplete)} lacks other changes of it;"
            " load the tables, and request the missing changes without these snapshots"
        )


def _holds(commit: TableCommit, table: Table | None) -> bool:
    """Whether a table has the changes of a commit, except for changes that later commits may have replaced."""
    if table is None or not (_was_applied(commit, table) or not commit.added):
        return False
    metadata, request = table.metadata, commit.request
    for requirement in request.requirements:
        if isinstance(requirement, AssertTableUUID) and requirement.uuid != metadata.table_uuid:
            return False
    for update in request.updates:
        if isinstance(update, SetPropertiesUpdate):
            properties = {name: value for name, value in update.updates.items() if name not in MANAGED_PROPERTIES}
            if not properties.items() <= metadata.properties.items():
                return False
        elif isinstance(update, RemovePropertiesUpdate):
            if metadata.properties.keys() & set(update.removals) - set(MANAGED_PROPERTIES):
                return False
        elif isinstance(update, SetSnapshotRefUpdate) and update.ref_name not in metadata.refs:
            return False
    return True


def check_readable(text: bytes, uri: str) -> LoadedMetadata:
    """Parse metadata as its readers will, before it is committed.

    Args:
        text: The metadata as JSON.
        uri: The URI of the metadata file, for error messages.

    Raises:
        RejectedError: Status 400 if readers would reject it.
    """
    try:
        with as_invalid_input():
            return parse_metadata(text, uri)
    except CorruptFileError as error:
        raise bad_request(f"the updates would result in invalid metadata: {error}") from error
