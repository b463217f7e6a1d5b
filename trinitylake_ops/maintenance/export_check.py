"""Checking that the copies of an export are what its manifest says."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from trinitylake_ops.errors import ExportNotFoundError, FileMissingError, InvalidInputError
from trinitylake_ops.format.definitions import ExportState
from trinitylake_ops.maintenance.export_manifest import CopiedFile, read_manifest
from trinitylake_ops.maintenance.export_records import record_of
from trinitylake_ops.maintenance.report import Cost, Document, MeteredLakehouse, new_table
from trinitylake_ops.maintenance.survey import Progress, no_progress
from trinitylake_ops.storage import Storage, open_storage
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.transaction.lakehouse import Lakehouse, options_for

_BATCH = 256


@dataclass(frozen=True, kw_only=True)
class ExportCheck(Document):
    """What became of the copies of an export: ``missing`` are gone, ``changed`` are not what was copied.

    Both hold paths under ``root``. Without ``deep`` only sizes were looked at, not checksums.
    """

    name: str
    root: str
    files: int
    bytes: int
    deep: bool
    missing: tuple[str, ...]
    changed: tuple[str, ...]
    cost: Cost

    @property
    def is_clean(self) -> bool:
        """Whether all copies are there and as they were."""
        return not self.missing and not self.changed

    def table(self) -> Table:
        """Return one row for each copy that is not as it was."""
        how = "sizes and checksums" if self.deep else "sizes"
        title = (
            f"Export {self.name}: {'all' if self.is_clean else 'not all'} of {self.files} copies at {self.root} are as"
            f" they were, by their {how}; {self.cost.total_requests} requests"
        )
        rows = [("missing", path) for path in self.missing] + [("changed", path) for path in self.changed]
        return new_table(title, "what", "path", rows=rows)


def verify_export(
    lake: Lakehouse,
    name: str,
    *,
    deep: bool = False,
    target_options: Mapping[str, str] | None = None,
    progress: Progress = no_progress,
) -> ExportCheck:
    """Compare the copies of an export with its manifest: sizes, and with ``deep`` checksums; reads only.

    Of an export into a lakehouse that earlier ones had made, these are the files that it added; verify checks that
    lakehouse whole. Raises ExportNotFoundError, InvalidInputError for one that is not complete or has no manifest,
    CorruptFileError, StorageError.
    """
    metered = MeteredLakehouse(lake)
    definition = metered.lake.snapshot().definition
    record = record_of(definition, name)
    if record is None and name not in definition.exported_snapshots:
        raise ExportNotFoundError(f"there is no export {name!r}")
    if record is None or not record.manifest_path:
        raise InvalidInputError(f"export {name!r} was recorded by another program, without a manifest to compare with")
    if record.state != ExportState.COMPLETE:
        raise InvalidInputError(f"export {name!r} was cut off; export it again to finish it, or drop it")
    copies = read_manifest(metered.lake.storage, record.manifest_path)
    storage = metered.lake.storage
    if record.target_uri:
        options = target_options if target_options is not None else options_for(lake, record.target_uri)
        storage = metered.also(open_storage(record.target_uri, options))
    there = {info.path: info.size_bytes for info in storage.list()}
    missing = [copy for copy in copies if copy.target not in there]
    changed = [copy for copy in copies if there.get(copy.target, copy.size_bytes) != copy.size_bytes]
    if deep:
        same = [copy for copy in copies if there.get(copy.target) == copy.size_bytes]
        changed += _with_other_checksums(storage, same, progress)
    return ExportCheck(
        name=name,
        root=storage.root,
        files=len(copies),
        bytes=sum(copy.size_bytes for copy in copies),
        deep=deep,
        missing=tuple(sorted(copy.target for copy in missing)),
        changed=tuple(sorted(copy.target for copy in changed)),
        cost=metered.cost(),
    )


def _with_other_checksums(storage: Storage, copies: Sequence[CopiedFile], progress: Progress) -> list[CopiedFile]:
    def is_other(copy: CopiedFile) -> bool:
        try:
            return hashlib.sha256(storage.read(copy.target)).hexdigest() != copy.sha256
        except FileMissingError:
            return True  # deleted since the list

    found = []
    for start in range(0, len(copies), _BATCH):
        batch = copies[start : start + _BATCH]
        others = run_parallel(is_other, batch, storage.concurrency)
        found += [copy for copy, other in zip(batch, others, strict=True) if other]
        progress("compared", start + len(batch), len(copies))
    return found
