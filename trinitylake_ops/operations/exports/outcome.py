"""The report of an export, and what happens after one that failed."""

from __future__ import annotations

import copy
import logging
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
from trinitylake_ops.format.definitions import ExportRecord
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
