"""Checks that the copies of an export are what its manifest says."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Mapping, Sequence
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

_BATCH = 256


@dataclass(frozen=True, kw_only=True)
class ExportCheck(Document):
    """The state of an export's files. ``missing`` files are gone, and ``changed`` ones differ from the manifest.

    Both hold paths under ``root``. Without ``deep`` only sizes were compared, not checksums.
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
            f"Export {self.name}: {'all' if self.is_clean else 'not all'} of {self.files} files at {self.root} are as"
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
    """Compare the files of an export with its manifest: sizes, and with ``deep`` checksums. Only reads.

    For an export at another root, these are all files that its version needs there. Checksums are known for its own
    copies; verify checks that lakehouse as a whole. Raises ExportNotFoundError, CorruptFileError, StorageError. Raises
    InvalidInputError for an export that is not complete, has no manifest, or whose place another lakehouse has taken.
    Raises VersionExpiredError if the other lakehouse's version expired.
    """
    with operation_span("verify-export"):
        metered = MeteredLakehouse(lake)
        definition = metered.lake.snapshot().definition
        record = record_of(definition, name)
        if record is None and name not in definition.exported_snapshots:
            raise ExportNotFoundError(f"there is no export {name!r}")
        check_no_clone(record)
        if record is None or not record.manifest_path:
            raise InvalidInputError(
                f"export {name!r} was recorded by another program, without a manifest to compare with"
            )
        if record.state != ExportState.COMPLETE:
            raise InvalidInputError(f"export {name!r} was cut off; export it again to finish it, or drop it")
        copies = read_manifest(metered.lake.storage, record.manifest_path)
        storage, options = metered.lake.storage, lake.storage_options
        if record.target_uri:
            if target_options is None:  # otherwise the caller knows the target
                lake.external_storages.allowed_roots.check_root(record.target_uri)
            options = StorageOptions(
                target_options if target_options is not None else options_for(lake, record.target_uri)
            )
            storage = metered.also(open_storage(record.target_uri, options))
        there = {info.path: info.size_bytes for info in storage.list()}
        io = reading_io(metered.lake)
        beyond = [copy.target for copy in copies if is_uri(copy.target)]  # below the table root
        sizes = run_parallel(io.size_bytes, beyond, storage.concurrency)
        there |= {uri: size for uri, size in zip(beyond, sizes, strict=True) if size is not None}
        sizes_bytes: dict[str, int | None] = {copy.target: copy.size_bytes for copy in copies}
        damaged: set[str] = set()
        if record.target_uri:
            other = uncached_on(storage, options)
            other.external_storages.register_storage(metered.lake.storage)  # for files that were not copied
            needed, damaged = _needed_at_target(metered.lake, other, record, there)
            copies = [copy for copy in copies if copy.target in needed]
            sizes_bytes = {path: sizes_bytes.get(path, size) for path, size in needed.items()}
        changed = damaged | {path for path, size in sizes_bytes.items() if size not in (None, there.get(path, size))}
        if deep:
            same = [copy for copy in copies if there.get(copy.target) == copy.size_bytes]
            changed |= {copy.target for copy in _with_other_checksums(storage, io, same, progress)}
        return ExportCheck(
            name=name,
            root=storage.root,
            files=len(sizes_bytes),
            bytes=sum(there.get(path, 0) for path in sizes_bytes),
            deep=deep,
            missing=tuple(sorted(sizes_bytes.keys() - there.keys())),
            changed=tuple(sorted(changed)),
            cost=metered.cost(),
        )


def _needed_at_target(
    lake: Lakehouse, other: Lakehouse, record: ExportRecord, there: Container[str]
) -> tuple[dict[str, int | None], set[str]]:
    """Return the files that an export's version at another root needs there, and those that cannot be read.

    Sizes in bytes are those in table metadata, else None. If a file is missing or unreadable, the files that it names
    may be missing here.
    """
    path = to_location(other.root, record.root_location)
    needed: dict[str, int | None] = {path: None}
    if path not in there:
        return needed, set()
    version = parse_root_path(path)
    assert version is not None, "the root of a version was recorded"
    exported = other.snapshot(version)
    check_is_export_of(exported, lake.snapshot(), record.name)
    reach = CatalogReach(other.files, skips_damaged=True)
    reach.add([SurveyedRoot.of(version, exported.root, path, located(other.root))])
    needed.update(dict.fromkeys(one for one in (*reach.nodes, *reach.tables, *reach.others) if not is_uri(one)))
    io = reading_io(other, [lake.storage])
    damaged: set[str] = set()

    def add_files(location: str) -> None:
        try:
            definition = other.files.definitions.table(location)
            metadata = iceberg_metadata(definition)
            if definition.is_managed and metadata and not is_uri(to_location(other.root, metadata)):
                live = [file for file in files_of(definition, io) if file.live]
                needed.update((file.location, file.size_bytes) for file in live if not is_uri(file.location))
        except FileMissingError as error:
            needed[to_location(other.root, error.path or location)] = None
        except (CorruptFileError, LocationNotAllowedError) as error:
            damaged.add(to_location(other.root, error.path or location))

    run_parallel(add_files, sorted(one for one in reach.tables if one in there), other.storage.concurrency)
    return needed, damaged


def _sha256(storage: Storage, path: str) -> str:
    """Return the checksum of a file, which is read piece by piece, as a data file may be large."""
    hashed, offset = hashlib.sha256(), 0
    while True:
        piece = storage.read(path, offset=offset, length=PIECE_BYTES)
        hashed.update(piece)
        offset += len(piece)
        if len(piece) < PIECE_BYTES:
            return hashed.hexdigest()


def _with_other_checksums(
    storage: Storage, io: StorageFileIO, copies: Sequence[CopiedFile], progress: Progress
) -> list[CopiedFile]:
    """Return the copies with another content. Those beyond the root, by their URIs, are read by ``io``."""

    def is_other(copy: CopiedFile) -> bool:
        try:
            describe_lease, path = io.resolve(copy.target) if is_uri(copy.target) else (storage, copy.target)
            return _sha256(describe_lease, path) != copy.sha256
        except FileMissingError:
            return True  # deleted since the list

    found = []
    for start in range(0, len(copies), _BATCH):
        batch = copies[start : start + _BATCH]
        others = run_parallel(is_other, batch, storage.concurrency)
        found += [copy for copy, other in zip(batch, others, strict=True) if other]
        progress("compared", start + len(batch), len(copies))
    return found
