"""Mutations of the engine: each introduces a fault, and the simulator must detect all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any
from unittest import mock

from trinitylake_ops.errors import (
    AmbiguousWriteError,
    CommitOutcomeUnknownError,
    FileExistsAlreadyError,
    FileMissingError,
    StorageError,
)
from trinitylake_ops.format.keys import COMMIT_ID
from trinitylake_ops.format.node_file import decode_system_rows
from trinitylake_ops.storage import RetryStorage
from trinitylake_ops.storage import conditional_create as write_outcome
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.transaction import change_set, commit, group, lakehouse, publish, submission, transaction
from trinitylake_ops.transaction.publish import CommitResolution
from trinitylake_ops.versions import latest as latest_version
from trinitylake_ops.versions import lookup
from trinitylake_ops.versions import roots as versions
from trinitylake_ops.versions.root_files import KnownRoot
from trinitylake_ops.versions.snapshot import Snapshot
from trinitylake_ops.versions.time_travel import VersionTime

Mutation = Callable[[], AbstractContextManager[Any]]


def _create_root(create: Callable[[Storage, KnownRoot, Callable[[], None]], bool]) -> AbstractContextManager[Any]:
    """Replace the function that creates roots and returns whether a root is ours."""

    def create_root(root: KnownRoot, roots: Any, before_send: Any, read_back: Any, calls: Any) -> bool:
        is_ours = create(roots.storage, root, before_send)
        if not is_ours:
            with suppress(FileMissingError):  # a lost response counts as a conflict even if there is no root
                read_back()
        return is_ours

    return mock.patch.object(publish, "create_root", create_root)


def _guess_lost_response(is_ours: bool) -> Mutation:
    def create(storage: Storage, root: KnownRoot, before_send: Callable[[], None]) -> bool:
        before_send()
        try:
            storage.send_with_retries(lambda: storage.create(root.path, root.data))
        except FileExistsAlreadyError:
            return False
        except AmbiguousWriteError:
            return is_ours
        return True

    return lambda: _create_root(create)


def _overwrite_roots() -> AbstractContextManager[Any]:
    def create(storage: Storage, root: KnownRoot, before_send: Callable[[], None]) -> bool:
        if storage.exists(root.path):
            return False
        before_send()
        storage.write(root.path, root.data)
        return True

    return _create_root(create)


def _treat_any_root_as_ours() -> AbstractContextManager[Any]:
    original = write_outcome.create_settled

    def create_settled(storage: Storage, path: str, data: bytes, **options: Any) -> bool:
        return original(storage, path, data, **{**options, "is_ours": lambda _: True})

    return mock.patch.object(publish, "create_settled", create_settled)


def _trust_hint() -> AbstractContextManager[Any]:
    find = versions.find_latest_from

    def find_latest_from(roots: Any, hinted: int | None, probed: Any = None) -> tuple[int, bytes]:
        path = versions.ROOT_NAMING.path(hinted or 0)
        if hinted is None or not roots.storage.exists(path):
            return find(roots, hinted, probed)
        return hinted, roots.storage.read(path)

    return mock.patch.object(latest_version, "find_latest_from", find_latest_from)


def _keep_stale_tree() -> AbstractContextManager[Any]:
    """Rebase the version number, but not the pointers of the tree."""
    draft_of = group.Group.draft

    def draft(self: Any, base: Snapshot, stamp: Any) -> Any:
        self.stale = getattr(self, "stale", base.root)
        system = {**self.stale.system, "created_at_millis": base.root.system["created_at_millis"]}
        stale = replace(self.stale, system={**system, "lakehouse_def": base.definition_location})
        return draft_of(self, Snapshot(base.files, base.version, base.location, stale, base.read_at_ms), stamp)

    return mock.patch.object(group.Group, "draft", draft)


def _delete_files_of_unknown_outcomes() -> AbstractContextManager[Any]:
    run = commit.Commit.run

    def run_and_discard(self: Any, base: Snapshot) -> Any:
        try:
            return run(self, base)
        except CommitOutcomeUnknownError:
            commit.discard(self._files.storage, [*self._definitions, *self._nodes])
            raise

    return mock.patch.object(commit.Commit, "run", run_and_discard)


def _expire_after_lost_response() -> AbstractContextManager[Any]:
    """Report that a transaction has expired, although an earlier request may have created its root."""

    def create(storage: Storage, root: KnownRoot, before_send: Callable[[], None]) -> bool:
        for _ in range(5):
            before_send()
            try:
                storage.send_with_retries(lambda: storage.create(root.path, root.data))
                return True
            except FileExistsAlreadyError:
                system = decode_system_rows(storage.read(root.path), root.path)
                return system.get(COMMIT_ID) == root.node.system[COMMIT_ID]
            except AmbiguousWriteError:
                continue
        raise StorageError("no response")

    return _create_root(create)


def _overwrite_definitions() -> AbstractContextManager[Any]:
    return mock.patch.object(submission, "merge_lakehouse_defs", lambda base, ours, theirs: (ours, []))


def _begin_on_earlier_version() -> AbstractContextManager[Any]:
    def previous_snapshot(files: Any, probed: Any = None) -> Snapshot:
        latest = latest_version.latest_snapshot(files, probed)
        return latest if latest.version < 2 else Snapshot.of(files, latest.version - 1)

    return mock.patch.object(lakehouse, "latest_snapshot", previous_snapshot)


def _report_undecided_as_lost() -> AbstractContextManager[Any]:
    def resolve_commit(*arguments: Any, **options: Any) -> CommitResolution:
        resolution = publish.resolve_commit(*arguments, **options)
        return CommitResolution.LOST if resolution is CommitResolution.UNDECIDED else resolution

    return mock.patch.object(lakehouse, "resolve_commit", resolve_commit)


def _requeue_sent_members() -> AbstractContextManager[Any]:
    def abandoned(self: Any) -> list[Any]:
        return [member for member in self._followers if member.outcome is None]

    return mock.patch.object(group.Group, "abandoned", abandoned)


def _keep_conflicting_members() -> AbstractContextManager[Any]:
    settle = group.Group._settle

    def settle_versions_only(self: Any, member: Any, outcome: int | Exception) -> None:
        if isinstance(outcome, int):
            settle(self, member, outcome)

    return mock.patch.object(group.Group, "_settle", settle_versions_only)


def _resend_unchecked() -> AbstractContextManager[Any]:
    """Make the storage retry creates by itself, so that no check precedes a retry."""
    create_once = RetryStorage.create

    def create(self: RetryStorage, path: str, data: bytes) -> None:
        self._retry(create_once, self, path, data)

    return mock.patch.object(RetryStorage, "create", create)


@contextmanager
def combined(*patches: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def _return_value(target: object, name: str, value: Any) -> Mutation:
    return lambda: mock.patch.object(target, name, side_effect=lambda *_, **__: copy.copy(value))


#: Mutations by the fault that they introduce.
MUTATIONS: Mapping[str, Mutation] = {
    "skip the read-back: a lost response counts as lost": _guess_lost_response(False),
    "skip the read-back: a lost response counts as committed": _guess_lost_response(True),
    "treat any existing root as ours": _treat_any_root_as_ours,
    "overwrite roots instead of creating them": _overwrite_roots,
    "trust the hint": _trust_hint,
    "keep stale pointers in a rebase": _keep_stale_tree,
    "skip the check of written keys": _return_value(change_set, "written_key_conflicts", []),
    "skip the check of read keys and ranges": _return_value(change_set, "read_conflicts", []),
    "skip the check of ranges": lambda: mock.patch.object(
        change_set, "read_conflicts",
        lambda keys, changes, points, prefixes, check=change_set.read_conflicts: check(keys, changes, points, ()),
    ),
    "skip the check of single keys": lambda: mock.patch.object(
        change_set, "read_conflicts",
        lambda keys, changes, points, prefixes, check=change_set.read_conflicts: check(keys, changes, (), prefixes),
    ),
    "skip the check that the namespace exists": _return_value(change_set.ChangeSet, "_namespace_conflicts", []),
    "skip the check of new tables in a dropped namespace": _return_value(change_set, "new_table_conflicts", []),
    "overwrite settings changed by other transactions": _overwrite_definitions,
    "acknowledge commits that were not made": lambda: mock.patch.object(
        transaction.Transaction, "_commit_once", lambda self, max_attempts: self.base.version
    ),
    "skip the check of read settings": lambda: mock.patch.object(
        transaction.Transaction, "definition", property(lambda self: self._changes.definition or self.base.definition)
    ),
    "skip the time to live": _return_value(group, "check_age", None),
    "use the clock's time even if it jumped back": lambda: mock.patch.object(
        commit, "time_after", lambda base, now_ms: VersionTime(now_ms, None)
    ),
    "group transactions that conflict": _return_value(change_set.Footprint, "is_touched_by", False),
    "delete the files of a commit with an unknown outcome": _delete_files_of_unknown_outcomes,
    "fail an expired transaction whose root was sent": _expire_after_lost_response,
    "keep a conflicting transaction in its group": _keep_conflicting_members,
    "begin on an earlier version": _begin_on_earlier_version,
    "report conflicts that do not exist": _return_value(change_set, "new_table_conflicts", ["does not exist"]),
    "skip the search for a resumed transaction": _return_value(submission, "version_of", None),
    "report an undecided commit as lost": _report_undecided_as_lost,
    "keep the files of failed attempts": _return_value(commit, "discard", None),
    "return the latest version for any time": lambda: mock.patch.object(
        lookup, "find_version_at", lambda roots, timestamp_ms, latest, probed: latest
    ),
    "resend after the time to live": _resend_unchecked,
    "requeue an interrupted group whose root was sent": _requeue_sent_members,
}  # fmt: skip

#: Simulation options for mutations that most runs do not detect.
CONDITIONS: Mapping[str, Mapping[str, Any]] = {
    "report conflicts that do not exist": {"writers": (1, 1), "fault_rate": 0.0, "maintenance_operations": ("export",)},
    "resend after the time to live": {"fault_rate": 0.15, "time_to_live_ms": 3_000},
    "report an undecided commit as lost": {
        "writers": (1,),
        "fault_rate": 0.2,
        "maintenance_operations": (),
        "time_to_live_ms": 60_000,
    },
    "keep the files of failed attempts": {"fault_rate": 0.0, "maintenance_operations": ()},
    "skip the check of read settings": {"writers": (3, 3), "maintenance_operations": ()},
    "skip the search for a resumed transaction": {"writers": (3, 3), "maintenance_operations": ()},
    "requeue an interrupted group whose root was sent": {
        "writers": (6,),
        "fault_rate": 0.02,
        "interrupt_rate": 0.03,
    },
}
