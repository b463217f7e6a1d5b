"""The data source ``trinitylake_catalog``: it answers what the catalog in Spark asks, and has no rows.

Spark makes a source of Python in a helper process of the driver and takes its schema. The catalog's request is an
option, in JSON. The answer is the metadata of a column, in JSON, and a table's columns stand beside it as a struct.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StringType, StructType

from trinitylake_ops.errors import InvalidInputError, TrinityLakeError

if TYPE_CHECKING:
    from trinitylake_ops.spark.catalog.namespaces import CatalogResponse

#: Names that the catalog in Spark knows, too.
CATALOG_FORMAT = "trinitylake_catalog"
REQUEST = "request"


class CatalogSource(DataSource):
    """One question of the catalog. Its schema is the answer."""

    @classmethod
    def name(cls) -> str:
        return CATALOG_FORMAT

    def schema(self) -> StructType:
        from trinitylake_ops.spark.catalog.namespaces import CatalogError
        from trinitylake_ops.spark.catalog.requests import handle_request

        if REQUEST not in self.options:
            raise InvalidInputError(f"the source {CATALOG_FORMAT!r} has no rows; it answers Spark's catalog")
        request: dict[str, Any] = json.loads(self.options[REQUEST])
        try:
            return _packed(
                handle_request(request, {key: self.options[key] for key in self.options if key.lower() != REQUEST})
            )
        except CatalogError as refusal:
            return _as_schema({"refusal": refusal.kind, "error": str(refusal)})
        except TrinityLakeError as error:
            return _as_schema({"error": f"{type(error).__name__}: {error}"})


def _packed(answered: CatalogResponse) -> StructType:
    schema = _as_schema({"value": answered.value})
    return schema if answered.schema is None else schema.add("schema", answered.schema)


def _as_schema(content: dict[str, Any]) -> StructType:
    return StructType().add("answer", StringType(), metadata={"json": json.dumps(content)})
