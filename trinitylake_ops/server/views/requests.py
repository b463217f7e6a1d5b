"""Requests about views. A view is a property of its namespace, so that no file holds its metadata."""

from __future__ import annotations

from pyiceberg.catalog.rest import ListViewsResponse
from pyiceberg.exceptions import NoSuchViewError

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.server.answers import NO_CONTENT, Answer, ok, unsupported
from trinitylake_ops.server.calls import Call, page_of
from trinitylake_ops.server.changes import changed
from trinitylake_ops.server.tables import renamed
from trinitylake_ops.server.tokens import Scope
from trinitylake_ops.tables.catalog.catalog import TrinityLakeCatalog
from trinitylake_ops.tables.catalog.updates import asked_for
from trinitylake_ops.tables.catalog.view_metadata import (
    NewViewRequest,
    ReplaceViewRequest,
    ViewMetadata,
    new_view,
    replaced_view,
)
from trinitylake_ops.tables.catalog.views import view_in


def list_views(call: Call) -> Answer:
    """List the views of a namespace."""
    namespace = call.namespace
    call.check(Scope.READ, namespace)
    page, token = page_of(call, [name for _, name in call.warehouse.catalog().list_views((namespace,))])
    entries = [{"name": name, "namespace": [namespace]} for name in page]
    return ok(ListViewsResponse.model_validate({"identifiers": entries, "next-page-token": token}))


def create_view(call: Call) -> Answer:
    """Create a view."""
    namespace = call.namespace
    call.check(Scope.WRITE, namespace)
    asked = call.model(NewViewRequest)
    with asked_for():
        made = new_view(asked.schema_, asked.view_version, asked.properties, call.warehouse.served.lake.root)
    name = (namespace, asked.name)
    done = changed(call, lambda catalog: catalog.put_view(name, lambda _: made, is_new=True))
    return _answer(done or _present(call, name))


def load_view(call: Call) -> Answer:
    """Return the metadata of a view."""
    namespace, view = _name(call)
    call.check(Scope.READ, namespace)
    return _answer(_present(call, (namespace, view)))


def view_exists(call: Call) -> Answer:
    """Tell whether a view exists."""
    namespace, view = _name(call)
    call.check(Scope.READ, namespace)
    if not call.warehouse.catalog().view_exists((namespace, view)):
        raise NoSuchViewError(f"View does not exist: {namespace}.{view}")
    return NO_CONTENT


def replace_view(call: Call) -> Answer:
    """Change a view: its versions, schemas and properties."""
    name = _name(call)
    call.check(Scope.WRITE, name[0])
    asked = call.model(ReplaceViewRequest)

    def change(current: ViewMetadata | None) -> ViewMetadata:
        if current is None:
            raise InvalidInputError("there is no view to replace")
        with asked_for():
            return replaced_view(current, asked)

    done = changed(call, lambda catalog: catalog.put_view(name, change))
    return _answer(done or _present(call, name))


def drop_view(call: Call) -> Answer:
    """Drop a view."""
    name = _name(call)
    call.check(Scope.WRITE, name[0])
    changed(call, lambda catalog: catalog.drop_view(name))
    return NO_CONTENT


def rename_view(call: Call) -> Answer:
    """Rename a view, also into another namespace."""
    return renamed(call, TrinityLakeCatalog.move_view)


def register_view(call: Call) -> Answer:
    """Refuse to register a view: its metadata is no file here."""
    call.check(Scope.WRITE, call.namespace)
    raise unsupported("the metadata of a view is no file here; create the view")


def _name(call: Call) -> tuple[str, str]:
    return call.namespace, call.names["view"]


def _present(call: Call, name: tuple[str, str]) -> ViewMetadata:
    return view_in(call.warehouse.catalog().target.reader(), *name)


def _answer(metadata: ViewMetadata) -> Answer:
    location = f"{metadata.location}/metadata/{metadata.current_version_id}.metadata.json"
    document = metadata.model_dump(mode="json", by_alias=True)
    return ok({"metadata-location": location, "metadata": document, "config": {}})
