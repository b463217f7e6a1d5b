"""The report of an export, and cleanup after a failed export."""

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

#: Errors that another run would raise again.
_PERMANENT_ERRORS = (InvalidInputError, CorruptFileError, FileMissingError, LocationNotAllowedError)
_MAX_NAMES = 10


@dataclass(frozen=True, kw_only=True)
class ExportReport(Document):
    """The result of an export, and the files that this run copied."""

    #: The name of the export.
    name: str
    #: The exported version.
    version: int
    #: "minimal", "partial" or "full".
    level: str
    #: The location of the exported root.
    location: str
    #: The path of the manifest.
    manifest_path: str
    #: The source version that records the export as complete.
    committed_version: int
    #: The version committed at another root; None within the lakehouse.
    target_version: int | None
    #: The number of files of the export.
    files: int
    #: The number of files that this run copied.
    copied_files: int
    #: The bytes that this run copied.
    copied_bytes: int
    #: Whether this run resumed an interrupted export.
    resumed: bool
    #: Registered tables whose files a full export does not copy, because another catalog keeps them.
    registered: tuple[str, ...]
    #: Tables that the export lacks because some of their files cannot be read, with the reason.
    damaged: Mapping[str, str]
    #: The requests and time that the export took.
    cost: Cost

    @property
    def is_complete(self) -> bool:
        """Whether the export contains all selected tables."""
        return not self.damaged

    def table(self) -> Table:
        """Return one row for the export."""
        row = (self.name, self.version, self.level, self.location, self.files, self.copied_files, self.copied_bytes)
        columns = ("name", "version", "level", "root", "files", "files copied", "bytes copied")
        title = f"Export{uncopied_note(self.registered)}{left_out(self.damaged)}"
        return new_table(title, *columns, rows=[row])


def uncopied_note(registered: Sequence[str]) -> str:
    """Return a note about registered tables, whose files a full export does not copy. Empty if there are none."""
    if not registered:
        return ""
    names = ", ".join(registered[:_MAX_NAMES]) + (
        f" and {len(registered) - _MAX_NAMES} more" if registered[_MAX_NAMES:] else ""
    )
    return f"; registered tables, whose files are kept by their own catalogs and not copied: {names}"


def left_out(damaged: Mapping[str, str]) -> str:
    """Return the part of a title that names the damaged tables that an export lacks. Empty if there are none."""
    if not damaged:
        return ""
    return (
        f"; incomplete, without damaged tables: {', '.join(list(damaged)[:_MAX_NAMES])}: {next(iter(damaged.values()))}"
    )


def reasons(damaged: Mapping[str, TrinityLakeError]) -> dict[str, str]:
    """Return the messages of errors, sorted by table name."""
    return {name: error.message for name, error in sorted(damaged.items())}


def after_failure(lake: Lakehouse, record: ExportRecord, error: TrinityLakeError, *, resumed: bool) -> TrinityLakeError:
    """Clean up after a failed export, and return the error to raise.

    The first run of an export drops its record if another run would fail in the same way, so that the export does not
    keep its version. Otherwise the message of the error says that the version remains kept.

    Args:
        lake: The lakehouse that records the export.
        record: The record of the export.
        error: The error of the run.
        resumed: Whether the run resumed an interrupted export.
    """
    failed = copy.copy(error)
    if isinstance(error, CommitOutcomeUnknownError):
        return failed  # the export may be complete
    if not resumed and isinstance(error, _PERMANENT_ERRORS):
        try:
            check_copying(lake.snapshot(), record)
            drop_exports(lake, [record.name])
        except TrinityLakeError as drop_error:
            logger.warning("could not drop the failed export %s: %s", record.name, drop_error)
        else:
            return failed
    failed.message = (
        f"{error.message}; export {record.name!r} is incomplete and keeps version {record.version} until it is run"
        " again or dropped"
    )
    return failed


def clean_up_if_dropped(lake: Lakehouse, record: ExportRecord) -> None:
    """Delete the root and the manifest of an export that was dropped during the run, and raise an error.

    An orphan removal later deletes the other copies.

    Args:
        lake: The lakehouse that records the export.
        record: The record with which the run began.

    Raises:
        ExportNotFoundError: The export was dropped.
        StorageError: A storage request failed.
    """
    latest = lake.snapshot()
    try:
        check_copying(latest, record)
    except ExportNotFoundError:
        delete_operation_files(lake.storage, [path for path in (record.root_location, record.manifest_path) if path])
        raise
