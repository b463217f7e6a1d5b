"""The destination of an export's files, and the outcome of an export."""

from __future__ import annotations

import copy
import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trinitylake_ops.errors import (
    CommitOutcomeUnknownError,
    CorruptFileError,
    ExportNotFoundError,
    FileMissingError,
    InvalidInputError,
    LocationNotAllowedError,
    TrinityLakeError,
)
from trinitylake_ops.format.checksums import name_identity
from trinitylake_ops.format.definitions import ExportLevel, ExportRecord
from trinitylake_ops.format.file_names import as_version_4, derived_uuid, new_namespace_path, new_table_path
from trinitylake_ops.format.keys import ObjectName
from trinitylake_ops.format.locations import is_uri, to_location, to_uri
from trinitylake_ops.operations.base import Cost
from trinitylake_ops.operations.export_records import check_copying
from trinitylake_ops.operations.exports.drop import drop_exports
from trinitylake_ops.operations.gc.delete import delete_operation_files
from trinitylake_ops.operations.rendering import Document, Table, new_table
from trinitylake_ops.transaction.lakehouse import Lakehouse

logger = logging.getLogger(__name__)

#: What a run that is made again would meet again.
_LASTING = (InvalidInputError, CorruptFileError, FileMissingError, LocationNotAllowedError)
_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class ExportReport(Document):
    """A finished export: its root's location, and the copies that this run sent.

    ``files`` are all its files. ``target_version`` is the version of the lakehouse at another root. ``registered``
    names tables whose files a full export did not copy, as another catalog keeps them. ``damaged`` are the tables that
    the export lacks, as their files cannot all be read, with the reason.
    """

    name: str
    version: int
    level: str
    location: str
    manifest_path: str
    committed_version: int
    target_version: int | None
    files: int
    copied_files: int
    copied_bytes: int
    resumed: bool
    registered: tuple[str, ...]
    damaged: Mapping[str, str]
    cost: Cost

    @property
    def is_complete(self) -> bool:
        """Whether the export has all tables that it was to have."""
        return not self.damaged

    def table(self) -> Table:
        """Return one row."""
        row = (self.name, self.version, self.level, self.location, self.files, self.copied_files, self.copied_bytes)
        columns = ("name", "version", "level", "root", "files", "files copied", "bytes copied")
        title = f"Export{uncopied_note(self.registered)}{left_out(self.damaged)}"
        return new_table(title, *columns, rows=[row])


def uncopied_note(registered: Sequence[str]) -> str:
    """Return what people have to know of tables whose files a full export does not copy, empty if there are none."""
    if not registered:
        return ""
    shown = ", ".join(registered[:_SHOWN]) + (f" and {len(registered) - _SHOWN} more" if registered[_SHOWN:] else "")
    return f"; registered tables, whose files stay with their own catalogs and are not copied: {shown}"


def left_out(damaged: Mapping[str, str]) -> str:
    """Return what a title adds about tables that an export lacks, empty if there are none."""
    if not damaged:
        return ""
    return f"; incomplete, without damaged tables: {', '.join(list(damaged)[:_SHOWN])}: {next(iter(damaged.values()))}"


def reasons(damaged: Mapping[str, TrinityLakeError]) -> dict[str, str]:
    """Return why an export lacks tables, by their names."""
    return {name: error.message for name, error in sorted(damaged.items())}


def after_failure(lake: Lakehouse, record: ExportRecord, error: TrinityLakeError, *, resumed: bool) -> TrinityLakeError:
    """Return the error of a failed export, which says that its version stays kept.

    A first run that would fail again in the same way is forgotten instead, so that it keeps nothing.
    """
    failed = copy.copy(error)
    if isinstance(error, CommitOutcomeUnknownError):
        return failed  # it may be complete
    if not resumed and isinstance(error, _LASTING):
        try:
            check_copying(lake.snapshot(), record)
            drop_exports(lake, [record.name])
        except TrinityLakeError as why:
            logger.warning("could not forget the failed export %s: %s", record.name, why)
        else:
            return failed
    failed.message = (
        f"{error.message}; export {record.name!r} is unfinished and keeps version {record.version} until it is run"
        " again or dropped"
    )
    return failed


def clean_up_if_dropped(lake: Lakehouse, record: ExportRecord) -> None:
    """Delete root and manifest of an export that was dropped meanwhile, and raise ExportNotFoundError for it.

    A removal of orphans deletes the other copies.
    """
    latest = lake.snapshot()
    try:
        check_copying(latest, record)
    except ExportNotFoundError:
        delete_operation_files(lake.storage, [path for path in (record.root_location, record.manifest_path) if path])
        raise


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
