"""Checks of the targets of exports and clones against every root that the lakehouse reads or writes.

A copy below such a root would be the original file itself, and would be lost together with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trinitylake_ops.errors import InvalidInputError, InvalidLocationError
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.locations import normalize_root_uri, to_uri
from trinitylake_ops.maintenance.exports.content import Content
from trinitylake_ops.storage.local.folders import check_can_hold, lies_within
from trinitylake_ops.transaction.lakehouse import Lakehouse

#: Schemes that name the same storage.
_SAME_SCHEMES = {"s3a": "s3", "s3n": "s3", "abfs": "abfss", "gcs": "gs"}


def target_root(lake: Lakehouse, target: str | None, *definitions: LakehouseDef) -> str:
    """Return the normalised root of a target, empty for none.

    What is recorded before the first write to the target would stay where that write fails.

    Args:
        lake: The lakehouse that is exported or cloned.
        target: The target as the caller names it.
        definitions: The settings of the lakehouse in the versions concerned; they name its table roots and others.

    Raises:
        InvalidInputError: The target is, lies in, or contains a root that the lakehouse reads or writes.
        InvalidLocationError: The target is no root.
        StoragePermissionError: The target can contain no lakehouse.
    """
    if target is None:
        return ""
    root = normalize_root_uri(target)
    for used, what in _used_roots(lake, definitions):
        if _overlap(root, used):
            raise InvalidInputError(
                f"target {root!r} cannot be used: it is, lies in, or contains {what} {used!r}; choose another one"
            )
    for definition in definitions:
        for record in definition.exports:
            other = _normalised(record.target_uri)
            if other and _spelled(other) != _spelled(root) and _overlap(root, other):
                raise InvalidInputError(
                    f"target {root!r} cannot be used: it lies in, or contains the target {other!r} of"
                    f" {record.name!r}; choose another one"
                )
    check_can_hold(root)
    return root


def check_contains_no_source(root: str, content: Content, lake_root: str) -> None:
    """Raise InvalidInputError if a file to copy is already below the target, such as below a former table root.

    Args:
        root: The target.
        content: The files to copy.
        lake_root: The root of the lakehouse, which their paths are relative to.
    """
    for table in content.tables:
        for file in table.files:
            source = to_uri(lake_root, file.source)
            if _spelled(source).startswith(_spelled(root)):
                raise InvalidInputError(
                    f"target {root!r} cannot be used: it contains {source!r}, a file that the export needs; choose"
                    " another one"
                )


def _used_roots(lake: Lakehouse, definitions: Sequence[LakehouseDef]) -> Iterator[tuple[str, str]]:
    """Yield the roots that a lakehouse reads or writes, and what each is."""
    yield lake.root, "the lakehouse itself"
    names = lake.elsewhere.names
    roots = [(root, "its table root") for root in names.table_roots]
    roots += [(root, "a lakehouse whose files it reads") for root in names.sources]
    for definition in definitions:
        roots.append((definition.table_root, "its table root"))
        roots += [(source.root, "a lakehouse whose files it reads") for source in definition.sources]
        if definition.parent is not None:
            roots.append((definition.parent.root, "its parent"))
    for named, what in roots:
        if root := _normalised(named):
            yield root, what


def _overlap(root: str, other: str) -> bool:
    """Whether one root lies in the other, or both are the same, by their text or by the folders they lead to."""
    if lies_within(root, other) or lies_within(other, root):
        return True
    first, second = _spelled(root), _spelled(other)
    return first.startswith(second) or second.startswith(first)


def _spelled(uri: str) -> str:
    """Return a URI in the one spelling of its scheme and host; S3 and Azure have several for the same place."""
    scheme, separator, rest = uri.partition("://")
    host, slash, path = rest.partition("/")
    scheme = _SAME_SCHEMES.get(scheme.lower(), scheme.lower())
    return f"{scheme}{separator}{host.lower()}{slash}{path}"


def _normalised(root: str) -> str:
    """Return a root that content names, empty for none and for a text that is no root."""
    try:
        return normalize_root_uri(root) if root else ""
    except InvalidLocationError:
        return ""
