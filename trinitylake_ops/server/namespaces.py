"""Requests about namespaces."""

from __future__ import annotations

from pyiceberg.catalog.rest import ListNamespaceResponse, NamespaceResponse, UpdateNamespacePropertiesResponse
from pyiceberg.exceptions import NoSuchNamespaceError

from trinitylake_ops.server.answers import NO_CONTENT, Answer, RefusedError, bad_request, ok
from trinitylake_ops.server.calls import SEPARATOR, Call, names, page_of, single_level, texts
from trinitylake_ops.server.changes import changed
from trinitylake_ops.server.tokens import Scope


def list_namespaces(call: Call) -> Answer:
    """List the namespaces that the principal may read. Within a namespace there are none."""
    catalog, parent = call.warehouse.catalog(), call.query.get("parent")
    if parent:
        name = single_level(parent.split(SEPARATOR))
        call.check(Scope.READ, name)
        catalog.load_namespace_properties((name,))
        return ok({"namespaces": [], "next-page-token": None})
    found = [name for (name,) in catalog.list_namespaces() if call.principal.may(Scope.READ, name)]
    page, token = page_of(call, found)
    return ok(ListNamespaceResponse.model_validate({"namespaces": [[name] for name in page], "next-page-token": token}))


def create_namespace(call: Call) -> Answer:
    """Create a namespace of one level."""
    asked = call.document()
    levels, properties = names(asked.get("namespace")), texts(asked.get("properties") or {})
    if len(levels) != 1:
        raise bad_request(f"namespace {'.'.join(levels)!r} has {len(levels)} levels; a lakehouse has one level")
    name = levels[0]
    call.check(Scope.WRITE, name)
    changed(call, lambda catalog: catalog.create_namespace((name,), properties))
    return ok(NamespaceResponse(namespace=(name,), properties=properties))


def load_namespace(call: Call) -> Answer:
    """Return the properties of a namespace."""
    name = _readable(call)
    properties = call.warehouse.catalog().load_namespace_properties((name,))
    return ok(NamespaceResponse(namespace=(name,), properties=properties))


def namespace_exists(call: Call) -> Answer:
    """Tell whether a namespace exists."""
    name = _readable(call)
    if not call.warehouse.catalog().namespace_exists((name,)):
        raise NoSuchNamespaceError(f"Namespace does not exist: {name}")
    return NO_CONTENT


def drop_namespace(call: Call) -> Answer:
    """Drop an empty namespace."""
    name = _writable(call)
    changed(call, lambda catalog: catalog.drop_namespace((name,)))
    return NO_CONTENT


def update_properties(call: Call) -> Answer:
    """Set and remove properties of a namespace."""
    name, asked = _writable(call), call.document()
    removals, updates = set(names(asked.get("removals") or [])), texts(asked.get("updates") or {})
    if both := sorted(removals & updates.keys()):
        raise RefusedError(
            422, "UnprocessableEntityException", f"properties are both set and removed: {', '.join(both)}"
        )
    summary = changed(call, lambda catalog: catalog.update_namespace_properties((name,), removals, updates))
    if summary is None:
        return ok(UpdateNamespacePropertiesResponse(removed=sorted(removals), updated=sorted(updates), missing=[]))
    return ok(
        UpdateNamespacePropertiesResponse(
            removed=sorted(summary.removed), updated=sorted(summary.updated), missing=sorted(summary.missing)
        )
    )


def _readable(call: Call) -> str:
    name = call.namespace
    call.check(Scope.READ, name)
    return name


def _writable(call: Call) -> str:
    name = call.namespace
    call.check(Scope.WRITE, name)
    return name
