"""Write, audit, publish: publish the tables that tasks staged as one version, once for each DAG run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from airflow.sdk import Asset, BaseOperator
from airflow.sdk.exceptions import AirflowFailException

from trinitylake_ops.airflow_plugin.hook import DEFAULT_CONNECTION, TrinityLakeHook
from trinitylake_ops.airflow_plugin.operators import run_name
from trinitylake_ops.declarations.options import split_name
from trinitylake_ops.errors import (
    CommitConflictError,
    InvalidInputError,
    LakehouseNotFoundError,
    TransactionExpiredError,
)
from trinitylake_ops.iceberg.write.publication import Publication, publication_id, publish_once, version_before
from trinitylake_ops.iceberg.write.staged_table import StagedTable
from trinitylake_ops.versions.time_travel import CLOCK_SKEW

if TYPE_CHECKING:
    import pyarrow as pa

    from trinitylake_ops.iceberg.write.partition_key import PartitionValue
    from trinitylake_ops.iceberg.write.staging import Mode

# The ``commit_info`` of a root is limited to 4 KiB, and Airflow's names have up to 250 characters.
_MAX_NAME_CHARS = 250
#: Errors of a publication that a retry would not fix.
_FINAL = (CommitConflictError, InvalidInputError, LakehouseNotFoundError, TransactionExpiredError)


def stage(
    rows: pa.Table | pa.RecordBatchReader,
    table: str,
    *,
    mode: Mode,
    partition_by: Sequence[str] | None = None,
    partitions: Sequence[Mapping[str, PartitionValue]] | None = None,
    trinitylake_conn_id: str = DEFAULT_CONNECTION,
) -> str:
    """Write rows for ``namespace.table`` without publishing them, and return the input of :class:`PublishOperator`.

    Call it in a task and return its result, which Airflow stores. Parameters are those of ``iceberg.stage_arrow``.
    Raises InvalidInputError, CommitConflictError, or StorageError.
    """
    from trinitylake_ops.iceberg import stage_arrow

    namespace, name = split_name(table)
    lake = TrinityLakeHook(trinitylake_conn_id).get_conn()
    staged = stage_arrow(lake, rows, namespace, name, mode=mode, partition_by=partition_by, partitions=partitions)
    return staged.to_json()


class PublishOperator(BaseOperator):
    """Publishes staged tables as one version, all of them or none.

    ``tables`` are the results of tasks that called :func:`stage`. Each DAG run is one publication. A cleared run
    reports the existing version, whether or not its tasks staged the tables again. With ``on_clear="replace"`` it
    publishes the tables that were staged again; tables with appended rows are then rejected. If another writer changed
    the replaced rows, the task fails and is not retried: clear the run from the tasks that stage. Events of the task's
    outlets contain the version. Raises InvalidInputError.
    """

    template_fields: Sequence[str] = ("tables", "message")
    ui_color = "#d9f2e0"

    def __init__(
        self,
        *,
        tables: Any,
        message: str | None = None,
        on_clear: Literal["keep", "replace"] = "keep",
        trinitylake_conn_id: str = DEFAULT_CONNECTION,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if on_clear not in ("keep", "replace"):
            raise InvalidInputError(f"on_clear is {on_clear!r}; it must be 'keep' or 'replace'")
        self.tables = tables
        self.message = message
        self.on_clear = on_clear
        self.trinitylake_conn_id = trinitylake_conn_id

    def execute(self, context: Any) -> dict[str, Any]:
        """Publish, and return the version with its metrics."""
        try:
            staged = self._staged()
            publication = self._publish(context, staged)
        except _FINAL as error:
            raise AirflowFailException(str(error)) from None  # so that the log shows the error once
        names = ", ".join(f"{table.namespace}.{table.table}" for table in staged)
        phrase = "had already been published" if publication.was_published else "published"
        self.log.info("%s: %s as version %s", names, phrase, publication.version)
        result = _publication_metrics(publication, staged)
        for outlet in self.outlets:
            if isinstance(outlet, Asset):
                context["outlet_events"][outlet].extra.update(result)
        return result

    def _staged(self) -> list[StagedTable]:
        texts = [self.tables] if isinstance(self.tables, str) else list(self.tables)
        if not all(isinstance(text, str) for text in texts):
            raise InvalidInputError("tables contains a value that stage did not return; pass only the results of stage")
        staged = [StagedTable.from_json(text) for text in texts]
        appended = [table for table in staged if table.replaces not in ("partitions", "all")]
        if self.on_clear == "replace" and appended:
            raise InvalidInputError(
                f"{appended[0].namespace}.{appended[0].table} was not replaced, so a cleared run would change it twice;"
                " use on_clear='keep'"
            )
        return staged

    def _publish(self, context: Any, staged: Sequence[StagedTable]) -> Publication:
        settings = TrinityLakeHook(self.trinitylake_conn_id).settings()
        lake = settings.open()
        run, instance = context["dag_run"], context["ti"]
        names = ["airflow", instance.dag_id, instance.run_id, instance.task_id, str(instance.map_index)]
        if self.on_clear == "replace":
            names.append(str(run.clear_number))
        return publish_once(
            lake,
            staged,
            publication_id(*names),
            # A run never starts before it is due. Its other timestamps change when it is cleared.
            since=version_before(lake, run.run_after - CLOCK_SKEW),
            isolation=None if settings.isolation == "lakehouse" else settings.isolation,
            run_id=run_name(context),
            message=self.message,
            properties={"dag": instance.dag_id[:_MAX_NAME_CHARS], "task": instance.task_id[:_MAX_NAME_CHARS]},
        )


def _publication_metrics(publication: Publication, staged: Sequence[StagedTable]) -> dict[str, Any]:
    return {
        "lakehouse_version": publication.version,
        "was_published": publication.was_published,
        "tables": [f"{table.namespace}.{table.table}" for table in staged],
        **(
            {}
            if publication.was_published
            else {
                "rows_added": sum(table.added_rows for table in publication.tables),
                "rows_removed": sum(table.removed_rows for table in publication.tables),
                "bytes_added": sum(table.added_bytes for table in publication.tables),
            }
        ),
    }
