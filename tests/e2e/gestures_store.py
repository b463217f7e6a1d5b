"""Four ways to store the tables of the project of gestures.

``own``: the IO manager of the lakehouse, each table published by its step. ``publisher``: the same with publish assets.
``iceberg``: dagster-iceberg with a catalog in SQLite. ``files``: Dagster's IO manager of files. Environments without
this package load ``iceberg``, so that other packages are imported where they are needed.

The folder ``GESTURES`` has a folder for each store with a file ``value``, the value of all rows, and files that
make steps fail (``broken``) or wait (``slow``).
"""

import os
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa

STORES = ("own", "publisher", "iceberg", "files")

IO = "tables"
SENSOR = "automation"
_PRELOADED = ["dagster", "pyarrow"]


def folder_of(store: str) -> Path:
    """Return the folder of the files that a store's project reads."""
    return Path(os.environ["GESTURES"]) / store


def lakehouse_root() -> str:
    """Return the root of the lakehouse of ``own`` and ``publisher``."""
    return str(Path(os.environ["GESTURES"]) / "lakehouse")


def catalog_properties() -> dict[str, str]:
    """Return the properties of the catalog of ``iceberg``."""
    folder = Path(os.environ["GESTURES"])
    return {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}/warehouse"}


class Store:
    """How a project stores its tables."""

    def __init__(self, name: str):
        self.name = name
        #: Of an input that is a table. Several partitions of files are a dictionary.
        self.input_type: Any = Any if name == "files" else pa.Table

    @property
    def is_lakehouse(self) -> bool:
        return self.name in {"own", "publisher"}

    def key(self, table: str) -> list[str]:
        return [self.name, table]

    def table(
        self, *inputs: str, columns: tuple[str, ...] = (), is_appended: bool = False, **options: Any
    ) -> Callable[[Callable[..., Any]], dg.AssetsDefinition]:
        """Make an asset that is a table of a function of the context and of inputs, which have the names of tables.

        ``columns`` are those that contain the partitions. ``ins`` can map the partitions of inputs.
        """
        mappings: Mapping[str, dg.PartitionMapping] = options.pop("mappings", {})
        ins = {
            name: dg.AssetIn(self.key(name), input_manager_key=IO, partition_mapping=mappings.get(name))
            for name in inputs
        }

        def made(compute: Callable[..., Any]) -> dg.AssetsDefinition:
            compute.__annotations__.update(dict.fromkeys(inputs, self.input_type), context=dg.AssetExecutionContext)
            compute.__annotations__["return"] = pa.Table
            return dg.asset(
                key=self.key(compute.__name__),
                ins=ins,
                io_manager_key=IO,
                metadata=self._metadata(columns, is_appended),
                **options,
            )(compute)

        return made

    def _metadata(self, columns: tuple[str, ...], is_appended: bool) -> Mapping[str, Any]:
        if self.is_lakehouse:
            from trinitylake_ops.dagster_plugin import stored_as

            by = list(columns) if len(columns) == 1 else None
            return stored_as(**({"mode": "append"} if is_appended else {}), **({"partition_by": by} if by else {}))
        if self.name == "iceberg":
            expression = {name: name for name in columns} if len(columns) > 1 else next(iter(columns), None)
            return {
                **({"partition_expr": expression} if expression else {}),
                **({"write_mode": "append"} if is_appended else {}),
            }
        return {}

    def publishing(self, name: str, *tables: dg.AssetsDefinition, **options: Any) -> list[dg.AssetsDefinition]:
        """Return the tables, with the asset that publishes them where one does."""
        return [*tables, self.publish(name, *tables, **options)] if self.name == "publisher" else list(tables)

    def publish(self, name: str, *tables: dg.AssetsDefinition | dg.AssetKey, **options: Any) -> dg.AssetsDefinition:
        """Return a publish asset of tables, which are definitions or keys."""
        from trinitylake_ops.dagster_plugin import LakehouseNames, build_publish_asset

        named = {(table if isinstance(table, dg.AssetKey) else table.key).path[-1]: table for table in tables}
        return build_publish_asset(key=self.key(name), tables=named, names=LakehouseNames("lake"), **options)

    def resources(self) -> dict[str, Any]:
        if self.is_lakehouse:
            from trinitylake_ops.dagster_plugin import LakehouseNames, TrinityLakeIOManager, TrinityLakeResource

            lakehouse = TrinityLakeResource(root=lakehouse_root())
            return {LakehouseNames("lake").resource_key: lakehouse, IO: TrinityLakeIOManager(lakehouse=lakehouse)}
        if self.name == "iceberg":
            from dagster_iceberg.config import IcebergCatalogConfig
            from dagster_iceberg.io_manager.arrow import PyArrowIcebergIOManager

            config = IcebergCatalogConfig(properties=catalog_properties())
            return {IO: PyArrowIcebergIOManager(name="tables", config=config)}
        return {IO: dg.FilesystemIOManager(base_dir=str(folder_of("files") / "stored"))}

    def definitions(self, *assets: dg.AssetsDefinition | dg.AssetSpec) -> dg.Definitions:
        executor = dg.multiprocess_executor.configured(
            {"max_concurrent": 2, "start_method": {"forkserver": {"preload_modules": _PRELOADED}}}
        )
        automation = dg.AutomationConditionSensorDefinition(
            SENSOR, target=dg.AssetSelection.all(), minimum_interval_seconds=5
        )
        return dg.Definitions(assets=assets, resources=self.resources(), executor=executor, sensors=[automation])

    # Rows

    def value(self) -> int:
        return int((folder_of(self.name) / "value").read_text())

    def rows(self, count: int, /, **columns: Any) -> pa.Table:
        """Return rows that differ in ``n``."""
        fixed = {name: [value] * count for name, value in columns.items()}
        return pa.table({**fixed, "n": list(range(1, count + 1)), "value": [self.value()] * count})

    def wait(self) -> None:
        """Wait while there is a file that says so, for two minutes at most."""
        deadline = time.monotonic() + 120
        (folder_of(self.name) / "waits").touch()
        while (folder_of(self.name) / "slow").exists() and time.monotonic() < deadline:
            time.sleep(0.1)


def count_rows(rows: Any) -> int:
    """Return the number of rows of an input; several partitions of files are a dictionary."""
    if rows is None:
        return 0
    return sum(map(count_rows, rows.values())) if isinstance(rows, dict) else len(rows)


def day_of(context: dg.AssetExecutionContext) -> date:
    key = context.partition_key
    return date.fromisoformat(key.keys_by_dimension["day"] if isinstance(key, dg.MultiPartitionKey) else key)
