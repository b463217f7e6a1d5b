"""Checks that distinct Dagster partitions are distinct partitions of the table.

A run replaces the rows of its partitions. If another partition had the same values in the partition columns, the run
would delete that partition's rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import product
from typing import TYPE_CHECKING, Literal, TypeAlias

import dagster as dg

from trinitylake_ops.errors import InvalidInputError

if TYPE_CHECKING:
    from trinitylake_ops.format.definitions import Schema

_Unit: TypeAlias = Literal["minute", "hour", "day", "week", "month", "year"]

#: Maximum number of partitions that are compared individually if the formats alone do not prove distinctness.
_MAX_COMPARED = 1_500
_SECONDS: Mapping[_Unit, int] = {
    "minute": 60,
    "hour": 3_600,
    "day": 86_400,
    "week": 7 * 86_400,
    "month": 28 * 86_400,
    "year": 365 * 86_400,
}
_LAST_YEAR = 9_000
_SHORTCUTS: Mapping[str, _Unit] = {
    "@hourly": "hour",
    "@daily": "day",
    "@midnight": "day",
    "@weekly": "week",
    "@monthly": "month",
    "@yearly": "year",
    "@annually": "year",
}
_EXAMPLES: Mapping[_Unit, str] = {
    "minute": "%Y-%m-%d %H:%M",
    "hour": "%Y-%m-%d %H",
    "day": "%Y-%m-%d",
    "week": "%G-W%V",
    "month": "%Y-%m",
    "year": "%Y",
}
_DIRECTIVE = re.compile(r"%(?P<flags>[^A-Za-z%]*[EO]?)(?P<letter>[A-Za-z%])")
_MONTHS = [datetime(2001, month, 1, tzinfo=UTC) for month in range(1, 13)]
_WEEKDAYS = [datetime(2001, 1, day, tzinfo=UTC) for day in range(1, 8)]
_HALF_DAYS = [datetime(2001, 1, 1, hour, tzinfo=UTC) for hour in (1, 13)]
_COMPOSED = {"F": "Ymd", "T": "HMS", "R": "HM"}


def check_formats(asset: str, partitions: dg.TimeWindowPartitionsDefinition, formats: Mapping[str, str]) -> None:
    """Check that the formats of partition columns give each time partition distinct values.

    Args:
        asset: The name of the asset for error messages.
        partitions: Its partitions.
        formats: A ``strftime`` format for each partition column.

    Raises:
        InvalidInputError: Two partitions have the same values, or the formats do not determine a partition.
    """

    def values_of(start: datetime) -> tuple[str, ...]:
        return tuple(start.strftime(text) for text in formats.values())

    unit = _shortest_period(partitions.cron_schedule)
    if unit not in _determined_units(list(formats.values())):
        keys, are_all = _first_keys(partitions, unit)
        duplicate = _same_values(partitions, keys, values_of)
        if duplicate is None and are_all:
            return
        example = "" if duplicate is None else f", for example {duplicate[0]!r} and {duplicate[1]!r}"
        raise InvalidInputError(
            f"asset {asset}: several partitions have the same values by partition_format {dict(formats)!r}{example},"
            f" and a run would replace the rows of all of them; use formats that determine the {unit}, such as"
            f" {_EXAMPLES[unit]!r}"
        )
    for window in _repeated_times(partitions):
        duplicate = _same_values(partitions, partitions.get_partition_keys_in_time_window(window), values_of)
        if duplicate is not None:
            raise InvalidInputError(
                f"asset {asset}: partitions {duplicate[0]!r} and {duplicate[1]!r} have the same values by"
                f" partition_format {dict(formats)!r}, as clocks go back, and a run would replace the rows of both; add"
                " %z to a format, or use a time zone without clock changes, such as UTC"
            )


def check_keys(
    asset: str,
    columns: Schema,
    values: Mapping[str, Sequence[str]],
    keys_of: Mapping[str, Callable[[], Sequence[str]]],
) -> None:
    """Check that no two partition keys become equal when they are converted to the table's column types.

    For example, ``1`` and ``01`` are different keys but the same integer.

    Args:
        asset: The name of the asset for error messages.
        columns: The columns of its table.
        values: The keys of the run's partitions, by partition column.
        keys_of: Returns all keys of a partition column. Does not include columns of time partitions.

    Raises:
        InvalidInputError: A key of the run and another key become equal.
    """
    from pyiceberg.types import StringType

    from trinitylake_ops.iceberg.types import to_iceberg_schema
    from trinitylake_ops.iceberg.write.partition_key import typed_value

    schema = to_iceberg_schema(columns)
    for column, run_keys in values.items():
        if column not in keys_of or isinstance(schema.find_type(column), StringType):
            continue
        by_value: dict[object, str] = {}
        for key in dict.fromkeys([*run_keys, *keys_of[column]()]):
            try:
                typed = typed_value(schema, column, key)
            except InvalidInputError:  # no run can write this key
                continue
            other = by_value.setdefault(None if typed is None else typed.value, key)
            if other != key and other in run_keys:
                raise InvalidInputError(
                    f"asset {asset}: the partition keys {other!r} and {key!r} are the same value of column {column!r},"
                    f" {schema.find_type(column)}, and a run would replace the rows of both; remove one of the keys, or"
                    " change the type of the column to string"
                )


def own_keys(context: dg.OutputContext) -> list[str]:
    """Return the partition keys that a run writes.

    Dagster caches the keys of a range by local time. For an hour that occurs twice when clocks go back, it may return
    both partitions for a range that contains one of them, or one for a range that contains both.
    """
    keys, partitions = list(context.asset_partition_keys), context.asset_partitions_def
    if context.has_partition_key:
        return [key for key in keys if key == context.partition_key]
    if not context.step_context.has_partition_key_range:
        return keys
    limits = context.step_context.partition_key_range
    if isinstance(partitions, dg.TimeWindowPartitionsDefinition):
        return _keys_between(partitions, limits.start, limits.end)
    if not isinstance(partitions, dg.MultiPartitionsDefinition):
        return keys
    first, last, *keys_by_dimension = (
        partitions.get_partition_key_from_str(key).keys_by_dimension for key in (limits.start, limits.end, *keys)
    )
    by_dimension: dict[str, Sequence[str]] = {}
    for dimension in partitions.partitions_defs:
        name, definition = dimension.name, dimension.partitions_def
        if isinstance(definition, dg.TimeWindowPartitionsDefinition):
            by_dimension[name] = _keys_between(definition, first[name], last[name])
        else:
            by_dimension[name] = list(dict.fromkeys(key[name] for key in keys_by_dimension))
    combined = product(*by_dimension.values())
    return [dg.MultiPartitionKey(dict(zip(by_dimension, keys, strict=True))) for keys in combined]


def _keys_between(partitions: dg.TimeWindowPartitionsDefinition, first: str, last: str) -> list[str]:
    """Return the partition keys of a time range."""
    start, end = (partitions.time_window_for_partition_key(key).start.astimezone(UTC) for key in (first, last))
    window = dg.TimeWindow(start, end + timedelta(seconds=1))  # in UTC: Dagster's cache confuses local times
    return list(partitions.get_partition_keys_in_time_window(window))


def _shortest_period(cron_schedule: str) -> _Unit:
    """Return the unit of local time in which at most one partition starts."""
    fields = cron_schedule.split()
    if len(fields) != 5:
        return _SHORTCUTS.get(cron_schedule.strip(), "minute")
    minute, hour, day, month, weekday = fields
    if not minute.isdigit():
        return "minute"
    if not hour.isdigit():
        return "hour"
    if day == "*" and re.fullmatch(r"[0-9]|[A-Za-z]{3}", weekday):
        return "week"
    if weekday == "*" and re.fullmatch(r"[0-9]+|L|l", day):
        return "year" if re.fullmatch(r"[0-9]+|[A-Za-z]{3}", month) else "month"
    return "day"


def _determined_units(formats: Sequence[str]) -> set[_Unit]:
    """Return the units of local time that the values of the formats determine."""
    letters = {letter for text in formats for letter in _letters(text)}
    months = bool(letters & {"m"}) or any(_differ(letter, _MONTHS) for letter in letters & {"b", "B"})
    weekdays = bool(letters & {"u", "w"}) or any(_differ(letter, _WEEKDAYS) for letter in letters & {"a", "A"})
    year = "Y" in letters
    iso_week, week = {"G", "V"} <= letters, year and bool(letters & {"U", "W"})
    month = year and months
    day = (month and bool(letters & {"d", "e"})) or (year and "j" in letters) or ((iso_week or week) and weekdays)
    hour = day and ("H" in letters or ({"I", "p"} <= letters and _differ("p", _HALF_DAYS)))
    by_unit: dict[_Unit, bool] = {
        "minute": hour and "M" in letters,
        "hour": hour,
        "day": day,
        "week": day or iso_week or week,
        "month": day or month,
        "year": day or year,
    }
    return {unit for unit, is_determined in by_unit.items() if is_determined}


def _letters(text: str) -> Iterator[str]:
    """Yield the directives of a format that have a fixed width or are delimited by other characters."""
    for match in _DIRECTIVE.finditer(text):
        before, after = text[: match.start()][-1:], text[match.end() :][:1]
        is_alone = not any(sign.isalnum() or sign == "%" for sign in (before, after))
        if match["flags"] in ("", "0") or (match["flags"] in ("-", "_") and is_alone):
            yield from _COMPOSED.get(match["letter"], match["letter"])


def _differ(letter: str, times: Sequence[datetime]) -> bool:
    """Whether a directive formats all times differently in the locale of this process."""
    return len({moment.strftime(f"%{letter}") for moment in times}) == len(times)


def _first_keys(partitions: dg.TimeWindowPartitionsDefinition, unit: _Unit) -> tuple[Sequence[str], bool]:
    """Return the first partition keys of a definition, and whether these are all of its keys."""
    start, end = partitions.start, partitions.end
    reach_s = (datetime(_LAST_YEAR, 1, 1, tzinfo=UTC) - start).total_seconds()
    horizon = start + timedelta(seconds=min(_SECONDS[unit] * _MAX_COMPARED, reach_s))
    is_all = end is not None and end <= horizon and partitions.end_offset <= 0
    last = end if end is not None and end <= horizon else horizon
    return partitions.get_partition_keys_in_time_window(dg.TimeWindow(start, last)), is_all


def _same_values(
    partitions: dg.TimeWindowPartitionsDefinition,
    keys: Sequence[str],
    values_of: Callable[[datetime], tuple[str, ...]],
) -> tuple[str, str] | None:
    """Return the first two keys whose partitions have the same values."""
    first_keys: dict[tuple[str, ...], str] = {}
    for key in keys:
        other = first_keys.setdefault(values_of(partitions.time_window_for_partition_key(key).start), key)
        if other != key:
            return other, key
    return None


def _repeated_times(partitions: dg.TimeWindowPartitionsDefinition) -> Iterator[dg.TimeWindow]:
    """Yield the windows around the times at which clocks go back, within the definition or the next three years."""
    zone = partitions.start.tzinfo
    end = (partitions.end or max(partitions.start, datetime.now(UTC)) + timedelta(days=3 * 366)).astimezone(UTC)
    at, step = partitions.start.astimezone(UTC), timedelta(days=7)
    while at < end:
        back = _offset_at(at, zone) - _offset_at(at + step, zone)
        if back > timedelta(0):
            low, high = at, at + step
            while high - low > timedelta(seconds=1):
                middle = low + (high - low) / 2
                low, high = (low, middle) if _offset_at(middle, zone) != _offset_at(at, zone) else (middle, high)
            moment = high.replace(microsecond=0)
            yield dg.TimeWindow(moment - back, moment + back)  # in UTC: Dagster's cache confuses local times
        at += step


def _offset_at(moment: datetime, zone: tzinfo | None) -> timedelta:
    return moment.astimezone(zone).utcoffset() or timedelta(0)
