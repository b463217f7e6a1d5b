"""Select the files that a promotion copies: definitions, and table files below the clone's root."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyiceberg.manifest import DataFile

from trinitylake_ops._lazy import cached_attribute
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.format.definitions import TableDef
from trinitylake_ops.format.file_names import table_prefix
from trinitylake_ops.format.keys import ObjectName
from trinitylake_ops.format.locations import is_uri, to_location, to_uri
from trinitylake_ops.iceberg.copy import REWRITTEN, FileCopy, TableCopy, TableFileMap, copied_definition
from trinitylake_ops.iceberg.io.file_io import reading_io
from trinitylake_ops.iceberg.reach import FileKind, files_of
from trinitylake_ops.operations.clones.clone_records import records_of_clone
from trinitylake_ops.operations.clones.compare import MergeInputs, promoted_path
from trinitylake_ops.operations.gc.table_files import iceberg_metadata
from trinitylake_ops.operations.transfer.selection import Selection
from trinitylake_ops.storage.parallel import run_parallel


def copied_files(
    sides: MergeInputs, promotion_id: str, table_id: str, existing: Mapping[str, str] | None = None
) -> TableFileMap:
    """Return the mapping from a table's files in the clone to their copies in the parent.

    Args:
        sides: The clone and its parent.
        promotion_id: The id of the promotion.
        table_id: The id of the table.
        existing: Files that the parent already has: path in the clone -> path in the parent.
    """
    root = sides.lake.root
    folder = _folder(promotion_id)
    return TableFileMap(table_id, sides.clone.lake.root, root, folder=folder, kept_root=root, existing=existing or {})


class PromotionSelector:
    """Select the files that a promotion copies, under names that no earlier attempt used."""

    def __init__(self, sides: MergeInputs, promotion_id: str):
        self._sides = sides
        self._id = promotion_id
        self._io = sides.clone_io()
        self._parent_io = reading_io(sides.lake)
        self._limit_bytes = sides.latest.definition.file_path_max_size_bytes
        self._kept = [
            sides.lake.snapshot(record.version, latest=sides.latest)
            for record in records_of_clone(sides.latest.definition, sides.record.clone_id)
        ]

    def select(self, changes: Mapping[str, str | None]) -> tuple[Selection, dict[str, str | None]]:
        """Select the files to copy for changes.

        Args:
            changes: The URI of each changed definition by key; None for an object to drop.

        Returns:
            The files to copy, and the parent's new entries by key.

        Raises:
            InvalidInputError: A table cannot be promoted.
            CorruptFileError: A file cannot be read.
            StorageError: A storage request failed.
        """
        selection = Selection()
        entries: dict[str, str | None] = {}
        clone_objects: list[tuple[str, ObjectName, str]] = []
        for key, uri in sorted(changes.items()):
            name = self._sides.latest.keys.decode(key)
            assert name is not None, "objects of unknown type are not compared"
            if uri is None:
                entries[key] = None
            elif uri.startswith(self._sides.lake.root):
                entries[key] = self._existing_path(key, name, uri)
            else:
                clone_objects.append((key, name, to_location(self._sides.clone.lake.root, uri)))
        tables = [(key, name, location) for key, name, location in clone_objects if name.table is not None]
        for key, name, location in clone_objects:
            if name.table is None:
                entries[key] = self._definition(selection, key, name, location, None)
        copies = run_parallel(self._table, tables, self._sides.clone.lake.storage.concurrency)
        for (key, name, location), (changed, copy) in zip(tables, copies, strict=True):
            entries[key] = self._definition(selection, key, name, location, changed)
            selection.tables += [] if copy is None else [copy]
        return selection, entries

    def appended(self, table_id: str, files: Sequence[DataFile]) -> TableCopy:
        """Return the data file copies to make for a table to which both sides appended.

        Args:
            table_id: The id of the table.
            files: The data files that the clone appended.
        """
        file_map, copies = copied_files(self._sides, self._id, table_id), []
        for file in files:
            location = self._io.location(file.file_path)
            if not file_map.keeps(location):
                copies.append(FileCopy(FileKind.DATA, location, file_map.path(location), file.file_size_in_bytes))
        return TableCopy(file_map, tuple(copies))

    def _existing_path(self, key: str, name: ObjectName, uri: str) -> str:
        """Return the path of a definition in the parent, which must be in a version that is kept for the clone."""
        path = to_location(self._sides.lake.root, uri)
        if path not in [snapshot.entry(key) for snapshot in self._kept]:
            raise InvalidInputError(
                f"{name} cannot be promoted: the clone refers to {path!r} of its parent, which is in no version kept"
                " for the clone; change the object in the clone, or leave it out",
                path=path,
            )
        return path

    def _definition(
        self, selection: Selection, key: str, name: ObjectName, location: str, changed: TableDef | None
    ) -> str:
        if is_uri(location):
            raise InvalidInputError(
                f"{name} cannot be promoted: its definition {location!r} is in another lakehouse; leave it out"
            )
        target = promoted_path(name, key, self._id, self._limit_bytes)
        selection.add_definition(location, target, changed)
        return target

    def _table(self, table: tuple[str, ObjectName, str]) -> tuple[TableDef | None, TableCopy | None]:
        """Return the definition that the parent needs, or None if it is the clone's, and the files to copy."""
        key, name, location = table
        definition = self._sides.clone.lake.files.definitions.table(location)
        metadata = iceberg_metadata(definition)
        clone_root, root = self._sides.clone.lake.root, self._sides.lake.root
        if not metadata:
            self._check_without_files(name, definition)
            return None, None
        if not definition.is_managed:
            return copied_definition(definition, to_uri(clone_root, metadata)), None
        file_map = copied_files(self._sides, self._id, definition.id, self._existing_copies(key, definition))
        metadata_location = self._io.location(to_uri(clone_root, metadata))
        if file_map.keeps(metadata_location):  # the clone changed only the definition
            self._check_kept(key, name, definition, to_location(root, metadata_location))
            return copied_definition(definition, to_location(root, metadata_location)), None
        copy = TableCopy.of(definition, self._io, file_map)
        return copied_definition(definition, copy.metadata_location(definition, self._io)), copy

    @cached_attribute
    def _missing_keys(self) -> list[str]:
        """The keys of tables that do not exist in the clone because they were dropped or renamed."""
        return [state.key for state in self._sides.states if state.name.table and state.base and state.clone is None]

    def _check_kept(self, key: str, name: ObjectName, definition: TableDef, metadata: str) -> None:
        """Raise InvalidInputError unless the table had this metadata in a version that is kept for the clone.

        In that version, the table may have had another name that does not exist in the clone.
        """
        for snapshot in self._kept:
            for entry in filter(None, map(snapshot.entry, [key, *self._missing_keys])):
                kept_definition = snapshot.table_at(entry)
                kept_metadata = iceberg_metadata(kept_definition)
                if not kept_metadata or kept_definition.id != definition.id:
                    continue
                if to_location(self._sides.lake.root, kept_metadata) == metadata:
                    return
        raise InvalidInputError(
            f"table {name} cannot be promoted: the clone refers to the metadata {metadata!r} of its parent, which is in"
            " no version kept for the clone; rewrite the table in the clone, or leave it out",
            path=metadata,
        )

    def _existing_copies(self, key: str, definition: TableDef) -> dict[str, str]:
        """Return the data files of a table that earlier promotions copied: path in the clone -> path in the parent.

        The parent's table and the version on which the promotion is committed refer to these files. Their names contain
        a UUID, so files with the same name are identical.
        """
        entry = self._sides.latest.entry(key) if self._sides.record.promotions else None
        if entry is None:
            return {}
        existing = self._sides.latest.table_at(entry)
        prefix = table_prefix(definition.id)
        if existing.id != definition.id or not existing.is_managed or not iceberg_metadata(existing):
            return {}
        files = files_of(existing, self._parent_io)
        paths = [file.location for file in files if file.live and file.kind not in REWRITTEN]
        folders = [f"{prefix}{_folder(promotion.id)}" for promotion in self._sides.record.promotions]
        return {
            f"{prefix}{path.removeprefix(folder)}": path
            for folder in folders
            for path in paths
            if path.startswith(folder)
        }

    def _check_without_files(self, name: ObjectName, definition: TableDef) -> None:
        """Raise InvalidInputError for a table in another format with files in the clone, as its paths are unknown."""
        if definition.is_iceberg or not definition.is_managed:
            return
        if any(True for _ in self._sides.clone.lake.storage.list(table_prefix(definition.id))):
            raise InvalidInputError(
                f"table {name} of format {definition.table_format!r} cannot be promoted: only files of Iceberg tables"
                " can be copied; leave it out"
            )


def _folder(promotion_id: str) -> str:
    """Return the folder within a table folder for the files that a promotion copies."""
    return f"promote-{promotion_id}/"
