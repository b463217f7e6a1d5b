"""Requests for access to files of tables: credentials again, and signatures."""

from __future__ import annotations

from pydantic import BaseModel

from trinitylake_ops.errors import InvalidDefinitionError
from trinitylake_ops.server.access.given import NOT_KEPT, gives_credentials, may_write, own_folder, vended
from trinitylake_ops.server.answers import Answer, ok, unsupported
from trinitylake_ops.server.calls import Call, FoundTable
from trinitylake_ops.tables.files.placement import own_location
from trinitylake_ops.tables.files.reached_files import ReachedFiles
from trinitylake_ops.tables.managed import metadata_uri

_NO_CREDENTIALS = "this server gives no credentials for files of this table; use your own"
_NO_SIGNATURES = "this server signs no requests for files of this table; use your own credentials"


class _ToSign(BaseModel):
    """The body of a request for a signature, as Iceberg's specification of signers has it."""

    method: str
    uri: str
    region: str
    headers: dict[str, list[str]]


def load_credentials(call: Call) -> Answer:
    """Return credentials for a table's files, for a client whose own end soon."""
    found = call.found_table()
    folder = _folder(call, found)
    if folder is None or not gives_credentials(call, found):
        raise unsupported(_NO_CREDENTIALS)
    writes = may_write(call, call.namespace, found)
    return ok({"storage-credentials": vended(call, folder, writes=writes)}, NOT_KEPT)


def sign_request(call: Call) -> Answer:
    """Sign one request for a file of a table. In an older version, that is a read of a file that this one reaches."""
    found = call.found_table()
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


def _reached(call: Call, found: FoundTable) -> ReachedFiles:
    """Return the files that a table reaches at the version of the warehouse. Raises StorageError."""
    io, kept = found.catalog.io, call.warehouse.served.reached
    uri = metadata_uri(found.definition, io.root)
    reached = kept.get(uri)
    if reached is None:
        reached = ReachedFiles(found.definition, io)
        kept.put(uri, reached, reached.size_bytes)
    return reached


def _folder(call: Call, found: FoundTable) -> str | None:
    """Return the folder of a table. None where the server gives no access to it."""
    definition = found.definition
    if not definition.is_managed:
        return None
    try:
        return own_folder(call, own_location(definition, found.catalog.io.home_of(definition.id)))
    except InvalidDefinitionError:  # such an id names no folder
        return None
