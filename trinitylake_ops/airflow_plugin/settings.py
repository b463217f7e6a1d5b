"""Settings of a lakehouse in an Airflow connection. This module does not import Airflow."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from trinitylake_ops import Lakehouse
from trinitylake_ops.declarations.options import is_root_uri
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.spark.runtime.addresses import DEFAULT_MASTER
from trinitylake_ops.storage.options import ALLOWED_ROOTS, StorageOptions, is_secret


class SparkSettings(BaseModel):
    """The Spark cluster that operations use if a connection selects the engine ``spark``."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    master: str = DEFAULT_MASTER
    remote: str | None = None
    conf: dict[str, str] = {}


class LakehouseSettings(BaseModel):
    """The extra field of a connection: storage options, allowed roots, and the isolation of publications."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    root: str
    storage_options: dict[str, str] = {}
    allowed_roots: list[str] = []
    isolation: Literal["lakehouse", "snapshot", "serializable"] = "lakehouse"
    engine: Literal["local", "spark"] = "local"
    spark: SparkSettings = SparkSettings()

    @classmethod
    def of(cls, root: str | None, extra: Any) -> LakehouseSettings:
        """Parse connection settings, whose extra field is a JSON object or a string that contains one.

        Raises InvalidInputError, whose message contains no values.
        """
        if not root or not is_root_uri(root):
            raise InvalidInputError(
                "the connection's root is not shown, as it may hold credentials; give an absolute path or a URI such as"
                " s3://BUCKET/PREFIX"
            )
        values = _parse_extra(extra)
        try:
            return cls(**{**values, "root": root})
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(map(str, first["loc"]))
        raise InvalidInputError(f"the connection's extra is invalid at {field}: {first['msg']}")

    @property
    def secrets(self) -> list[str]:
        """The values that must not appear in logs."""
        return [value for name, value in self.storage_options.items() if is_secret(name)]

    def open(self) -> Lakehouse:
        """Return the lakehouse. Raises LakehouseNotFoundError or StorageError."""
        options = dict(self.storage_options)
        if roots := [*options.get(ALLOWED_ROOTS, "").split(), *self.allowed_roots]:
            options[ALLOWED_ROOTS] = " ".join(roots)
        return Lakehouse.open(self.root, StorageOptions(options))


def _parse_extra(extra: Any) -> dict[str, Any]:
    """Parse the extra field of a connection. Airflow itself ignores an extra field that is not JSON."""
    values = extra
    if isinstance(extra, str):
        try:
            values = json.loads(extra.strip() or "{}")
        except ValueError:
            raise InvalidInputError("the connection's extra is not JSON") from None
    if not isinstance(values, dict | None):
        raise InvalidInputError("the connection's extra is not a JSON object")
    return values or {}
