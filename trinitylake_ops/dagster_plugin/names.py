"""Names of a lakehouse's Dagster definitions, which distinguish it from other lakehouses of the code location."""

from __future__ import annotations

import re
from dataclasses import dataclass

import dagster as dg

from trinitylake_ops.errors import InvalidInputError

_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


@dataclass(frozen=True, slots=True)
class LakehouseNames:
    """Names of the definitions of one lakehouse in a code location.

    Raises:
        InvalidInputError: ``name`` is not a valid prefix of Dagster names.
    """

    #: Prefix of all names. It is empty for the only lakehouse of a code location.
    name: str = ""

    def __post_init__(self) -> None:
        if self.name and not _NAME.fullmatch(self.name):
            raise InvalidInputError(
                f"{self.name!r} is not a valid lakehouse name for Dagster: use up to 40 lowercase letters, digits and"
                " underscores, beginning with a letter"
            )

    @classmethod
    def of_io_manager(cls, key: str) -> LakehouseNames:
        """Return the names of the lakehouse whose IO manager has this key, or unprefixed names for any other key."""
        name = key.removesuffix(f"_{ONLY.io_manager_key}")
        return cls(name) if name != key and _NAME.fullmatch(name) else ONLY

    def of(self, name: str) -> str:
        """Return the prefixed name of a job, sensor, schedule or group, given the unprefixed name."""
        return f"{self.name}_{name}" if self.name else name

    def key(self, *path: str) -> dg.AssetKey:
        """Return the key of an asset of this lakehouse."""
        return dg.AssetKey([self.name, *path] if self.name else [*path])

    def op(self, job: str) -> str:
        """Return the name of the only op of a job, which is also its step key."""
        return f"run_{self.of(job)}"

    def table_key(self, namespace: str, table: str) -> dg.AssetKey:
        """Return the asset key of a table."""
        return self.key(namespace, table)

    @property
    def resource_key(self) -> str:
        """The key of the lakehouse's resource."""
        return self.of("lakehouse")

    @property
    def io_manager_key(self) -> str:
        """The key of the IO manager that stages and reads the lakehouse's tables."""
        return self.of("lakehouse_io_manager")

    @property
    def lakehouse_key(self) -> dg.AssetKey:
        """The key of the asset that represents the whole lakehouse."""
        return self.key("lakehouse")

    @property
    def exports_key(self) -> dg.AssetKey:
        """The key of the asset that has a partition for each export."""
        return self.key("exports")

    @property
    def exports_partitions(self) -> str:
        """The name of the dynamic partitions definition of exports."""
        return self.of("trinitylake_exports")

    @property
    def pool(self) -> str:
        """The pool of all operations that reclaim space in this lakehouse, so that only one of them runs at a time."""
        return f"trinitylake_deletes_{self.name}" if self.name else "trinitylake_deletes"


#: Unprefixed names, for a code location with a single lakehouse.
ONLY = LakehouseNames()
