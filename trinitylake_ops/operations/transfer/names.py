"""Names of copies at the target of a transfer, and checks of target roots."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from trinitylake_ops.errors import InvalidInputError, InvalidLocationError
from trinitylake_ops.format.checksums import name_identity
from trinitylake_ops.format.definitions import ExportLevel, LakehouseDef
from trinitylake_ops.format.file_names import as_version_4, derived_uuid, new_namespace_path, new_table_path
from trinitylake_ops.format.keys import ObjectName
from trinitylake_ops.format.locations import is_uri, normalize_root_uri, to_location, to_uri
from trinitylake_ops.storage.local.posix_files import check_can_hold, lies_within
from trinitylake_ops.transaction.lakehouse import Lakehouse

_RECOGNIZED_GENERATIONS = 4


@dataclass(frozen=True, slots=True)
class Destination:
    """The target root of a transfer, and the rule for the names of the copies."""

    #: The target root.
    root: str
    #: The seed from which, together with the name of the source, the name of a copied definition is derived.
    seed: uuid.UUID
    #: The folder of the copies within the table folder; empty if table files keep their paths.
    folder: str
    #: Other rules under which the target may have the same copies.
    siblings: tuple[Destination, ...] = ()

    @classmethod
    def same_root(cls, root: str, export_id: uuid.UUID) -> Destination:
        """Return names that only one export uses, for copies within its lakehouse.

        Args:
            root: The root of the lakehouse.
            export_id: The id of the export.
        """
        return cls(root, export_id, f"export-{export_id}/")

    @classmethod
    def other_root(cls, root: str, source_id: str, level: ExportLevel, generation: int = 0) -> Destination:
        """Return names that all exports of a lakehouse at a level share, so that a later export finds existing copies.

        Args:
            root: The target root.
            source_id: The id of the lakehouse.
            level: The level of the export.
            generation: Each generation uses different names, for copies whose names in earlier generations cannot be
                used. Generation 0 recognizes the names of later generations.
        """
        seed = uuid.uuid5(uuid.NAMESPACE_URL, f"{source_id}/{level.name.lower()}")
        if generation:
            seed = uuid.uuid5(seed, f"generation {generation}")
            return cls(root, seed, f"export-{as_version_4(seed)}/")
        later = range(1, _RECOGNIZED_GENERATIONS)
        return cls(root, seed, "", tuple(cls.other_root(root, source_id, level, number) for number in later))

    def definition_path(self, name: ObjectName, source: str, limit_bytes: int, *, is_changed: bool) -> str:
        """Return the path of the copy of a definition.

        Args:
            name: The name of the object.
            source: The location of the definition.
            limit_bytes: The maximum length of a path.
            is_changed: Whether the copy differs from its source.
        """
        if not self.folder and not is_changed and not is_uri(source):
            return source
        return definition_path(name, limit_bytes, derived_uuid(self.seed, source))

    def is_copy(self, location: str, name: ObjectName, source: str, limit_bytes: int) -> bool:
        """Whether a location refers to a copy of a definition, under any of its possible names.

        Args:
            location: The location.
            name: The name of the object.
            source: The location of the definition.
            limit_bytes: The maximum length of a path.
        """
        copies = [
            rule.definition_path(name, source, limit_bytes, is_changed=is_changed)
            for rule in (self, *self.siblings)
            for is_changed in (False, True)
        ]
        # Older releases used UUIDs of version 5 in names.
        copies += [definition_path(name, limit_bytes, uuid.uuid5(rule.seed, source)) for rule in (self, *self.siblings)]
        return name_identity(location) in map(name_identity, copies)

    def pointer(self, source_root: str, location: str) -> str:
        """Return the location by which the tree at the target refers to a file that is not copied.

        Args:
            source_root: The root of the source.
            location: The location of the file in the source.
        """
        return to_location(self.root, to_uri(source_root, location))


def definition_path(name: ObjectName, limit_bytes: int, identifier: uuid.UUID) -> str:
    """Return the path of a new definition of a namespace or table.

    Args:
        name: The name of the object.
        limit_bytes: The maximum length of a path.
        identifier: The part of the file name that distinguishes the definition from other definitions of the object.
    """
    if name.table is None:
        return new_namespace_path(name.namespace, limit_bytes, identifier)
    return new_table_path(name.namespace, name.table, limit_bytes, identifier)


#: Schemes that refer to the same storage.
_SAME_SCHEMES = {"s3a": "s3", "s3n": "s3", "abfs": "abfss", "gcs": "gs"}


def target_root(lake: Lakehouse, target: str | None, *definitions: LakehouseDef) -> str:
    """Return the normalized root of a target; empty if there is no target.

    Targets are checked before anything is recorded, because otherwise a record would remain if the first write to the
    target failed.

    Args:
        lake: The lakehouse that is exported or cloned.
        target: The target, as given by the caller.
        definitions: The definitions of the lakehouse in the relevant versions, which contain other roots in use.

    Raises:
        InvalidInputError: The target is the same as, is inside, or contains a root that the lakehouse reads or writes.
        InvalidLocationError: The target is not a root.
        StoragePermissionError: The target cannot contain a lakehouse.
    """
    if target is None:
        return ""
    root = normalize_root_uri(target)
    for used_root, description in _used_roots(lake, definitions):
        if _overlap(root, used_root):
            raise InvalidInputError(
                f"target {root!r} cannot be used: it is, is inside, or contains {description} {used_root!r}; choose"
                " another target"
            )
    for definition in definitions:
        for record in definition.exports:
            other = _normalize_root(record.target_uri)
            if other and _canonical(other) != _canonical(root) and _overlap(root, other):
                raise InvalidInputError(
                    f"target {root!r} cannot be used: it is inside, or contains the target {other!r} of"
                    f" {record.name!r}; choose another target"
                )
    check_can_hold(root)
    return root


def check_contains_no_source(root: str, sources: Iterable[str]) -> None:
    """Raise InvalidInputError if a file to copy is already below the target, for example below a former table root.

    Args:
        root: The target.
        sources: The URIs of the files to copy.
    """
    for source in sources:
        if _canonical(source).startswith(_canonical(root)):
            raise InvalidInputError(
                f"target {root!r} cannot be used: it contains {source!r}, a file that the export needs; choose"
                " another target"
            )


def _used_roots(lake: Lakehouse, definitions: Sequence[LakehouseDef]) -> Iterator[tuple[str, str]]:
    """Yield the roots that a lakehouse reads or writes, with a description of each root."""
    yield lake.root, "the lakehouse itself"
    names = lake.external_storages.names
    roots = [(root, "its table root") for root in names.table_roots]
    roots += [(root, "a lakehouse whose files it reads") for root in names.sources]
    for definition in definitions:
        roots.append((definition.table_root, "its table root"))
        roots += [(source.root, "a lakehouse whose files it reads") for source in definition.sources]
        if definition.parent is not None:
            roots.append((definition.parent.root, "its parent"))
    for recorded_root, description in roots:
        if root := _normalize_root(recorded_root):
            yield root, description


def _overlap(root: str, other: str) -> bool:
    """Whether one root is inside the other or both are the same, by their text or by their resolved folders."""
    if lies_within(root, other) or lies_within(other, root):
        return True
    first, second = _canonical(root), _canonical(other)
    return first.startswith(second) or second.startswith(first)


def _canonical(uri: str) -> str:
    """Return a URI with a canonical scheme and host; S3 and Azure have several spellings for one location."""
    scheme, separator, rest = uri.partition("://")
    host, slash, path = rest.partition("/")
    scheme = _SAME_SCHEMES.get(scheme.lower(), scheme.lower())
    return f"{scheme}{separator}{host.lower()}{slash}{path}"


def _normalize_root(root: str) -> str:
    """Normalize a root that a lakehouse file contains; empty if the text is empty or is not a root."""
    try:
        return normalize_root_uri(root) if root else ""
    except InvalidLocationError:
        return ""
