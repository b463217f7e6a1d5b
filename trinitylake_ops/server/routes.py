"""The routes of Iceberg's REST specification that this server implements."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from trinitylake_ops.server import credentials as access
from trinitylake_ops.server import namespaces, tables
from trinitylake_ops.server import namespaces as views
from trinitylake_ops.server.calls import Call
from trinitylake_ops.server.responses import JsonResponse, RejectedError, bad_request
from trinitylake_ops.server.scans import files as scans
from trinitylake_ops.server.warehouses import Name
from trinitylake_ops.server.workers import Work

_NAMESPACES = "/v1/{prefix}/namespaces"
_NAMESPACE = f"{_NAMESPACES}/{{namespace}}"
_TABLES = f"{_NAMESPACE}/tables"
_TABLE = f"{_TABLES}/{{table}}"
_VIEWS = f"{_NAMESPACE}/views"
_VIEW = f"{_VIEWS}/{{view}}"
_MAX_NAME_BYTES = 10_000


@dataclass(frozen=True, slots=True)
class Route:
    """An endpoint."""

    #: The HTTP method.
    method: str
    #: The path template, with a placeholder ``{name}`` for each name.
    template: str
    #: The request handler.
    handle: Callable[[Call], JsonResponse]
    #: Whether the request changes the lakehouse.
    changes: bool = False
    #: Whether the endpoint is in the list that is sent to clients.
    is_documented: bool = True
    #: Checks the principal's rights and returns the tables that the request changes. The request waits in their queues.
    tables: Callable[[Call], Collection[Name]] | None = None
    #: Whether the request plans a scan.
    plans: bool = False

    @property
    def work(self) -> Work:
        """The class of work for requests without a large body."""
        if self.plans:
            return Work.PLAN
        return Work.CHANGE if self.changes else Work.READ


ROUTES = (
    Route("GET", _NAMESPACES, namespaces.list_namespaces),
    Route("POST", _NAMESPACES, namespaces.create_namespace, changes=True),
    Route("GET", _NAMESPACE, namespaces.load_namespace),
    Route("HEAD", _NAMESPACE, namespaces.namespace_exists),
    Route("DELETE", _NAMESPACE, namespaces.drop_namespace, changes=True),
    Route("POST", f"{_NAMESPACE}/properties", namespaces.update_properties, changes=True),
    Route("GET", _TABLES, tables.list_tables),
    Route("POST", _TABLES, tables.create_table, changes=True),
    Route("GET", _TABLE, tables.load_table),
    Route("HEAD", _TABLE, tables.table_exists),
    Route("POST", _TABLE, tables.commit_table, changes=True, tables=tables.committed_table),
    Route("DELETE", _TABLE, tables.drop_table, changes=True),
    Route("POST", f"{_NAMESPACE}/register", tables.register_table, changes=True),
    Route("POST", f"{_TABLE}/metrics", tables.report_metrics),
    Route("GET", f"{_TABLE}/credentials", access.load_credentials),
    Route("POST", f"{_TABLE}/sign", access.sign_request),
    Route("POST", "/v1/{prefix}/tables/rename", tables.rename_table, changes=True),
    Route(
        "POST",
        "/v1/{prefix}/transactions/commit",
        tables.commit_transaction,
        changes=True,
        tables=tables.committed_tables,
    ),
    Route("POST", f"{_TABLE}/plan", scans.plan_scan, plans=True),
    Route("POST", f"{_TABLE}/tasks", scans.fetch_tasks, plans=True),
    Route("GET", f"{_TABLE}/plan/{{plan}}", scans.no_such_plan, is_documented=False),
    Route("DELETE", f"{_TABLE}/plan/{{plan}}", scans.no_such_plan, is_documented=False),
    Route("GET", _VIEWS, views.list_views),
    Route("POST", _VIEWS, views.create_view, changes=True),
    Route("GET", _VIEW, views.load_view),
    Route("HEAD", _VIEW, views.view_exists),
    Route("POST", _VIEW, views.replace_view, changes=True),
    Route("DELETE", _VIEW, views.drop_view, changes=True),
    Route("POST", "/v1/{prefix}/views/rename", views.rename_view, changes=True),
    Route("POST", f"{_NAMESPACE}/register-view", views.register_view, changes=True, is_documented=False),
)
#: The endpoints that the configuration response lists.
ENDPOINTS = tuple(f"{route.method} {route.template}" for route in ROUTES if route.is_documented)
_SPLIT = tuple((route, route.template.strip("/").split("/")) for route in ROUTES)


def find_route(method: str, raw_path: bytes) -> tuple[Route, Mapping[str, str]]:
    """Find the route of a request.

    Names are decoded one by one, because they may contain a slash.

    Args:
        method: The HTTP method.
        raw_path: The path, percent-encoded.

    Returns:
        The route, and the decoded names in the path.

    Raises:
        RejectedError: Status 404 for an unknown path, 405 for the wrong method, 400 for a name that is not UTF-8.
    """
    segments = raw_path.decode("ascii", "replace").strip("/").split("/")
    methods = []
    for route, template in _SPLIT:
        names = _names_in(segments, template)
        if names is None:
            continue
        if route.method == method:
            return route, {name: _decoded(text) for name, text in names.items()}
        methods.append(route.method)
    if methods:
        raise RejectedError(
            405,
            "BadRequestException",
            f"method {method} is not allowed for this path",
            headers={"Allow": ", ".join(methods)},
        )
    advice = "; remove /v1 from the address in the client's configuration" if segments[:2] == ["v1", "v1"] else ""
    raise RejectedError(
        404, "NotFoundException", f"No such path: paths begin with /v1/ and the prefix of a warehouse{advice}"
    )


def _names_in(segments: list[str], template: list[str]) -> dict[str, str] | None:
    if len(segments) != len(template):
        return None
    names = {}
    for segment, part in zip(segments, template, strict=True):
        if part.startswith("{"):
            names[part[1:-1]] = segment
        elif segment != part:
            return None
    return names


def _decoded(text: str) -> str:
    if len(text) > _MAX_NAME_BYTES:
        raise bad_request("a name in the path is too long")
    try:
        return unquote_to_bytes(text).decode()
    except UnicodeDecodeError:
        raise bad_request("a name in the path is not valid UTF-8") from None
