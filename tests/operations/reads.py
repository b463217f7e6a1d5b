"""A storage that records reads."""

from __future__ import annotations

from trinitylake_ops.format.file_names import is_immutable_path
from trinitylake_ops.operations import DropNamespacePlan, PrunePlan
from trinitylake_ops.storage import Storage, StorageWrapper


class ReadPaths(StorageWrapper):
    """Records the path of each read, in order."""

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self.paths: list[str] = []

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        self.paths.append(path)
        return super().read(path, offset=offset, length=length, limit_bytes=limit_bytes)

    def immutable(self) -> list[str]:
        """Return the reads of nodes and definitions, which are cached."""
        return [path for path in self.paths if is_immutable_path(path)]

    def check_nothing_is_read_again(self, plan: DropNamespacePlan | PrunePlan) -> None:
        """Execute an approved plan, and check that it reads no node or definition that planning read."""
        plan_reads = set(self.immutable())
        assert plan_reads
        self.paths.clear()
        report = plan.execute(plan.digest)
        assert not plan_reads & set(self.immutable())
        assert report.cost.requests["read"] == len(self.paths)
