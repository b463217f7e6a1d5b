"""Send the lineage of publications as OpenLineage events, with OpenLineage's client library.

OpenLineage's own environment variables (``OPENLINEAGE_URL``, ``OPENLINEAGE_CONFIG``, ``OPENLINEAGE__TRANSPORT__...``)
configure the target. Without them no events are created. Requires the extra ``lineage``.
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

#: OpenLineage requires a URI, which need not be a URL.
_PRODUCER = "urn:trinitylake:trinitylake-ops"
_NAMES = ("OPENLINEAGE_URL", "OPENLINEAGE_CONFIG")
_PREFIX, _DISABLED = "OPENLINEAGE__TRANSPORT", "OPENLINEAGE_DISABLED"
_RUNS = uuid.UUID("b6f0f2d3-6a1d-4d0f-9b41-0f2c6de3f8a5")


@dataclass(frozen=True, slots=True)
class Origin:
    """The job that published the tables, and its run."""

    #: The program that ran the job, for example ``DAGSTER``.
    integration: str
    job: str
    run_id: str
    #: Start and end of the run, in UTC.
    began: datetime
    ended: datetime

    @property
    def run_uuid(self) -> str:
        """The run's id as a UUID, which OpenLineage requires. The same run always has the same UUID."""
        try:
            return str(uuid.UUID(self.run_id))
        except ValueError:
            return str(uuid.uuid5(_RUNS, self.run_id))


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A table that was published."""

    name: str
    #: Names and types of the columns.
    columns: tuple[tuple[str, str], ...]
    #: The number of added rows.
    rows: int
    #: The size of the added files.
    size_bytes: int
    #: The number of added files.
    files: int


@dataclass(frozen=True, slots=True)
class ReadTable:
    """A table that was read at a version of the lakehouse at ``root``."""

    root: str
    name: str
    version: int


def is_wanted(environment: Mapping[str, str] | None = None) -> bool:
    """Whether OpenLineage's variables configure a target and do not disable events."""
    variables = os.environ if environment is None else environment
    if variables.get(_DISABLED, "").strip().lower() in ("1", "true"):
        return False
    return any(variables.get(name) for name in _NAMES) or any(name.startswith(_PREFIX) for name in variables)


def publication_events(
    root: str, version: int, origin: Origin, published: Sequence[PublishedTable], read: Sequence[ReadTable]
) -> list[RunEvent]:
    """Return the two events of a publication: the start of the run, and the end of the run with all tables.

    A dataset's namespace is the root of its lakehouse, and its name is the name of the table.

    Args:
        root: The root of the lakehouse.
        version: The version that was published.
        origin: The job and the run.
        published: The published tables.
        read: The tables that were read.

    Raises:
        MissingExtraError: The extra ``lineage`` is not installed.
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
    inputs, outputs = [_input(table) for table in read], [_output(root, version, table) for table in published]
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
    root: str, version: int, origin: Origin, published: Sequence[PublishedTable], read: Sequence[ReadTable]
) -> None:
    """Send the events of a publication if a target is configured. A failure is only logged.

    Args:
        root: The root of the lakehouse.
        version: The version that was published.
        origin: The job and the run.
        published: The published tables.
        read: The tables that were read.
    """
    if not is_wanted():
        return
    try:
        events = publication_events(root, version, origin, published, read)
        from openlineage.client import OpenLineageClient

        client = OpenLineageClient()
        for event in events:
            client.emit(event)
        client.close()
    except Exception as error:  # noqa: BLE001 - transports raise their own errors, which must not fail a publication
        logger.warning("the lineage of version %s was not sent: %s: %s", version, type(error).__name__, error)


def _namespace(root: str) -> str:
    return root.rstrip("/")


def _input(table: ReadTable) -> InputDataset:
    from openlineage.client.event_v2 import InputDataset
    from openlineage.client.generated.dataset_version_dataset import DatasetVersionDatasetFacet

    facet = DatasetVersionDatasetFacet(datasetVersion=str(table.version), producer=_PRODUCER)
    return InputDataset(namespace=_namespace(table.root), name=table.name, facets={"version": facet})


def _output(root: str, version: int, table: PublishedTable) -> OutputDataset:
    from openlineage.client.event_v2 import OutputDataset
    from openlineage.client.generated.dataset_version_dataset import DatasetVersionDatasetFacet
    from openlineage.client.generated.output_statistics_output_dataset import OutputStatisticsOutputDatasetFacet
    from openlineage.client.generated.schema_dataset import SchemaDatasetFacet, SchemaDatasetFacetFields

    fields = [SchemaDatasetFacetFields(name=name, type=kind) for name, kind in table.columns]
    statistics = OutputStatisticsOutputDatasetFacet(
        rowCount=table.rows, size=table.size_bytes, fileCount=table.files, producer=_PRODUCER
    )
    return OutputDataset(
        namespace=_namespace(root),
        name=table.name,
        facets={
            "version": DatasetVersionDatasetFacet(datasetVersion=str(version), producer=_PRODUCER),
            "schema": SchemaDatasetFacet(fields=fields, producer=_PRODUCER),
        },
        outputFacets={"outputStatistics": statistics},
    )
