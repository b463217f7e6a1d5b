"""Faulty versions of maintenance, each with one changed function. The simulator must detect all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest import mock

from tests.simulator.mutations import Mutation, both
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

#: Imported by name because the package exports functions of the same names.
_RECONCILE = import_module("trinitylake_ops.operations.gc.reconcile")
_REPAIR = import_module("trinitylake_ops.operations.repairs")
_ROLLBACK = import_module("trinitylake_ops.operations.rollbacks")


def _replace(place: object, name: str, value: Any) -> Mutation:
    return lambda: mock.patch.object(place, name, value)


def _ignore_messages() -> AbstractContextManager[Any]:
    """Mark what the keys of nodes point to, but ignore their buffers."""
    of = survey.Pointers.of
    return mock.patch.object(survey.Pointers, "of", lambda node, place: of(replace(node, buffer={}), place))


def _forget_expired_ones() -> AbstractContextManager[Any]:
    return mock.patch.object(survey.Survey, "expired", return_value=[])


def _forget_exports() -> AbstractContextManager[Any]:
    return both(
        mock.patch.object(reachability, "exported_roots", return_value=[]),
        mock.patch.object(survey, "pinned_versions", return_value={}),
        mock.patch.object(purge, "pinned_versions", return_value={}),
    )


def _go_back_to_the_old_definition() -> AbstractContextManager[Any]:
    """Copy the root of the target unchanged, like a program that does not know our extensions."""
    draft = _WholeTree.draft

    def literal(self: Any, base: Snapshot, stamp: Any) -> Any:
        found = draft(self, base, stamp)
        if found is None:
            return None
        old = self.target.snapshot
        system = {**found.root_system, "lakehouse_def": old.definition_location}
        return replace(found, root_system=system, definition=old.definition)

    return mock.patch.object(_WholeTree, "draft", literal)


def _delete_roots() -> AbstractContextManager[Any]:
    def delete(self: purge.Purge, plan: purge.PurgePlan, held: Any) -> None:
        for version in VersionRanges.parse(plan.versions):
            self.lake.storage.delete(self.lake.files.roots.path(version))

    return mock.patch.object(purge.Purge, "_seal", delete)


def _undelete_what_is_being_purged() -> AbstractContextManager[Any]:
    without = expire._without

    def blindly(batches: Iterable[Any], wanted: Any) -> Any:
        return without([replace(batch, state=ExpirationState.EXPIRED) for batch in batches], wanted)

    return mock.patch.object(expire, "_without", blindly)


def _remove_young_orphans() -> AbstractContextManager[Any]:
    """Treat files of any age as orphans, and block no transaction."""
    return both(
        mock.patch.object(orphans, "protected_ms", return_value=0),
        mock.patch.object(orphans, "barred_before_ms", return_value=0),
    )


def _reach_no_further_than(kind: str) -> Mutation:
    def shallow() -> AbstractContextManager[Any]:
        add = reachability.CatalogReach.add

        def forgetting(self: Any, *arguments: Any, **options: Any) -> None:
            add(self, *arguments, **options)
            getattr(self, kind).clear()

        return mock.patch.object(reachability.CatalogReach, "add", forgetting)

    return shallow


def _repair_existing_exports() -> AbstractContextManager[Any]:
    """Treat complete exports as lost even if their roots exist."""

    def missing_exports(lake: Lakehouse, definition: Any) -> list[str]:
        return sorted(record.name for record in definition.exports)

    return both(
        mock.patch.object(_REPAIR, "missing_exports", missing_exports),
        mock.patch.object(repair_steps, "missing_exports", missing_exports),
    )


def _remove_orphans_unrecorded() -> AbstractContextManager[Any]:
    """Delete orphans without first committing the next version."""

    class Unrecorded(orphans.DefinitionChange):
        def commit(self, lake: Lakehouse, base: Snapshot) -> int:
            return base.version

    return mock.patch.object(orphans, "DefinitionChange", Unrecorded)


def _register_during_purges() -> AbstractContextManager[Any]:
    """Neither wait for running deletions, nor check that the table was ever committed."""
    return mock.patch.object(register, "_deletions_blocked", return_value=nullcontext(lambda _base: None))


def _purge_before_its_time() -> AbstractContextManager[Any]:
    """Purge without a grace period and without a check for undeleted versions."""
    return both(
        mock.patch.object(purge, "protected_ms", return_value=0),
        mock.patch.object(purge.PurgePlan, "check_batches"),
    )


#: Mutations by the fault that they introduce.
MAINTENANCE_MUTATIONS: Mapping[str, Mutation] = {
    "free the names of purged versions": _delete_roots,
    "mark no messages": _ignore_messages,
    "mark no nodes": _reach_no_further_than("nodes"),
    "mark no definitions of the lakehouse and of namespaces": _reach_no_further_than("others"),
    "keep nothing that can be undeleted": _forget_expired_ones,
    "forget exports": _forget_exports,
    "remove orphans of any age": _remove_young_orphans,
    "purge what was undeleted": _replace(purge.PurgePlan, "check_batches", lambda self, definition, states=(): None),
    "undelete what is being purged": _undelete_what_is_being_purged,
    "delete what the plan names, reached or not": _replace(
        reachability.Mark, "__contains__", lambda self, path: False
    ),
    "roll back to the definition of that time": _go_back_to_the_old_definition,
    "mark only once": _replace(reachability.Mark, "extend", lambda self, latest: None),
    "see no change by other programs": _replace(survey.Survey, "foreign_steps", lambda self: []),
    "reconcile: forget the exports of the other side": _replace(
        _RECONCILE, "_all_exports",
        lambda ours, replaced: ({record.name: record for record in ours.exports}, dict(ours.exported_snapshots)),
    ),
    "reconcile: forget what purges began with": _replace(
        _RECONCILE, "_common_batches", lambda ours, replaced: ours.expirations
    ),
    "let transactions commit whose files went as orphans": _replace(
        orphans, "barred_before_ms", lambda now_ms, older_than_ms: 0
    ),
    "roll back a choice, whatever else of it changed": _replace(_ROLLBACK, "_check_unchanged", lambda *_: None),
    "restore beside other commits": _replace(restore.Restore, "_check_base", lambda self, plan, base: None),
    "export elsewhere beside other exports": _replace(
        export_roots.TargetExport, "check_unchanged", lambda self, latest: None
    ),
    "repair: forget exports that stand": _repair_existing_exports,
    "reconcile: bring back exports elsewhere that were dropped": _replace(
        _RECONCILE, "_was_dropped", lambda survey, record, sides: False
    ),
}  # fmt: skip

#: Mutations that only a few of a hundred runs detect.
RARE_MAINTENANCE_MUTATIONS: Mapping[str, Mutation] = {
    "purge without grace, and what was undeleted": _purge_before_its_time,
    "expire what was exported meanwhile": _replace(expire, "_check_same_settings", lambda base, latest: None),
    "remove orphans without a commit": _remove_orphans_unrecorded,
    "register beside purges": _register_during_purges,
    "export into what others clean up, with copies of any age": _replace(
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
    "export into what others clean up, with copies of any age": {
        "maintenance_operations": ("export elsewhere", "clean up elsewhere"),
        "time_to_live_ms": 1_500,
        "stop_rate": 0.02,
        "leap_rate": 0.9,
    },
    "restore beside other commits": {"maintenance_operations": ("export elsewhere", "restore"), "fault_rate": 0.0},
    "export elsewhere beside other exports": {
        "maintenance_operations": ("export elsewhere",),
        "writers": (2,),
        "fault_rate": 0.0,
    },
    "reconcile: bring back exports elsewhere that were dropped": {
        **_WITH_FOREIGN_ROLLBACKS,
        "maintenance_operations": ("export elsewhere", "drop export", "reconcile"),
    },
    "remove orphans of any age": {"maintenance_operations": ("orphans",), "time_to_live_ms": 600_000},
    "forget exports": {"maintenance_operations": ("expire", "purge", "export")},
    "roll back to the definition of that time": {"maintenance_operations": ("expire", "purge", "export")},
    "expire what was exported meanwhile": {"maintenance_operations": ("expire", "export")},
    "purge what was undeleted": {"maintenance_operations": ("expire", "purge", "undelete")},
    "purge without grace, and what was undeleted": {"maintenance_operations": ("expire", "purge", "undelete")},
    "undelete what is being purged": {"maintenance_operations": ("expire", "purge", "undelete")},
    "mark only once": {**_WITH_FOREIGN_ROLLBACKS, "n_foreign_steps": 40, "writers": (2,), "time_to_live_ms": 6_000},
    "see no change by other programs": _WITH_FOREIGN_ROLLBACKS,
    "reconcile: forget the exports of the other side": {
        **_WITH_FOREIGN_ROLLBACKS,
        "maintenance_operations": ("export", "reconcile"),
    },
    "reconcile: forget what purges began with": {**_WITH_FOREIGN_ROLLBACKS, "leap_rate": 0.9},
    "let transactions commit whose files went as orphans": {
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
    "register beside purges": {
        "with_table": True,
        "maintenance_operations": ("expire", "purge", "trim", "register"),
        "time_to_live_ms": 3_000,
        "leap_rate": 0.7,
        "fault_rate": 0.0,
    },
}
