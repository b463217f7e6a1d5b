"""The requests of the catalog in Spark, and who answers each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.spark_jobs.catalog import namespaces, tables
from trinitylake_ops.spark_jobs.catalog.answers import Answer, in_terms_of_the_catalog
from trinitylake_ops.spark_jobs.source.options import TABLE, SourceOptions
from trinitylake_ops.transaction.lakehouse import Lakehouse

Request: TypeAlias = Mapping[str, Any]

_ANSWERED_BY: Mapping[str, Callable[[Lakehouse, Request], Answer]] = {
    "list_namespaces": namespaces.list_namespaces,
    "load_namespace": namespaces.load_namespace,
    "create_namespace": namespaces.create_namespace,
    "alter_namespace": namespaces.alter_namespace,
    "drop_namespace": namespaces.drop_namespace,
    "list_tables": tables.list_tables,
    "load_table": tables.load_table,
    "create_table": tables.create_table,
    "stage_table": tables.stage_table,
    "alter_table": tables.alter_table,
    "drop_table": tables.drop_table,
    "rename_table": tables.rename_table,
}


def answer(request: Request, options: Mapping[str, str]) -> Answer:
    """Return the answer to a request. ``options`` are those of the catalog: the root, and ``storage.*``.

    Raises RefusedError, and the errors of what was asked for. Raises InvalidInputError for wrong options.
    """
    unknown = [name for name in options if name.lower() != "root" and not name.lower().startswith("storage.")]
    if unknown:
        raise InvalidInputError(
            f"the catalog has the settings 'root' and 'storage.*', and none {unknown[0]!r}; reads have their own"
        )
    settings = SourceOptions.parse({**options, TABLE: "objects"})
    with in_terms_of_the_catalog():
        return _ANSWERED_BY[request["request"]](Lakehouse.open(settings.root, settings.storage_options), request)
