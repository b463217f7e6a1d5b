"""Compare the responses to random requests with an oracle that knows the names and the rights of tokens.

Each namespace, table, view, export, clone, root and comment of two lakehouses contains a unique string, and every
response is searched for strings that the token may not see. A denied request is repeated with names that do not
exist, and must get the same response.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pyarrow as pa
import pytest
import yaml

from tests.lakes import Lakes, allowing
from tests.server.authorization_oracle import OPERATE, READ, WRITE, Need, Secret, Token
from tests.server.live_server import Response, serving, settings_for
from tests.server.request_bodies import SCHEMA, new_key
from tests.server.test_access_control import entry
from tests.server.test_generated import VIEW_SCHEMA
from tests.server.test_views import version, view
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.iceberg.views import ViewVersion, new_view
from trinitylake_ops.server.openapi import OPERATIONS, Operation
from trinitylake_ops.server.routes import ROUTES
from trinitylake_ops.server.settings import ONLY, LakehouseSettings, Limits

N_REQUESTS, N_SOAK_REQUESTS = 1_500, 20_000
N_TOKENS, N_NAMESPACES = 24, 4
MAX_SECONDS = 5.0
_RESTORE_INTERVAL = 150
_SCOPES = ("none", READ, WRITE, OPERATE)
_UNUSED_NAMES = tuple(f"free{number}" for number in range(4))
#: Endpoints that ``OPERATIONS`` does not contain.
_UNROUTED_OPERATIONS = ("config", "metrics", "page")


@dataclass
class PlantedLakehouse:
    """A lakehouse and the unique strings in it. ``missing`` maps each namespace to a missing name of equal length."""

    name: str
    lake: Lakehouse
    namespaces: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    secrets: list[Secret] = field(default_factory=list)
    exports: list[str] = field(default_factory=list)
    clones: list[str] = field(default_factory=list)
    locations: list[str] = field(default_factory=list)
    warehouses: list[str] = field(default_factory=list)

    def table(self, namespace: str) -> str:
        return f"tab{namespace}"

    def view(self, namespace: str) -> str:
        return f"viw{namespace}"

    def plant(self, text: str, namespace: str | None = None, *, root_of: str | None = None) -> str:
        self.secrets.append(Secret(text, self.name, namespace, root_of))
        return text

    def restore_objects(self) -> None:
        """Create the objects again that earlier requests dropped or renamed."""
        catalog = catalog_at(self.lake)
        for namespace in self.namespaces:
            if not catalog.namespace_exists(namespace):
                catalog.create_namespace(namespace, {"comment": f"com{namespace}"})
        if not catalog.namespace_exists(_UNUSED_NAMES[0]):
            catalog.create_namespace(_UNUSED_NAMES[0])
        for namespace in self.namespaces:
            table, view_name = self.table(namespace), self.view(namespace)
            if not catalog.table_exists((namespace, table)) and not catalog.view_exists((namespace, table)):
                columns = pa.table({"id": pa.array([1, 2], pa.int64()), f"col{namespace}": ["a", "b"]})
                table_in_namespace = catalog.create_table((namespace, table), columns.schema)
                table_in_namespace.append(columns)
                table_in_namespace.append(columns)
            if not catalog.view_exists((namespace, view_name)) and not catalog.table_exists((namespace, view_name)):
                first = ViewVersion.model_validate(version(f"SELECT id FROM {table}"))
                new = new_view(VIEW_SCHEMA, first, {}, "file:///")
                catalog.put_view((namespace, view_name), lambda _, view=new: view, is_new=True)


def build_lakehouse(name: str, label: str, folder: Path, lakes: Lakes) -> PlantedLakehouse:
    """Create a lakehouse in which every name contains a unique string."""
    root = f"rot{label}zq9"
    lake = lakes.local(root, is_watched=False)
    planted = PlantedLakehouse(name, lake)
    planted.plant(root, root_of="")
    for number in range(N_NAMESPACES):
        namespace = f"nsp{label}{number}zq9"
        planted.namespaces.append(planted.plant(namespace, namespace))
        planted.missing[namespace] = namespace.replace("zq9", "mis")
    planted.restore_objects()
    for kind in range(2):
        export = planted.plant(f"exp{label}{kind}zq9")
        target = (
            {"level": "full", "target": f"file://{folder}/{planted.plant(f'far{label}zq9', root_of=export)}/"}
            if kind
            else {}
        )
        operations.plan_export(lake, export, **target).execute()
        planted.exports.append(export)
        clone, folder_name = planted.plant(f"cln{label}{kind}zq9"), f"plc{label}{kind}zq9"
        operations.plan_clone(lake, f"file://{folder}/{planted.plant(folder_name, root_of=clone)}/", clone).execute()
        planted.clones.append(clone)
        if kind:
            shutil.rmtree(folder / folder_name)
    created_at_ms = lake.snapshot().created_at_ms
    names = [f"export-{name}" for name in planted.exports] + [f"clone-{name}" for name in planted.clones]
    missing_names = [name.replace("zq9", "mis") for name in names]
    existing = [
        "main",
        "",
        "v1",
        f"v{lake.latest_version()}",
        f"at-{created_at_ms}",
        f"at-{created_at_ms + 10**9}",
        *names,
    ]
    planted.warehouses = (
        ["main"] * len(existing) + existing + [*missing_names, "v99999", "at-1999-01-01", "at-x", "parent@1", "."]
    )
    for namespace in planted.namespaces:
        table = catalog_at(lake).load_table((namespace, planted.table(namespace)))
        planted.locations.append(table.metadata_location)
    return planted


@dataclass(frozen=True)
class GeneratedRequest:
    """A request with the rights that it needs. ``missing_names`` maps existing names in it to missing ones."""

    operation: str
    method: str
    target: str
    body: Any
    headers: dict[str, str]
    lakehouse: str
    needs: Sequence[Need]
    needs_all: bool = False
    reads_main: bool = False
    missing_names: Sequence[tuple[str, str]] = ()

    @property
    def text(self) -> str:
        return f"{self.target} {json.dumps(self.body)}"

    def with_missing_names(self) -> GeneratedRequest:
        def replaced(text: str) -> str:
            for existing, missing in self.missing_names:
                text = text.replace(existing, missing)
            return text

        body = None if self.body is None else json.loads(replaced(json.dumps(self.body)))
        return replace(self, target=replaced(self.target), body=body)


@dataclass
class _Draft:
    """A request under construction. By default it needs the operation's scope in the namespace of its path."""

    token: Token
    operation: Operation
    planted: PlantedLakehouse
    namespace: str
    name: str
    body: Any = None
    query: str = ""
    needs: list[Need] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.needs = [(self.operation.scope, self.namespace)]


class RequestGenerator:
    """Generates random requests for every operation and every kind of warehouse."""

    def __init__(self, rng: random.Random, lakehouses: Sequence[PlantedLakehouse], *, is_single: bool):
        self._random, self._lakehouses, self._is_single = rng, lakehouses, is_single
        self._keys = [new_key() for _ in range(6)]
        #: Tasks of scan plans, each with the namespace and name of its table.
        self.tasks = [((planted.namespaces[0], "x"), "x") for planted in lakehouses]

    def generate(self, token: Token) -> GeneratedRequest:
        """Return a request whose names are chosen regardless of the token's rights."""
        index = self._random.randrange(len(OPERATIONS) + 1)
        return self._routed(token, OPERATIONS[index]) if index < len(OPERATIONS) else self._unrouted()

    def _unrouted(self) -> GeneratedRequest:
        planted, name = self._random.choice(self._lakehouses), self._random.choice(_UNROUTED_OPERATIONS)
        if name == "config":
            prefix, lakehouse = self._prefix(planted, self._random.choice(planted.warehouses))
            target = f"/v1/config?warehouse={quote(prefix, safe='')}"
            return GeneratedRequest(
                name, "GET", target, None, {}, lakehouse, (), missing_names=self._missing_names(planted, lakehouse)
            )
        target = "/metrics" if name == "metrics" else "/"
        return GeneratedRequest(name, "GET", target, None, {}, "" if self._is_single else "*", (), needs_all=True)

    def _prefix(self, planted: PlantedLakehouse, warehouse: str) -> tuple[str, str]:
        """Return the name of a warehouse and its lakehouse, sometimes one that does not exist."""
        if self._is_single:
            return warehouse, ONLY
        lakehouse = planted.name if self._random.random() < 0.95 else f"{planted.name[:-1]}x"
        return (f"{lakehouse}.{warehouse}" if warehouse else lakehouse), lakehouse

    def _missing_names(self, planted: PlantedLakehouse, lakehouse: str) -> list[tuple[str, str]]:
        pairs = [
            *planted.missing.items(),
            *((text, text.replace("zq9", "mis")) for text in (*planted.exports, *planted.clones)),
        ]
        return [*pairs, *([] if self._is_single else [(f"{lakehouse}.", f"{lakehouse[:-1]}y.")])]

    def _routed(self, token: Token, operation: Operation) -> GeneratedRequest:
        pick, planted = self._random.choice, self._random.choice(self._lakehouses)
        warehouse = pick(planted.warehouses)
        prefix, lakehouse = self._prefix(planted, warehouse)
        namespace = pick([*planted.namespaces * 3, *planted.missing.values(), pick(_UNUSED_NAMES)])
        if operation.name == "dropNamespace":
            namespace = pick([_UNUSED_NAMES[0], _UNUSED_NAMES[0], namespace])
        owner = namespace if namespace in planted.namespaces else planted.namespaces[0]
        # The name of a new object must not contain the unique string of another namespace.
        names = [planted.view(owner) if "iew" in operation.name else planted.table(owner), *_UNUSED_NAMES]
        target_name = pick([*_UNUSED_NAMES, planted.table(owner) if namespace == owner else _UNUSED_NAMES[0]])
        draft = _Draft(token, operation, planted, namespace, pick(names[:1] * 4 + names[1:]))
        if operation.body is not None:
            draft.body = self._body(draft, target_name)
        self._specialize(draft)
        path = operation.path.replace("{prefix}", quote(prefix, safe=""))
        for part, value in (("namespace", draft.namespace), ("table", draft.name), ("view", draft.name), ("plan", "p")):
            path = path.replace(f"{{{part}}}", quote(value, safe=""))
        headers = {"X-Iceberg-Access-Delegation": "vended-credentials"} if operation.name == "loadTable" else {}
        if "Idempotency-Key" in operation.headers and self._random.random() < 0.2:
            headers["Idempotency-Key"] = pick(self._keys)
        reads_main = operation.scope == READ and warehouse in ("main", "") and lakehouse in (ONLY, planted.name)
        return GeneratedRequest(
            operation.name, operation.method, path + draft.query, draft.body, headers, lakehouse, draft.needs,
            reads_main=reads_main, missing_names=self._missing_names(planted, lakehouse),
        )  # fmt: skip

    def _specialize(self, draft: _Draft) -> None:
        """Adjust the names and needs of operations that need other rights than those in the namespace of the path."""
        name, rng = draft.operation.name, self._random
        if name == "listNamespaces":
            draft.needs = []
            if rng.random() < 0.3:
                draft.needs, draft.query = [(READ, draft.namespace)], f"?parent={draft.namespace}"
            elif rng.random() < 0.5:
                draft.query = f"?pageSize=2&pageToken={rng.choice(['', 'bnNw', 'enp6'])}"
        elif name == "createNamespace":
            hidden = [namespace for namespace in draft.planted.namespaces if not draft.token.may(WRITE, namespace)]
            new_name = rng.choice([*_UNUSED_NAMES, *hidden])
            draft.body, draft.needs = {"namespace": [new_name], "properties": {"a": "1"}}, [(WRITE, new_name)]
        elif name in ("renameTable", "renameView"):
            other = rng.choice(draft.planted.namespaces)
            if all(draft.token.may(WRITE, namespace) for namespace in (draft.namespace, other)):
                other = draft.namespace  # a renamed object would carry its unique strings to the other namespace
            draft.body["destination"]["namespace"] = [other]
            draft.needs.append((WRITE, other))
        elif name == "commitTransaction":
            second = rng.choice(draft.planted.namespaces)
            draft.body["table-changes"].append(self._commit(second, draft.planted.table(second)))
            draft.needs.append((WRITE, second))
        elif name == "fetchScanTasks" and rng.random() < 0.6:
            (draft.namespace, draft.name), draft.body["plan-task"] = rng.choice(self.tasks[-40:])
            draft.needs = [(READ, draft.namespace)]

    def _commit(self, namespace: str, table: str) -> dict[str, Any]:
        updates = [{"action": "set-properties", "updates": {"a": self._random.choice("123")}}]
        return {"identifier": {"namespace": [namespace], "name": table}, "requirements": [], "updates": updates}

    def _body(self, draft: _Draft, target_name: str) -> dict[str, Any]:
        pick, planted, namespace, name = self._random.choice, draft.planted, draft.namespace, draft.name
        destination = {"namespace": [namespace], "name": target_name}
        source = {"namespace": [namespace], "name": name}
        location = pick([*planted.locations, f"{planted.lake.root}none.metadata.json"])
        signed = {"method": "GET", "uri": location, "region": "us-east-1", "headers": {"Host": ["a"]}}
        update: dict[str, Any] = {"action": "set-properties", "updates": {"a": "1"}}
        bodies: dict[str, dict[str, Any]] = {
            "updateProperties": {"removals": [], "updates": {"a": pick("123")}},
            "createTable": {"name": target_name, "schema": SCHEMA, "stage-create": pick([True, False])},
            "updateTable": self._commit(namespace, name),
            "registerTable": {"name": target_name, "metadata-location": location},
            "reportMetrics": {"report-type": "scan-report"},
            "signRequest": signed,
            "renameTable": {"source": source, "destination": destination},
            "renameView": {"source": source, "destination": destination},
            "commitTransaction": {"table-changes": [self._commit(namespace, name)]},
            "planTableScan": {"stats-fields": ["id"]},
            "fetchScanTasks": {"plan-task": pick(self.tasks[-40:])[1]},
            "createView": view(target_name),
            "replaceView": {"updates": [update], "requirements": []},
            "registerView": {"name": target_name, "metadata-location": location},
        }
        return bodies.get(draft.operation.name, {})


def random_tokens(rng: random.Random, lakehouses: Sequence[PlantedLakehouse]) -> dict[str, Token]:
    """Return tokens by their secrets. A token has the same scope in a namespace and in its missing counterpart."""
    tokens = {"everything": Token("everything", OPERATE), "nothing": Token("nothing")}
    for number in range(N_TOKENS):
        scopes = {}
        for planted in lakehouses:
            for namespace, missing in planted.missing.items():
                if rng.random() < 0.6:
                    scopes[namespace] = scopes[missing] = rng.choice(_SCOPES)
        visible = rng.choice([None, None, None, *([{planted.name} for planted in lakehouses]), set()])
        visible_lakehouses = None if visible is None else frozenset(visible)
        tokens[f"token-{number}"] = Token(f"t{number}", rng.choice(_SCOPES), scopes, visible_lakehouses)
    return tokens


def send(connection: HTTPConnection, request: GeneratedRequest, secret: str) -> Response:
    body = None if request.body is None else json.dumps(request.body).encode()
    connection.request(request.method, request.target, body, {**request.headers, "Authorization": f"Bearer {secret}"})
    response = connection.getresponse()
    return Response(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())


@dataclass
class Results:
    """Failures, and counts of successful and denied requests by operation."""

    failures: list[str] = field(default_factory=list)
    succeeded: Counter[str] = field(default_factory=Counter)
    denied: Counter[str] = field(default_factory=Counter)
    warehouse_kinds: Counter[str] = field(default_factory=Counter)
    n_requests: int = 0
    n_twins: int = 0
    slowest_s: float = 0.0
    slowest: str = ""

    def add_failure(self, failure: str, request: GeneratedRequest, token: Token, response: Response) -> None:
        self.failures.append(
            f"{failure}: {token} {request.method} {request.text[:400]} -> {response.status} {response.body[:400]!r}"
        )


def check(
    request: GeneratedRequest,
    token: Token,
    response: Response,
    lakehouses: Sequence[PlantedLakehouse],
    results: Results,
) -> bool:
    """Check a response against the oracle. Return whether the request had to be denied."""
    allowed = token.allows(request.lakehouse, request.needs)
    if request.needs_all:
        allowed = token.reads_all and (
            request.operation == "page" or all(token.sees(planted.name) for planted in lakehouses)
        )
    if response.status >= 500:
        results.add_failure("server error", request, token, response)
    if not allowed and response.status not in (400, 403, 404):
        results.add_failure("wrongly allowed", request, token, response)
    if allowed and request.reads_main and response.status == 403:
        results.add_failure("wrongly denied", request, token, response)
    text = response.body.decode("utf-8", "replace") + json.dumps(dict(response.headers))
    for secret in (secret for planted in lakehouses for secret in planted.secrets):
        if secret.text in text and not secret.may_be_sent_to(token, request.text):
            results.add_failure(f"leaks {secret}", request, token, response)
    results.n_requests += 1
    counter = results.succeeded if response.status < 400 else results.denied if not allowed else None
    if counter is not None:
        counter[request.operation] += 1
    return not allowed


def comparable(response: Response, request: GeneratedRequest) -> tuple[int, str, dict[str, str]]:
    """Return the comparable part of a response, with real names replaced by missing ones."""
    text = response.body.decode("utf-8", "replace")
    for existing, missing in request.missing_names:
        text = text.replace(existing, missing)
    headers = {name: value for name, value in response.headers.items() if name not in ("date", "x-request-id")}
    return response.status, text, headers


@contextmanager
def servers(
    lakehouses: Sequence[PlantedLakehouse], tokens: dict[str, Token], folder: Path
) -> Iterator[list[tuple[bool, str]]]:
    """Run a server of all lakehouses and one of the first. Yield whether each serves only one, and its address."""
    path = folder / "tokens.yaml"
    entries = [
        entry(secret, token.name, scope=token.scope, namespaces=dict(token.namespaces))
        | ({} if token.lakehouses is None else {"lakehouses": sorted(token.lakehouses)})
        for secret, token in tokens.items()
    ]
    path.write_text(yaml.safe_dump({"tokens": entries}))
    allowed_lakes = {planted.name: allowing(planted.lake, folder) for planted in lakehouses}
    with ExitStack() as stack:
        addresses = []
        for is_single in (False, True):
            lakes = {ONLY: allowed_lakes[lakehouses[0].name]} if is_single else allowed_lakes
            lake_settings = {name: LakehouseSettings(lake.root, lake.storage_options) for name, lake in lakes.items()}
            settings = settings_for(
                lakehouses[0].lake, lakehouses=lake_settings, tokens=path, limits=Limits(scan_files=1)
            )
            addresses.append((is_single, stack.enter_context(serving(settings)).url))
        yield addresses


def run(lakes: Lakes, folder: Path, n_requests: int, seed: int) -> Results:
    rng = random.Random(seed)
    lakehouses = [build_lakehouse(name, label, folder, lakes) for name, label in (("north", "nor"), ("south", "sou"))]
    tokens, results = random_tokens(rng, lakehouses), Results()
    secrets = [*tokens, *["everything"] * 8]
    with servers(lakehouses, tokens, folder) as addresses, ExitStack() as stack:
        clients = []
        for is_single, url in addresses:
            served_lakehouses = [replace(lakehouses[0], name=ONLY)] if is_single else lakehouses
            if is_single:
                served_lakehouses[0].secrets = [
                    replace(secret, lakehouse=ONLY) for secret in served_lakehouses[0].secrets
                ]
            split = urlsplit(url)
            connection = stack.enter_context(closing(HTTPConnection(split.hostname or "", split.port, timeout=60)))
            requests = RequestGenerator(rng, served_lakehouses, is_single=is_single)
            clients.append((served_lakehouses, connection, requests))
        for number in range(n_requests):
            if number % _RESTORE_INTERVAL == 0:
                for planted in lakehouses:
                    planted.restore_objects()
            served_lakehouses, connection, requests = rng.choice(clients)
            secret = rng.choice(secrets)
            token = tokens[secret]
            request = requests.generate(token)
            started_s = time.monotonic()
            response = send(connection, request, secret)
            seconds = time.monotonic() - started_s
            if seconds > results.slowest_s:
                results.slowest_s, results.slowest = seconds, f"{request.method} {request.target}"
            results.warehouse_kinds[_warehouse_kind(request.target)] += 1
            if check(request, token, response, served_lakehouses, results):
                twin = request.with_missing_names()
                is_comparable = not token.sees(request.lakehouse) or _same_warehouse(request, twin)
                if twin.text != request.text and is_comparable:
                    results.n_twins += 1
                    twin_response = send(connection, twin, secret)
                    if comparable(twin_response, twin) != comparable(response, request):
                        results.add_failure(
                            f"differs from {twin_response.status} {twin_response.body[:300]!r}",
                            request,
                            token,
                            response,
                        )
            elif request.operation == "planTableScan" and response.status == 200:
                parts = request.target.split("/")
                requests.tasks += [((parts[4], parts[6]), task) for task in response.document.get("plan-tasks", [])]
    return results


def _same_warehouse(request: GeneratedRequest, twin: GeneratedRequest) -> bool:
    """Whether two requests are for the same warehouse, so that only other names differ."""
    return request.target.split("/")[2:3] == twin.target.split("/")[2:3] and "config" not in request.operation


def _warehouse_kind(target: str) -> str:
    parts = target.split("/")
    prefix = parts[2] if len(parts) > 3 else ""
    _, dot, suffix = prefix.partition(".")
    form = suffix if dot else prefix
    kind = next((kind for kind in ("main", "export-", "clone-", "at-", "v") if form.startswith(kind)), "other")
    return ("qualified " if dot else "") + kind


def check_results(results: Results) -> None:
    assert results.failures == [], "\n".join(results.failures[:10])
    routes = {(route.method, route.template) for route in ROUTES}
    names = {operation.name for operation in OPERATIONS}
    assert {(operation.method, operation.path) for operation in OPERATIONS} == routes
    assert names | set(_UNROUTED_OPERATIONS) <= results.denied.keys(), "an operation was never denied"
    # Local disks have no credentials and signatures. Two operations are always rejected, and one registers a table.
    without_success = {operation.name for operation in OPERATIONS if not operation.responses} | {
        "loadCredentials",
        "signRequest",
        "registerTable",
    }
    assert names | set(_UNROUTED_OPERATIONS) <= results.succeeded.keys() | without_success, (
        "an operation never succeeded"
    )
    kinds = {"main", "export-", "clone-", "at-", "v"}
    assert kinds | {f"qualified {kind}" for kind in kinds} <= results.warehouse_kinds.keys()
    assert results.n_twins > results.n_requests // 20


def test_tokens_never_exceed_their_rights_or_learn_hidden_names(lakes: Lakes, tmp_path: Path) -> None:
    check_results(run(lakes, tmp_path, N_REQUESTS, seed=1))


@pytest.mark.soak
@pytest.mark.timeout(3_600)
def test_tokens_never_exceed_their_rights_in_many_requests(
    lakes: Lakes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = run(lakes, tmp_path, N_SOAK_REQUESTS, seed=2)
    with capsys.disabled():
        print(
            f"\n{results.n_requests} requests, {results.n_twins} compared with missing names,"
            f" {results.succeeded.total()} succeeded, {results.denied.total()} denied,"
            f" {len(results.failures)} failures;"
            f" the longest took {results.slowest_s:.2f} s ({results.slowest}), limit {MAX_SECONDS} s"
        )
    check_results(results)
