"""The metadata of an asset that says how it is stored, and what it means for the partitions of a run.

Definitions import this module, so it imports pyarrow and pyiceberg only where a step or a check of tables needs them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, get_args

import dagster as dg
import pyarrow as pa

from trinitylake_ops.dagster_plugin.metadata import PREVIEW_ROWS, column_schema
from trinitylake_ops.dagster_plugin.partition_checks import check_formats, check_keys
from trinitylake_ops.declarations.options import split_name
from trinitylake_ops.errors import InvalidInputError

if TYPE_CHECKING:
    import pyarrow as pa

    from trinitylake_ops.format.definitions import Schema
    from trinitylake_ops.iceberg.write.staged_table import StagedTable
    from trinitylake_ops.iceberg.write.staging import Mode

StoreMode: TypeAlias = Literal["overwrite", "overwrite_partition", "append", "upsert"]

_MODES: Mapping[StoreMode, Mode] = {
    "overwrite": "replace_table",
    "overwrite_partition": "replace_partitions",
    "append": "append",
    "upsert": "append",  # of the rows whose keys are new; the others are updated
}
_TABLE = "trinitylake/table"
_MODE = "trinitylake/mode"
_PARTITION_BY = "trinitylake/partition_by"
_PARTITION_FORMAT = "trinitylake/partition_format"
_KEYS = "trinitylake/keys"
_LINEAGE = "dagster/column_lineage"
_COLUMNS = "dagster/column_schema"

#: Rows of a table are kept by Dagster, and seen by whoever sees the asset. So there are few.
MOST_PREVIEW_ROWS = 100


def stored_as(
    *,
    table: str | None = None,
    mode: StoreMode | None = None,
    partition_by: Sequence[str] = (),
    partition_format: Mapping[str, str] | None = None,
    keys: Sequence[str] = (),
    column_lineage: dg.TableColumnLineage | None = None,
    preview_rows: int = 0,
) -> dict[str, Any]:
    """Return the metadata of an asset that says how :class:`TrinityLakeIOManager` stores it.

    ``table`` is ``namespace.table``, by default the last two parts of the asset's key. With the ``mode``
    ``overwrite`` all rows are replaced, with ``append`` none. ``upsert`` updates the rows of the same ``keys``, and
    adds others. With ``overwrite_partition``, those of the run's partitions are replaced if the asset has Dagster
    partitions. Otherwise it replaces the partitions that rows arrive for. The default is ``overwrite_partition`` for
    an asset with Dagster partitions, and ``overwrite`` for others. ``partition_by`` are the table's partition
    columns. Dagster's partition key is the value of the one column. In a key of several dimensions, each is the value
    of the column of its name, and ``partition_by`` need not be given. For partitions by time ``partition_format`` may
    give a ``strftime`` format per column, such as ``{"year": "%Y", "month": "%m"}``. ``column_lineage`` says of which
    columns of other assets its columns are made. With ``preview_rows``, so many of its first rows are shown with each
    version, and kept by Dagster. Raises InvalidInputError.
    """
    if mode is not None and mode not in _MODES:
        raise InvalidInputError(f"mode {mode!r} is none of {', '.join(get_args(StoreMode))}")
    if table is not None:
        split_name(table)
    columns = list(partition_by)
    if mode == "overwrite_partition" and not columns:
        raise InvalidInputError("mode overwrite_partition needs the columns of the partitions, partition_by")
    if (mode == "upsert") != bool(keys):
        raise InvalidInputError("mode upsert needs the columns by which rows are the same, keys; no other mode has any")
    if partition_format is not None and sorted(partition_format) != sorted(columns):
        raise InvalidInputError("partition_format needs a format for each column of partition_by, and for no other")
    if not 0 <= preview_rows <= MOST_PREVIEW_ROWS:
        raise InvalidInputError(f"preview_rows is {preview_rows}, it must be from 0 to {MOST_PREVIEW_ROWS}")
    metadata: dict[str, Any] = {_TABLE: table, _MODE: mode, _PARTITION_BY: columns, _PARTITION_FORMAT: partition_format}
    metadata |= {_KEYS: list(keys), PREVIEW_ROWS: preview_rows, _LINEAGE: column_lineage}
    return {name: value for name, value in metadata.items() if value}


def preview_rows_of(metadata: Mapping[str, Any]) -> int:
    """Return how many rows of its table an asset shows."""
    number = _plain(metadata.get(PREVIEW_ROWS))
    return min(number, MOST_PREVIEW_ROWS) if type(number) is int and number > 0 else 0


def described_in(metadata: Mapping[str, Any]) -> dg.TableSchema | None:
    """Return what an asset says of the columns of its table, None if it says nothing."""
    described: dg.TableSchema | None = _plain(metadata.get(_COLUMNS))
    return described


def storage_metadata(asset_key: dg.AssetKey, metadata: Mapping[str, Any], staged: StagedTable) -> dict[str, Any]:
    """Return what an asset says of its table, as metadata of it: of its columns, their origin, and its preview.

    Descriptions and tags of columns are those of ``dagster/column_schema``. Raises InvalidInputError for the origin of
    a column that the table lacks.
    """
    entries: dict[str, Any] = {_COLUMNS: column_schema(staged.table_def, described_in(metadata))}
    if preview_rows := preview_rows_of(metadata):
        entries[PREVIEW_ROWS] = preview_rows
    lineage: dg.TableColumnLineage | None = _plain(metadata.get(_LINEAGE))
    if lineage is None:
        return entries
    columns = [column.name for column in staged.table_def.schema.columns]
    if unknown := sorted(lineage.deps_by_column.keys() - {*columns}):
        raise InvalidInputError(
            f"asset {asset_key.to_user_string()}: its column_lineage names the column {unknown[0]!r}, and its table has"
            f" {', '.join(columns)}"
        )
    return {**entries, _LINEAGE: lineage}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What the metadata of an asset says, with what its partitions add: ``columns`` are those of the table's.

    ``keys`` are the columns by which rows are updated, none where they are only added or replaced.
    """

    name: tuple[str, str]
    mode: Mode
    columns: tuple[str, ...]
    formats: Mapping[str, str] | None
    keys: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, asset_key: dg.AssetKey, metadata: Mapping[str, Any], partitions: dg.PartitionsDefinition[str] | None
    ) -> Self:
        """Return how an asset of some partitions, None without any, is stored. Raises InvalidInputError."""
        stored_mode: StoreMode | None = _plain(metadata.get(_MODE))
        columns = list(_plain(metadata.get(_PARTITION_BY)) or ())
        formats: Mapping[str, str] | None = _plain(metadata.get(_PARTITION_FORMAT))
        if isinstance(partitions, dg.MultiPartitionsDefinition) and not columns and stored_mode != "overwrite":
            columns = [dimension.name for dimension in partitions.partitions_defs]
        if partitions is not None:
            _check_dimensions(asset_key.to_user_string(), partitions, columns, formats)
        mode = _MODES[stored_mode or ("overwrite" if partitions is None else "overwrite_partition")]
        keys = tuple(_plain(metadata.get(_KEYS)) or ())
        return cls(name=table_of(asset_key, metadata), mode=mode, columns=tuple(columns), formats=formats, keys=keys)

    def check_rows_are_known(self, asset_key: dg.AssetKey) -> None:
        """Raise InvalidInputError if nothing says which rows of the table a run replaces."""
        if self.mode == "replace_partitions" and not self.columns:
            raise InvalidInputError(
                f"asset {asset_key.to_user_string()} has partitions, and nothing says which column of table"
                f" {'.'.join(self.name)} holds them. Give it metadata=stored_as(partition_by=[COLUMN]), and each run"
                " replaces the rows of its partitions. With stored_as(mode='overwrite') each replaces the whole table"
            )

    def check_partitions(self, asset_key: dg.AssetKey, partitions: dg.PartitionsDefinition[str] | None) -> None:
        """Raise InvalidInputError if several partitions have the same values by the formats of partition columns.

        An asset whose runs replace the whole table may have any formats.
        """
        if self.mode != "replace_table" and self.formats and isinstance(partitions, dg.TimeWindowPartitionsDefinition):
            check_formats(asset_key.to_user_string(), partitions, self.formats)

    def check_values(
        self,
        asset_key: dg.AssetKey,
        columns: Schema,
        values: Sequence[Mapping[str, str]],
        partitions: dg.PartitionsDefinition[str],
        instance: dg.DagsterInstance | None,
    ) -> None:
        """Check that a run's partitions are not the same as others in the types of the table.

        Args:
            asset_key: The asset.
            columns: The columns of its table.
            values: The values of the run's partitions.
            partitions: All partitions of the asset.
            instance: Knows the keys of dynamic partitions.

        Raises:
            InvalidInputError: Two partition keys are the same value of a column.
        """
        own = {column: list(dict.fromkeys(one[column] for one in values)) for column in self.columns}
        by_column = {self.columns[0]: partitions}
        if isinstance(partitions, dg.MultiPartitionsDefinition):
            by_column = {dimension.name: dimension.partitions_def for dimension in partitions.partitions_defs}

        def keys_of(definition: dg.PartitionsDefinition[str]) -> Callable[[], Sequence[str]]:
            return lambda: definition.get_partition_keys(dynamic_partitions_store=instance)

        check_keys(
            asset_key.to_user_string(),
            columns,
            own,
            {
                column: keys_of(definition)
                for column, definition in by_column.items()
                if not isinstance(definition, dg.TimeWindowPartitionsDefinition)
            },
        )

    def check_columns(self, asset_key: dg.AssetKey, names: Collection[str]) -> None:
        """Check that rows have the partition columns that the asset names: without them they would be NULL.

        Args:
            asset_key: The asset.
            names: The columns of the rows.

        Raises:
            InvalidInputError: The rows lack a partition column.
        """
        if missing := [column for column in self.columns if column not in names]:
            raise InvalidInputError(
                f"asset {asset_key.to_user_string()} was not stored: its rows lack the column {missing[0]!r}, by which"
                f" table {'.'.join(self.name)} is partitioned; add it, also if there are no rows"
            )

    def check_days(
        self, asset_key: dg.AssetKey, schema: pa.Schema, partitions: dg.PartitionsDefinition[str] | None
    ) -> None:
        """Raise InvalidInputError if a partition by time is to be all rows of one moment."""
        if self.formats or not isinstance(partitions, dg.TimeWindowPartitionsDefinition):
            return
        import pyarrow as pa

        for column in self.columns:
            if column in schema.names and pa.types.is_timestamp(schema.field(column).type):
                raise InvalidInputError(
                    f"asset {asset_key.to_user_string()}: column {column!r} holds moments, and a partition is longer."
                    " Add a column with the day of each row, or its month, and name it in partition_by"
                )

    def values(self, keys: Sequence[str], partitions: dg.PartitionsDefinition[str]) -> list[dict[str, str]]:
        """Return the values of the partition columns for each of some partitions."""
        return [self._values_of(key, partitions) for key in keys]

    def _values_of(self, key: str, partitions: dg.PartitionsDefinition[str]) -> dict[str, str]:
        if self.formats:
            assert isinstance(partitions, dg.TimeWindowPartitionsDefinition)
            start = partitions.time_window_for_partition_key(key).start
            return {column: start.strftime(text) for column, text in self.formats.items()}
        if isinstance(key, dg.MultiPartitionKey):
            return dict(key.keys_by_dimension)
        return {self.columns[0]: key}


def is_stored_as(metadata: Mapping[str, Any]) -> bool:
    """Return whether the metadata of an asset says how it is stored, as :func:`stored_as` returns it."""
    return any(name in metadata for name in (_TABLE, _MODE, _PARTITION_BY, _PARTITION_FORMAT, _KEYS))


def check_stored(asset: dg.AssetsDefinition, keys: Iterable[dg.AssetKey] | None = None) -> None:
    """Check that runs can store an asset, when definitions load.

    Args:
        asset: The asset, or several assets of one step.
        keys: Those of the assets to check, None for all.

    Raises:
        InvalidInputError: No run could store it.
    """
    for key in asset.keys if keys is None else keys:
        if is_self_staging(asset, key):
            continue  # the asset itself says what it replaces
        spec = asset.get_asset_spec(key)
        stored = Stored.of(key, spec.metadata, spec.partitions_def)
        stored.check_rows_are_known(key)
        stored.check_partitions(key, spec.partitions_def)


def is_self_staging(asset: dg.AssetsDefinition, key: dg.AssetKey) -> bool:
    """Whether an asset returns a StagedTable, by its annotation."""
    from trinitylake_ops.iceberg.write.staged_table import StagedTable

    output = next(name for name, one in asset.keys_by_output_name.items() if one == key)
    return asset.node_def.output_def_named(output).dagster_type.typing_type is StagedTable


def _check_dimensions(
    shown: str,
    partitions: dg.PartitionsDefinition[str],
    columns: Sequence[str],
    formats: Mapping[str, str] | None,
) -> None:
    """Raise InvalidInputError if a partition key does not give one value for each partition column."""
    if isinstance(partitions, dg.MultiPartitionsDefinition):
        dimensions = sorted(dimension.name for dimension in partitions.partitions_defs)
        if columns and sorted(columns) != dimensions:
            raise InvalidInputError(
                f"asset {shown} has partitions by {', '.join(dimensions)}, and the table by {', '.join(columns)}; name"
                " the dimensions as the columns"
            )
        if formats:
            raise InvalidInputError(f"asset {shown}: partition_format is for partitions by time, of one dimension")
    elif formats and not isinstance(partitions, dg.TimeWindowPartitionsDefinition):
        raise InvalidInputError(f"asset {shown}: partition_format is for partitions by time")
    elif len(columns) > 1 and not formats:
        raise InvalidInputError(
            f"asset {shown}: a partition is one value, the table has the partition columns {', '.join(columns)}; give a"
            " partition_format, or partitions of as many dimensions"
        )


def names_table(metadata: Mapping[str, Any]) -> bool:
    """Whether the metadata of an asset names its table."""
    return bool(_plain(metadata.get(_TABLE)))


def table_of(asset_key: dg.AssetKey, metadata: Mapping[str, Any]) -> tuple[str, str]:
    """Return namespace and table of an asset. Raises InvalidInputError."""
    name = _plain(metadata.get(_TABLE))
    if name:
        return split_name(name)
    if len(asset_key.path) < 2:
        raise InvalidInputError(
            f"asset {asset_key.to_user_string()} names no namespace: give it a key such as ['sales', 'orders'], or"
            " metadata=stored_as(table='sales.orders')"
        )
    return asset_key.path[-2], asset_key.path[-1]


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, dg.MetadataValue) else value


# What pandas, polars and Arrow raise for values that Arrow has no type for, or that do not fit its types.
_UNSTORABLE = (ValueError, TypeError, NotImplementedError, OverflowError)


def is_spark(kind: Any) -> bool:
    """Whether a type is Spark's DataFrame, without importing Spark: where nobody did, there is none."""
    if not isinstance(kind, type) or "pyspark.sql.dataframe" not in sys.modules:
        return False
    from pyspark.sql import DataFrame

    return issubclass(kind, DataFrame)


def is_pandas(kind: Any) -> bool:
    """Whether a type is the DataFrame of pandas, without importing pandas, which need not be installed."""
    module = getattr(kind, "__module__", "")
    return getattr(kind, "__name__", "") == "DataFrame" and (module == "pandas" or module.startswith("pandas."))


def is_polars(kind: Any) -> bool:
    """Whether a type is the DataFrame or LazyFrame of polars, without importing polars."""
    module = getattr(kind, "__module__", "")
    is_frame = getattr(kind, "__name__", "") in ("DataFrame", "LazyFrame")
    return is_frame and (module == "polars" or module.startswith("polars."))


def arrow_of_polars(frame: Any) -> pa.Table:
    """Return a frame of polars. A lazy one is collected. Raises InvalidInputError for values that do not fit."""
    collected = frame.collect() if type(frame).__name__ == "LazyFrame" else frame
    for name, kind in collected.schema.items():
        if _has_objects(kind):  # polars would export the addresses of the objects
            raise InvalidInputError(
                f"column {name!r} of the frame of polars has Python objects; cast it to a type such as pl.String"
            )
    try:
        rows: pa.Table = collected.to_arrow()
    except _UNSTORABLE as error:
        reason = str(error).partition("\n")[0]
        raise InvalidInputError(f"the frame of polars cannot be stored: {reason}; cast the column") from error
    return rows


def _has_objects(kind: Any) -> bool:
    """Whether a type of polars is Object, or has it within."""
    if getattr(kind, "__name__", type(kind).__name__) == "Object":
        return True
    fields = [field.dtype for field in getattr(kind, "fields", ())]
    inner = getattr(kind, "inner", None)
    return any(_has_objects(part) for part in (*fields, *([] if inner is None else [inner])))


def arrow_of(frame: Any) -> pa.Table:
    """Return a DataFrame of pandas with its columns and the named levels of its index.

    Row numbers are left out. Raises InvalidInputError for other levels, which would get lost, for columns of several
    levels or the same name, and for values that do not fit.
    """
    if frame.columns.nlevels > 1:
        raise InvalidInputError(
            "the columns of the DataFrame are a MultiIndex, and a table has columns of one name; join the levels, as by"
            " df.columns = ['_'.join(map(str, column)) for column in df.columns]"
        )
    if frame.columns.has_duplicates:
        first = frame.columns[frame.columns.duplicated()][0]
        raise InvalidInputError(
            f"the DataFrame has several columns {first!r}; drop all but one by df.loc[:, ~df.columns.duplicated()], or"
            " rename them"
        )
    levels = frame.index.levels if frame.index.nlevels > 1 else [frame.index]
    for name, level in zip(frame.index.names, levels, strict=True):
        if name is None and len(level) and level.dtype.kind not in "iu":
            raise InvalidInputError(
                f"the index of the DataFrame holds {level.dtype} values and has no name: name it, and it becomes a"
                " column, or drop it with reset_index(drop=True)"
            )
    kept = [name for name in frame.index.names if name is not None and name not in frame.columns]
    try:
        return pa.Table.from_pandas(frame.reset_index(level=kept) if kept else frame, preserve_index=False)
    except _UNSTORABLE as error:
        parts = error.args if isinstance(error, pa.ArrowException) else [error]  # Arrow's has the column as the second
        reason = ", ".join(str(part).partition("\n")[0] for part in parts)
        raise InvalidInputError(
            f"the DataFrame of pandas cannot be stored: {reason}; give the column one type by astype(...)"
        ) from error
