"""Every operation of the server: method, path, parameters, statuses and error types. This list is maintained manually.

Tests send generated requests, and fail for any response that is not listed here. The reference in
docs/rest-catalog/run.md is generated from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

Errors: TypeAlias = tuple[tuple[int, str], ...]

BAD = (400, "BadRequestException")
UNAUTHORIZED = (401, "NotAuthorizedException")
FORBIDDEN = (403, "ForbiddenException")
NO_PATH = (404, "NotFoundException")
NO_WAREHOUSE = (404, "NoSuchWarehouseException")
NO_NAMESPACE = (404, "NoSuchNamespaceException")
NO_TABLE = (404, "NoSuchTableException")
NO_VIEW = (404, "NoSuchViewException")
NO_PLAN = (404, "NoSuchPlanIdException")
NO_TASK = (404, "NoSuchPlanTaskException")
NO_METHOD = (405, "BadRequestException")
UNSUPPORTED = (406, "UnsupportedOperationException")
EXISTS = (409, "AlreadyExistsException")
CONFLICT = (409, "CommitFailedException")
NOT_EMPTY = (409, "NamespaceNotEmptyException")
UNPROCESSABLE = (422, "UnprocessableEntityException")
LATE_BODY = (408, "BadRequestException")
TOO_LARGE = (413, "BadRequestException")
BROKEN = (500, "InternalServerError")
UNKNOWN = (500, "CommitStateUnknownException")
UNAVAILABLE = (503, "ServiceUnavailableException")
LATE = (504, "ServiceUnavailableException")
LATE_COMMIT = (504, "CommitStateUnknownException")

#: Errors that may occur for any request.
_ALWAYS: Errors = (BAD, UNAUTHORIZED, FORBIDDEN, LATE_BODY, TOO_LARGE, UNAVAILABLE)
_READING: Errors = (*_ALWAYS, NO_WAREHOUSE, NO_NAMESPACE, BROKEN, LATE)
_CHANGING: Errors = (*_ALWAYS, NO_WAREHOUSE, NO_NAMESPACE, CONFLICT, UNPROCESSABLE, UNKNOWN, LATE_COMMIT)

_NAMESPACES = "/v1/{prefix}/namespaces"
_NAMESPACE = f"{_NAMESPACES}/{{namespace}}"
_TABLES = f"{_NAMESPACE}/tables"
_TABLE = f"{_TABLES}/{{table}}"
_VIEWS = f"{_NAMESPACE}/views"
_VIEW = f"{_VIEWS}/{{view}}"
_PAGES = ("pageToken", "pageSize")
_KEY = ("Idempotency-Key",)


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation."""

    #: The name in Iceberg's specification.
    name: str
    #: The HTTP method.
    method: str
    #: The path template.
    path: str
    #: The scope that a token needs.
    scope: str
    #: The statuses of successful responses.
    responses: tuple[int, ...]
    #: The possible errors, as statuses and error types.
    errors: Errors
    #: The parameters of the query that have an effect.
    query: tuple[str, ...] = ()
    #: The headers that have an effect.
    headers: tuple[str, ...] = ()
    #: The members of the body, required members first, or None for a request without a body.
    body: tuple[str, ...] | None = None


OPERATIONS = (
    Operation("listNamespaces", "GET", _NAMESPACES, "read", (200,), _READING, query=("parent", *_PAGES)),
    Operation(
        "createNamespace",
        "POST",
        _NAMESPACES,
        "write",
        (200,),
        (*_CHANGING, EXISTS),
        headers=_KEY,
        body=("namespace", "properties"),
    ),
    Operation("loadNamespaceMetadata", "GET", _NAMESPACE, "read", (200,), _READING),
    Operation("namespaceExists", "HEAD", _NAMESPACE, "read", (204,), _READING),
    Operation("dropNamespace", "DELETE", _NAMESPACE, "write", (204,), (*_CHANGING, NOT_EMPTY), headers=_KEY),
    Operation(
        "updateProperties",
        "POST",
        f"{_NAMESPACE}/properties",
        "write",
        (200,),
        _CHANGING,
        headers=_KEY,
        body=("removals", "updates"),
    ),
    Operation("listTables", "GET", _TABLES, "read", (200,), _READING, query=_PAGES),
    Operation(
        "createTable",
        "POST",
        _TABLES,
        "write",
        (200,),
        (*_CHANGING, EXISTS),
        headers=_KEY,
        body=("name", "schema", "partition-spec", "write-order", "stage-create", "properties"),
    ),
    Operation(
        "loadTable",
        "GET",
        _TABLE,
        "read",
        (200, 304),
        (*_READING, NO_TABLE),
        query=("snapshots",),
        headers=("If-None-Match", "X-Iceberg-Access-Delegation"),
    ),
    Operation("tableExists", "HEAD", _TABLE, "read", (204,), (*_READING, NO_TABLE)),
    Operation(
        "updateTable",
        "POST",
        _TABLE,
        "write",
        (200,),
        (*_CHANGING, NO_TABLE, EXISTS),
        headers=_KEY,
        body=("updates", "requirements", "identifier"),
    ),
    Operation(
        "dropTable",
        "DELETE",
        _TABLE,
        "write",
        (204,),
        (*_CHANGING, NO_TABLE),
        query=("purgeRequested",),
        headers=_KEY,
    ),
    Operation(
        "registerTable",
        "POST",
        f"{_NAMESPACE}/register",
        "operate",
        (200,),
        (*_CHANGING, EXISTS),
        headers=_KEY,
        body=("name", "metadata-location", "overwrite"),
    ),
    Operation(
        "reportMetrics", "POST", f"{_TABLE}/metrics", "read", (204,), (*_READING, NO_TABLE), body=("report-type",)
    ),
    Operation("loadCredentials", "GET", f"{_TABLE}/credentials", "read", (200,), (*_READING, NO_TABLE, UNSUPPORTED)),
    Operation(
        "signRequest",
        "POST",
        f"{_TABLE}/sign",
        "read",
        (200,),
        (*_READING, NO_TABLE, UNSUPPORTED),
        body=("method", "uri", "region", "headers"),
    ),
    Operation(
        "renameTable",
        "POST",
        "/v1/{prefix}/tables/rename",
        "write",
        (204,),
        (*_CHANGING, NO_TABLE, EXISTS),
        headers=_KEY,
        body=("source", "destination"),
    ),
    Operation(
        "commitTransaction",
        "POST",
        "/v1/{prefix}/transactions/commit",
        "write",
        (204,),
        (*_CHANGING, NO_TABLE, EXISTS),
        headers=_KEY,
        body=("table-changes",),
    ),
    Operation(
        "planTableScan",
        "POST",
        f"{_TABLE}/plan",
        "read",
        (200,),
        (*_READING, NO_TABLE, UNSUPPORTED),
        body=(
            "snapshot-id",
            "start-snapshot-id",
            "end-snapshot-id",
            "filter",
            "select",
            "case-sensitive",
            "use-snapshot-schema",
            "stats-fields",
        ),
    ),
    Operation(
        "fetchScanTasks",
        "POST",
        f"{_TABLE}/tasks",
        "read",
        (200,),
        (*_READING, NO_TABLE, NO_TASK, UNSUPPORTED),
        body=("plan-task",),
    ),
    Operation("fetchPlanningResult", "GET", f"{_TABLE}/plan/{{plan}}", "read", (), (*_READING, NO_TABLE, NO_PLAN)),
    Operation("cancelPlanning", "DELETE", f"{_TABLE}/plan/{{plan}}", "read", (), (*_READING, NO_TABLE, NO_PLAN)),
    Operation("listViews", "GET", _VIEWS, "read", (200,), _READING, query=_PAGES),
    Operation(
        "createView",
        "POST",
        _VIEWS,
        "write",
        (200,),
        (*_CHANGING, EXISTS),
        headers=_KEY,
        body=("name", "schema", "view-version", "properties"),
    ),
    Operation("loadView", "GET", _VIEW, "read", (200,), (*_READING, NO_VIEW)),
    Operation("viewExists", "HEAD", _VIEW, "read", (204,), (*_READING, NO_VIEW)),
    Operation(
        "replaceView",
        "POST",
        _VIEW,
        "write",
        (200,),
        (*_CHANGING, NO_VIEW),
        headers=_KEY,
        body=("updates", "requirements"),
    ),
    Operation("dropView", "DELETE", _VIEW, "write", (204,), (*_CHANGING, NO_VIEW), headers=_KEY),
    Operation(
        "renameView",
        "POST",
        "/v1/{prefix}/views/rename",
        "write",
        (204,),
        (*_CHANGING, NO_VIEW, EXISTS),
        headers=_KEY,
        body=("source", "destination"),
    ),
    Operation("registerView", "POST", f"{_NAMESPACE}/register-view", "write", (), (*_CHANGING, UNSUPPORTED)),
)

#: Errors for requests that match no operation.
OF_NO_OPERATION: Errors = (*_ALWAYS, NO_PATH, NO_METHOD)


def reference() -> str:
    """Return the reference of all operations in Markdown, for docs/rest-catalog/run.md."""
    lines = ["| operation | request | scope | body | success | specific errors |", "|---|---|---|---|---|---|"]
    for operation in OPERATIONS:
        path = operation.path.removeprefix("/v1/{prefix}")
        parameters = "".join(f" `{name}`" for name in (*operation.query, *operation.headers))
        body = ", ".join(f"`{name}`" for name in operation.body or ())
        responses = ", ".join(map(str, operation.responses)) or "none"
        specific_errors = _shown(error for error in operation.errors if error not in (*_READING, *_CHANGING))
        request = f"`{operation.method} {path}`{parameters}"
        lines.append(f"| {operation.name} | {request} | {operation.scope} | {body} | {responses} | {specific_errors} |")
    common = [error for error in _READING if error in _CHANGING]
    return "\n".join(
        [
            *lines,
            "",
            f"- Every operation: {_shown(common)}.",
            f"- Operations that read, in addition: {_shown(error for error in _READING if error not in common)}.",
            f"- Operations that write, in addition: {_shown(error for error in _CHANGING if error not in common)}.",
        ]
    )


def _shown(errors: Iterable[tuple[int, str]]) -> str:
    return ", ".join(f"{status} `{kind}`" for status, kind in sorted(errors))
