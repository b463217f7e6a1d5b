"""The metadata table ``exports``: the lakehouse's records of its exports, read in one task."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trinitylake_ops.maintenance.state.export_records import list_exports
from trinitylake_ops.spark_jobs.metadata.columns import METADATA_TABLES, Condition, Row
from trinitylake_ops.spark_jobs.metadata.pinned_snapshot import PinnedSnapshot


@dataclass(frozen=True, slots=True)
class Exports:
    """All exports, complete or not, as they are when they are read."""

    latest: PinnedSnapshot

    def limited(self, conditions: Sequence[Condition]) -> Exports:
        return self

    def partitions(self) -> list[None]:
        return [None]

    def rows(self, partition: None) -> Iterator[Row]:
        for info in list_exports(self.latest.lakehouse()):
            row = dataclasses.asdict(info)
            yield tuple(row[column] for column in METADATA_TABLES["exports"])
