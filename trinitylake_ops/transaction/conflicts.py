"""Finds changes of a concurrent commit that conflict with a transaction (docs/internals/protocol.md, "Rebase")."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any

from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.keys import KeyCodec
from trinitylake_ops.tree.diff import KeyChange

# One key each: their entries depend on each other, so they never merge.
_OPERATIONAL_STATE = ("exported_snapshots", "exports", "expirations")
_MERGED_BY_KEY = ("properties", "maximum_version_age_millis_overrides")


def written_key_conflicts(keys: KeyCodec, changes: Mapping[str, KeyChange], written: Mapping[str, object]) -> list[str]:
    """Return a line for every key that both sides wrote."""
    return [
        f"{describe_key(keys, key)}: we {_did_to(written[key])} it, a concurrent commit {_did(changes[key])} it"
        for key in sorted(changes.keys() & written.keys())
    ]


def new_table_conflicts(
    keys: KeyCodec, changes: Mapping[str, KeyChange], dropped_namespace: str, written: Collection[str]
) -> list[str]:
    """Return a line for every table that a concurrent commit put into a namespace that we drop."""
    prefix = keys.tables_prefix(dropped_namespace)
    return [
        f"{describe_key(keys, key)}: a concurrent commit {_did(change)} it, we dropped its namespace"
        for key, change in changes.items()
        if key.startswith(prefix) and change.after is not None and key not in written
    ]


def read_conflicts(
    keys: KeyCodec, changes: Mapping[str, KeyChange], points: Collection[str], prefixes: Collection[str]
) -> list[str]:
    """Return a line for every change to what a serializable transaction read: keys and scanned prefixes."""
    return [
        f"{describe_key(keys, key)}: we read it or the range it is in, a concurrent commit {_did(change)} it"
        for key, change in sorted(changes.items())
        if key in points or any(key.startswith(prefix) for prefix in prefixes)
    ]


def describe_key(keys: KeyCodec, key: str) -> str:
    """Return a key in the words that people use."""
    name = keys.decode(key)
    if name is None:
        return f"object {key!r}"
    return f"{'namespace' if name.table is None else 'table'} {name}"


def _did(change: KeyChange) -> str:
    if change.before is None:
        return "created"
    return "dropped" if change.after is None else "changed"


def _did_to(write: object) -> str:
    return "dropped" if write is None else "wrote"


def merge_lakehouse_defs(
    base: LakehouseDef, ours: LakehouseDef, theirs: LakehouseDef
) -> tuple[LakehouseDef, list[str]]:
    """Return the definition that holds the changes of both sides, and a line for each conflict.

    Settings merge field by field, free-form maps key by key; exports and expirations count as one key.
    """
    conflicts: list[str] = []
    merged: dict[str, Any] = {}
    if _changed(base, ours, _OPERATIONAL_STATE) and _changed(base, theirs, _OPERATIONAL_STATE):
        conflicts.append("exports, pins and expirations of the lakehouse: both sides changed them")
    for name in (spec.name for spec in fields(LakehouseDef)):
        before, mine, other = getattr(base, name), getattr(ours, name), getattr(theirs, name)
        if name in _MERGED_BY_KEY:
            merged[name], both = _merge_maps(before, mine, other)
            conflicts += [f"{name}[{key!r}] of the lakehouse: both sides changed it" for key in both]
        elif mine != before and other not in (before, mine) and name not in _OPERATIONAL_STATE:
            conflicts.append(f"{name} of the lakehouse: we set {mine!r}, a concurrent commit {other!r}")
        elif mine != before:
            merged[name] = mine
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
