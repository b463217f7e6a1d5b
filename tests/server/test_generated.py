"""Send generated requests for all operations: every response is documented, and no request fails in the server.

Names, bodies, parameters and headers are mostly valid for the operation, mixed with other and random values.
"""

from __future__ import annotations

import itertools
import json
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

from tests.lakes import Lakes
from tests.server.live_server import serving, settings_for
from tests.server.request_bodies import SCHEMA, WIDER_SCHEMA, new_key
from tests.server.test_views import version
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.iceberg.catalog import TrinityLakeCatalog
from trinitylake_ops.iceberg.views import ViewVersion, new_view
from trinitylake_ops.server.openapi import OF_NO_OPERATION, OPERATIONS, Operation, reference
from trinitylake_ops.server.routes import ROUTES

#: Number of requests in a normal run and in a soak test.
N_REQUESTS, N_SOAK_REQUESTS = 80, 10_000
ROWS = pa.table({"id": pa.array([1, 2], pa.int64())})
VIEW_SCHEMA = Schema(NestedField(1, "id", LongType(), required=False))
_BY_NAME = {operation.name: operation for operation in OPERATIONS}

text = st.text(max_size=12)
unusual_name = st.one_of(st.sampled_from(["none", "a b", "a\x1fb", "ü", "."]), text)


def mostly(usual: st.SearchStrategy[Any], unusual: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return a strategy that chooses the usual value seven times out of eight, so that most requests succeed."""
    return st.integers(0, 7).flatmap(lambda chosen: usual if chosen else unusual)


namespaces = mostly(st.sampled_from(["ns", "ns", "ns", "own"]), unusual_name)
names = mostly(st.sampled_from(["t", "u", "v", "w", "d"]), unusual_name)
number = mostly(st.integers(-1, 2), st.sampled_from([2**31, 2**63 - 1, 2**63, -(2**63) - 1]))
any_json = st.recursive(
    st.one_of(st.none(), st.booleans(), number, st.floats(), text),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(text, inner, max_size=3)),
    max_leaves=6,
)
keys = mostly(
    st.sampled_from(["a", "b", "gc.enabled"]),
    st.one_of(st.sampled_from(["format-version", "write.data.path", "x.impl", "trinitylake.view.x"]), text),
)
properties = st.dictionaries(keys, text, max_size=2)
types = mostly(st.sampled_from(["long", "string", "date", "decimal(9, 2)", "uuid"]), st.sampled_from(["no", "variant"]))
column = st.fixed_dictionaries(
    {"id": number, "name": st.one_of(st.just("id"), text), "type": types, "required": st.booleans()}
)
schema = mostly(
    st.just(SCHEMA),
    st.fixed_dictionaries({"type": st.just("struct"), "schema-id": number, "fields": st.lists(column, max_size=3)}),
)
view_version = mostly(
    st.builds(version, text),
    st.fixed_dictionaries({"version-id": number, "schema-id": number, "default-namespace": st.just(["ns"])}),
)
transform = st.sampled_from(["identity", "bucket[4]", "void", "day", "paint"])
partition = st.fixed_dictionaries(
    {
        "spec-id": number,
        "fields": st.lists(
            st.fixed_dictionaries({"source-id": number, "field-id": number, "transform": transform, "name": text}),
            max_size=2,
        ),
    }
)
order = st.fixed_dictionaries(
    {
        "order-id": number,
        "fields": st.lists(
            st.fixed_dictionaries(
                {
                    "source-id": number,
                    "transform": transform,
                    "direction": st.sampled_from(["asc", "desc", "up"]),
                    "null-order": st.just("nulls-first"),
                }
            ),
            max_size=2,
        ),
    }
)
snapshot = st.fixed_dictionaries(
    {
        "snapshot-id": number,
        "sequence-number": number,
        "timestamp-ms": number,
        "manifest-list": st.sampled_from(["file:///etc/passwd", "x", ""]),
        "summary": st.just({"operation": "append"}),
        "schema-id": number,
    }
)
usual_update = st.one_of(
    *(
        st.fixed_dictionaries({"action": st.just(action), **fields})
        for action, fields in {
            "set-properties": {"updates": st.dictionaries(st.sampled_from(["a", "b"]), text, min_size=1, max_size=2)},
            "remove-properties": {"removals": st.lists(text, max_size=2)},
            "add-schema": {"schema": st.just(WIDER_SCHEMA)},
            "set-current-schema": {"schema-id": st.just(0)},
            "set-location": {"location": text},
        }.items()
    )
)
any_update = st.one_of(
    *(
        st.fixed_dictionaries({"action": st.just(action), **fields})
        for action, fields in {
            "assign-uuid": {"uuid": text},
            "upgrade-format-version": {"format-version": number},
            "add-schema": {"schema": schema},
            "set-current-schema": {"schema-id": number},
            "add-spec": {"spec": partition},
            "set-default-spec": {"spec-id": number},
            "add-sort-order": {"sort-order": order},
            "set-default-sort-order": {"sort-order-id": number},
            "add-snapshot": {"snapshot": snapshot},
            "set-snapshot-ref": {
                "ref-name": names,
                "type": st.sampled_from(["branch", "tag", "x"]),
                "snapshot-id": number,
            },
            "remove-snapshots": {"snapshot-ids": st.lists(number, max_size=2)},
            "remove-snapshot-ref": {"ref-name": names},
            "set-location": {"location": text},
            "set-properties": {"updates": properties},
            "remove-properties": {"removals": st.lists(text, max_size=2)},
            "add-view-version": {"view-version": view_version},
            "set-current-view-version": {"view-version-id": number},
            "remove-partition-specs": {"spec-ids": st.lists(number, max_size=2)},
            "remove-schemas": {"schema-ids": st.lists(number, max_size=2)},
            "set-statistics": {"snapshot-id": number, "statistics": any_json},
            "remove-statistics": {"snapshot-id": number},
            "paint-it-black": {},
        }.items()
    )
)
update = mostly(usual_update, any_update)
view_update = mostly(
    st.one_of(
        st.fixed_dictionaries({"action": st.just("set-properties"), "updates": st.just({"a": "1"})}),
        st.fixed_dictionaries({"action": st.just("add-view-version"), "view-version": st.builds(version, text)}),
        st.fixed_dictionaries({"action": st.just("set-current-view-version"), "view-version-id": st.just(1)}),
    ),
    any_update,
)
requirement = st.one_of(
    *(
        st.fixed_dictionaries({"type": st.just(kind), **fields})
        for kind, fields in {
            "assert-create": {},
            "assert-table-uuid": {"uuid": st.just("017f22e2-79b0-7cc3-98c4-dc0c0c07398f")},
            "assert-view-uuid": {"uuid": text},
            "assert-ref-snapshot-id": {"ref": names, "snapshot-id": st.one_of(st.none(), number)},
            "assert-current-schema-id": {"current-schema-id": number},
            "assert-last-assigned-field-id": {"last-assigned-field-id": number},
            "assert-nothing": {},
        }.items()
    )
)
requirements = mostly(st.just([]), st.lists(requirement, max_size=2))
identifier = st.fixed_dictionaries(
    {"namespace": mostly(namespaces.map(lambda name: [name]), st.lists(namespaces, max_size=2)), "name": names}
)
table_commit = st.fixed_dictionaries(
    {
        "identifier": identifier,
        "requirements": requirements,
        "updates": st.lists(update, max_size=2),
    }
)
predicate = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["eq", "lt", "gt-eq", "not-eq", "starts-with", "is-null", "in", "x"]),
        "term": st.one_of(st.just("id"), text),
        "value": any_json,
    }
)
expression = st.recursive(
    st.one_of(predicate, st.booleans(), any_json),
    lambda inner: st.one_of(
        st.fixed_dictionaries({"type": st.sampled_from(["and", "or"]), "left": inner, "right": inner}),
        st.fixed_dictionaries({"type": st.just("not"), "child": inner}),
    ),
    max_leaves=4,
)
#: Strategies for the members of request bodies, by member name.
MEMBERS: dict[str, st.SearchStrategy[Any]] = {
    "namespace": mostly(namespaces.map(lambda name: [name]), st.lists(namespaces, max_size=2)),
    "properties": properties,
    "removals": st.lists(text, max_size=2),
    "updates": st.lists(update, max_size=2),
    "requirements": requirements,
    "identifier": identifier,
    "name": names,
    "schema": schema,
    "partition-spec": st.one_of(st.none(), partition),
    "write-order": st.one_of(st.none(), order),
    "stage-create": st.booleans(),
    "metadata-location": st.sampled_from(["file:///etc/passwd", "s3://other/m.json", "x", "../x", ""]),
    "overwrite": st.booleans(),
    "report-type": text,
    "source": identifier,
    "destination": identifier,
    "table-changes": st.lists(table_commit, max_size=2),
    "view-version": view_version,
    "snapshot-id": number,
    "start-snapshot-id": number,
    "end-snapshot-id": number,
    "filter": expression,
    "select": st.lists(st.one_of(st.just("id"), text), max_size=2),
    "case-sensitive": st.booleans(),
    "use-snapshot-schema": st.booleans(),
    "stats-fields": st.lists(st.one_of(st.just("id"), text), max_size=2),
    "plan-task": st.one_of(text, st.text("AZaz09-_", max_size=40)),
    "method": st.one_of(st.just("GET"), text),
    "uri": st.one_of(st.just("http://127.0.0.1/bucket/a"), text),
    "region": text,
    "headers": st.dictionaries(text, st.lists(text, max_size=2), max_size=2),
}
#: Strategies for members that differ for one operation, by operation and member name.
OPERATION_MEMBERS = {
    ("updateProperties", "updates"): properties,
    ("replaceView", "updates"): st.lists(view_update, max_size=2),
}
#: Operations whose members mostly exclude each other, so that most members are omitted.
SPARSE = {"planTableScan"}
QUERY = {
    "parent": namespaces,
    "pageToken": st.one_of(st.just(""), text),
    "pageSize": st.one_of(st.integers(-1, 3).map(str), text),
    "snapshots": st.sampled_from(["all", "refs", "some"]),
    "purgeRequested": st.sampled_from(["true", "false", "x"]),
}


@st.composite
def request_for(draw: st.DrawFn) -> tuple[Operation, str, str, bytes, dict[str, str]]:
    """Return an operation, and a request for it: its method, target, body and headers."""
    operation = draw(st.sampled_from(OPERATIONS))
    prefix = draw(
        st.sampled_from(["main"] * 12 + ["v1", "v999", "at-2030-01-31", "at-x", "export-none", "clone-none", "x"])
    )
    path = operation.path.replace("{prefix}", prefix)
    path = path.replace("{namespace}", quote(draw(namespaces) or "x", safe=""))
    for name in ("table", "view", "plan"):
        path = path.replace(f"{{{name}}}", quote(draw(names) or "x", safe=""))
    query = {name: draw(QUERY[name]) for name in operation.query if draw(st.booleans())}
    headers = {"If-None-Match": '"x"'} if "If-None-Match" in operation.headers else {}
    if "X-Iceberg-Access-Delegation" in operation.headers:
        headers["X-Iceberg-Access-Delegation"] = "vended-credentials,remote-signing"
    if "Idempotency-Key" in operation.headers and draw(st.integers(0, 3)) == 0:
        headers["Idempotency-Key"] = draw(st.sampled_from([new_key(), new_key(3_600_000 * 24), "x"]))
    body = b""
    if operation.body is not None:
        content = {}
        for name in operation.body:
            choice = draw(st.integers(0, 7))
            if choice == 1 if name == "identifier" or operation.name in SPARSE else choice:
                content[name] = draw(OPERATION_MEMBERS.get((operation.name, name), MEMBERS[name]))
        if draw(st.integers(0, 7)) == 0:
            content[draw(st.sampled_from(sorted(operation.body)))] = draw(any_json)
        body = json.dumps(content).encode() if draw(st.integers(0, 15)) else draw(st.binary(max_size=8))
    target = f"{path}?{urlencode(query, errors='replace')}" if query else path
    return operation, operation.method, target, body, headers


def send(
    connection: HTTPConnection, method: str, target: str, body: bytes, headers: dict[str, str]
) -> tuple[int, bytes]:
    """Send a request on a persistent connection, and return the status and body of the response."""
    connection.request(method, target, body or None, headers)
    response = connection.getresponse()
    return response.status, response.read()


def check(operation: Operation, method: str, status: int, body: bytes) -> None:
    """Assert that a response is documented for the operation and is not a server failure."""
    assert status < 500, (operation.name, status, body)
    if status in operation.responses:
        assert (body == b"") == (status in (204, 304)), (operation.name, status, body)
        return
    if method == "HEAD":
        assert status in {code for code, _ in operation.errors}, (operation.name, status)
        return
    error = json.loads(body)["error"]
    assert (status, error["type"]) in operation.errors, (operation.name, status, error)
    assert error["code"] == status


def restore_objects(catalog: TrinityLakeCatalog) -> None:
    """Create the objects again that earlier requests dropped: namespaces, tables with and without rows, and a view."""
    for name in ("ns", "own"):
        if not catalog.namespace_exists(name):
            catalog.create_namespace(name)
    for name in ("t", "u", "d"):
        if not catalog.table_exists(("ns", name)) and not catalog.view_exists(("ns", name)):
            table = catalog.create_table(("ns", name), ROWS.schema)
            if name == "d":
                table.append(ROWS)
    if not catalog.view_exists(("ns", "v")) and not catalog.table_exists(("ns", "v")):
        first = ViewVersion.model_validate(version())
        new_metadata = new_view(VIEW_SCHEMA, first, {}, "file:///")
        catalog.put_view(("ns", "v"), lambda _: new_metadata, is_new=True)


def run(lake: Lakehouse, n_requests: int) -> None:
    with serving(settings_for(lake)) as server, ExitStack() as stack:
        split = urlsplit(server.url)
        connection = stack.enter_context(closing(HTTPConnection(split.hostname or "", split.port, timeout=60)))
        catalog, n_sent = catalog_at(lake), itertools.count()

        @settings(
            max_examples=n_requests,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(request_for())
        def send_request(generated: tuple[Operation, str, str, bytes, dict[str, str]]) -> None:
            if next(n_sent) % 25 == 0:
                restore_objects(catalog)
            operation, method, target, body, headers = generated
            status, response = send(connection, method, target, body, headers)
            check(operation, method, status, response)

        send_request()
        assert next(n_sent) >= n_requests
    assert operations.verify(lake, deep=True).findings == ()


@pytest.fixture
def generated_lake(lakes: Lakes) -> Lakehouse:
    return lakes.local(is_watched=False)


def test_responses_are_documented(generated_lake: Lakehouse) -> None:
    run(generated_lake, N_REQUESTS)


@pytest.mark.soak
@pytest.mark.timeout(3_600)
def test_responses_are_documented_in_many_requests(generated_lake: Lakehouse) -> None:
    run(generated_lake, N_SOAK_REQUESTS)


def test_operations_table_matches_routes() -> None:
    routes = {(route.method, route.template): route for route in ROUTES}
    assert {(operation.method, operation.path) for operation in OPERATIONS} == routes.keys()
    assert len(_BY_NAME) == len(OPERATIONS)
    for operation in OPERATIONS:
        route = routes[operation.method, operation.path]
        assert route.changes == ("Idempotency-Key" in operation.headers or operation.name == "registerView"), (
            operation.name
        )
        assert route.is_documented == bool(operation.responses), operation.name
        assert set(operation.body or ()) <= MEMBERS.keys()


def test_requests_for_missing_objects_get_documented_errors(generated_lake: Lakehouse) -> None:
    with serving(settings_for(generated_lake)) as server:
        for method, path in (
            ("GET", "/v1/x/y"),
            ("PUT", "/v1/main/namespaces"),
            ("POST", "/"),
            ("TRACE", "/v1/config/x"),
        ):
            assert server.request(method, path).error in OF_NO_OPERATION


def test_docs_contain_generated_reference() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "rest-catalog" / "run.md").read_text()
    assert reference() in docs
