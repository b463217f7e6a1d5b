"""Requests for access to files of tables: credentials again, and signatures."""

from __future__ import annotations

from pydantic import BaseModel

from trinitylake_ops.errors import InvalidDefinitionError
from trinitylake_ops.server.access.given import NOT_KEPT, may_write, own_folder, vended
from trinitylake_ops.server.answers import Answer, ok, unsupported
from trinitylake_ops.server.calls import Call
from trinitylake_ops.server.tokens import Scope
from trinitylake_ops.tables.files.placement import own_location

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
    namespace, folder = call.namespace, _folder(call)
    delegate = call.warehouse.served.delegate
    if delegate is None or not delegate.settings.gives_credentials or folder is None:
        raise unsupported(_NO_CREDENTIALS)
    return ok({"storage-credentials": vended(call, namespace, folder)}, NOT_KEPT)


def sign_request(call: Call) -> Answer:
    """Sign one request for a file of a table."""
    namespace, folder = call.namespace, _folder(call)
    delegate = call.warehouse.served.delegate
    if delegate is None or not delegate.settings.sign or folder is None:
        raise unsupported(_NO_SIGNATURES)
    asked = _ToSign.model_validate(call.document())
    from trinitylake_ops.storage.s3.delegation import S3Delegate
    from trinitylake_ops.storage.s3.signing import UnsignedRequest

    assert isinstance(delegate, S3Delegate)
    headers = {name.lower(): values for name, values in asked.headers.items()}
    request = UnsignedRequest(asked.method.upper(), asked.uri, asked.region, headers)
    made = delegate.sign(request, folder, may_write=may_write(call, namespace), name=call.principal.name)
    return ok({"uri": made.uri, "headers": made.headers}, NOT_KEPT)


def _folder(call: Call) -> str | None:
    """Return the folder of the table in the path. None where access to it is nobody's to give.

    Raises RefusedError, 403, NoSuchTableError.
    """
    namespace, name = call.table
    call.check(Scope.READ, namespace)
    catalog = call.warehouse.catalog()
    definition = catalog.definition_of(namespace, name)
    if not definition.is_managed:
        return None
    try:
        return own_folder(call, own_location(definition, catalog.io.home_of(definition.id)))
    except InvalidDefinitionError:  # such an id names no folder
        return None
