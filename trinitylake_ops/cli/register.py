"""The ``register-table`` command, which registers existing Iceberg tables."""

from __future__ import annotations

import click
from rich.console import Console

from trinitylake_ops import operations
from trinitylake_ops.cli.context import (
    Session,
    json_option,
    pass_session,
    print_committed,
    print_notice,
    print_shown,
    properties_of,
)
from trinitylake_ops.iceberg.io.file_io import reading_io
from trinitylake_ops.iceberg.managed import metadata_uri
from trinitylake_ops.iceberg.table_change import registering_io, root_to_allow


@click.command("register-table", short_help="Register existing Iceberg tables.")
@click.argument("table", metavar="[NAMESPACE.TABLE]", required=False)
@click.argument("metadata_location", required=False)
@click.option("--catalog", metavar="NAME", help="Register all tables of this pyiceberg catalog, as one version.")
@click.option(
    "--catalog-option",
    "catalog_options",
    multiple=True,
    metavar="NAME=VALUE",
    help="A property of the catalog, such as uri=... Repeatable. Put credentials into its configuration file or the"
    " environment (PYICEBERG_CATALOG__NAME__...), because all users of the machine can see arguments.",
)
@click.option("--namespace", "namespaces", multiple=True, help="Only this namespace of the catalog. Repeatable.")
@json_option
@pass_session
def register_table(
    session: Session,
    table: str | None,
    metadata_location: str | None,
    catalog: str | None,
    catalog_options: tuple[str, ...],
    namespaces: tuple[str, ...],
    as_json: bool,
) -> None:
    """Register an existing Iceberg table by its METADATA_LOCATION, or all tables of a catalog.

    Nothing is copied, and the lakehouse never deletes a file of a registered table. The namespace of a single table
    must exist; the namespaces of a catalog are created. The name of a nested namespace consists of all its names,
    joined by dots. Tables that are already registered with the same metadata are skipped.

    Example: trinitylake register-table sales.orders s3://bucket/orders/metadata/00007-6f1b.metadata.json
    """
    if catalog is None:
        if table is None or metadata_location is None:
            raise click.UsageError("pass either NAMESPACE.TABLE and METADATA_LOCATION, or --catalog")
        if catalog_options or namespaces:
            raise click.UsageError("--catalog-option and --namespace need --catalog")
        _register_one(session, table, metadata_location, as_json)
        return
    if table is not None:
        raise click.UsageError("pass either NAMESPACE.TABLE and METADATA_LOCATION, or --catalog, not both")
    lake, properties = session.lake(), properties_of(catalog_options, "--catalog-option")
    with Console(stderr=True).status("reading the catalog"):
        report = operations.register_catalog(lake, catalog, properties, namespaces=namespaces or None)
    print_shown(report, as_json)


def _register_one(session: Session, table: str, metadata_location: str, as_json: bool) -> None:
    # Names of namespaces may contain dots, so the last dot separates the table.
    namespace, dot, name = table.rpartition(".")
    if not dot:
        raise click.UsageError(f"{table!r} is not a table name; use NAMESPACE.TABLE")
    lake = session.lake()
    version = operations.register_table(lake, namespace, name, metadata_location)
    definition = lake.snapshot(version).table(namespace, name)
    io = reading_io(lake)
    missing_root = root_to_allow(definition, registering_io(io, [metadata_uri(definition, lake.root)]))
    print_committed(
        version,
        as_json,
        f"Registered table {table}",
        namespace=namespace,
        table=name,
        definition=definition,
        root_to_allow=missing_root,
    )
    if missing_root is not None:
        print_notice(
            f"Its files are at another root, which readers and operations that delete must allow:"
            f" --allow-root {missing_root}"
        )
