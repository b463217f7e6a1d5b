"""Commits of tables: one request is one version of the lakehouse, however many tables it changes.

Requirements are checked on the version that the commit builds on. Where another commit was faster, the engine rebases.
If it cannot, since the same table has changed, all is done again on what is there now. So a client hears of a conflict
only if its own requirements no longer hold.
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
from trinitylake_ops.iceberg.copy import repaired_uri, with_valid_bounds
from trinitylake_ops.iceberg.io.checked_files import files_below
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.loaded_table import commit_message, loaded_now, registered_table_error
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
from trinitylake_ops.iceberg.new_files import ManifestBudget, check_new_entries, check_new_lists, new_files, oldest_of
from trinitylake_ops.iceberg.reach import files_of, manifests_in
from trinitylake_ops.iceberg.table_change import TransactionTarget
from trinitylake_ops.iceberg.totals import with_totals
from trinitylake_ops.iceberg.updates import (
    as_invalid_input,
    check_snapshot_dependencies,
    fitted,
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

#: Each update is applied to all metadata, so that its work grows with both.
_MOST_PARTS = 1_000
#: Entries of large manifests take gigabytes in memory, so that one commit has them at a time.
_LARGE_MANIFESTS = threading.Lock()


class _OneCommit(TransactionTarget):
    """An open transaction in which each table changes once, so that its files can go with the commit."""

    commits_changes = True


@dataclass(frozen=True, slots=True)
class TableCommit:
    """What a client asks for one table."""

    name: Name
    request: CommitTableRequest

    @classmethod
    def of(cls, request: CommitTableRequest) -> TableCommit:
        """Return the commit of a request. Raises NoSuchNamespaceError, and RejectedError for one of too many parts."""
        if max(len(request.updates), len(request.requirements)) > _MOST_PARTS:
            raise bad_request(f"a commit of a table has at most {_MOST_PARTS} updates and requirements; send several")
        namespace = single_level(request.identifier.namespace.root)
        return cls((namespace, request.identifier.name), request)

    @property
    def added(self) -> list[AddSnapshotUpdate]:
        """The snapshots that it adds."""
        return [update for update in self.request.updates if isinstance(update, AddSnapshotUpdate)]

    @property
    def creates(self) -> bool:
        """Whether the table must not exist."""
        return any(isinstance(requirement, AssertCreate) for requirement in self.request.requirements)


@dataclass(frozen=True, slots=True)
class Committed:
    """What a table is after a commit: the URI of its metadata file, and the JSON of the metadata."""

    metadata_location: str
    text: bytes

    @classmethod
    def of(cls, table: Table) -> Committed:
        """Return it for a table that was loaded."""
        return cls(table.metadata_location, encoded(table.metadata))


def commit_tables(call: Call, commits: Sequence[TableCommit]) -> Mapping[Name, Committed]:
    """Commit changes of tables as one version, and return what each of them is then.

    A request that was carried out before, and whose answer was lost, returns what is there now. Raises
    CommitFailedException, NoSuchTableError, RejectedError, and what a commit raises.
    """
    for commit in commits:
        call.check(Scope.WRITE, commit.name[0])
    if len({commit.name for commit in commits}) < len(commits):
        raise bad_request("a transaction may change each table once")
    made = _committed_at_once(call, commits)
    if made is None:
        made = retry_on_conflict(lambda: _Attempt(call, commits).commit(), call.note_conflict)
    return made if made is not None else _present(call.warehouse.served.catalog, commits)


def _committed_at_once(call: Call, commits: Sequence[TableCommit]) -> Mapping[Name, Committed] | None:
    """Commit on the version that this server made a moment ago, without a question to the storage first.

    Returns None where there is no such version, and where anything was in the way: the latest version may not be it.
    Raises CommitStateUnknownException.
    """
    base = call.warehouse.served.lake.just_committed()
    if base is None or "idempotency-key" in call.headers or any(commit.creates for commit in commits):
        return None
    attempt = _Attempt(call, commits, base)
    try:
        made = attempt.commit()
    except (CommitStateUnknownException, CommitOutcomeUnknownError):
        raise
    except Exception as error:  # noqa: BLE001 - the attempt on the latest version has the answer
        logger.debug("a commit on version %s failed, and begins anew: %s", base.version, error)
        return None
    return made if attempt.has_changed else None


def _present(catalog: TrinityLakeCatalog, commits: Sequence[TableCommit]) -> dict[Name, Committed]:
    return {commit.name: Committed.of(catalog.load_table(commit.name)) for commit in commits}


class _Attempt:
    """One attempt to commit a request, on ``base`` or the version that is the latest when it begins."""

    def __init__(self, call: Call, commits: Sequence[TableCommit], base: Snapshot | None = None):
        self._call = call
        self._served = call.warehouse.served
        self._commits = commits
        summary = "; ".join(commit_message(".".join(one.name), one.request.updates) for one in commits)
        self._txn = transaction_of(call, summary or "nothing", base)
        target = _OneCommit(self._txn, self._served.lake.storage_options)
        self._catalog = self._served.catalog_on(target)
        self._io: StorageFileIO = self._catalog.io

    def commit(self) -> Mapping[Name, Committed]:
        """Commit, and return what each table is then. Raises as :func:`commit_tables`, and CommitConflictError."""
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
        """Apply the commit of one table. ``parse_slot`` gets the slot for large manifests, which ends with them."""
        current = table.metadata if table is not None else None
        for requirement in commit.request.requirements:
            requirement.validate(current)
        if table is not None and not self._txn.table(*commit.name).is_managed:
            raise forbidden(registered_table_error(".".join(commit.name)).message)
        _check_keeps_snapshots(commit)
        check_snapshot_dependencies(commit.request.updates, current)
        updates = fitted(commit.request.updates, current)
        if table is None or current is None:
            updates = self._placed(updates)
            table, place = self._new_table(commit.name), location_in(updates)
        else:
            check_format_version(current)
            place = current.location
        read, empty_ids = self._check_files(commit, updates, place, current, parse_slot)
        with as_invalid_input():
            updates = list(with_totals(updates, current, self._io, read, empty_ids))
            faulty = {one for one, entries in read.items() if has_faulty_bounds(entries)}
            if faulty := {one for one in faulty if _is_within(one.manifest_path, place)}:
                updates = self._with_valid_bounds(updates, faulty)
            response = self._catalog.commit_table(table, commit.request.requirements, tuple(updates))
        return self._read_back(response)

    def _read_back(self, made: CommitTableResponse) -> Committed:
        """Return what a table will be, by the very bytes that the commit writes. Raises as :func:`check_readable`.

        They are parsed once. The next request for the table finds what was parsed here.
        """
        uri = made.metadata_location
        data = self._txn.added_file(uri.removeprefix(self._io.root))
        text = encoded(made.metadata) if data is None else unsealed_json(metadata_json(data, uri))
        loaded = check_readable(text, uri)
        if self._catalog.parsed is not None:
            self._catalog.parsed.put(self._io.root, uri, loaded)
        return Committed(uri, text)

    def _new_table(self, name: Name) -> StagedTable:
        config = loaded_now(self._io.storage)
        return StagedTable(name, self._catalog._empty_table_metadata(), "", self._io, self._catalog, config)

    def _placed(self, updates: list[TableUpdate]) -> list[TableUpdate]:
        """Return the updates of a new table with its place, which is one of this lakehouse that no table has had."""
        lakehouse = self._txn.base.definition
        place = location_in(updates)
        if not place:
            place = new_table_location(self._io.root, lakehouse)
            claim_location(self._io.storage, place, lakehouse)
            return [*updates, SetLocationUpdate(location=place)]
        roots = [self._io.root, *([normalize_root_uri(lakehouse.table_root)] if lakehouse.table_root else [])]
        if all(managed_table_id(place, root) is None for root in roots):
            raise forbidden("a new table lies where this server staged it; begin with a staged create, or leave it out")
        table_id = managed_table_id(place, self._io.root)
        is_ours = table_id is None or is_owner(self._io.storage, table_id, lakehouse)
        if not is_ours or _has_metadata(self._io, place):
            raise forbidden("the place of the new table is not one that this server staged, or it is in use already")
        kept = [update for update in updates if not isinstance(update, SetLocationUpdate)]
        return [*kept, SetLocationUpdate(location=place)]

    def _with_valid_bounds(self, updates: Sequence[TableUpdate], faulty: set[ManifestFile]) -> list[TableUpdate]:
        """Return the updates with snapshots whose manifests are written again where their bounds are faulty."""
        repaired: list[TableUpdate] = []
        written: set[str] = set()
        for update in updates:
            if isinstance(update, AddSnapshotUpdate):
                own = faulty.intersection(manifests_in(update.snapshot, self._io))
                if own:
                    snapshot = with_valid_bounds(update.snapshot, own, self._io)
                    written |= {snapshot.manifest_list, *(repaired_uri(manifest.manifest_path) for manifest in own)}
                    repaired.append(update.model_copy(update={"snapshot": snapshot}))
                    continue
            repaired.append(update)
        self._txn.backdate(oldest_of(lambda: written, self._io))  # of an attempt before, some may be old
        return repaired

    def _check_files(
        self,
        commit: TableCommit,
        updates: Sequence[TableUpdate],
        place: str,
        current: TableMetadata | None,
        parse_slot: ExitStack,
    ) -> tuple[Mapping[ManifestFile, list[ManifestEntry]], set[int]]:
        """Check that all files of new snapshots lie in the table's folder, or are its files already, each once.

        The transaction becomes as old as the oldest file that the snapshots add. Returns the entries of manifests that
        the table does not have yet, and the ids of snapshots whose manifest list is empty.

        Raises RejectedError, LocationNotAllowedError and InvalidDefinitionError.
        """
        files = set(named_files(updates))
        _check_within(files, place)
        if not files:
            return {}, set()
        io = self._io.for_managed(table_id_of(place) or "")
        try:
            budget = ManifestBudget(lambda: parse_slot.enter_context(_LARGE_MANIFESTS))
            new = new_files([update.snapshot for update in commit.added], current, io, budget)
        except (FileMissingError, CorruptFileError) as error:
            raise bad_request(f"a file that the commit names cannot be read: {error}") from error
        except LocationNotAllowedError as error:  # its advice, to allow a root, helps a table that has such files only
            if current is not None:
                self._reached(commit, io)
            raise _outside(error.path or "the file", place) from error
        beyond = {file for file in new.named if not _is_within(file, place)}
        if beyond and current is not None:  # such as files that the operator allowed, which others wrote
            reached = self._reached(commit, io)
            beyond = {file for file in beyond if io.location(file) not in reached}
        _check_within(beyond, place)
        snapshots = [update.snapshot for update in commit.added]
        check_new_lists(new, snapshots, spec_ids_after(updates, current))
        check_new_entries(new.entries, snapshots, io)
        self._txn.backdate(oldest_of(lambda: files | new.added, io))
        return new.entries, {snapshot_id for snapshot_id, manifests in new.listed.items() if not manifests}

    def _reached(self, commit: TableCommit, io: StorageFileIO) -> set[str]:
        """Return the locations of all files that the table has. Raises LocationNotAllowedError for an external one."""
        return {file.location for file in files_of(self._txn.table(*commit.name), io)}


def _check_keeps_snapshots(commit: TableCommit) -> None:
    """Raise RejectedError for a commit that removes snapshots: what sends it may delete their files next."""
    if any(isinstance(update, RemoveSnapshotsUpdate) for update in commit.request.updates):
        raise bad_request(
            f"snapshots of {'.'.join(commit.name)} are not removed by engines: versions of the lakehouse read them, and"
            " an engine would delete their files next; 'trinitylake trim' drops those that no kept version needs, then"
            " 'trinitylake expire' and 'trinitylake purge' free their files, and 'trinitylake orphans' what nothing"
            " names"
        )


def _check_within(files: set[str], place: str) -> None:
    for file in sorted(files):
        if not _is_within(file, place):
            raise _outside(file, place)


def _outside(file: str, place: str) -> RejectedError:
    return forbidden(
        f"{file[:200]!r} does not lie in the table's place '{place}/', and cannot be added; append its rows, or copy"
        f" data files to '{place}/data/' and add the copies"
    )


def _is_within(file: str, place: str) -> bool:
    try:
        return to_location(f"{place}/", file) != file  # engines on Hadoop spell some URIs in their own way
    except InvalidLocationError:
        return False


def _has_metadata(io: StorageFileIO, place: str) -> bool:
    return any(file.path.endswith(".metadata.json") for file in files_below(io, f"{place}/metadata/"))


def _was_applied(commit: TableCommit, table: Table | None) -> bool:
    """Whether a table has the snapshots of a commit, exactly. Their ids are random, so it is this commit's own."""
    if table is None or not commit.added:
        return False
    found = {snapshot.snapshot_id: snapshot.manifest_list for snapshot in table.metadata.snapshots}
    return all(
        (uri := update.snapshot.manifest_list) != ""
        and found.get(update.snapshot.snapshot_id) in (uri, repaired_uri(uri))
        for update in commit.added
    )


def _check_all_applied(commits: Sequence[TableCommit], tables: Mapping[Name, Table | None]) -> None:
    """Raise CommitStateUnknownException where tables have snapshots of a request, but not all that it asks for.

    Then others have changed it since, or it is another request with these snapshots. It is no conflict: a client would
    delete the files of its snapshots.
    """
    lacking = [".".join(commit.name) for commit in commits if not _holds(commit, tables[commit.name])]
    if lacking:
        raise CommitStateUnknownException(
            f"snapshots of this request were committed before, but {', '.join(lacking)} lacks something that it asks"
            " for; load the tables, and ask again for what is missing, without these snapshots"
        )


def _holds(commit: TableCommit, table: Table | None) -> bool:
    """Whether a table has what a commit asks for, as far as later commits leave it as it was."""
    if table is None or not (_was_applied(commit, table) or not commit.added):
        return False
    metadata, asked = table.metadata, commit.request
    for requirement in asked.requirements:
        if isinstance(requirement, AssertTableUUID) and requirement.uuid != metadata.table_uuid:
            return False
    for update in asked.updates:
        if isinstance(update, SetPropertiesUpdate):
            wanted = {name: value for name, value in update.updates.items() if name not in MANAGED_PROPERTIES}
            if not wanted.items() <= metadata.properties.items():
                return False
        elif isinstance(update, RemovePropertiesUpdate):
            if metadata.properties.keys() & set(update.removals) - set(MANAGED_PROPERTIES):
                return False
        elif isinstance(update, SetSnapshotRefUpdate) and update.ref_name not in metadata.refs:
            return False
    return True


def check_readable(text: bytes, uri: str) -> LoadedMetadata:
    """Return metadata as readers of its JSON get it, before any version has it.

    Raises RejectedError, 400, if no reader would take it.
    """
    try:
        with as_invalid_input():
            return parse_metadata(text, uri)
    except CorruptFileError as error:
        raise bad_request(f"the updates would leave metadata that cannot be read: {error}") from error
