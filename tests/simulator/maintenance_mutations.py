"""Mutations of maintenance: each introduces a fault, and the simulator must detect all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest import mock

from tests.simulator.mutations import Mutation, combined
from trinitylake_ops import Lakehouse
from trinitylake_ops.format.definitions import ExpirationState
from trinitylake_ops.format.version_ranges import VersionRanges
from trinitylake_ops.operations import register, repair_steps
from trinitylake_ops.operations.exports import export as export_module
from trinitylake_ops.operations.exports import restore
from trinitylake_ops.operations.exports import roots as export_roots
from trinitylake_ops.operations.gc import expire, orphans, purge, survey
from trinitylake_ops.operations.gc import mark as reachability
from trinitylake_ops.operations.rollbacks import _WholeTree
from trinitylake_ops.versions.snapshot import Snapshot

#: Imported by name, because the package exports functions with the same names.
_RECONCILE = import_module("trinitylake_ops.operations.gc.reconcile")
_REPAIR = import_module("trinitylake_ops.operations.repairs")
_ROLLBACK = import_module("trinitylake_ops.operations.rollbacks")


def _replace(target: object, name: str, value: Any) -> Mutation:
    return lambda: mock.patch.object(target, name, value)


def _ignore_messages() -> AbstractContextManager[Any]:
    """Mark the files in the keys of nodes, but ignore those in their buffers."""
    pointers_of = survey.Pointers.of
    return mock.patch.object(survey.Pointers, "of", lambda node, root: pointers_of(replace(node, buffer={}), root))


def _ignore_expired_versions() -> AbstractContextManager[Any]:
    return mock.patch.object(survey.Survey, "expired", return_value=[])


def _ignore_exports() -> AbstractContextManager[Any]:
    return combined(
        mock.patch.object(reachability, "exported_roots", return_value=[]),
        mock.patch.object(survey, "pinned_versions", return_value={}),
        mock.patch.object(purge, "pinned_versions", return_value={}),
    )


def _roll_back_to_target_definition() -> AbstractContextManager[Any]:
    """Copy the root of the target unchanged, as a program without our extensions would."""
    draft_of = _WholeTree.draft

    def draft_with_target_definition(self: Any, base: Snapshot, stamp: Any) -> Any:
        draft = draft_of(self, base, stamp)
        if draft is None:
            return None
        target = self.target.snapshot
        system = {**draft.root_system, "lakehouse_def": target.definition_location}
        return replace(draft, root_system=system, definition=target.definition)

    return mock.patch.object(_WholeTree, "draft", draft_with_target_definition)


def _delete_roots() -> AbstractContextManager[Any]:
    def delete(self: purge.Purge, plan: purge.PurgePlan, held: Any) -> None:
        for version in VersionRanges.parse(plan.versions):
            self.lake.storage.delete(self.lake.files.roots.path(version))

    return mock.patch.object(purge.Purge, "_seal", delete)


def _undelete_versions_being_purged() -> AbstractContextManager[Any]:
    without = expire._without

    def without_any_state(batches: Iterable[Any], wanted: Any) -> Any:
        return without([replace(batch, state=ExpirationState.EXPIRED) for batch in batches], wanted)

    return mock.patch.object(expire, "_without", without_any_state)


def _remove_young_orphans() -> AbstractContextManager[Any]:
    """Treat unreferenced files of any age as orphans, and block no transaction."""
    return combined(
        mock.patch.object(orphans, "protected_ms", return_value=0),
        mock.patch.object(orphans, "barred_before_ms", return_value=0),
    )


def _do_not_mark(kind: str) -> Mutation:
    """Leave out one kind of files when marking reachable files."""

    def mutation() -> AbstractContextManager[Any]:
        add = reachability.CatalogReach.add

        def add_without_kind(self: Any, *arguments: Any, **options: Any) -> None:
            add(self, *arguments, **options)
            getattr(self, kind).clear()

        return mock.patch.object(reachability.CatalogReach, "add", add_without_kind)

    return mutation


def _repair_existing_exports() -> AbstractContextManager[Any]:
    """Treat complete exports as lost even if their roots exist."""

    def missing_exports(lake: Lakehouse, definition: Any) -> list[str]:
        return sorted(record.name for record in definition.exports)

    return combined(
        mock.patch.object(_REPAIR, "missing_exports", missing_exports),
        mock.patch.object(repair_steps, "missing_exports", missing_exports),
    )


def _remove_orphans_without_commit() -> AbstractContextManager[Any]:
    """Delete orphans without committing the next version first."""

    class SkippedCommit(orphans.DefinitionChange):
        def commit(self, lake: Lakehouse, base: Snapshot) -> int:
            return base.version

    return mock.patch.object(orphans, "DefinitionChange", SkippedCommit)


def _register_during_purges() -> AbstractContextManager[Any]:
    """Neither wait for running deletions nor check that the table was ever committed."""
    return mock.patch.object(register, "_deletions_blocked", return_value=nullcontext(lambda _base: None))


def _purge_without_grace_period() -> AbstractContextManager[Any]:
    """Purge without a grace period and without a check for undeleted versions."""
    return combined(
        mock.patch.object(purge, "protected_ms", return_value=0),
        mock.patch.object(purge.PurgePlan, "check_batches"),
    )


#: Mutations by the fault that they introduce.
MAINTENANCE_MUTATIONS: Mapping[str, Mutation] = {
    "delete the roots of purged versions": _delete_roots,
    "mark no messages": _ignore_messages,
    "mark no nodes": _do_not_mark("nodes"),
    "mark no lakehouse and namespace definitions": _do_not_mark("others"),
    "keep no files of expired versions": _ignore_expired_versions,
    "ignore exports": _ignore_exports,
    "remove orphans of any age": _remove_young_orphans,
    "purge undeleted versions": _replace(purge.PurgePlan, "check_batches", lambda self, definition, states=(): None),
    "undelete versions that are being purged": _undelete_versions_being_purged,
    "delete all planned files, even referenced ones": _replace(
        reachability.Mark, "__contains__", lambda self, path: False
    ),
    "roll back to the lakehouse definition of the target": _roll_back_to_target_definition,
    "mark only once": _replace(reachability.Mark, "extend", lambda self, latest: None),
    "ignore changes by other programs": _replace(survey.Survey, "foreign_steps", lambda self: []),
    "reconcile: ignore the exports of the replaced definition": _replace(
        _RECONCILE, "_all_exports",
        lambda ours, replaced: ({record.name: record for record in ours.exports}, dict(ours.exported_snapshots)),
    ),
    "reconcile: ignore purges that have begun": _replace(
        _RECONCILE, "_common_batches", lambda ours, replaced: ours.expirations
    ),
    "commit transactions whose files were removed as orphans": _replace(
        orphans, "barred_before_ms", lambda now_ms, older_than_ms: 0
    ),
    "roll back a selection despite concurrent changes": _replace(_ROLLBACK, "_check_unchanged", lambda *_: None),
    "restore despite concurrent commits": _replace(restore.Restore, "_check_base", lambda self, plan, base: None),
    "export to a target despite concurrent exports": _replace(
        export_roots.TargetExport, "check_unchanged", lambda self, latest: None
    ),
    "repair: drop existing exports": _repair_existing_exports,
    "reconcile: restore dropped exports to a target": _replace(
        _RECONCILE, "_was_dropped", lambda survey, record, sides: False
    ),
}  # fmt: skip

#: Mutations that only a few of a hundred runs detect.
RARE_MAINTENANCE_MUTATIONS: Mapping[str, Mutation] = {
    "purge without a grace period, and undeleted versions": _purge_without_grace_period,
    "expire versions that were exported in the meantime": _replace(
        expire, "_check_same_settings", lambda base, latest: None
    ),
    "remove orphans without a commit": _remove_orphans_without_commit,
    "register during purges": _register_during_purges,
    "export with copies of any age during a cleanup of the target": _replace(
        export_module, "with_safe_names", lambda selection, *_: selection
    ),
}

_WITH_FOREIGN_ROLLBACKS: Mapping[str, Any] = {
    "maintenance_operations": ("expire", "purge", "reconcile"),
    "n_foreign_steps": 8,
    "time_to_live_ms": 3_000,
    "leap_rate": 0.7,
    "fault_rate": 0.0,
}
#: Simulation options for mutations that most runs do not detect.
MAINTENANCE_CONDITIONS: Mapping[str, Mapping[str, Any]] = {
    "export with copies of any age during a cleanup of the target": {
        "maintenance_operations": ("export to target", "clean up target"),
        "time_to_live_ms": 1_500,
        "stop_rate": 0.02,
        "leap_rate": 0.9,
    },
    "restore despite concurrent commits": {
        "maintenance_operations": ("export to target", "restore"),
        "fault_rate": 0.0,
    },
    "export to a target despite concurrent exports": {
        "maintenance_operations": ("export to target",),
        "writers": (2,),
        "fault_rate": 0.0,
    },
    "reconcile: restore dropped exports to a target": {
        **_WITH_FOREIGN_ROLLBACKS,
        "maintenance_operations": ("export to target", "drop export", "reconcile"),
    },
    "remove orphans of any age": {"maintenance_operations": ("orphans",), "time_to_live_ms": 600_000},
    "ignore exports": {"maintenance_operations": ("expire", "purge", "export")},
    "roll back to the lakehouse definition of the target": {"maintenance_operations": ("expire", "purge", "export")},
    "expire versions that were exported in the meantime": {"maintenance_operations": ("expire", "export")},
    "purge undeleted versions": {"maintenance_operations": ("expire", "purge", "undelete")},
    "purge without a grace period, and undeleted versions": {"maintenance_operations": ("expire", "purge", "undelete")},
    "undelete versions that are being purged": {"maintenance_operations": ("expire", "purge", "undelete")},
    "mark only once": {**_WITH_FOREIGN_ROLLBACKS, "n_foreign_steps": 40, "writers": (2,), "time_to_live_ms": 6_000},
    "ignore changes by other programs": _WITH_FOREIGN_ROLLBACKS,
    "reconcile: ignore the exports of the replaced definition": {
        **_WITH_FOREIGN_ROLLBACKS,
        "maintenance_operations": ("export", "reconcile"),
    },
    "reconcile: ignore purges that have begun": {**_WITH_FOREIGN_ROLLBACKS, "leap_rate": 0.9},
    "commit transactions whose files were removed as orphans": {
        "maintenance_operations": ("orphans",),
        "time_to_live_ms": 1_500,
        "times_to_live": (1, 40),
        "changes": {"put": 1, "set time to live": 1},
        "stop_rate": 0.02,
    },
    "remove orphans without a commit": {
        "writers": (1,),
        "maintenance_operations": ("orphans",),
        "time_to_live_ms": 1_500,
        "stop_rate": 0.02,
    },
    "register during purges": {
        "with_table": True,
        "maintenance_operations": ("expire", "purge", "trim", "register"),
        "time_to_live_ms": 3_000,
        "leap_rate": 0.7,
        "fault_rate": 0.0,
    },
}
