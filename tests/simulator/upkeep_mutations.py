"""Wrong versions of what frees space, each by one change of its code: the simulator must catch every one of them."""

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

#: The package has functions of these names.
_RECONCILE = import_module("trinitylake_ops.operations.gc.reconcile")
_REPAIR = import_module("trinitylake_ops.operations.repairs")
_ROLLBACK = import_module("trinitylake_ops.operations.rollbacks")


def _replacing(place: object, name: str, value: Any) -> Mutation:
    return lambda: mock.patch.object(place, name, value)


def _ignore_messages() -> AbstractContextManager[Any]:
    """Mark what the keys of nodes point to, and not what their buffers say."""
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
    """Copy the root of the target as it is, as a program may that does not know what the definition holds for us."""
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
    """Take files of any age for orphans, and bar no transaction."""
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
    """Take complete exports for lost, whether their roots stand or not."""

    def missing_exports(lake: Lakehouse, definition: Any) -> list[str]:
        return sorted(record.name for record in definition.exports)

    return both(
        mock.patch.object(_REPAIR, "missing_exports", missing_exports),
        mock.patch.object(repair_steps, "missing_exports", missing_exports),
    )


def _remove_orphans_unrecorded() -> AbstractContextManager[Any]:
    """Delete orphans without the commit that takes the next version before."""

    class Unrecorded(orphans.DefinitionChange):
        def commit(self, lake: Lakehouse, base: Snapshot) -> int:
            return base.version

    return mock.patch.object(orphans, "DefinitionChange", Unrecorded)


def _register_during_purges() -> AbstractContextManager[Any]:
    """Neither wait for who deletes files, nor look whether the table was ever committed."""
    return mock.patch.object(register, "_deletions_blocked", return_value=nullcontext(lambda _base: None))


def _purge_before_its_time() -> AbstractContextManager[Any]:
    """No grace at all, and no check of what was undeleted meanwhile."""
    return both(
        mock.patch.object(purge, "protected_ms", return_value=0),
        mock.patch.object(purge.PurgePlan, "check_batches"),
    )


#: What each mutation does wrong.
UPKEEP_MUTATIONS: Mapping[str, Mutation] = {
    "free the names of purged versions": _delete_roots,
    "mark no messages": _ignore_messages,
    "mark no nodes": _reach_no_further_than("nodes"),
    "mark no definitions of the lakehouse and of namespaces": _reach_no_further_than("others"),
    "keep nothing that can be undeleted": _forget_expired_ones,
    "forget exports": _forget_exports,
    "remove orphans of any age": _remove_young_orphans,
    "purge what was undeleted": _replacing(purge.PurgePlan, "check_batches", lambda self, definition, states=(): None),
    "undelete what is being purged": _undelete_what_is_being_purged,
    "delete what the plan names, reached or not": _replacing(
        reachability.Mark, "__contains__", lambda self, path: False
    ),
    "roll back to the definition of that time": _go_back_to_the_old_definition,
    "mark only once": _replacing(reachability.Mark, "extend", lambda self, latest: None),
    "see no change by other programs": _replacing(survey.Survey, "foreign_steps", lambda self: []),
    "reconcile: forget the exports of the other side": _replacing(
        _RECONCILE, "_all_exports",
        lambda ours, replaced: ({record.name: record for record in ours.exports}, dict(ours.exported_snapshots)),
    ),
    "reconcile: forget what purges began with": _replacing(
        _RECONCILE, "_agreed", lambda ours, replaced: ours.expirations
    ),
    "let transactions commit whose files went as orphans": _replacing(
        orphans, "barred_before_ms", lambda now_ms, older_than_ms: 0
    ),
    "roll back a choice, whatever else of it changed": _replacing(_ROLLBACK, "_check_unchanged", lambda *_: None),
    "restore beside other commits": _replacing(restore.Restore, "_check_base", lambda self, plan, base: None),
    "export elsewhere beside other exports": _replacing(
        export_roots.TargetExport, "check_unchanged", lambda self, latest: None
    ),
    "repair: forget exports that stand": _repair_existing_exports,
    "reconcile: bring back exports elsewhere that were dropped": _replacing(
        _RECONCILE, "_was_dropped", lambda survey, record, sides: False
    ),
}  # fmt: skip

#: Those that show only in some of a hundred runs.
RARE_UPKEEP_MUTATIONS: Mapping[str, Mutation] = {
    "purge without grace, and what was undeleted": _purge_before_its_time,
    "expire what was exported meanwhile": _replacing(expire, "_check_same_settings", lambda base, latest: None),
    "remove orphans without a commit": _remove_orphans_unrecorded,
    "register beside purges": _register_during_purges,
    "export into what others clean up, with copies of any age": _replacing(
        export_module, "with_safe_names", lambda selection, *_: selection
    ),
}

_WITH_FOREIGN_ROLLBACKS: Mapping[str, Any] = {
    "upkeep": ("expire", "purge", "reconcile"),
    "n_foreign_steps": 8,
    "time_to_live_ms": 3_000,
    "leaps": 0.7,
    "fault_rate": 0.0,
}
#: Runs in which a mutation shows that seldom matters.
UPKEEP_CONDITIONS: Mapping[str, Mapping[str, Any]] = {
    "export into what others clean up, with copies of any age": {
        "upkeep": ("export elsewhere", "clean up elsewhere"),
        "time_to_live_ms": 1_500,
        "stop_rate": 0.02,
        "leaps": 0.9,
    },
    "restore beside other commits": {"upkeep": ("export elsewhere", "restore"), "fault_rate": 0.0},
    "export elsewhere beside other exports": {"upkeep": ("export elsewhere",), "writers": (2,), "fault_rate": 0.0},
    "reconcile: bring back exports elsewhere that were dropped": {
        **_WITH_FOREIGN_ROLLBACKS,
        "upkeep": ("export elsewhere", "drop export", "reconcile"),
    },
    "remove orphans of any age": {"upkeep": ("orphans",), "time_to_live_ms": 600_000},
    "forget exports": {"upkeep": ("expire", "purge", "export")},
    "roll back to the definition of that time": {"upkeep": ("expire", "purge", "export")},
    "expire what was exported meanwhile": {"upkeep": ("expire", "export")},
    "purge what was undeleted": {"upkeep": ("expire", "purge", "undelete")},
    "purge without grace, and what was undeleted": {"upkeep": ("expire", "purge", "undelete")},
    "undelete what is being purged": {"upkeep": ("expire", "purge", "undelete")},
    "mark only once": {**_WITH_FOREIGN_ROLLBACKS, "n_foreign_steps": 40, "writers": (2,), "time_to_live_ms": 6_000},
    "see no change by other programs": _WITH_FOREIGN_ROLLBACKS,
    "reconcile: forget the exports of the other side": {**_WITH_FOREIGN_ROLLBACKS, "upkeep": ("export", "reconcile")},
    "reconcile: forget what purges began with": {**_WITH_FOREIGN_ROLLBACKS, "leaps": 0.9},
    "let transactions commit whose files went as orphans": {
        "upkeep": ("orphans",),
        "time_to_live_ms": 1_500,
        "times_to_live": (1, 40),
        "changes": {"put": 1, "set time to live": 1},
        "stop_rate": 0.02,
    },
    "remove orphans without a commit": {
        "writers": (1,),
        "upkeep": ("orphans",),
        "time_to_live_ms": 1_500,
        "stop_rate": 0.02,
    },
    "register beside purges": {
        "with_table": True,
        "upkeep": ("expire", "purge", "trim", "register"),
        "time_to_live_ms": 3_000,
        "leaps": 0.7,
        "fault_rate": 0.0,
    },
}
