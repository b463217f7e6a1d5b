"""Find changes of a concurrent commit that conflict with a transaction (protocol.md, "Rebase")."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any

from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.keys import KeyCodec
from trinitylake_ops.tree.diff import KeyChange

# These settings depend on each other, so concurrent changes to them are never merged.
_OPERATIONAL_STATE = ("exported_snapshots", "exports", "expirations")
_MERGED_BY_KEY = ("properties", "maximum_version_age_millis_overrides")


def written_key_conflicts(keys: KeyCodec, changes: Mapping[str, KeyChange], written: Mapping[str, object]) -> list[str]:
    """Describe every key that both sides wrote, one line per key.

    Args:
        keys: The encoding of keys.
        changes: The changes of the concurrent commits by key.
        written: The writes of the transaction by key.
    """
    return [
        f"{describe_key(keys, key)}: we {_verb_for_write(written[key])} it, a concurrent commit"
        f" {_verb_for_change(changes[key])} it"
        for key in sorted(changes.keys() & written.keys())
    ]


def new_table_conflicts(
    keys: KeyCodec, changes: Mapping[str, KeyChange], dropped_namespace: str, written: Collection[str]
) -> list[str]:
    """Describe every table that a concurrent commit created in a namespace that the transaction drops.

    Args:
        keys: The encoding of keys.
        changes: The changes of the concurrent commits by key.
        dropped_namespace: The namespace.
        written: The keys that the transaction writes.
    """
    prefix = keys.tables_prefix(dropped_namespace)
    return [
        f"{describe_key(keys, key)}: a concurrent commit {_verb_for_change(change)} it, we dropped its namespace"
        for key, change in changes.items()
        if key.startswith(prefix) and change.after is not None and key not in written
    ]


def read_conflicts(
    keys: KeyCodec, changes: Mapping[str, KeyChange], points: Collection[str], prefixes: Collection[str]
) -> list[str]:
    """Describe every change to a key or prefix that a serializable transaction read, one line per key.

    Args:
        keys: The encoding of keys.
        changes: The changes of the concurrent commits by key.
        points: The keys that were read.
        prefixes: The prefixes that were listed.
    """
    return [
        f"{describe_key(keys, key)}: we read it or listed it, a concurrent commit {_verb_for_change(change)} it"
        for key, change in sorted(changes.items())
        if key in points or any(key.startswith(prefix) for prefix in prefixes)
    ]


def describe_key(keys: KeyCodec, key: str) -> str:
    """Return a readable description of a key."""
    name = keys.decode(key)
    if name is None:
        return f"object {key!r}"
    return f"{'namespace' if name.table is None else 'table'} {name}"


def _verb_for_change(change: KeyChange) -> str:
    if change.before is None:
        return "created"
    return "dropped" if change.after is None else "changed"


def _verb_for_write(write: object) -> str:
    return "dropped" if write is None else "wrote"


def merge_lakehouse_defs(
    base: LakehouseDef, ours: LakehouseDef, theirs: LakehouseDef
) -> tuple[LakehouseDef, list[str]]:
    """Merge two lakehouse definitions that were changed concurrently.

    Settings are merged by field, and free-form maps by key. Exports and expirations count as a single field.

    Args:
        base: The common base.
        ours: The definition of the transaction.
        theirs: The definition of the concurrent commit.

    Returns:
        The merged definition, and a line for each conflict.
    """
    conflicts: list[str] = []
    merged: dict[str, Any] = {}
    if _changed(base, ours, _OPERATIONAL_STATE) and _changed(base, theirs, _OPERATIONAL_STATE):
        conflicts.append("exports, pins and expirations of the lakehouse: both sides changed them")
    for name in (spec.name for spec in fields(LakehouseDef)):
        before, own_value, other = getattr(base, name), getattr(ours, name), getattr(theirs, name)
        if name in _MERGED_BY_KEY:
            merged[name], both = _merge_maps(before, own_value, other)
            conflicts += [f"{name}[{key!r}] of the lakehouse: both sides changed it" for key in both]
        elif own_value != before and other not in (before, own_value) and name not in _OPERATIONAL_STATE:
            conflicts.append(f"{name} of the lakehouse: we set {own_value!r}, a concurrent commit {other!r}")
        elif own_value != before:
            merged[name] = own_value
    return replace(theirs, **merged), conflicts


def _changed(base: LakehouseDef, side: LakehouseDef, names: tuple[str, ...]) -> bool:
    return any(getattr(base, name) != getattr(side, name) for name in names)


def _merge_maps(base: Mapping[Any, Any], ours: Mapping[Any, Any], theirs: Mapping[Any, Any]) -> tuple[Any, list[Any]]:
    merged = dict(theirs)
    both: list[Any] = []
    for key in base.keys() | ours.keys():
        if ours.get(key) == base.get(key):
            continue
        if theirs.get(key) not in (base.get(key), ours.get(key)):
            both.append(key)
        elif key in ours:
            merged[key] = ours[key]
        else:
            merged.pop(key, None)
    return merged, both
