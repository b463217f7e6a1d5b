"""Where the copies of an export go, and under which names."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from trinitylake_ops.format.definitions import ExportLevel
from trinitylake_ops.format.file_identity import name_identity
from trinitylake_ops.format.file_names import as_version_4, derived_uuid, new_namespace_path, new_table_path
from trinitylake_ops.format.locations import is_uri, to_location, to_uri
from trinitylake_ops.format.nodes.keys import ObjectName

_RECOGNISED_GENERATIONS = 4


@dataclass(frozen=True, slots=True)
class Destination:
    """Where the copies go: ``seed`` and the name of what was copied make the names of copies.

    ``folder`` is that of table files, empty where they keep their paths. ``siblings`` are other names that the same
    copies may have there.
    """

    root: str
    seed: uuid.UUID
    folder: str
    siblings: tuple[Destination, ...] = ()

    @classmethod
    def same_root(cls, root: str, export_id: uuid.UUID) -> Destination:
        """Return names of their own for all copies of one export."""
        return cls(root, export_id, f"export-{export_id}/")

    @classmethod
    def other_root(cls, root: str, source_id: str, level: ExportLevel, generation: int = 0) -> Destination:
        """Return names that all exports of a lakehouse at a level share.

        Each generation has names of its own, for copies whose names of the ones before cannot be relied on. The
        first one knows those of the next ones.
        """
        seed = uuid.uuid5(uuid.NAMESPACE_URL, f"{source_id}/{level.name.lower()}")
        if generation:
            seed = uuid.uuid5(seed, f"generation {generation}")
            return cls(root, seed, f"export-{as_version_4(seed)}/")
        later = range(1, _RECOGNISED_GENERATIONS)
        return cls(root, seed, "", tuple(cls.other_root(root, source_id, level, number) for number in later))

    def definition_path(self, name: ObjectName, source: str, limit_bytes: int, *, is_changed: bool) -> str:
        """Return the path of the copy of a definition."""
        if not self.folder and not is_changed and not is_uri(source):
            return source
        return _definition_path(name, limit_bytes, derived_uuid(self.seed, source))

    def is_copy(self, found: str, name: ObjectName, source: str, limit_bytes: int) -> bool:
        """Whether a location is that of a copy of a definition, under any of the names that it may have."""
        copies = [
            names.definition_path(name, source, limit_bytes, is_changed=is_changed)
            for names in (self, *self.siblings)
            for is_changed in (False, True)
        ]
        # Earlier exports into the same target made names of version 5.
        copies += [
            _definition_path(name, limit_bytes, uuid.uuid5(names.seed, source)) for names in (self, *self.siblings)
        ]
        return name_identity(found) in map(name_identity, copies)

    def pointer(self, source_root: str, location: str) -> str:
        """Return how the tree of the export points to what is not copied."""
        return to_location(self.root, to_uri(source_root, location))


def _definition_path(name: ObjectName, limit_bytes: int, identifier: uuid.UUID) -> str:
    if name.table is None:
        return new_namespace_path(name.namespace, limit_bytes, identifier)
    return new_table_path(name.namespace, name.table, limit_bytes, identifier)
