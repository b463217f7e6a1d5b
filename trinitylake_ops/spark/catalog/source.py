"""The data source ``trinitylake_catalog``, which handles requests of Spark's catalog. It has no rows.

Spark creates a Python data source in a helper process of the driver and reads its schema. The catalog's jar passes its
request as an option, in JSON, and gets the response in the schema: JSON in a column's metadata, and a table's columns
as an additional struct.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StringType, StructType

from trinitylake_ops.errors import InvalidInputError, TrinityLakeError

if TYPE_CHECKING:
    from trinitylake_ops.spark.catalog.namespaces import CatalogResponse

#: Names that the jar uses as well.
CATALOG_FORMAT = "trinitylake_catalog"
REQUEST = "request"


class CatalogSource(DataSource):
    """A request from the catalog. The schema is the response."""

    @classmethod
    def name(cls) -> str:
        return CATALOG_FORMAT

    def schema(self) -> StructType:
        from trinitylake_ops.spark.catalog.namespaces import CatalogError
        from trinitylake_ops.spark.catalog.requests import handle_request

        if REQUEST not in self.options:
            raise InvalidInputError(
                f"data source {CATALOG_FORMAT!r} has no rows; it is for internal use by Spark's catalog"
            )
        request: dict[str, Any] = json.loads(self.options[REQUEST])
        try:
            return _pack(
                handle_request(request, {key: self.options[key] for key in self.options if key.lower() != REQUEST})
            )
        except CatalogError as refusal:
            return _as_schema({"refusal": refusal.kind, "error": str(refusal)})
        except TrinityLakeError as error:
            return _as_schema({"error": f"{type(error).__name__}: {error}"})


def _pack(response: CatalogResponse) -> StructType:
    schema = _as_schema({"value": response.value})
    return schema if response.schema is None else schema.add("schema", response.schema)


def _as_schema(content: dict[str, Any]) -> StructType:
    return StructType().add("answer", StringType(), metadata={"json": json.dumps(content)})
