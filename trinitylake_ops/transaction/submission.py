"""A transaction that is submitted for commit: its writes on a base, and its conflicts with later versions.

``Submission`` only turns changes into files and messages; ``commit.py`` writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from trinitylake_ops.errors import CommitConflictError, TransactionExpiredError
from trinitylake_ops.format.definitions import IsolationLevel, NamespaceDef
from trinitylake_ops.format.file_names import new_lakehouse_def_path, new_namespace_path, new_table_path
from trinitylake_ops.transaction.change_set import ChangeSet, Footprint, NewNames, is_namespace_key
from trinitylake_ops.transaction.conflicts import describe_key, merge_lakehouse_defs
from trinitylake_ops.transaction.draft import Writes
from trinitylake_ops.transaction.saved import CommittedByOtherError, version_of
from trinitylake_ops.tree.diff import KeyChange
from trinitylake_ops.versions.commit_info import CommitInfo
from trinitylake_ops.versions.snapshot import Entry, Snapshot

_MAX_OPERATION = "alter-definition"
_MAX_SUMMARY_CHARS = 200
_SHORT_CHARS = 64  # an operation and a run id of this length always leave enough room
_LARGEST_COUNTS = {"set": 10**9, "deleted": 10**9}


def check_info(info: CommitInfo) -> None:
    """Raise InvalidInputError if the message leaves no room for the entries that the commit adds."""
    if not (info.message or info.properties) and max(len(info.operation), len(info.run_id or "")) <= _SHORT_CHARS:
        return
    _largest(info, "\N{LARGE BLUE CIRCLE}" * _MAX_SUMMARY_CHARS).largest()


@dataclass(frozen=True, slots=True)
class Precondition:
    """A condition for the commit of a transaction."""

    #: Raises a typed error for a version on which the transaction must not be committed.
    check: Callable[[Snapshot], None]
    #: Whether other transactions in a group may affect the condition, so that the transaction needs a separate version.
    is_alone: bool


class Submission:
    """A transaction that is ready to be committed.

    Args:
        transaction_id: The id of the transaction.
        base: The version that the transaction began on.
        changes: The changes.
        isolation: The isolation level.
        info: The commit info of the transaction.
        begun_at_ms: When the transaction began, on the storage's clock.
        preconditions: Conditions that are checked on each later version.
        was_saved: Whether the transaction was saved, so that other processes may have resumed it.
    """

    def __init__(
        self,
        transaction_id: str,
        base: Snapshot,
        changes: ChangeSet,
        isolation: IsolationLevel,
        info: CommitInfo,
        *,
        begun_at_ms: int,
        preconditions: Sequence[Precondition] = (),
        was_saved: bool = False,
    ):
        self.id = transaction_id
        self.base = base
        self.begun_at_ms = begun_at_ms
        self._changes = changes
        self._isolation = isolation
        self._info = info
        self._preconditions = preconditions
        self._was_saved = was_saved
        self._keys = base.keys
        self._paths: dict[str, str] = {}
        self._definition_path: str | None = None
        self._was_rolled_back = False
        self._names = NewNames(base, changes.writes)

    @property
    def changes_nothing(self) -> bool:
        """Whether the transaction would have no effect on its base version. Raises StorageError."""
        return self._changes.changes_nothing_on(self.base)

    @property
    def is_alone(self) -> bool:
        """Whether the transaction needs a separate version, because it may touch any object."""
        return self._changes.definition is not None or any(condition.is_alone for condition in self._preconditions)

    def footprint(self) -> Footprint:
        """Return the keys that the transaction touches, including the keys of its new views. Raises StorageError."""
        footprint, view_keys = self._changes.footprint(self._keys, self._isolation), self._names.view_keys
        return replace(footprint, keys={*footprint.keys, *view_keys}) if view_keys else footprint

    def largest_info(self) -> CommitInfo:
        """Return an upper bound of the transaction's commit info, with the largest possible numbers."""
        return _largest(self._info, self._summary())

    def writes_on(self, base: Snapshot) -> Writes | None:
        """Return the transaction's writes on ``base``, or None if nothing would change."""
        messages: dict[str, str | None] = {}
        self._check_not_reclaimed()
        files = dict(self._changes.files)
        drops = [key for key, entry in self._changes.writes.items() if entry is None]
        dropped = base.entries(drops) if drops else {}
        for key, entry in self._changes.writes.items():
            if entry is None:
                if dropped[key] is not None:
                    messages[key] = None
            elif isinstance(entry, str):
                messages[key] = entry
            else:
                path = self._paths.setdefault(key, self._new_path(key))
                messages[key] = path
                files[path] = self._changes.definition_file(key, path)
        lakehouse_def, definition = None, self._changes.definition
        if definition == base.definition:
            definition = None
        if definition is not None:
            lakehouse_def = self._definition_path = self._definition_path or new_lakehouse_def_path()
            files[lakehouse_def] = definition.to_bytes(lakehouse_def)
        if not messages and definition is None:
            return None
        return Writes(messages, files, self._info_on(base, messages), lakehouse_def, definition)

    @property
    def has_new_names(self) -> bool:
        """Whether :meth:`check_names` has anything to check. Raises StorageError."""
        return self._names.has_any

    def check_names(self, base: Snapshot) -> None:
        """Raise ObjectExistsError if a table and a view would have the same name. May raise StorageError."""
        self._names.check(base)

    def rename_files(self) -> None:
        """Choose new names for all files, because files with the old names may be deleted at any time."""
        self._paths.clear()
        self._definition_path = None
        self._was_rolled_back = True

    def _check_not_reclaimed(self) -> None:
        """Raise CommitConflictError if the caller chose the name of a file that may be deleted at any time."""
        if self._was_rolled_back and self._changes.files:
            raise CommitConflictError(
                "nothing was committed: the thread that committed this transaction with others was interrupted; try"
                " again",
                base_version=self.base.version,
                latest_version=self.base.version,
            )

    def check(self, base: Snapshot, latest: Snapshot, changes: Mapping[str, KeyChange]) -> None:
        """Check that the transaction does not conflict with ``latest``, and merge lakehouse definitions.

        Args:
            base: The latest version that is known not to conflict.
            latest: The version to check.
            changes: The differences between the two versions by key.

        Raises:
            CommitConflictError: A change conflicts with the transaction.
            CommittedByOtherError: The transaction was saved, and another process has committed it with the same
                changes.
            TrinityLakeError: A precondition is not satisfied.
        """
        if self._was_saved and (version := version_of(base.files, self.id, base.version, latest.version)) is not None:
            self._check_committed_as(Snapshot.of(base.files, version), base)
        conflicts = self._changes.conflicts(self._isolation, base, latest, changes)
        conflicts += self._merge_definition(base, latest)
        if conflicts:
            raise CommitConflictError(
                f"version {latest.version} conflicts with this transaction, which is based on version {base.version}: "
                + "; ".join(conflicts),
                conflicts=tuple(conflicts),
                base_version=base.version,
                latest_version=latest.version,
            )
        for precondition in self._preconditions:
            precondition.check(latest)

    def _merge_definition(self, base: Snapshot, latest: Snapshot) -> list[str]:
        """Merge the changes of other commits to the lakehouse definition into ours. Return the conflicts."""
        ours = self._changes.definition
        if ours is None or latest.definition_location == base.definition_location:
            return []
        self._changes.definition, conflicts = merge_lakehouse_defs(base.definition, ours, latest.definition)
        self._definition_path = None
        return conflicts

    def _check_committed_as(self, committed: Snapshot, base: Snapshot) -> NoReturn:
        """Raise CommittedByOtherError for a transaction that another process committed.

        Raises CommitConflictError instead if this copy contains other changes, or TransactionExpiredError if the
        version was purged.
        """
        if committed.root.is_sealed:
            raise TransactionExpiredError(
                f"transaction {self.id} was committed by another process as version {committed.version}; that version"
                " was purged, so it is unknown whether it contained these changes",
                path=committed.location,
                version=committed.version,
            )
        for key, entry in self._changes.writes.items():
            if not _has_entry(committed, key, entry):
                self._raise_changed(committed, base, describe_key(self._keys, key))
        ours = self._changes.definition
        if ours is not None:
            merged, conflicts = merge_lakehouse_defs(base.definition, ours, committed.definition)
            if conflicts or merged != committed.definition:
                self._raise_changed(committed, base, "settings of the lakehouse")
        raise CommittedByOtherError(
            f"transaction {self.id} was committed by another process", committed_version=committed.version
        )

    def _raise_changed(self, committed: Snapshot, base: Snapshot, what: str) -> NoReturn:
        raise CommitConflictError(
            f"transaction {self.id} was committed by another process as version {committed.version}, with a different"
            f" {what}; begin a new transaction for the missing changes",
            conflicts=(f"{what}: this process changed it after the transaction was saved",),
            base_version=base.version,
            latest_version=committed.version,
        )

    # Commit info

    def _info_on(self, base: Snapshot, messages: Mapping[str, str | None]) -> CommitInfo:
        n_set = sum(value is not None for value in messages.values())
        return replace(
            self._info,
            operation=self._info.operation or self._operation_on(base),
            message=self._info.message or self._summary(),
            counts={"set": n_set, "deleted": len(messages) - n_set},
        )

    def _operation_on(self, base: Snapshot) -> str:
        """Derive the name of the operation for a transaction that does not specify one."""
        writes = self._changes.writes
        if not writes:
            return "alter-definition"
        if len(writes) > 1 or self._changes.definition is not None:
            return "transaction"
        key, write = next(iter(writes.items()))
        kind = "namespace" if is_namespace_key(key) else "table"
        if write is None:
            return f"drop-{kind}"
        return f"{'create' if base.entry(key) is None else 'alter'}-{kind}"

    def _summary(self) -> str | None:
        """Return the name of the changed object as the message, if the transaction changes a single object."""
        if len(self._changes.writes) != 1:
            return None
        return str(self.base.object_name(next(iter(self._changes.writes))))[:_MAX_SUMMARY_CHARS]

    def _new_path(self, key: str) -> str:
        name = self.base.object_name(key)
        limit_bytes = self.base.definition.file_path_max_size_bytes
        if name.table is None:
            return new_namespace_path(name.namespace, limit_bytes)
        return new_table_path(name.namespace, name.table, limit_bytes)


def _has_entry(version: Snapshot, key: str, entry: Entry | None) -> bool:
    """Whether a key maps to an equal entry in a version. Raises StorageError or CorruptFileError."""
    location = version.entry(key)
    if entry is None or isinstance(entry, str) or location is None:
        return location == entry
    if isinstance(entry, NamespaceDef):
        return version.namespace_at(location) == entry
    return version.table_at(location) == entry


def _largest(info: CommitInfo, summary: str | None) -> CommitInfo:
    operation, message = info.operation or _MAX_OPERATION, info.message or summary
    return replace(info, operation=operation, message=message, counts=_LARGEST_COUNTS)
