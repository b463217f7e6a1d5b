"""Verify the copies of an export against its manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trinitylake_ops.errors import (
    CorruptFileError,
    ExportNotFoundError,
    FileMissingError,
    InvalidInputError,
    LocationNotAllowedError,
)
from trinitylake_ops.format.definitions import ExportRecord, ExportState
from trinitylake_ops.format.file_names import parse_root_path
from trinitylake_ops.format.locations import is_uri, located, to_location
from trinitylake_ops.iceberg.io.file_io import StorageFileIO, reading_io
from trinitylake_ops.iceberg.reach import files_of
from trinitylake_ops.operations.base import Cost, MeteredLakehouse, operation_span, uncached_on
from trinitylake_ops.operations.export_records import CopiedFile, check_no_clone, read_manifest, record_of
from trinitylake_ops.operations.exports.roots import check_is_export_of
from trinitylake_ops.operations.gc.mark import CatalogReach
from trinitylake_ops.operations.gc.survey import Progress, SurveyedRoot, no_progress
from trinitylake_ops.operations.gc.table_files import iceberg_metadata
from trinitylake_ops.operations.rendering import Document, Table, new_table
from trinitylake_ops.operations.verification.storage import PIECE_BYTES
from trinitylake_ops.storage import Storage, open_storage
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.transaction.lakehouse import Lakehouse, options_for

#: The number of files compared between two calls of ``progress``.
_BATCH_FILES = 256


@dataclass(frozen=True, kw_only=True)
class ExportCheck(Document):
    """The state of the files of an export."""

    #: The name of the export.
    name: str
    #: The root under which the copies are.
    root: str
    #: The number of files that the export needs under ``root``.
    files: int
    #: The total size of these files.
    bytes: int
    #: Whether checksums were compared, not only sizes.
    deep: bool
    #: Paths under ``root`` of files that do not exist.
    missing: tuple[str, ...]
    #: Paths under ``root`` of files that differ from the manifest or cannot be read.
    changed: tuple[str, ...]
    #: The requests and time that the check took.
    cost: Cost

    @property
    def is_clean(self) -> bool:
        """Whether all copies exist and match the manifest."""
        return not self.missing and not self.changed

    def table(self) -> Table:
        """Return one row for each copy that is missing or changed."""
        compared = "sizes and checksums" if self.deep else "sizes"
        title = (
            f"Export {self.name}: {self.files} files at {self.root}, {len(self.missing)} missing, {len(self.changed)}"
            f" changed; {compared} compared, {self.cost.total_requests} requests"
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
    """Compare the files of an export with its manifest, without writing anything.

    For an export at another root, these are all files that the exported version needs there. The manifest contains
    checksums only for files that this export copied; run ``verify`` on that lakehouse to check everything.

    Args:
        lake: The lakehouse that records the export.
        name: The name of the export.
        deep: Also compare SHA-256 checksums. By default only sizes are compared.
        target_options: Options of the storage of an export at another root; None to derive them from the options of the
            lakehouse.
        progress: Called with the number of files compared so far.

    Raises:
        ExportNotFoundError: The export does not exist.
        InvalidInputError: The export is incomplete, has no manifest, is a clone, or another lakehouse now uses its
            root.
        VersionExpiredError: The version at the other root has expired.
        CorruptFileError: The manifest, or the lakehouse at the other root, cannot be read.
        StorageError: A storage request failed.
    """
    with operation_span("verify-export"):
        metered = MeteredLakehouse(lake)
        definition = metered.lake.snapshot().definition
        record = record_of(definition, name)
        if record is None and name not in definition.exported_snapshots:
            raise ExportNotFoundError(f"export {name!r} does not exist")
        check_no_clone(record)
        if record is None or not record.manifest_path:
            raise InvalidInputError(
                f"export {name!r} cannot be verified: another program recorded it without a manifest"
            )
        if record.state != ExportState.COMPLETE:
            raise InvalidInputError(f"export {name!r} is incomplete; export it again to finish it, or drop it")
        copies = read_manifest(metered.lake.storage, record.manifest_path)
        storage, options = metered.lake.storage, lake.storage_options
        if record.target_uri:
            if target_options is None:  # explicit options mean that the caller trusts the target
                lake.external_storages.allowed_roots.check_root(record.target_uri)
            options = StorageOptions(
                target_options if target_options is not None else options_for(lake, record.target_uri)
            )
            storage = metered.meter(open_storage(record.target_uri, options))
        present = {info.path: info.size_bytes for info in storage.list()}
        io = reading_io(metered.lake)
        external = [copy.target for copy in copies if is_uri(copy.target)]  # below the table root
        external_sizes = run_parallel(io.size_bytes, external, storage.concurrency)
        present |= {uri: size for uri, size in zip(external, external_sizes, strict=True) if size is not None}
        expected: dict[str, int | None] = {copy.target: copy.size_bytes for copy in copies}
        damaged: set[str] = set()
        if record.target_uri:
            target = uncached_on(storage, options)
            target.external_storages.register_storage(metered.lake.storage)  # for files that were not copied
            needed, damaged = _needed_at_target(metered.lake, target, record, present)
            copies = [copy for copy in copies if copy.target in needed]
            expected = {path: expected.get(path, size) for path, size in needed.items()}
        changed = damaged | {path for path, size in expected.items() if size not in (None, present.get(path, size))}
        if deep:
            same_size = [copy for copy in copies if present.get(copy.target) == copy.size_bytes]
            changed |= {copy.target for copy in _with_different_checksums(storage, io, same_size, progress)}
        return ExportCheck(
            name=name,
            root=storage.root,
            files=len(expected),
            bytes=sum(present.get(path, 0) for path in expected),
            deep=deep,
            missing=tuple(sorted(expected.keys() - present.keys())),
            changed=tuple(sorted(changed)),
            cost=metered.cost(),
        )


def _needed_at_target(
    lake: Lakehouse, target: Lakehouse, record: ExportRecord, present: Mapping[str, int]
) -> tuple[dict[str, int | None], set[str]]:
    """Return the files that an export at another root needs there, and the files that cannot be read.

    Sizes in bytes come from table metadata; a size that is not recorded there is None. If a file is missing or
    unreadable, the files that it refers to may be absent from the result.
    """
    path = to_location(target.root, record.root_location)
    needed: dict[str, int | None] = {path: None}
    if path not in present:
        return needed, set()
    version = parse_root_path(path)
    assert version is not None, "the root of a version was recorded"
    exported = target.snapshot(version)
    check_is_export_of(exported, lake.snapshot(), record.name)
    reach = CatalogReach(target.files, skips_damaged=True)
    reach.add([SurveyedRoot.of(version, exported.root, path, located(target.root))])
    locations = (*reach.nodes, *reach.tables, *reach.others)
    needed.update(dict.fromkeys(location for location in locations if not is_uri(location)))
    io = reading_io(target, [lake.storage])
    damaged: set[str] = set()

    def add_files(location: str) -> None:
        try:
            definition = target.files.definitions.table(location)
            metadata = iceberg_metadata(definition)
            if definition.is_managed and metadata and not is_uri(to_location(target.root, metadata)):
                live = [file for file in files_of(definition, io) if file.live]
                needed.update((file.location, file.size_bytes) for file in live if not is_uri(file.location))
        except FileMissingError as error:
            needed[to_location(target.root, error.path or location)] = None
        except (CorruptFileError, LocationNotAllowedError) as error:
            damaged.add(to_location(target.root, error.path or location))

    run_parallel(add_files, sorted(reach.tables & present.keys()), target.storage.concurrency)
    return needed, damaged


def _sha256(storage: Storage, path: str) -> str:
    """Return the SHA-256 of a file, reading it in pieces because data files can be large."""
    sha256, offset = hashlib.sha256(), 0
    while True:
        piece = storage.read(path, offset=offset, length=PIECE_BYTES)
        sha256.update(piece)
        offset += len(piece)
        if len(piece) < PIECE_BYTES:
            return sha256.hexdigest()


def _with_different_checksums(
    storage: Storage, io: StorageFileIO, copies: Sequence[CopiedFile], progress: Progress
) -> list[CopiedFile]:
    """Return the copies whose content differs. Copies outside the root, identified by URI, are read through ``io``."""

    def is_different(copy: CopiedFile) -> bool:
        try:
            copy_storage, path = io.resolve(copy.target) if is_uri(copy.target) else (storage, copy.target)
            return _sha256(copy_storage, path) != copy.sha256
        except FileMissingError:
            return True  # deleted since the listing

    different: list[CopiedFile] = []
    for start in range(0, len(copies), _BATCH_FILES):
        batch = copies[start : start + _BATCH_FILES]
        results = run_parallel(is_different, batch, storage.concurrency)
        different += [copy for copy, differs in zip(batch, results, strict=True) if differs]
        progress("compared", start + len(batch), len(copies))
    return different
