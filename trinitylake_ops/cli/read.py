"""Commands that create a lakehouse, or inspect it: init, ls, show, diff, tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from datetime import datetime
from enum import IntEnum
from typing import Any

import click
from rich.console import Console
from rich.filesize import decimal

from trinitylake_ops import Lakehouse
from trinitylake_ops.cli.context import (
    Session,
    WholeNumber,
    at_options,
    json_option,
    pass_session,
    print_json,
    print_line,
    print_shown,
    print_table,
    properties_of,
    with_flags,
)
from trinitylake_ops.errors import InvalidDefinitionError, InvalidNameError
from trinitylake_ops.format.definitions import (
    ExpirationBatch,
    ExportRecord,
    IsolationLevel,
    LakehouseDef,
    ParentRecord,
    RetentionRules,
)
from trinitylake_ops.format.limits import MAX_NODE_FILE_BYTES, MAX_ORDER, MIN_ORDER
from trinitylake_ops.operations.rendering import change_rows, new_table
from trinitylake_ops.tree.forecast import TreeForecast, forecast_tree
from trinitylake_ops.versions.snapshot import Snapshot
from trinitylake_ops.versions.table_names import resolve_table

_BAR_CHARS = 20
_MAX_SHOWN = 20  # tables of a namespace
_FORECAST_OBJECTS = [10**exponent for exponent in range(3, 10)]
_SIZE = WholeNumber(1, MAX_NODE_FILE_BYTES)
# Limits of the lifetime of a transaction. A writer may wait for its slot for 20 s, but at most for a quarter of the
# lifetime. No space is reclaimed during the lifetime.
_MIN_LIFE_MS, _MAX_LIFE_MS = 60_000, 10 * 365 * 86_400_000
_SETTINGS = (
    ("order", WholeNumber(MIN_ORDER, MAX_ORDER), "Maximum children of a node."),
    ("namespace_name_max_size_bytes", _SIZE, "Maximum length of a namespace name."),
    ("table_name_max_size_bytes", _SIZE, "Maximum length of a table name."),
    ("file_path_max_size_bytes", _SIZE, "Maximum length of a file path."),
    ("node_file_max_size_bytes", _SIZE, "Maximum size of a node file."),
    ("maximum_version_age_millis", WholeNumber(0, 2**63 - 1), "Age at which versions may expire."),
    ("minimum_versions_to_keep", WholeNumber(1, 2**31 - 1), "Number of newest versions that never expire by age."),
    ("txn_ttl_millis", WholeNumber(_MIN_LIFE_MS, _MAX_LIFE_MS), "Maximum duration of a transaction."),
)


def _setting_options(command: Any) -> Any:
    defaults = LakehouseDef(id="")
    for name, kind, description in reversed(_SETTINGS):
        flag = "--" + name.replace("_", "-")
        option = click.option(
            flag, name, type=kind, default=getattr(defaults, name), show_default=True, help=description
        )
        command = option(command)
    return command


@click.command(short_help="Create an empty lakehouse at the root.")
@_setting_options
@click.option(
    "--isolation-level",
    type=click.Choice(["snapshot", "serializable"]),
    default="snapshot",
    show_default=True,
    help="Isolation level of transactions.",
)
@click.option(
    "--node-compression",
    type=click.Choice(["none", "lz4", "zstd"]),
    default="none",
    show_default=True,
    help="Compression of node files. Other programs may only support none.",
)
@click.option(
    "--table-root",
    default="",
    metavar="URI",
    help="Root for files of new tables, if not below the root of the lakehouse. The lakehouse deletes files there that"
    " it no longer needs. It may be on another kind of storage; set its storage options as SCHEME.NAME.",
)
@click.option("--property", "properties", multiple=True, metavar="NAME=VALUE", help="A property of the lakehouse.")
@click.option("--explain", is_flag=True, help="Also print the settings, and a forecast for large numbers of tables.")
@json_option
@pass_session
def init(
    session: Session,
    /,
    isolation_level: str,
    node_compression: str,
    properties: tuple[str, ...],
    explain: bool,
    as_json: bool,
    **settings: Any,
) -> None:
    """Create an empty lakehouse at the root, as version 0.

    Size limits and the order can never be changed. With --explain the command forecasts the tree for 1,000 to
    1,000,000,000 tables: its height, the messages in the root's buffer, and the bytes of a commit of one table, before
    compression.

    With a catalog in Redis and tables on S3: trinitylake --root redis://host:6379/0/lake init --table-root s3://bucket/t

    Example: trinitylake --root /data/lake init --order 64
    """
    try:
        lake = Lakehouse.create(
            session.root,
            session.storage_options,
            isolation_level=IsolationLevel[isolation_level.upper()],
            node_compression="" if node_compression == "none" else node_compression,
            properties=properties_of(properties, "--property"),
            **settings,
        )
    except InvalidDefinitionError as error:
        flags = {name: f"--{name.replace('_', '-')}" for name in settings}
        raise InvalidDefinitionError(with_flags(error.message, flags), path=error.path) from error
    snapshot = lake.snapshot()
    forecasts = [forecast_tree(snapshot.definition, objects) for objects in _FORECAST_OBJECTS] if explain else None
    if as_json:
        content = {"root": lake.root, "version": snapshot.version, "definition": snapshot.definition}
        print_json(content if forecasts is None else {**content, "forecast": forecasts})
        return
    print_line(f"Created a lakehouse at {lake.root}")
    if forecasts is None:
        print_line("Next: set TRINITYLAKE_ROOT to this root, so that commands need no --root, and write tables.")
        return
    print_table(_definition_table(snapshot))
    print_table(_forecast_table(forecasts))


def _forecast_table(forecasts: Sequence[TreeForecast]) -> Any:
    rows = [
        (
            f"{forecast.objects:,}",
            forecast.height + 1,
            f"{forecast.nodes:,}",
            forecast.buffer_messages,
            f"{forecast.nodes_per_commit:.2f}",
            _size(forecast.bytes_per_commit),
            f"{forecast.write_amplification:,.0f} x",
        )
        for forecast in forecasts
    ]
    title = "Forecast: trees after random inserts, and the average cost of a commit that changes one table"
    columns = (
        *("tables", "levels", "nodes", "messages in a full buffer"),
        *("nodes / commit", "bytes / commit", "bytes written / changed"),
    )
    return new_table(title, *columns, rows=rows)


def _size(size_bytes: float) -> str:
    return str(decimal(round(size_bytes)))


def _definition_table(snapshot: Snapshot) -> Any:
    definition = replace(snapshot.definition, node_compression=snapshot.definition.node_compression or "none")
    settings = [(spec.name, getattr(definition, spec.name)) for spec in fields(LakehouseDef)]
    clones = tuple(record for record in definition.exports if record.clone_id)
    exports = tuple(record for record in definition.exports if not record.clone_id)
    clone_names = {record.name for record in clones}
    snapshots = {name: root for name, root in definition.exported_snapshots.items() if name not in clone_names}
    without_clones = {"exports": exports, "exported_snapshots": snapshots}
    settings = [(name, without_clones.get(name, value)) for name, value in settings] + [("clones", clones)]
    rows = [(name, _setting(value)) for name, value in settings if value not in ({}, (), None, "", b"")]
    return new_table(
        f"Lakehouse at version {snapshot.version}, {_time(snapshot.created_at)}", "setting", "value", rows=rows
    )


def _setting(value: Any) -> object:
    """Format a setting of a lakehouse for display. Long lists are cut, and the omitted items are counted."""
    if isinstance(value, IntEnum):
        return value.name.lower()
    if isinstance(value, RetentionRules):
        value = {spec.name: getattr(value, spec.name) for spec in fields(value) if getattr(value, spec.name)}
    if isinstance(value, ParentRecord):
        return f"{value.root} at version {value.version}, as {value.name}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={text}" for name, text in sorted(value.items()))
    if isinstance(value, tuple):
        rest = f" and {len(value) - _MAX_SHOWN:,} more" if len(value) > _MAX_SHOWN else ""
        return ", ".join(map(_part, value[:_MAX_SHOWN])) + rest
    return value


def _part(record: Any) -> str:
    if isinstance(record, ExportRecord):
        where = f"at {record.target_uri}" if record.clone_id else record.level.name.lower()
        return f"{record.name} (version {record.version}, {where})"
    if isinstance(record, ExpirationBatch):
        return f"{record.versions} ({record.state.name.lower()})"
    return f"{record.root} at version {record.version}"  # a source


@click.command(short_help="Draw the tree: levels, fill, buffers, bytes.")
@at_options
@json_option
@pass_session
def tree(session: Session, version: str | None, timestamp: datetime | int | None, as_json: bool) -> None:
    """Draw the tree of a version by level: nodes, their fill, messages in buffers, bytes.

    The command reads all nodes of the tree. Thin nodes and many messages make reads slower; compact removes both.

    Example: trinitylake tree --version 12
    """
    snapshot = session.lake().snapshot(version, timestamp)
    with Console(stderr=True).status("reading the tree"):
        shape = snapshot.tree_shape()
    if as_json:
        print_json({"version": snapshot.version, "order": snapshot.limits.order, "levels": shape.levels})
        return
    rows = [
        (
            "root" if level.depth == 0 else "leaves" if level.depth == shape.height else f"level {level.depth}",
            f"{level.nodes:,}",
            f"{level.keys:,}",
            f"{_bar(level.fill)} {level.fill:4.0%}",
            f"{level.fewest_keys}-{level.most_keys} of {snapshot.limits.max_keys}",
            f"{level.messages:,}",
            _size(level.message_bytes),
            _size(level.file_bytes),
        )
        for level in shape.levels
    ]
    columns = ("", "nodes", "keys", "fill", "keys of a node", "messages", "text of messages", "bytes")
    print_table(new_table(f"Tree of version {snapshot.version}", *columns, rows=rows))


def _bar(part: float) -> str:
    """Draw a bar of 20 characters."""
    return f"{'█' * round(min(1.0, part) * _BAR_CHARS):░<{_BAR_CHARS}}"


def _time(time: datetime) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC")


@click.command(short_help="List namespaces, or the tables of one.")
@click.argument("namespace", required=False)
@at_options
@json_option
@pass_session
def ls(
    session: Session, namespace: str | None, version: str | None, timestamp: datetime | int | None, as_json: bool
) -> None:
    """List the namespaces, or the tables of one.

    Example: trinitylake ls sales --timestamp 2026-01-31
    """
    snapshot = session.lake().snapshot(version, timestamp)
    names = snapshot.namespaces() if namespace is None else snapshot.tables(namespace)
    if as_json:
        print_json(names)
        return
    print_table(new_table("", "namespace" if namespace is None else "table", rows=[(name,) for name in names]))


@click.command()
@click.argument("name", required=False, metavar="[NS[.TABLE]]")
@at_options
@json_option
@pass_session
def show(
    session: Session, name: str | None, version: str | None, timestamp: datetime | int | None, as_json: bool
) -> None:
    """Show the lakehouse, a namespace or a table.

    The name of an existing namespace selects the namespace. Otherwise each dot is tried as the separator of namespace
    and table, because names may contain dots.

    Example: trinitylake show sales.orders --version 12
    """
    snapshot = session.lake().snapshot(version, timestamp)
    if name is None:
        _show_lakehouse(snapshot, as_json)
    elif _is_namespace(snapshot, name):
        _show_namespace(snapshot, name, as_json)
    else:
        _show_table(snapshot, *resolve_table(name, snapshot), as_json)


def _is_namespace(snapshot: Snapshot, name: str) -> bool:
    """Whether a name selects a namespace. A name with dots may be too long for a namespace, but select a table."""
    if "." not in name:
        return True
    try:
        return snapshot.has_namespace(name)
    except InvalidNameError:
        return False


def _show_lakehouse(snapshot: Snapshot, as_json: bool) -> None:
    if as_json:
        content = {"version": snapshot.version, "created_at": snapshot.created_at, "namespaces": snapshot.namespaces()}
        print_json({**content, "definition": snapshot.definition})
        return
    print_table(_definition_table(snapshot))
    print_line(f"namespaces: {', '.join(snapshot.namespaces()) or 'none'}")


def _show_namespace(snapshot: Snapshot, namespace: str, as_json: bool) -> None:
    definition, tables = snapshot.namespace(namespace), snapshot.tables(namespace)
    if as_json:
        print_json({"version": snapshot.version, "namespace": namespace, "definition": definition, "tables": tables})
        return
    listed = ", ".join(tables) if len(tables) <= _MAX_SHOWN else f"{len(tables):,}; list them with: ls {namespace}"
    rows = [("id", definition.id), ("tables", listed or "none"), *sorted(definition.properties.items())]
    print_table(new_table(f"Namespace {namespace} at version {snapshot.version}", "property", "value", rows=rows))


def _show_table(snapshot: Snapshot, namespace: str, table: str, as_json: bool) -> None:
    definition = snapshot.table(namespace, table)
    if as_json:
        content = {"version": snapshot.version, "namespace": namespace, "table": table, "definition": definition}
        print_json(content)
        return
    details = {"type": definition.table_type or "MANAGED", "format": definition.table_format, "id": definition.id}
    rows = [*details.items(), *sorted(definition.format_properties.items()), *sorted(definition.properties.items())]
    print_table(new_table(f"Table {namespace}.{table} at version {snapshot.version}", "property", "value", rows=rows))
    keys = set(definition.primary_keys)
    columns = [
        (
            column.id,
            column.name,
            column.type_name,
            "yes" if column.nullable else "no",
            "yes" if column.id in keys else "",
        )
        for column in definition.schema.columns
    ]
    print_table(new_table("Columns", "id", "name", "type", "nullable", "key", rows=columns))


@click.command(short_help="List the differences between two versions.")
@click.argument("before", metavar="N|NAME")
@click.argument("after", metavar="N|NAME")
@click.option("--stat", is_flag=True, help="Also show rows, files and bytes of tables. Reads metadata only.")
@json_option
@pass_session
def diff(session: Session, before: str, after: str, stat: bool, as_json: bool) -> None:
    """List the namespaces and tables that differ between two versions or exports.

    With --stat, the command also shows the rows, files and bytes added and removed. These numbers come from the
    summaries of Iceberg snapshots, as recorded by the tables' writers.

    Example: trinitylake diff 11 12 --stat
    """
    lake = session.lake()
    if stat:
        from trinitylake_ops.operations import diff_versions  # imports Iceberg

        print_shown(diff_versions(lake, lake.snapshot(before), lake.snapshot(after)), as_json)
        return
    changes = lake.diff(before, after)
    if as_json:
        print_json(changes)
    elif changes:
        print_table(new_table("", "change", "object", rows=change_rows(changes)))
    else:
        print_line(f"{before} and {after} do not differ.")
