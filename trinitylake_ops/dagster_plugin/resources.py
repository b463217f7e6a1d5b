"""Resources: the lakehouse, and the Spark session of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import dagster as dg
from pydantic import Field, PrivateAttr
from pyspark.sql import SparkSession

from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import LakehouseExistsError, LakehouseNotFoundError
from trinitylake_ops.spark_jobs.session import DEFAULT_MASTER, session_scope


class TrinityLakeResource(dg.ConfigurableResource["TrinityLakeResource"]):
    """A lakehouse by its root URI."""

    root: str = Field(description="Root URI of the lakehouse, such as file:///data/lake/ or an absolute path.")
    storage_options: dict[str, str] = Field(
        default={}, description="Options of the storage, such as fsync for a local one. Give secrets by EnvVar."
    )
    isolation: Literal["snapshot", "serializable"] = Field(
        default="snapshot", description="Isolation of the transactions that publish tables."
    )

    def open(self) -> Lakehouse:
        """Return the lakehouse. Raises LakehouseNotFoundError."""
        return Lakehouse.open(self.root, self.storage_options)

    def open_or_create(self) -> Lakehouse:
        """Return the lakehouse, a new one where there is none."""
        with contextlib.suppress(LakehouseNotFoundError):
            return self.open()
        with contextlib.suppress(LakehouseExistsError):  # another run was first
            return Lakehouse.create(self.root, self.storage_options)
        return self.open()


class SparkResource(dg.ConfigurableResource["SparkResource"]):
    """One Spark session for the steps of a run, started when the first of them asks and stopped with the run."""

    master: str = Field(default=DEFAULT_MASTER, description="Spark master URL.")
    conf: dict[str, str] = Field(default={}, description="Further Spark settings by name.")

    _session: SparkSession | None = PrivateAttr(default=None)
    _scope: contextlib.ExitStack = PrivateAttr(default_factory=contextlib.ExitStack)

    @contextlib.contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> Iterator[SparkResource]:
        """Keep the session for as long as Dagster keeps the resource."""
        with self._scope:
            yield self
        self._session = None

    def session(self) -> SparkSession:
        """Return the session. Raises JavaNotFoundError."""
        if self._session is None:
            self._session = self._scope.enter_context(session_scope("trinitylake-ops", self.master, **self.conf))
        return self._session
