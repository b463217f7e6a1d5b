"""The chain of roots: faults in a link of it, and those that an operator has acknowledged.

Another program's root stays as it is for ever, also as a sealed one. An operator who looked into it acknowledges it
once, and from then on verify reports it as past.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from trinitylake_ops.errors import CorruptFileError, FileMissingError, InvalidInputError, InvalidLocationError
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.locations import to_location
from trinitylake_ops.format.nodes.node_file import NodeFile, decode_node
from trinitylake_ops.format.nodes.system_rows import PREVIOUS_ROOT, is_clock_reset
from trinitylake_ops.format.version_ranges import VersionRanges
from trinitylake_ops.versions.roots import Roots
from trinitylake_ops.versions.snapshot import Snapshot

#: The property of the lakehouse definition that lists them, as ranges of versions.
ACKNOWLEDGED = "trinitylake.acknowledged-versions"
_MOST_AT_ONCE = 1000


def chain_faults(roots: Roots, version: int, root: NodeFile, before_ms: int) -> Iterator[tuple[str, str]]:
    """Yield code and message of each fault between a root and the one before, created at ``before_ms``."""
    expected = roots.path(version - 1) if version > 0 else None
    named = root.system.get(PREVIOUS_ROOT)
    if _path_of(roots, named) != expected:
        yield "chain-broken", f"previous_root is {named!r}, not {expected!r}"
    if root.created_at_ms <= before_ms and not is_clock_reset(root.system, version):
        yield "time-not-rising", f"created at {root.created_at_ms} ms, not after its predecessor at {before_ms} ms"


def _path_of(roots: Roots, location: str | None) -> str | None:
    """Return the path of a root. Other programs may name it by its URI."""
    try:
        return None if location is None else to_location(roots.storage.root, location)
    except InvalidLocationError:
        return location


def acknowledged_versions(definition: LakehouseDef) -> VersionRanges:
    """Return the versions whose faults an operator acknowledged, none if the record cannot be read."""
    try:
        return VersionRanges.parse(definition.properties.get(ACKNOWLEDGED, ""))
    except InvalidInputError:
        return VersionRanges()


def with_acknowledged(definition: LakehouseDef, more: Iterable[VersionRanges]) -> LakehouseDef:
    """Return a definition that lists further versions."""
    known = acknowledged_versions(definition)
    for versions in more:
        known |= versions
    if known == acknowledged_versions(definition):
        return definition
    return replace(definition, properties={**definition.properties, ACKNOWLEDGED: str(known)})


def without_acknowledged(definition: LakehouseDef) -> LakehouseDef:
    """Return the definition for another lakehouse, which has other versions."""
    properties = {name: value for name, value in definition.properties.items() if name != ACKNOWLEDGED}
    return replace(definition, properties=properties)


def parse_acknowledged(text: str) -> VersionRanges:
    """Return versions as an operator gives them, such as ``7`` or ``7,9-12``. Raises InvalidInputError."""
    versions = VersionRanges.parse(text)
    if not versions or len(versions) > _MOST_AT_ONCE:
        raise InvalidInputError(
            f"{text!r} cannot be acknowledged at once: give 1 to {_MOST_AT_ONCE} versions, such as 7 or 7,9-12"
        )
    return versions


def check_faulty(latest: Snapshot, versions: VersionRanges) -> None:
    """Raise InvalidInputError for a version whose root has no fault, or cannot be read. Only faults are settled."""
    for version in versions:
        faults: list[tuple[str, str]] = []
        if 0 <= version <= latest.version:
            root = _read(latest, version)
            before = _read(latest, version - 1) if version > 0 else None
            roots = latest.files.roots
            faults = (
                [] if root is None else [*chain_faults(roots, version, root, before.created_at_ms if before else -1)]
            )
        if not faults:
            raise InvalidInputError(
                f"version {version} has nothing to acknowledge: that is for roots in which verify finds chain-broken"
                " or time-not-rising"
            )


def _read(latest: Snapshot, version: int) -> NodeFile | None:
    path = latest.files.roots.path(version)
    try:
        return decode_node(latest.files.storage.read(path), path)
    except (FileMissingError, CorruptFileError):
        return None
