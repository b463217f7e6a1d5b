"""Request handlers for tables."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from pyiceberg.catalog.rest import (
    CreateTableRequest,
    ListTablesResponse,
    RegisterTableRequest,
)
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.table import CommitTableRequest, Table, TableIdentifier
from pyiceberg.table.metadata import TableMetadata, new_table_metadata
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER

from trinitylake_ops.errors import CorruptFileError, FileMissingError, NotFoundError
from trinitylake_ops.format.definitions import TableDef
from trinitylake_ops.format.locations import as_uri
from trinitylake_ops.iceberg.catalog import TrinityLakeCatalog
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.managed import LATEST_WRITTEN_VERSION, MANAGED_PROPERTIES, managed_table_id, metadata_uri
from trinitylake_ops.iceberg.metadata import read_table_metadata
from trinitylake_ops.iceberg.properties import check_settable
from trinitylake_ops.iceberg.table_change import registered_uri
from trinitylake_ops.iceberg.updates import as_invalid_input, check_format
from trinitylake_ops.server.calls import Call, changed, page_of, single_level
from trinitylake_ops.server.commits import TableCommit, check_readable, commit_tables
from trinitylake_ops.server.credentials import access_at, may_write, vends
from trinitylake_ops.server.responses import (
    NO_CONTENT,
    JsonResponse,
    as_member,
    bad_request,
    encoded,
    forbidden,
    ok,
    table_response,
    unsupported,
)
from trinitylake_ops.server.tokens import Scope
from trinitylake_ops.server.warehouses import Name

logger = logging.getLogger(__name__)

_LOCAL = "file://"
#: Locks that make concurrent requests encode the same metadata only once, selected by the hash of its ETag.
_ENCODING = tuple(threading.Lock() for _ in range(64))
_MAX_IN_TRANSACTION = 1_000
#: The types of client reports that are accepted.
_REPORTS = ("scan-report", "commit-report")


def list_tables(call: Call) -> JsonResponse:
    """List the tables in a namespace."""
    namespace = call.namespace
    call.check(Scope.READ, namespace)
    page, token = page_of(call, [name for _, name in call.warehouse.catalog().list_tables((namespace,))])
    entries = [{"name": name, "namespace": [namespace]} for name in page]
    return ok(ListTablesResponse.model_validate({"identifiers": entries, "next-page-token": token}))


def load_table(call: Call) -> JsonResponse:
    """Return the metadata of a table, or 304 if the client already has it."""
    namespace, name = call.table
    call.check(Scope.READ, namespace)
    mode = call.query.get("snapshots", "all")
    if mode not in ("all", "refs"):
        raise bad_request("snapshots must be all or refs")
    requested = call.requested_table()
    catalog, definition = requested.catalog, requested.definition
    tag = _tag(call, metadata_uri(definition, catalog.io.root), mode)
    is_vended = vends(call, requested)
    if not is_vended and _matches(call.headers.get("if-none-match", ""), tag):
        return JsonResponse(304, headers={"ETag": tag})
    table = catalog.load_defined(namespace, name, definition)
    _check_served_format(table.metadata)
    writes = may_write(call, namespace, requested)
    if definition.is_managed and writes:
        _make_local_folders(call, table.metadata.location)
    return _table_response(call, table, definition, mode, writes=writes, is_vended=is_vended)


def table_exists(call: Call) -> JsonResponse:
    """Report whether a table exists."""
    call.requested_table()
    return NO_CONTENT


def create_table(call: Call) -> JsonResponse:
    """Create a managed table, or stage a table that a later commit creates."""
    namespace = call.namespace
    call.check(Scope.WRITE, namespace)
    absent: dict[str, Any] = {"location": None, "partition-spec": None, "write-order": None}
    request = call.model(CreateTableRequest, **absent)
    properties = {name: value for name, value in request.properties.items() if name not in MANAGED_PROPERTIES}
    check_format(properties)
    check_settable(properties)
    spec, order = request.partition_spec or UNPARTITIONED_PARTITION_SPEC, request.write_order or UNSORTED_SORT_ORDER
    with as_invalid_input():
        metadata = new_table_metadata(request.table_schema, spec, order, "file:///place", dict(properties))
    check_readable(encoded(metadata), "the new table")
    arguments = ((namespace, request.name), request.table_schema, None, spec, order, properties)
    if request.stage_create:
        catalog = call.warehouse.catalog()
        catalog.load_namespace_properties((namespace,))
        staged = catalog.stage_table(*arguments)
        _make_local_folders(call, staged.metadata.location)
        location, is_vended = staged.metadata.location, vends(call, None)
        access = access_at(call, namespace, request.name, location, writes=True, is_vended=is_vended)
        return table_response(None, as_member(encoded(staged.metadata)), access.members, access.headers)
    table = changed(call, lambda catalog: catalog.create_table(*arguments))
    table = table or call.warehouse.catalog().load_table((namespace, request.name))
    _make_local_folders(call, table.metadata.location)
    return _table_response(call, table, is_vended=vends(call, None))


def committed_table(call: Call) -> list[Name]:
    """Return the table that a commit changes. Raises RejectedError (403) if the principal may not change it."""
    call.check(Scope.WRITE, call.table[0])
    return [call.table]


def commit_table(call: Call) -> JsonResponse:
    """Commit updates to one table."""
    namespace, name = call.table
    request = call.model(CommitTableRequest, identifier={"namespace": [namespace], "name": name})
    commit = TableCommit.of(request)
    if commit.name != (namespace, name):
        raise bad_request("the identifier in the body does not match the table in the path")
    committed = commit_tables(call, [commit])[commit.name]
    return table_response(
        committed.metadata_location,
        as_member(committed.text),
        headers={"ETag": _tag(call, committed.metadata_location, "all")},
    )


def committed_tables(call: Call) -> list[Name]:
    """Return the tables that a transaction changes. Raises RejectedError (403) if any of them may not be changed."""
    names = [_identifier_of(isinstance(change, dict) and change.get("identifier")) for change in _changes(call)]
    for namespace, _ in names:
        call.check(Scope.WRITE, namespace)
    return names


def _changes(call: Call) -> list[Any]:
    changes = call.document().get("table-changes")
    if not isinstance(changes, list) or not 1 <= len(changes) <= _MAX_IN_TRANSACTION:
        raise bad_request(f"table-changes must be a list of 1 to {_MAX_IN_TRANSACTION} changes")
    return changes


def commit_transaction(call: Call) -> JsonResponse:
    """Commit updates to several tables as one version of the lakehouse."""
    with as_invalid_input():
        requests = [CommitTableRequest.model_validate(change) for change in _changes(call)]
    commit_tables(call, [TableCommit.of(request) for request in requests])
    return NO_CONTENT


def register_table(call: Call) -> JsonResponse:
    """Register an external table by its metadata file, which must be in a location that the operator allows."""
    namespace = call.namespace
    call.check(Scope.OPERATE, namespace)
    request = call.model(RegisterTableRequest, overwrite=False)
    io = call.warehouse.served.catalog.io.strict()
    uri = registered_uri(io.root, request.metadata_location)
    _check_allowed(call, uri)
    # Check this before the file is read, so that the response does not reveal whether another table has such a file.
    _check_is_not_own(io, uri)
    try:
        metadata = read_table_metadata(io, uri)
    except (FileMissingError, CorruptFileError) as error:
        raise bad_request(f"cannot read the metadata file: {error}") from error
    _check_served_format(metadata)
    location = as_uri(metadata.location).rstrip("/")
    _check_allowed(call, f"{location}/metadata/any")
    _check_is_not_own(io, f"{location}/metadata/any")
    changed(
        call, lambda catalog: catalog.register_table((namespace, request.name), uri, overwrite=bool(request.overwrite))
    )
    loaded = call.warehouse.catalog().load_table((namespace, request.name))
    definition = call.warehouse.served.lake.snapshot().table(namespace, request.name)
    return _table_response(call, loaded, definition, writes=False, is_vended=False)


def rename_table(call: Call) -> JsonResponse:
    """Rename a table, possibly into another namespace."""
    return renamed(call, TrinityLakeCatalog.move_table, _check_all_names)


def drop_table(call: Call) -> JsonResponse:
    """Drop a table. Its files are kept for older versions, even if a purge is requested, and are purged with them."""
    namespace, name = call.table
    call.check(Scope.WRITE, namespace)
    call.flag("purgeRequested")
    _check_all_names(call, (namespace, name))
    changed(call, lambda catalog: catalog.drop_table((namespace, name)))
    return NO_CONTENT


def report_metrics(call: Call) -> JsonResponse:
    """Accept a client's metrics report, which is only logged."""
    namespace, name = call.table
    call.check(Scope.READ, namespace)
    kind = call.document().get("report-type")
    if kind not in _REPORTS:
        raise bad_request(f"report-type must be one of {', '.join(_REPORTS)}")
    call.requested_table()
    logger.debug("%s sent a report about %s.%s: %.40r", call.principal.name, namespace, name, kind)
    return NO_CONTENT


def renamed(
    call: Call,
    move: Callable[[TrinityLakeCatalog, tuple[str, str], tuple[str, str]], object],
    check: Callable[[Call, tuple[str, str]], None] = lambda call, source: None,
) -> JsonResponse:
    """Rename a table or a view.

    Args:
        call: The request.
        move: The catalog method that renames the object.
        check: Raises RejectedError if the principal may not change the object under its old name.
    """
    body = call.document()
    source, target = (_identifier_of(body.get(name)) for name in ("source", "destination"))
    call.check(Scope.WRITE, source[0])
    call.check(Scope.WRITE, target[0])
    check(call, source)
    changed(call, lambda catalog: move(catalog, source, target))
    return NO_CONTENT


def _check_all_names(call: Call, name: tuple[str, str]) -> None:
    """Raise RejectedError (403) unless the principal may write the table under all of its current names."""
    if call.principal.min_scope < Scope.WRITE:
        latest = call.warehouse.served.lake.snapshot()
        with contextlib.suppress(NotFoundError):  # the change reports it, unless this request was already carried out
            call.check_table(Scope.WRITE, latest.table(*name), latest)


def _identifier_of(content: Any) -> tuple[str, str]:
    """Parse the namespace and the name of a table or a view in a request body. Raises InvalidInputError."""
    with as_invalid_input():
        identifier = TableIdentifier.model_validate(content)
    return single_level(identifier.namespace.root), identifier.name


def _check_is_not_own(io: StorageFileIO, uri: str) -> None:
    """Raise RejectedError (400) if a URI is in a folder for managed tables of this lakehouse, existing or not."""
    if io.folders.is_own_file(uri):
        raise bad_request(
            f"cannot register {uri[:200]!r}: it is in a table folder of this lakehouse; rename an existing table"
            " instead, or ask the operator to restore a dropped one with 'trinitylake rollback' or 'trinitylake"
            " register-table'"
        )


def _check_allowed(call: Call, uri: str) -> None:
    io = call.warehouse.served.catalog.io
    if io.strict().allowed_roots.known(uri) is None:
        raise forbidden(
            f"this server may not read {uri[:200]!r}; ask its operator to allow a root that contains it, with"
            " --allow-root or the lakehouse's allowed_roots"
        )


def _table_response(
    call: Call,
    table: Table,
    definition: TableDef | None = None,
    mode: str = "all",
    *,
    writes: bool = True,
    is_vended: bool,
) -> JsonResponse:
    """Return a response with a table and the configuration to access its files. The defaults are for a new table.

    Args:
        call: The request.
        table: The table.
        definition: The definition of the table, or None for a new managed table.
        mode: Which snapshots the client requested: ``all`` or ``refs``.
        writes: Whether the client may write the table's files.
        is_vended: Whether the client gets credentials for the files.
    """
    tag, cache = _tag(call, table.metadata_location, mode), call.warehouse.served.encoded
    with _ENCODING[hash(tag) % len(_ENCODING)]:  # many clients may load the same large table
        text = cache.get(tag)
        if text is None:
            text = as_member(encoded(table.metadata if mode == "all" else _with_refs_only(table.metadata)))
            cache.put(tag, text, len(text))
    namespace, name = table.name()
    is_managed = definition is None or definition.is_managed
    location = table.metadata.location if is_managed else None
    access = access_at(call, namespace, name, location, writes=writes, is_vended=is_vended)
    headers = access.headers or {"ETag": tag}
    return table_response(table.metadata_location, text, access.members, headers)


def _check_served_format(metadata: TableMetadata) -> None:
    """Raise RejectedError (406) for a format version that pyiceberg cannot write as JSON."""
    if metadata.format_version > LATEST_WRITTEN_VERSION:
        raise unsupported(
            f"the table has Iceberg format version {metadata.format_version}, and this server supports versions up to"
            f" {LATEST_WRITTEN_VERSION}; read the table's metadata file with an engine"
        )


def _with_refs_only(metadata: TableMetadata) -> TableMetadata:
    referenced_ids = {ref.snapshot_id for ref in metadata.refs.values()}
    return metadata.model_copy(
        update={"snapshots": [snapshot for snapshot in metadata.snapshots if snapshot.snapshot_id in referenced_ids]}
    )


def _tag(call: Call, metadata_location: str, mode: str) -> str:
    """Return the ETag of a table's metadata. Metadata files have unique names and never change.

    The root is included because an export at another root may share the metadata file, and its table has a location
    under that root.
    """
    text = f"{mode} {call.warehouse.root} {metadata_location}"
    return f'"{hashlib.sha256(text.encode()).hexdigest()[:32]}"'


def _matches(requested: str, tag: str) -> bool:
    return tag in (value.strip().removeprefix("W/") for value in requested.split(","))


def _make_local_folders(call: Call, location: str) -> None:
    """Create the folders of a managed table on a local disk, if this process may write there.

    Some engines do not create folders when they write files. No folder is created at other locations, because a
    definition or metadata file of another writer could name any location.
    """
    root = call.warehouse.served.lake.root
    if root.startswith(_LOCAL) and managed_table_id(location, root) is not None:
        for folder in ("data", "metadata"):
            try:
                os.makedirs(f"{location.removeprefix(_LOCAL)}/{folder}", exist_ok=True)
            except OSError as error:
                logger.info("cannot create the folder %r of %s: %s", folder, location, error)
