"""Access to the files of tables for clients without keys: credentials and signed requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel

from trinitylake_ops.errors import InvalidDefinitionError
from trinitylake_ops.iceberg.io.checked_files import own_location
from trinitylake_ops.iceberg.managed import managed_table_id, metadata_uri
from trinitylake_ops.iceberg.reach import ReachedFiles
from trinitylake_ops.server.calls import Call, RequestedTable
from trinitylake_ops.server.responses import JsonResponse, ok, unsupported
from trinitylake_ops.server.tokens import Scope
from trinitylake_ops.storage.registry import with_environment

#: What a client may ask for, by its header.
DELEGATION, _VENDED, _SIGNING = "x-iceberg-access-delegation", "vended-credentials", "remote-signing"
#: What clients of a storage on S3 need too, by the names that Iceberg has for it. None is a secret.
_ENDPOINT = "s3.endpoint"
#: The specification has the first name for the region, which Java alone needs. The other one is pyiceberg's.
_REGIONS = ("client.region", "s3.region")
_PATH_STYLE = "s3.path-style-access"
_GCS_ENDPOINT = "gcs.service.host"
#: Where clients ask for credentials again, by the scheme of the storage.
_REFRESH = {"s3": "client.refresh-credentials-endpoint", "gs": "gcs.oauth2.refresh-credentials-endpoint"}
NOT_KEPT = {"Cache-Control": "no-store"}


@dataclass(frozen=True, slots=True)
class Access:
    """Members of an answer, and its headers. An answer with credentials is kept by nobody."""

    members: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)


def vends(call: Call, found: RequestedTable | None) -> bool:
    """Whether the response about a table contains credentials: the client requests them, and may have them.

    Args:
        call: The request.
        found: The table, None for one that the request creates.

    Raises:
        StorageError: If the latest version cannot be read for now.
    """
    return _VENDED in _requested_delegation(call) and vends_credentials(call, found)


def vends_credentials(call: Call, found: RequestedTable | None) -> bool:
    """Whether the client may have credentials for the folder of a table that the principal may read.

    Credentials reach all files in the folder, also those of the latest version. So an older version gives them only
    for a table that the latest version has. Its files are readable there, because :meth:`Call.requested_table` has
    checked the rights under all current names. Raises as :func:`vends`.
    """
    delegate = call.warehouse.served.delegate
    if delegate is None or not delegate.settings.vends_credentials:
        return False
    return found is None or call.warehouse.has_now(call.table, found.definition.id)


def access_at(call: Call, namespace: str, table: str, location: str | None, *, writes: bool, is_vended: bool) -> Access:
    """Return what a client needs to reach the files of a table.

    Args:
        call: The request.
        namespace: The namespace of the table.
        table: The name of the table.
        location: The place of the table, None for one that is another catalog's.
        writes: Whether the client may write there.
        is_vended: Whether the client gets credentials, as :func:`vends` returns it.

    Raises:
        InvalidInputError: If no credentials can be bound to the place.
        StorageError: If the storage gives no credentials.
    """
    config = _public_config(call)
    folder = None if location is None else own_folder(call, location)
    if folder is None:
        return Access({"config": config})
    if is_vended:
        found, refresh = vended(call, folder, writes=writes), _REFRESH[folder.partition("://")[0]]
        config |= {**found[0]["config"], refresh: _path(call, namespace, table, "credentials")}
        return Access({"config": config, "storage-credentials": found}, NOT_KEPT)
    delegate = call.warehouse.served.delegate
    if delegate is not None and delegate.settings.sign and _SIGNING in _requested_delegation(call):
        config |= {
            "s3.remote-signing-enabled": "true",
            "s3.signer": "S3V4RestSigner",
            "s3.signer.endpoint": _path(call, namespace, table, "sign"),
        }
    return Access({"config": config})


def vended(call: Call, folder: str, *, writes: bool) -> list[dict[str, Any]]:
    """Return credentials for a table's folder, as the specification has them. Raises as :func:`access_at`."""
    delegate = call.warehouse.served.delegate
    assert delegate is not None
    given = delegate.credentials(folder, writes=writes, name=call.principal.name)
    return [{"prefix": folder, "config": {**_public_config(call), **given.properties}}]


def may_write(call: Call, namespace: str, found: RequestedTable) -> bool:
    """Whether the principal may write to a table of a namespace, in the warehouse that it asks for."""
    is_latest, principal = call.warehouse.version is None, call.principal
    return (
        is_latest
        and principal.may(Scope.WRITE, namespace)
        and call.may_change(Scope.WRITE, found.definition, found.latest)
    )


def own_folder(call: Call, location: str) -> str | None:
    """Return the folder of a MANAGED table as a URI that ends with ``/``. None for one that is nobody's to give.

    A clone and its parent share files. Access to the parent's is not given by the clone.
    """
    io, delegate = call.warehouse.served.catalog.io, call.warehouse.served.delegate
    is_own = any(managed_table_id(location, root) is not None for root in (io.root, *io.table_roots))
    is_reached = delegate is not None and location.startswith(f"{delegate.scheme}://")
    if not is_own or not is_reached or call.warehouse.served.lake.external_storages.names.sources:
        return None
    return f"{location}/"


def _requested_delegation(call: Call) -> frozenset[str]:
    return frozenset(word.strip().lower() for word in call.headers.get(DELEGATION, "").split(","))


def _path(call: Call, namespace: str, table: str, what: str) -> str:
    return f"v1/{call.warehouse.prefix}/namespaces/{quote(namespace, safe='')}/tables/{quote(table, safe='')}/{what}"


def _public_config(call: Call) -> dict[str, str]:
    """Return what a client needs to reach the files of tables, beside credentials."""
    lake = call.warehouse.served.lake
    scheme = lake.root.partition("://")[0]
    if scheme not in _REFRESH:
        return {}
    options: Mapping[str, str] = with_environment(lake.root, lake.storage_options).of_scheme(scheme)
    if scheme == "gs":
        return {_GCS_ENDPOINT: options["endpoint"].rstrip("/")} if "endpoint" in options else {}
    found = {client: options["region"] for client in _REGIONS if "region" in options}
    if "endpoint" in options:
        # All clients take both forms. ClickHouse finds no file by the other one, as it joins paths in its own way.
        found[_ENDPOINT] = f"{options['endpoint'].rstrip('/')}/"
    if options.get("addressing_style") == "path":
        found[_PATH_STYLE] = "true"
    return found


_NO_CREDENTIALS = "this server gives no credentials for files of this table; use your own"
_NO_SIGNATURES = "this server signs no requests for files of this table; use your own credentials"


class _ToSign(BaseModel):
    """The body of a request for a signature, as Iceberg's specification of signers has it."""

    method: str
    uri: str
    region: str
    headers: dict[str, list[str]]


def load_credentials(call: Call) -> JsonResponse:
    """Return credentials for a table's files, for a client whose own end soon."""
    found = call.requested_table()
    folder = _folder(call, found)
    if folder is None or not vends_credentials(call, found):
        raise unsupported(_NO_CREDENTIALS)
    writes = may_write(call, call.namespace, found)
    return ok({"storage-credentials": vended(call, folder, writes=writes)}, NOT_KEPT)


def sign_request(call: Call) -> JsonResponse:
    """Sign one request for a file of a table. In an older version, that is a read of a file that this one reaches."""
    found = call.requested_table()
    folder = _folder(call, found)
    delegate = call.warehouse.served.delegate
    if delegate is None or not delegate.settings.sign or folder is None:
        raise unsupported(_NO_SIGNATURES)
    asked = _ToSign.model_validate(call.document())
    from trinitylake_ops.storage.s3.delegation import S3Delegate
    from trinitylake_ops.storage.s3.signing import UnsignedRequest

    assert isinstance(delegate, S3Delegate)
    headers = {name.lower(): values for name, values in asked.headers.items()}
    request = UnsignedRequest(asked.method.upper(), asked.uri, asked.region, headers)
    made = delegate.sign(
        request,
        folder,
        may_write=may_write(call, call.namespace, found),
        name=call.principal.name,
        reached=None if call.warehouse.version is None else _reached(call, found),
    )
    return ok({"uri": made.uri, "headers": made.headers}, NOT_KEPT)


def _reached(call: Call, found: RequestedTable) -> ReachedFiles:
    """Return the files that a table reaches at the version of the warehouse. Raises StorageError."""
    io, kept = found.catalog.io, call.warehouse.served.reached
    uri = metadata_uri(found.definition, io.root)
    reached = kept.get(uri)
    if reached is None:
        reached = ReachedFiles(found.definition, io)
        kept.put(uri, reached, reached.size_bytes)
    return reached


def _folder(call: Call, found: RequestedTable) -> str | None:
    """Return the folder of a table. None where the server gives no access to it."""
    definition = found.definition
    if not definition.is_managed:
        return None
    try:
        return own_folder(call, own_location(definition, found.catalog.io.home_of(definition.id)))
    except InvalidDefinitionError:  # such an id names no folder
        return None
