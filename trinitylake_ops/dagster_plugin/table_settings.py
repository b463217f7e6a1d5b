"""Storage settings in an asset's metadata, and their meaning for the partitions of a run.

Modules with definitions import this module, so it imports pyiceberg only where a step needs it.
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
    "upsert": "append",  # appends rows with new keys; the other rows are updated
}
_TABLE = "trinitylake/table"
_MODE = "trinitylake/mode"
_PARTITION_BY = "trinitylake/partition_by"
_PARTITION_FORMAT = "trinitylake/partition_format"
_KEYS = "trinitylake/keys"
_LINEAGE = "dagster/column_lineage"
_COLUMNS = "dagster/column_schema"

#: Maximum number of preview rows. Dagster stores these rows, and every user who can view the asset sees them.
MAX_PREVIEW_ROWS = 100


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
    """Return asset metadata that configures how :class:`TrinityLakeIOManager` stores the asset.

    Args:
        table: The table as ``namespace.table``. Defaults to the last two parts of the asset key.
        mode: Which rows a run replaces. ``overwrite`` replaces all rows. ``append`` replaces none. ``upsert`` updates
            rows with the same ``keys`` and adds the others. ``overwrite_partition`` replaces the partitions of the run
            if the asset has Dagster partitions, and otherwise the partitions for which there are new rows. Defaults to
            ``overwrite_partition`` for an asset with Dagster partitions, and to ``overwrite`` for other assets.
        partition_by: The partition columns of the table. A Dagster partition key is the value of the single column. In
            a multi-dimensional key, each dimension is the value of the column with its name, and ``partition_by`` may
            be omitted.
        partition_format: For time partitions, a ``strftime`` format for each column, for example
            ``{"year": "%Y", "month": "%m"}``.
        keys: The columns that identify a row in mode ``upsert``.
        column_lineage: The columns of other assets from which each column is derived.
        preview_rows: Number of rows to show with each version. Dagster stores these rows.

    Raises:
        InvalidInputError: A value is invalid, or the values are inconsistent.
    """
    if mode is not None and mode not in _MODES:
        raise InvalidInputError(f"unknown mode {mode!r}; choose from {', '.join(get_args(StoreMode))}")
    if table is not None:
        split_name(table)
    columns = list(partition_by)
    if mode == "overwrite_partition" and not columns:
        raise InvalidInputError("mode overwrite_partition requires the partition columns; set partition_by")
    if (mode == "upsert") != bool(keys):
        raise InvalidInputError(
            "mode upsert requires keys, the columns that identify a row, and other modes do not support them; set both"
            " mode='upsert' and keys, or neither"
        )
    if partition_format is not None and sorted(partition_format) != sorted(columns):
        raise InvalidInputError("partition_format must have a format for each column of partition_by and no others")
    if not 0 <= preview_rows <= MAX_PREVIEW_ROWS:
        raise InvalidInputError(f"preview_rows is {preview_rows}; it must be between 0 and {MAX_PREVIEW_ROWS}")
    metadata: dict[str, Any] = {_TABLE: table, _MODE: mode, _PARTITION_BY: columns, _PARTITION_FORMAT: partition_format}
    metadata |= {_KEYS: list(keys), PREVIEW_ROWS: preview_rows, _LINEAGE: column_lineage}
    return {name: value for name, value in metadata.items() if value}


def preview_rows_of(metadata: Mapping[str, Any]) -> int:
    """Return the number of preview rows from an asset's metadata."""
    number = _plain(metadata.get(PREVIEW_ROWS))
    return min(number, MAX_PREVIEW_ROWS) if type(number) is int and number > 0 else 0


def described_in(metadata: Mapping[str, Any]) -> dg.TableSchema | None:
    """Return the column schema from an asset's metadata, or None."""
    described: dg.TableSchema | None = _plain(metadata.get(_COLUMNS))
    return described


def storage_metadata(asset_key: dg.AssetKey, metadata: Mapping[str, Any], staged: StagedTable) -> dict[str, Any]:
    """Return the metadata of a staged table that depends on the asset's settings: columns, lineage and preview.

    Args:
        asset_key: The asset.
        metadata: Its metadata. ``dagster/column_schema`` provides descriptions and tags of columns.
        staged: The staged table.

    Raises:
        InvalidInputError: The column lineage names a column that the table lacks.
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
            f"asset {asset_key.to_user_string()}: column_lineage names column {unknown[0]!r}, which its table does not"
            f" have; the columns are {', '.join(columns)}"
        )
    return {**entries, _LINEAGE: lineage}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Storage settings of an asset, from its metadata and its partitions."""

    #: The table's namespace and name.
    name: tuple[str, str]
    mode: Mode
    #: The partition columns of the table.
    columns: tuple[str, ...]
    #: The ``strftime`` format of each partition column, or None.
    formats: Mapping[str, str] | None
    #: The columns that identify a row for updates. Empty unless the mode is upsert.
    keys: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, asset_key: dg.AssetKey, metadata: Mapping[str, Any], partitions: dg.PartitionsDefinition[str] | None
    ) -> Self:
        """Return the storage settings of an asset.

        Args:
            asset_key: The asset.
            metadata: Its metadata.
            partitions: Its partitions, or None.

        Raises:
            InvalidInputError: The settings do not match the partitions, or the table name is invalid.
        """
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
        """Raise InvalidInputError if the settings do not determine which rows of the table a run replaces."""
        if self.mode == "replace_partitions" and not self.columns:
            raise InvalidInputError(
                f"asset {asset_key.to_user_string()} cannot be stored: it has partitions, but no partition column of"
                f" table {'.'.join(self.name)} is set; set metadata=stored_as(partition_by=[COLUMN]), so that each run"
                " replaces the rows of its partitions, or stored_as(mode='overwrite'), so that each run replaces the"
                " whole table"
            )

    def check_partitions(self, asset_key: dg.AssetKey, partitions: dg.PartitionsDefinition[str] | None) -> None:
        """Check that the partition formats give each partition distinct values, unless runs replace the whole table.

        Args:
            asset_key: The asset.
            partitions: Its partitions, or None.

        Raises:
            InvalidInputError: Several partitions have the same values.
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
        """Check that the run's partition keys remain distinct from all others after conversion to the column types.

        Args:
            asset_key: The asset.
            columns: The columns of its table.
            values: The values of the run's partitions.
            partitions: All partitions of the asset.
            instance: The Dagster instance, which stores dynamic partition keys.

        Raises:
            InvalidInputError: Two partition keys become the same value of a column.
        """
        written = {column: list(dict.fromkeys(row[column] for row in values)) for column in self.columns}
        by_column = {self.columns[0]: partitions}
        if isinstance(partitions, dg.MultiPartitionsDefinition):
            by_column = {dimension.name: dimension.partitions_def for dimension in partitions.partitions_defs}

        def keys_of(definition: dg.PartitionsDefinition[str]) -> Callable[[], Sequence[str]]:
            return lambda: definition.get_partition_keys(dynamic_partitions_store=instance)

        check_keys(
            asset_key.to_user_string(),
            columns,
            written,
            {
                column: keys_of(definition)
                for column, definition in by_column.items()
                if not isinstance(definition, dg.TimeWindowPartitionsDefinition)
            },
        )

    def check_columns(self, asset_key: dg.AssetKey, names: Collection[str]) -> None:
        """Check that rows have the partition columns of the asset, because missing columns would be NULL.

        Args:
            asset_key: The asset.
            names: The columns of the rows.

        Raises:
            InvalidInputError: The rows lack a partition column.
        """
        if missing := [column for column in self.columns if column not in names]:
            raise InvalidInputError(
                f"asset {asset_key.to_user_string()} was not stored: its rows lack column {missing[0]!r}, by which"
                f" table {'.'.join(self.name)} is partitioned; add the column, even if there are no rows"
            )

    def check_days(
        self, asset_key: dg.AssetKey, schema: pa.Schema, partitions: dg.PartitionsDefinition[str] | None
    ) -> None:
        """Check that time partitions without formats do not use a timestamp column.

        A partition key would then match only rows with exactly that timestamp.

        Args:
            asset_key: The asset.
            schema: The row schema.
            partitions: The partitions of the asset, or None.

        Raises:
            InvalidInputError: A partition column is a timestamp.
        """
        if self.formats or not isinstance(partitions, dg.TimeWindowPartitionsDefinition):
            return
        import pyarrow as pa

        for column in self.columns:
            if column in schema.names and pa.types.is_timestamp(schema.field(column).type):
                raise InvalidInputError(
                    f"asset {asset_key.to_user_string()} cannot be partitioned by column {column!r}: it contains"
                    " timestamps, but a partition covers a period; add a column with the day or month of each row, and"
                    " name it in partition_by"
                )

    def values(self, keys: Sequence[str], partitions: dg.PartitionsDefinition[str]) -> list[dict[str, str]]:
        """Return the values of the partition columns for each partition key.

        Args:
            keys: The partition keys.
            partitions: The asset's partitions.
        """
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
    """Whether the metadata of an asset contains storage settings from :func:`stored_as`."""
    return any(name in metadata for name in (_TABLE, _MODE, _PARTITION_BY, _PARTITION_FORMAT, _KEYS))


def check_stored(asset: dg.AssetsDefinition, keys: Iterable[dg.AssetKey] | None = None) -> None:
    """Check, when definitions load, that runs can store an asset.

    Args:
        asset: The asset, or several assets of one step.
        keys: The assets to check. Defaults to all of them.

    Raises:
        InvalidInputError: No run could store an asset.
    """
    for key in asset.keys if keys is None else keys:
        if is_self_staging(asset, key):
            continue  # the asset itself determines what it replaces
        spec = asset.get_asset_spec(key)
        stored = Stored.of(key, spec.metadata, spec.partitions_def)
        stored.check_rows_are_known(key)
        stored.check_partitions(key, spec.partitions_def)


def is_self_staging(asset: dg.AssetsDefinition, key: dg.AssetKey) -> bool:
    """Whether an asset is annotated to return a StagedTable.

    Args:
        asset: The asset, or several assets of one step.
        key: The key of the asset.
    """
    from trinitylake_ops.iceberg.write.staged_table import StagedTable

    output = next(name for name, output_key in asset.keys_by_output_name.items() if output_key == key)
    return asset.node_def.output_def_named(output).dagster_type.typing_type is StagedTable


def _check_dimensions(
    asset_name: str,
    partitions: dg.PartitionsDefinition[str],
    columns: Sequence[str],
    formats: Mapping[str, str] | None,
) -> None:
    """Raise InvalidInputError unless a partition key determines one value for each partition column."""
    if isinstance(partitions, dg.MultiPartitionsDefinition):
        dimensions = sorted(dimension.name for dimension in partitions.partitions_defs)
        if columns and sorted(columns) != dimensions:
            raise InvalidInputError(
                f"asset {asset_name} has the partition dimensions {', '.join(dimensions)}, but its table is partitioned"
                f" by {', '.join(columns)}; use the same names for dimensions and columns"
            )
        if formats:
            raise InvalidInputError(
                f"asset {asset_name}: partition_format requires time partitions of a single dimension; remove it"
            )
    elif formats and not isinstance(partitions, dg.TimeWindowPartitionsDefinition):
        raise InvalidInputError(f"asset {asset_name}: partition_format requires time partitions; remove it")
    elif len(columns) > 1 and not formats:
        raise InvalidInputError(
            f"asset {asset_name}: a partition key is a single value, but the table has the partition columns"
            f" {', '.join(columns)}; set partition_format, or use multi-dimensional partitions"
        )


def names_table(metadata: Mapping[str, Any]) -> bool:
    """Whether the metadata of an asset names its table."""
    return bool(_plain(metadata.get(_TABLE)))


def table_of(asset_key: dg.AssetKey, metadata: Mapping[str, Any]) -> tuple[str, str]:
    """Return the namespace and the name of an asset's table.

    Args:
        asset_key: The asset.
        metadata: Its metadata.

    Raises:
        InvalidInputError: Neither the metadata nor the key determines the table.
    """
    name = _plain(metadata.get(_TABLE))
    if name:
        return split_name(name)
    if len(asset_key.path) < 2:
        raise InvalidInputError(
            f"asset {asset_key.to_user_string()} has no namespace: its key has a single part; use a key such as"
            " ['sales', 'orders'], or set metadata=stored_as(table='sales.orders')"
        )
    return asset_key.path[-2], asset_key.path[-1]


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, dg.MetadataValue) else value


# Errors that pandas, polars and Arrow raise for values that cannot be converted to Arrow types.
_UNSTORABLE = (ValueError, TypeError, NotImplementedError, OverflowError)


def is_spark(kind: Any) -> bool:
    """Whether a type is Spark's DataFrame, without importing Spark: unless Spark is imported, no such type exists."""
    if not isinstance(kind, type) or "pyspark.sql.dataframe" not in sys.modules:
        return False
    from pyspark.sql import DataFrame

    return issubclass(kind, DataFrame)


def is_pandas(kind: Any) -> bool:
    """Whether a type is a pandas DataFrame, without importing pandas, which need not be installed."""
    module = getattr(kind, "__module__", "")
    return getattr(kind, "__name__", "") == "DataFrame" and (module == "pandas" or module.startswith("pandas."))


def is_polars(kind: Any) -> bool:
    """Whether a type is a polars DataFrame or LazyFrame, without importing polars."""
    module = getattr(kind, "__module__", "")
    is_frame = getattr(kind, "__name__", "") in ("DataFrame", "LazyFrame")
    return is_frame and (module == "polars" or module.startswith("polars."))


def arrow_of_polars(frame: Any) -> pa.Table:
    """Convert a polars frame to Arrow, collecting a LazyFrame. Raises InvalidInputError for unsupported values."""
    eager_frame = frame.collect() if type(frame).__name__ == "LazyFrame" else frame
    for name, kind in eager_frame.schema.items():
        if _has_objects(kind):  # polars would export the addresses of the objects
            raise InvalidInputError(
                f"the polars frame cannot be stored: column {name!r} contains Python objects; cast it to a type such as"
                " pl.String"
            )
    try:
        rows: pa.Table = eager_frame.to_arrow()
    except _UNSTORABLE as error:
        reason = str(error).partition("\n")[0]
        raise InvalidInputError(f"the polars frame cannot be stored: {reason}; cast the column") from error
    return rows


def _has_objects(kind: Any) -> bool:
    """Whether a polars type is Object or contains it."""
    if getattr(kind, "__name__", type(kind).__name__) == "Object":
        return True
    fields = [field.dtype for field in getattr(kind, "fields", ())]
    inner = getattr(kind, "inner", None)
    return any(_has_objects(part) for part in (*fields, *([] if inner is None else [inner])))


def arrow_of(frame: Any) -> pa.Table:
    """Convert a pandas DataFrame to Arrow, with its columns and the named levels of its index.

    Unnamed integer indexes are omitted.

    Raises:
        InvalidInputError: The index has another unnamed level, which would be lost, columns have several levels or
            duplicate names, or values are not supported.
    """
    if frame.columns.nlevels > 1:
        raise InvalidInputError(
            "the DataFrame cannot be stored: its columns are a MultiIndex; join the levels, for example with"
            " df.columns = ['_'.join(map(str, column)) for column in df.columns]"
        )
    if frame.columns.has_duplicates:
        first = frame.columns[frame.columns.duplicated()][0]
        raise InvalidInputError(
            f"the DataFrame cannot be stored: it has several columns {first!r}; rename them, or drop all but one with"
            " df.loc[:, ~df.columns.duplicated()]"
        )
    levels = frame.index.levels if frame.index.nlevels > 1 else [frame.index]
    for name, level in zip(frame.index.names, levels, strict=True):
        if name is None and len(level) and level.dtype.kind not in "iu":
            raise InvalidInputError(
                f"the DataFrame cannot be stored: its index contains {level.dtype} values and has no name; name the"
                " index to store it as a column, or drop it with reset_index(drop=True)"
            )
    index_columns = [name for name in frame.index.names if name is not None and name not in frame.columns]
    try:
        return pa.Table.from_pandas(
            frame.reset_index(level=index_columns) if index_columns else frame, preserve_index=False
        )
    except _UNSTORABLE as error:
        parts = (
            error.args if isinstance(error, pa.ArrowException) else [error]
        )  # Arrow names the column in its second argument
        reason = ", ".join(str(part).partition("\n")[0] for part in parts)
        raise InvalidInputError(
            f"the pandas DataFrame cannot be stored: {reason}; convert the column to one type with astype(...)"
        ) from error
