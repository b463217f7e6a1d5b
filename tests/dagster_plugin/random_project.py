"""Random Dagster projects of two tables on one lakehouse. Each row records the rows that it was derived from."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import dagster as dg
import pyarrow as pa

from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin import (
    LakehouseNames,
    TrinityLakeIOManager,
    TrinityLakeResource,
    build_publish_asset,
    stored_as,
)
from trinitylake_ops.dagster_plugin.resources import StorageSettings
from trinitylake_ops.iceberg.write.publication import Publication

LAKE = LakehouseNames("lake")
IO = LAKE.io_manager_key
TABLES = ("a", "b")
BERLIN = "Europe/Berlin"
DAILY = dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-01-05")
SHOPS = dg.StaticPartitionsDefinition(["x", "y"])
Values = tuple[tuple[str, str], ...]
PREVIOUS = dg.TimeWindowPartitionMapping(start_offset=-1, end_offset=-1)
PREVIOUS_AND_SAME = dg.TimeWindowPartitionMapping(start_offset=-1, end_offset=0)


@dataclass(frozen=True)
class Partitions:
    """Partitions of a table, with the values of its partition columns."""

    definition: Any = None
    keys: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    formats: Mapping[str, str] | None = None
    is_valid: bool = True

    def values(self, key: str | None) -> Values:
        if key is None:
            return ()
        if self.formats is not None:
            start = self.definition.time_window_for_partition_key(key).start
            return tuple((column, start.strftime(text)) for column, text in self.formats.items())
        return tuple(zip(self.columns, key.split("|") if len(self.columns) > 1 else [key], strict=True))

    def previous_key(self, key: str) -> str | None:
        start = self.definition.get_partition_keys().index(key)
        return self.definition.get_partition_keys()[start - 1] if start else None


def _time_partitions(definition: Any, first: int = 0, **options: Any) -> Partitions:
    formats = options.get("formats")
    columns = tuple(formats or ("part",))
    return Partitions(definition, tuple(definition.get_partition_keys()[first : first + 4]), columns, **options)


HOURLY = dg.HourlyPartitionsDefinition("2026-10-25-00:00", end_date="2026-10-25-06:00", timezone=BERLIN)
WEEKLY = dg.WeeklyPartitionsDefinition("2026-01-01", end_date="2026-02-10")
MONTHLY = dg.MonthlyPartitionsDefinition("2026-01-01", end_date="2026-06-01")
BOTH = dg.MultiPartitionsDefinition({"day": DAILY, "shop": SHOPS})
PARTITIONS = {
    "none": Partitions(),
    "daily": _time_partitions(DAILY),
    "daily formats": _time_partitions(DAILY, formats={"year": "%Y", "month": "%m", "day": "%d"}),
    "hourly": _time_partitions(HOURLY, 1),
    "hourly formats": _time_partitions(HOURLY, 1, formats={"day": "%Y-%m-%d", "hour": "%H%z"}),
    "weekly": _time_partitions(WEEKLY, formats={"week": "%G-W%V"}),
    "monthly": _time_partitions(MONTHLY, formats={"month": "%Y-%m"}),
    "static": Partitions(dg.StaticPartitionsDefinition(["1", "01", "null", "b c"]), ("1", "01", "null"), ("part",)),
    "dynamic": Partitions(dg.DynamicPartitionsDefinition(name="parts"), ("p", "q", "r"), ("part",)),
    "multi": Partitions(BOTH, ("2026-01-01|x", "2026-01-01|y", "2026-01-02|x"), ("day", "shop")),
    "coarse": _time_partitions(DAILY, formats={"month": "%Y-%m"}, is_valid=False),
    "repeated hour": _time_partitions(HOURLY, 1, formats={"hour": "%Y-%m-%d %H"}, is_valid=False),
}


@dataclass(frozen=True)
class Row:
    """A row of a table: a unique token, and the tokens of the rows that it was derived from."""

    values: Values
    key: int
    token: int
    read: tuple[int, ...] = ()


@dataclass(eq=False)
class Staging:
    """The output of one execution of an asset. ``read`` are tokens of table a, and ``read_self`` those of table b."""

    run_id: str
    table: str
    keys: tuple[str | None, ...]
    rows: tuple[Row, ...]
    read: frozenset[int] = frozenset()
    read_self: frozenset[int] = frozenset()
    version: int | None = None


@dataclass(eq=False)
class Run:
    """A run with its partitions, and a fault to inject at a named point."""

    keys: tuple[str | None, ...] = (None,)
    selection: tuple[str, ...] = ()
    fault: tuple[str, str] | None = None
    fault_point: str = ""
    check_fails: bool = False
    run_id: str = ""
    parent: "Run | None" = None
    error: str = ""
    was_killed: bool = False
    is_finished: bool = False
    is_successful: bool = False


class PausableThread(threading.Thread):
    """A thread that runs an action up to its next pause each time the thread is resumed."""

    def __init__(self, action: Callable[[], object], local: threading.local):
        super().__init__(daemon=True)
        self._action, self._local = action, local
        self._resumed, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self.is_done = False
        self.error: BaseException | None = None

    def run(self) -> None:
        self._resumed.acquire()
        try:
            self._local.thread = self
            self._action()
        except BaseException as error:  # noqa: BLE001 - re-raised by the thread that resumes this one
            self.error = error
        self.is_done = True
        self._paused.release()

    def resume(self) -> None:
        """Continue until the next pause."""
        if not self.is_alive() and not self.is_done:
            self.start()
        self._resumed.release()
        self._paused.acquire()

    def pause(self) -> None:
        """Block until this thread is resumed, so that other threads can run."""
        self._paused.release()
        self._resumed.acquire()

    def end(self) -> None:
        """Block forever, like a killed process: no code of Dagster or of the plugin runs after this."""
        self.is_done = True
        self.pause()


@dataclass(eq=False)
class Shape:
    """The randomly chosen properties of a project."""

    partitions: str
    layout: str  # none, both, split, first
    mapping: str  # identity, previous, self, all
    modes: tuple[str, str]
    is_serializable: bool
    has_check: bool
    has_retries: bool


@dataclass(eq=False)
class Project:
    """A random project. Its assets record their outputs, and pause where other runs can be interleaved."""

    shape: Shape
    lake: Lakehouse
    token_numbers: Iterator[int] = field(default_factory=lambda: count(1))
    stagings: list[Staging] = field(default_factory=list)
    reported: list[tuple[str, frozenset[int]]] = field(default_factory=list)
    faults: int = 0
    local: threading.local = field(default_factory=threading.local)

    @property
    def partitions(self) -> Partitions:
        return PARTITIONS[self.shape.partitions]

    @property
    def publishers(self) -> Mapping[str, tuple[str, ...]]:
        return {
            "none": {},
            "both": {"publish/both": TABLES},
            "split": {"publish/a": ("a",), "publish/b": ("b",)},
            "first": {"publish/a": ("a",)},
        }[self.shape.layout]

    def publisher_of(self, table: str) -> str | None:
        return next((name for name, tables in self.publishers.items() if table in tables), None)

    def partitions_of(self, table: str) -> Partitions:
        return PARTITIONS["none"] if table == "b" and self.shape.mapping == "all" else self.partitions

    def pause(self) -> None:
        thread: PausableThread | None = getattr(self.local, "thread", None)
        if thread is not None:
            thread.pause()

    def reach(self, name: str) -> None:
        """Pause at a named point of a run, and raise the run's fault if it is defined for this point."""
        run: Run = self.local.run
        self.pause()
        if run.fault is not None and run.fault[0] == name:
            kind, run.fault, run.fault_point = run.fault[1], None, name
            self.faults += 1
            if kind == "die":
                run.was_killed = True
                self.local.thread.end()
            raise OSError(f"fault at {name}")

    def compute(
        self, table: str, context: Any, read: pa.Table | None = None, previous: pa.Table | None = None
    ) -> pa.Table:
        run: Run = self.local.run
        run.run_id = context.run.run_id
        self.reach(table)
        keys = run.keys if self.partitions_of(table).definition is not None else (None,)
        tokens, previous_tokens = _tokens(read), _tokens(previous)
        input_tokens = tuple(sorted(tokens | previous_tokens))
        partitions = self.partitions_of(table)
        rows = [
            Row(partitions.values(key), number, next(self.token_numbers), input_tokens)
            for key in keys
            for number in ((1, 2) if table == "a" else (1,))
        ]
        self.stagings.append(Staging(context.run.run_id, table, keys, tuple(rows), tokens, previous_tokens))
        columns: dict[str, Any] = {name: [dict(row.values)[name] for row in rows] for name in partitions.columns}
        columns |= {"key": [row.key for row in rows], "token": [row.token for row in rows]}
        return pa.table({**columns, "sources": [" ".join(map(str, row.read)) for row in rows]})

    def replaces_whole_table(self, table: str) -> bool:
        """Whether each run of a table replaces all its rows, regardless of their partitions."""
        return self.shape.modes[TABLES.index(table)] == "overwrite"

    def assets(self) -> list[Any]:
        shape = self.shape
        retries = dg.RetryPolicy(max_retries=1) if shape.has_retries else None
        table_assets: dict[str, dg.AssetsDefinition] = {}
        for table, mode in zip(TABLES, shape.modes, strict=True):
            partitions = self.partitions_of(table)
            metadata = stored_as(
                mode=mode,  # type: ignore[arg-type]
                partition_by=partitions.columns,
                partition_format=partitions.formats,
                keys=["key"] if mode == "upsert" else (),
            )
            options: dict[str, Any] = {
                "key": ["shop", table],
                "io_manager_key": IO,
                "partitions_def": partitions.definition,
                "metadata": metadata,
                "retry_policy": retries,
            }
            table_assets[table] = self._asset_a(options) if table == "a" else self._asset_b(options)
        publishers = [
            build_publish_asset(
                key=name.split("/"),
                tables={table: table_assets[table] for table in tables},
                partitions_def=self.partitions_of(tables[0]).definition,
                names=LAKE,
                retry_policy=retries,
            )
            for name, tables in self.publishers.items()
        ]

        @dg.asset(ins={"b": dg.AssetIn(["shop", "b"], input_manager_key=IO)}, io_manager_key="memory")
        def report(context: dg.AssetExecutionContext, b: pa.Table) -> int:
            self.reported.append((context.run.run_id, _tokens(b)))
            return b.num_rows

        return [*table_assets.values(), *publishers, report]

    def _asset_a(self, options: dict[str, Any]) -> dg.AssetsDefinition:
        @dg.asset(**options)
        def a(context: dg.AssetExecutionContext) -> pa.Table:
            return self.compute("a", context)

        return a

    def _asset_b(self, options: dict[str, Any]) -> dg.AssetsDefinition:
        mapping = PREVIOUS_AND_SAME if self.shape.mapping == "previous" else None
        input_a = dg.AssetIn(["shop", "a"], partition_mapping=mapping)
        if self.shape.mapping != "self":

            @dg.asset(**options, ins={"a": input_a})
            def b(context: dg.AssetExecutionContext, a: pa.Table) -> pa.Table:
                return self.compute("b", context, a)

            return b

        @dg.asset(**options, ins={"a": input_a, "previous": dg.AssetIn(["shop", "b"], partition_mapping=PREVIOUS)})
        def b_with_previous_partition(context: dg.AssetExecutionContext, a: pa.Table, previous: pa.Table) -> pa.Table:
            return self.compute("b", context, a, previous)

        return b_with_previous_partition

    def definitions(self) -> dg.Definitions:
        lakehouse = TrinityLakeResource(root=self.lake.root, storage_options=StorageSettings(fsync="false"))

        @dg.asset_check(asset=dg.AssetKey(["shop", "a"]), blocking=True)
        def is_good(a: pa.Table) -> dg.AssetCheckResult:
            return dg.AssetCheckResult(passed=not self.local.run.check_fails)

        return dg.Definitions(
            assets=self.assets(),
            asset_checks=[is_good] if self.shape.has_check else [],
            resources={
                LAKE.resource_key: lakehouse,
                IO: TrinityLakeIOManager(lakehouse=lakehouse),
                "memory": dg.mem_io_manager,
            },
            jobs=[dg.define_asset_job("everything")],
            executor=dg.in_process_executor,
        )

    @contextmanager
    def publishing(self, monkeypatch: Any) -> Iterator[None]:
        """Pause runs and inject faults immediately before and after each commit of a publication.

        In a deployment, each run has its own process and does not see partitions of a time window that Dagster cached
        for another run. The cache does not distinguish the two hours with the same local time when clocks go back.
        """
        from trinitylake_ops.dagster_plugin import publish_step

        windows = dg.TimeWindowPartitionsDefinition
        with monkeypatch.context() as patch:
            uncached = windows.get_partition_keys_in_time_window.__wrapped__  # type: ignore[attr-defined]
            patch.setattr(windows, "get_partition_keys_in_time_window", uncached)
            patch.setattr(publish_step, "publish_once", self._publish_once)
            yield

    def _publish_once(self, lake: Lakehouse, staged: Sequence[Any], *args: Any, **options: Any) -> Publication:
        from trinitylake_ops.iceberg.write.publication import publish_once

        names = "+".join(sorted(table.table for table in staged))
        self.reach(f"before {names}")
        publication = publish_once(lake, staged, *args, **options)
        self.reach(f"after {names}")
        return publication


def _tokens(table: pa.Table | None) -> frozenset[int]:
    return frozenset() if table is None or "token" not in table.column_names else frozenset(table["token"].to_pylist())
