"""Lineage of publications as OpenLineage events, by its own client library: from which tables which others were made.

Events go where OpenLineage's own variables say (``OPENLINEAGE_URL``, ``OPENLINEAGE_CONFIG``,
``OPENLINEAGE__TRANSPORT__...``). Without one of them nothing is made or sent. Needs the extra ``lineage``.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version as package_version
from typing import TYPE_CHECKING

from trinitylake_ops.extras import needs

if TYPE_CHECKING:
    from openlineage.client.event_v2 import InputDataset, OutputDataset, RunEvent

logger = logging.getLogger(__name__)

#: A URI, as OpenLineage wants it, of no place.
_PRODUCER = "urn:trinitylake:trinitylake-ops"
_NAMES = ("OPENLINEAGE_URL", "OPENLINEAGE_CONFIG")
_PREFIX, _DISABLED = "OPENLINEAGE__TRANSPORT", "OPENLINEAGE_DISABLED"
_RUNS = uuid.UUID("b6f0f2d3-6a1d-4d0f-9b41-0f2c6de3f8a5")


@dataclass(frozen=True, slots=True)
class Origin:
    """The job that published: its name, the program that ran it, and its run. ``began`` is when, in UTC."""

    integration: str
    job: str
    run_id: str
    began: datetime
    ended: datetime

    @property
    def run_uuid(self) -> str:
        """The run's id as a UUID, as OpenLineage wants it. The same run always has the same."""
        try:
            return str(uuid.UUID(self.run_id))
        except ValueError:
            return str(uuid.uuid5(_RUNS, self.run_id))


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A table that was published: its columns as names and types, and what was added to it."""

    name: str
    columns: tuple[tuple[str, str], ...]
    rows: int
    size_bytes: int
    files: int


@dataclass(frozen=True, slots=True)
class ReadTable:
    """A table that was read, at a version of the lakehouse at ``root``."""

    root: str
    name: str
    version: int


def is_wanted(environment: Mapping[str, str] | None = None) -> bool:
    """Whether OpenLineage's variables say where events go, and do not switch them off."""
    found = os.environ if environment is None else environment
    if found.get(_DISABLED, "").strip().lower() in ("1", "true"):
        return False
    return any(found.get(name) for name in _NAMES) or any(name.startswith(_PREFIX) for name in found)


def publication_events(
    root: str, version: int, origin: Origin, made: Sequence[PublishedTable], read: Sequence[ReadTable]
) -> list[RunEvent]:
    """Return the two events of a publication: the run's start, and its end with all tables.

    The namespace of a dataset is the root of its lakehouse, its name that of the table. Raises MissingExtraError.
    """
    with needs("lineage"):
        from openlineage.client.event_v2 import Job, Run, RunEvent, RunState
        from openlineage.client.generated.job_type_job import JobTypeJobFacet
        from openlineage.client.generated.processing_engine_run import ProcessingEngineRunFacet

    engine = ProcessingEngineRunFacet(
        version=package_version("trinitylake-ops"), name="trinitylake-ops", producer=_PRODUCER
    )
    kind = JobTypeJobFacet(processingType="BATCH", integration=origin.integration, jobType="JOB", producer=_PRODUCER)
    run = Run(runId=origin.run_uuid, facets={"processing_engine": engine})
    job = Job(namespace=_namespace(root), name=origin.job, facets={"jobType": kind})
    inputs, outputs = [_input(one) for one in read], [_output(root, version, one) for one in made]
    return [
        RunEvent(eventTime=origin.began.isoformat(), producer=_PRODUCER, eventType=RunState.START, run=run, job=job),
        RunEvent(
            eventTime=origin.ended.isoformat(),
            producer=_PRODUCER,
            eventType=RunState.COMPLETE,
            run=run,
            job=job,
            inputs=inputs,
            outputs=outputs,
        ),
    ]


def send_publication(
    root: str, version: int, origin: Origin, made: Sequence[PublishedTable], read: Sequence[ReadTable]
) -> None:
    """Send the events of a publication, if somebody wants them. A failure is logged: the tables are published."""
    if not is_wanted():
        return
    try:
        events = publication_events(root, version, origin, made, read)
        from openlineage.client import OpenLineageClient

        client = OpenLineageClient()
        for event in events:
            client.emit(event)
        client.close()
    except Exception as error:  # noqa: BLE001 - transports raise their own; none may fail what is published
        logger.warning("the lineage of version %s was not sent: %s: %s", version, type(error).__name__, error)


def _namespace(root: str) -> str:
    return root.rstrip("/")


def _input(one: ReadTable) -> InputDataset:
    from openlineage.client.event_v2 import InputDataset
    from openlineage.client.generated.dataset_version_dataset import DatasetVersionDatasetFacet

    facet = DatasetVersionDatasetFacet(datasetVersion=str(one.version), producer=_PRODUCER)
    return InputDataset(namespace=_namespace(one.root), name=one.name, facets={"version": facet})


def _output(root: str, version: int, one: PublishedTable) -> OutputDataset:
    from openlineage.client.event_v2 import OutputDataset
    from openlineage.client.generated.dataset_version_dataset import DatasetVersionDatasetFacet
    from openlineage.client.generated.output_statistics_output_dataset import OutputStatisticsOutputDatasetFacet
    from openlineage.client.generated.schema_dataset import SchemaDatasetFacet, SchemaDatasetFacetFields

    fields = [SchemaDatasetFacetFields(name=name, type=kind) for name, kind in one.columns]
    statistics = OutputStatisticsOutputDatasetFacet(
        rowCount=one.rows, size=one.size_bytes, fileCount=one.files, producer=_PRODUCER
    )
    return OutputDataset(
        namespace=_namespace(root),
        name=one.name,
        facets={
            "version": DatasetVersionDatasetFacet(datasetVersion=str(version), producer=_PRODUCER),
            "schema": SchemaDatasetFacet(fields=fields, producer=_PRODUCER),
        },
        outputFacets={"outputStatistics": statistics},
    )
