"""The plan file of an expiration, which lists the files that a purge of the expired versions may delete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trinitylake_ops.errors import CorruptFileError
from trinitylake_ops.format.checksums import MAX_FILE_LIST_BYTES
from trinitylake_ops.format.definitions import ExpirationBatch
from trinitylake_ops.format.file_names import new_plan_path
from trinitylake_ops.format.sealed_files import decode_sealed_json, encode_sealed_json
from trinitylake_ops.operations.base import timed_digest
from trinitylake_ops.storage import Storage
from trinitylake_ops.storage.conditional_create import create_fresh


@dataclass(frozen=True)
class PlanFile:
    """The versions and exports of an expiration, and the files that only they reached, with sizes in bytes."""

    operation: str
    base_version: int
    now_ms: int
    versions: str
    exports: tuple[str, ...]
    sizes_bytes: Mapping[str, int]

    @property
    def digest(self) -> str:
        """Return the digest of the content."""
        files = sorted(self.sizes_bytes.items())
        return timed_digest(self.base_version, self.now_ms, self.operation, self.versions, list(self.exports), files)

    def to_bytes(self, path: str) -> bytes:
        """Encode the plan as JSON. The checksum covers the path as well."""
        content = {
            "operation": self.operation,
            "base_version": self.base_version,
            "now_ms": self.now_ms,
            "versions": self.versions,
            "exports": list(self.exports),
            "files": sorted(self.sizes_bytes.items()),
        }
        return encode_sealed_json(content, path)

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> PlanFile:
        """Decode a plan file.

        Args:
            data: The content of the file.
            path: The path of the file, which its checksum covers.

        Raises:
            CorruptFileError: The file is not a plan file.
        """
        try:
            content = decode_sealed_json(data, path)
            return cls(
                content["operation"],
                content["base_version"],
                content["now_ms"],
                content["versions"],
                tuple(content["exports"]),
                {str(file): int(size_bytes) for file, size_bytes in content["files"]},
            )
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise CorruptFileError(f"{path!r} is not a plan file", path=path) from error


def write_plan_file(storage: Storage, plan: PlanFile) -> str:
    """Write a plan under a new name, and return its path.

    Args:
        storage: The storage of the lakehouse.
        plan: The plan.

    Raises:
        StorageError: A storage request failed.
    """
    path = new_plan_path()
    create_fresh(storage, {path: plan.to_bytes(path)})
    return path


def read_plan_file(storage: Storage, batch: ExpirationBatch) -> PlanFile:
    """Read the plan of a batch.

    Args:
        storage: The storage of the lakehouse.
        batch: The batch.

    Raises:
        CorruptFileError: The file is not the recorded plan.
        StorageError: A storage request failed.
    """
    plan = PlanFile.from_bytes(storage.read(batch.plan_path, limit_bytes=MAX_FILE_LIST_BYTES), batch.plan_path)
    if plan.digest != batch.digest:
        raise CorruptFileError(
            f"{batch.plan_path!r} is not the plan that expired versions {batch.versions}", path=batch.plan_path
        )
    return plan
