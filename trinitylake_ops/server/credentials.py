"""Access to table files for clients without storage credentials: vended credentials and signed requests."""

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
from trinitylake_ops.storage.opening import with_environment

#: The access delegation header, and the values that a client may request.
DELEGATION, _VENDED, _SIGNING = "x-iceberg-access-delegation", "vended-credentials", "remote-signing"
#: Additional client properties for an S3 storage, by Iceberg's names. They contain no secrets.
_ENDPOINT = "s3.endpoint"
#: Names of the region property. The specification uses the first one, which only Java clients need; pyiceberg uses the
#: second one.
_REGIONS = ("client.region", "s3.region")
_PATH_STYLE = "s3.path-style-access"
_GCS_ENDPOINT = "gcs.service.host"
#: The client property with the endpoint for refreshing credentials, by storage scheme.
_REFRESH = {"s3": "client.refresh-credentials-endpoint", "gs": "gcs.oauth2.refresh-credentials-endpoint"}
NOT_KEPT = {"Cache-Control": "no-store"}


@dataclass(frozen=True, slots=True)
class Access:
    """Access configuration for a response about a table. Responses with credentials must not be cached."""

    #: Members of the response body.
    members: Mapping[str, Any]
    #: Headers of the response.
    headers: Mapping[str, str] = field(default_factory=dict)


def vends(call: Call, requested: RequestedTable | None) -> bool:
    """Whether the response about a table contains credentials: the client requests them and is allowed to get them.

    Args:
        call: The request.
        requested: The table, or None if the request creates it.

    Raises:
        StorageError: If the latest version cannot be read at the moment.
    """
    return _VENDED in _requested_delegation(call) and vends_credentials(call, requested)


def vends_credentials(call: Call, requested: RequestedTable | None) -> bool:
    """Whether the client may get credentials for the folder of a table that the principal may read.

    Credentials give access to all files in the folder, including those of the latest version. A warehouse at an older
    version therefore vends credentials only for a table that still exists in the latest version. The principal may read
    those files there, because :meth:`Call.requested_table` has checked its rights under all current names.

    Args:
        call: The request.
        requested: The table, or None if the request creates it.

    Raises:
        StorageError: If the latest version cannot be read at the moment.
    """
    delegate = call.warehouse.served.delegate
    if delegate is None or not delegate.settings.vends_credentials:
        return False
    return requested is None or call.warehouse.has_now(call.table, requested.definition.id)


def access_at(call: Call, namespace: str, table: str, location: str | None, *, writes: bool, is_vended: bool) -> Access:
    """Return the configuration that a client needs to access the files of a table.

    Args:
        call: The request.
        namespace: The namespace of the table.
        table: The name of the table.
        location: The location of the table, or None for an external table.
        writes: Whether the client may write in the folder.
        is_vended: Whether the client gets credentials, from :func:`vends`.

    Raises:
        InvalidInputError: If credentials cannot be restricted to the location.
        StorageError: If the storage issues no credentials.
    """
    config = _public_config(call)
    folder = None if location is None else own_folder(call, location)
    if folder is None:
        return Access({"config": config})
    if is_vended:
        credentials, refresh = vended_credentials(call, folder, writes=writes), _REFRESH[folder.partition("://")[0]]
        config |= {**credentials[0]["config"], refresh: _path(call, namespace, table, "credentials")}
        return Access({"config": config, "storage-credentials": credentials}, NOT_KEPT)
    delegate = call.warehouse.served.delegate
    if delegate is not None and delegate.settings.sign and _SIGNING in _requested_delegation(call):
        config |= {
            "s3.remote-signing-enabled": "true",
            "s3.signer": "S3V4RestSigner",
            "s3.signer.endpoint": _path(call, namespace, table, "sign"),
        }
    return Access({"config": config})


def vended_credentials(call: Call, folder: str, *, writes: bool) -> list[dict[str, Any]]:
    """Return credentials for a table's folder in the form that the specification defines.

    Args:
        call: The request.
        folder: The URI of the folder.
        writes: Whether the client may write in the folder.

    Raises:
        InvalidInputError: If credentials cannot be restricted to the folder.
        StorageError: If the storage issues no credentials.
    """
    delegate = call.warehouse.served.delegate
    assert delegate is not None
    credentials = delegate.credentials(folder, writes=writes, name=call.principal.name)
    return [{"prefix": folder, "config": {**_public_config(call), **credentials.properties}}]


def may_write(call: Call, namespace: str, requested: RequestedTable) -> bool:
    """Whether the principal may write to a table in the requested warehouse.

    Args:
        call: The request.
        namespace: The namespace of the table.
        requested: The table.
    """
    is_latest, principal = call.warehouse.version is None, call.principal
    return (
        is_latest
        and principal.may(Scope.WRITE, namespace)
        and call.may_change(Scope.WRITE, requested.definition, requested.latest)
    )


def own_folder(call: Call, location: str) -> str | None:
    """Return the folder of a managed table as a URI that ends with ``/``, or None if access to it cannot be delegated.

    A clone shares files with its parent, and must not give access to the parent's files.

    Args:
        call: The request.
        location: The location of the table.
    """
    io, delegate = call.warehouse.served.catalog.io, call.warehouse.served.delegate
    is_own = any(managed_table_id(location, root) is not None for root in (io.root, *io.table_roots))
    is_reached = delegate is not None and location.startswith(f"{delegate.scheme}://")
    if not is_own or not is_reached or call.warehouse.served.lake.external_storages.names.sources:
        return None
    return f"{location}/"


def _requested_delegation(call: Call) -> frozenset[str]:
    return frozenset(word.strip().lower() for word in call.headers.get(DELEGATION, "").split(","))


def _path(call: Call, namespace: str, table: str, endpoint: str) -> str:
    path = f"v1/{call.warehouse.prefix}/namespaces/{quote(namespace, safe='')}/tables/{quote(table, safe='')}"
    return f"{path}/{endpoint}"


def _public_config(call: Call) -> dict[str, str]:
    """Return the client properties for access to table files, except credentials."""
    lake = call.warehouse.served.lake
    scheme = lake.root.partition("://")[0]
    if scheme not in _REFRESH:
        return {}
    options: Mapping[str, str] = with_environment(lake.root, lake.storage_options).of_scheme(scheme)
    if scheme == "gs":
        return {_GCS_ENDPOINT: options["endpoint"].rstrip("/")} if "endpoint" in options else {}
    config = {client: options["region"] for client in _REGIONS if "region" in options}
    if "endpoint" in options:
        # All clients accept both forms. ClickHouse joins paths differently, and needs the trailing slash.
        config[_ENDPOINT] = f"{options['endpoint'].rstrip('/')}/"
    if options.get("addressing_style") == "path":
        config[_PATH_STYLE] = "true"
    return config


_NO_CREDENTIALS = "this server vends no credentials for this table; use your own credentials for its files"
_NO_SIGNATURES = "this server signs no requests for this table; use your own credentials for its files"


class _SignRequest(BaseModel):
    """The body of a signing request, in the form of Iceberg's signer specification."""

    method: str
    uri: str
    region: str
    headers: dict[str, list[str]]


def load_credentials(call: Call) -> JsonResponse:
    """Return credentials for a table's files, for a client whose credentials expire soon."""
    requested = call.requested_table()
    folder = _folder(call, requested)
    if folder is None or not vends_credentials(call, requested):
        raise unsupported(_NO_CREDENTIALS)
    writes = may_write(call, call.namespace, requested)
    return ok({"storage-credentials": vended_credentials(call, folder, writes=writes)}, NOT_KEPT)


def sign_request(call: Call) -> JsonResponse:
    """Sign a request for a file of a table. At an older version, only reads of that version's files are signed."""
    requested = call.requested_table()
    folder = _folder(call, requested)
    delegate = call.warehouse.served.delegate
    if delegate is None or not delegate.settings.sign or folder is None:
        raise unsupported(_NO_SIGNATURES)
    to_sign = _SignRequest.model_validate(call.document())
    from trinitylake_ops.storage.s3.delegation import S3Delegate
    from trinitylake_ops.storage.s3.signing import UnsignedRequest

    assert isinstance(delegate, S3Delegate)
    headers = {name.lower(): values for name, values in to_sign.headers.items()}
    request = UnsignedRequest(to_sign.method.upper(), to_sign.uri, to_sign.region, headers)
    signed = delegate.sign(
        request,
        folder,
        may_write=may_write(call, call.namespace, requested),
        name=call.principal.name,
        reached=None if call.warehouse.version is None else _reached_files(call, requested),
    )
    return ok({"uri": signed.uri, "headers": signed.headers}, NOT_KEPT)


def _reached_files(call: Call, requested: RequestedTable) -> ReachedFiles:
    """Return the files that a table refers to at the version of the warehouse. Raises StorageError."""
    io, cache = requested.catalog.io, call.warehouse.served.reached
    uri = metadata_uri(requested.definition, io.root)
    reached = cache.get(uri)
    if reached is None:
        reached = ReachedFiles(requested.definition, io)
        cache.put(uri, reached, reached.size_bytes)
    return reached


def _folder(call: Call, requested: RequestedTable) -> str | None:
    """Return the folder of a table, or None if the server gives no access to it."""
    definition = requested.definition
    if not definition.is_managed:
        return None
    try:
        return own_folder(call, own_location(definition, requested.catalog.io.home_of(definition.id)))
    except InvalidDefinitionError:  # an invalid id has no folder
        return None
