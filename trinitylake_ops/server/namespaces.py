"""Request handlers for namespaces and views."""

from __future__ import annotations

from pyiceberg.catalog.rest import (
    ListNamespaceResponse,
    ListViewsResponse,
    NamespaceResponse,
    UpdateNamespacePropertiesResponse,
)
from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchViewError

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.iceberg.catalog import TrinityLakeCatalog
from trinitylake_ops.iceberg.updates import as_invalid_input
from trinitylake_ops.iceberg.views import (
    NewViewRequest,
    ReplaceViewRequest,
    ViewMetadata,
    new_view,
    replaced_view,
    view_in,
)
from trinitylake_ops.server.calls import SEPARATOR, Call, changed, names, page_of, single_level, texts
from trinitylake_ops.server.responses import NO_CONTENT, JsonResponse, RejectedError, bad_request, ok, unsupported
from trinitylake_ops.server.tables import renamed
from trinitylake_ops.server.tokens import Scope


def list_namespaces(call: Call) -> JsonResponse:
    """List the namespaces that the principal may read. Namespaces cannot be nested."""
    catalog, parent = call.warehouse.catalog(), call.query.get("parent")
    if parent:
        name = single_level(parent.split(SEPARATOR))
        call.check(Scope.READ, name)
        catalog.load_namespace_properties((name,))
        return ok({"namespaces": [], "next-page-token": None})
    visible = [name for (name,) in catalog.list_namespaces() if call.principal.may(Scope.READ, name)]
    page, token = page_of(call, visible)
    return ok(ListNamespaceResponse.model_validate({"namespaces": [[name] for name in page], "next-page-token": token}))


def create_namespace(call: Call) -> JsonResponse:
    """Create a namespace, which must have one level."""
    body = call.document()
    levels, properties = names(body.get("namespace")), texts(body.get("properties") or {})
    if len(levels) != 1:
        raise bad_request(
            f"namespace {'.'.join(levels)!r} has {len(levels)} levels; namespaces of a lakehouse have one level"
        )
    name = levels[0]
    call.check(Scope.WRITE, name)
    changed(call, lambda catalog: catalog.create_namespace((name,), properties))
    return ok(NamespaceResponse(namespace=(name,), properties=properties))


def load_namespace(call: Call) -> JsonResponse:
    """Return the properties of a namespace."""
    name = _readable(call)
    properties = call.warehouse.catalog().load_namespace_properties((name,))
    return ok(NamespaceResponse(namespace=(name,), properties=properties))


def namespace_exists(call: Call) -> JsonResponse:
    """Report whether a namespace exists."""
    name = _readable(call)
    if not call.warehouse.catalog().namespace_exists((name,)):
        raise NoSuchNamespaceError(f"Namespace does not exist: {name}")
    return NO_CONTENT


def drop_namespace(call: Call) -> JsonResponse:
    """Drop an empty namespace."""
    name = _writable(call)
    changed(call, lambda catalog: catalog.drop_namespace((name,)))
    return NO_CONTENT


def update_properties(call: Call) -> JsonResponse:
    """Set and remove properties of a namespace."""
    name, body = _writable(call), call.document()
    removals, updates = set(names(body.get("removals") or [])), texts(body.get("updates") or {})
    if both := sorted(removals & updates.keys()):
        raise RejectedError(
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


def list_views(call: Call) -> JsonResponse:
    """List the views in a namespace."""
    namespace = call.namespace
    call.check(Scope.READ, namespace)
    page, token = page_of(call, [name for _, name in call.warehouse.catalog().list_views((namespace,))])
    entries = [{"name": name, "namespace": [namespace]} for name in page]
    return ok(ListViewsResponse.model_validate({"identifiers": entries, "next-page-token": token}))


def create_view(call: Call) -> JsonResponse:
    """Create a view."""
    namespace = call.namespace
    call.check(Scope.WRITE, namespace)
    request = call.model(NewViewRequest)
    with as_invalid_input():
        metadata = new_view(request.schema_, request.view_version, request.properties, call.warehouse.served.lake.root)
    name = (namespace, request.name)
    view = changed(call, lambda catalog: catalog.put_view(name, lambda _: metadata, is_new=True))
    return _view_response(view or _present(call, name))


def load_view(call: Call) -> JsonResponse:
    """Return the metadata of a view."""
    namespace, view = _name(call)
    call.check(Scope.READ, namespace)
    return _view_response(_present(call, (namespace, view)))


def view_exists(call: Call) -> JsonResponse:
    """Report whether a view exists."""
    namespace, view = _name(call)
    call.check(Scope.READ, namespace)
    if not call.warehouse.catalog().view_exists((namespace, view)):
        raise NoSuchViewError(f"View does not exist: {namespace}.{view}")
    return NO_CONTENT


def replace_view(call: Call) -> JsonResponse:
    """Change a view: its versions, schemas and properties."""
    name = _name(call)
    call.check(Scope.WRITE, name[0])
    request = call.model(ReplaceViewRequest)

    def change(current: ViewMetadata | None) -> ViewMetadata:
        if current is None:
            raise InvalidInputError("the view does not exist, so it cannot be replaced; create it")
        with as_invalid_input():
            return replaced_view(current, request)

    view = changed(call, lambda catalog: catalog.put_view(name, change))
    return _view_response(view or _present(call, name))


def drop_view(call: Call) -> JsonResponse:
    """Drop a view."""
    name = _name(call)
    call.check(Scope.WRITE, name[0])
    changed(call, lambda catalog: catalog.drop_view(name))
    return NO_CONTENT


def rename_view(call: Call) -> JsonResponse:
    """Rename a view, possibly into another namespace."""
    return renamed(call, TrinityLakeCatalog.move_view)


def register_view(call: Call) -> JsonResponse:
    """Reject the registration of a view, because the metadata of views is not stored in files."""
    call.check(Scope.WRITE, call.namespace)
    raise unsupported("views cannot be registered, because their metadata is not stored in files; create the view")


def _name(call: Call) -> tuple[str, str]:
    return call.namespace, call.names["view"]


def _present(call: Call, name: tuple[str, str]) -> ViewMetadata:
    return view_in(call.warehouse.catalog().target.reader(), *name)


def _view_response(metadata: ViewMetadata) -> JsonResponse:
    location = f"{metadata.location}/metadata/{metadata.current_version_id}.metadata.json"
    document = metadata.model_dump(mode="json", by_alias=True)
    return ok({"metadata-location": location, "metadata": document, "config": {}})
