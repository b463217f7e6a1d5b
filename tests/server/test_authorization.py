"""Random tokens and requests against an oracle of names and rights: none is let in wrongly, none learns a hidden name.

Each namespace, table, view, export, clone, root and comment of two lakehouses contains a unique text. Every response is
searched for those that the token may not see. A request that is denied is sent again with names that do not exist,
and has to get the same response.
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
from tests.server.requests import SCHEMA, new_key
from tests.server.rights import OPERATE, READ, WRITE, Need, Secret, Token
from tests.server.served import Reply, serving, settings_for
from tests.server.test_generated import SCHEMA_OF_VIEW
from tests.server.test_safety import entry
from tests.server.test_views import version, view
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.iceberg.views import ViewVersion, new_view
from trinitylake_ops.server.openapi import OPERATIONS, Operation
from trinitylake_ops.server.routes import ROUTES
from trinitylake_ops.server.settings import ONLY, LakehouseSettings, Limits

N_REQUESTS, N_IN_SOAK = 1_500, 20_000
N_TOKENS, N_NAMESPACES = 24, 4
LONGEST_SECONDS = 5.0
_FURNISHED_EVERY = 150
_SCOPES = ("none", READ, WRITE, OPERATE)
_FREE = tuple(f"free{number}" for number in range(4))
#: Operations outside the table: their paths, and whether they are about all lakehouses of the server.
_OTHERS = ("config", "metrics", "page")


@dataclass
class World:
    """A lakehouse, and the texts that are planted in it. ``missing`` has a name of equal length for each hidden one."""

    name: str
    lake: Lakehouse
    namespaces: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    secrets: list[Secret] = field(default_factory=list)
    exports: list[str] = field(default_factory=list)
    clones: list[str] = field(default_factory=list)
    locations: list[str] = field(default_factory=list)
    forms: list[str] = field(default_factory=list)

    def table(self, namespace: str) -> str:
        return f"tab{namespace}"

    def view(self, namespace: str) -> str:
        return f"viw{namespace}"

    def plant(self, text: str, namespace: str | None = None, *, root_of: str | None = None) -> str:
        self.secrets.append(Secret(text, self.name, namespace, root_of))
        return text

    def furnish(self) -> None:
        """Create what earlier requests have dropped or renamed."""
        catalog = catalog_at(self.lake)
        for namespace in self.namespaces:
            if not catalog.namespace_exists(namespace):
                catalog.create_namespace(namespace, {"comment": f"com{namespace}"})
        if not catalog.namespace_exists(_FREE[0]):
            catalog.create_namespace(_FREE[0])
        for namespace in self.namespaces:
            table, shown = self.table(namespace), self.view(namespace)
            if not catalog.table_exists((namespace, table)) and not catalog.view_exists((namespace, table)):
                columns = pa.table({"id": pa.array([1, 2], pa.int64()), f"col{namespace}": ["a", "b"]})
                made = catalog.create_table((namespace, table), columns.schema)
                made.append(columns)
                made.append(columns)
            if not catalog.view_exists((namespace, shown)) and not catalog.table_exists((namespace, shown)):
                first = ViewVersion.model_validate(version(f"SELECT id FROM {table}"))
                made_view = new_view(SCHEMA_OF_VIEW, first, {}, "file:///")
                catalog.put_view((namespace, shown), lambda _, made=made_view: made, is_new=True)


def built(name: str, shown: str, folder: Path, lakes: Lakes) -> World:
    """Return a lakehouse with unique texts in all that has a name."""
    root = f"rot{shown}zq9"
    lake = lakes.local(root, is_watched=False)
    world = World(name, lake)
    world.plant(root, root_of="")
    for number in range(N_NAMESPACES):
        namespace = f"nsp{shown}{number}zq9"
        world.namespaces.append(world.plant(namespace, namespace))
        world.missing[namespace] = namespace.replace("zq9", "mis")
    world.furnish()
    for kind in range(2):
        export = world.plant(f"exp{shown}{kind}zq9")
        target = (
            {"level": "full", "target": f"file://{folder}/{world.plant(f'far{shown}zq9', root_of=export)}/"}
            if kind
            else {}
        )
        operations.plan_export(lake, export, **target).execute()
        world.exports.append(export)
        clone, place = world.plant(f"cln{shown}{kind}zq9"), f"plc{shown}{kind}zq9"
        operations.plan_clone(lake, f"file://{folder}/{world.plant(place, root_of=clone)}/", clone).execute()
        world.clones.append(clone)
        if kind:
            shutil.rmtree(folder / place)
    middle = lake.snapshot().created_at_ms
    names = [f"export-{one}" for one in world.exports] + [f"clone-{one}" for one in world.clones]
    absent = [one.replace("zq9", "mis") for one in names]
    known = ["main", "", "v1", f"v{lake.latest_version()}", f"at-{middle}", f"at-{middle + 10**9}", *names]
    world.forms = ["main"] * len(known) + known + [*absent, "v99999", "at-1999-01-01", "at-x", "parent@1", "."]
    for namespace in world.namespaces:
        table = catalog_at(lake).load_table((namespace, world.table(namespace)))
        world.locations.append(table.metadata_location)
    return world


@dataclass(frozen=True)
class Asked:
    """A request, what it needs, and where it goes. ``absent`` replaces names that exist by names that do not."""

    operation: str
    method: str
    target: str
    body: Any
    headers: dict[str, str]
    lakehouse: str
    needs: Sequence[Need]
    needs_all: bool = False
    reads_main: bool = False
    absent: Sequence[tuple[str, str]] = ()

    @property
    def text(self) -> str:
        return f"{self.target} {json.dumps(self.body)}"

    def with_absent_names(self) -> Asked:
        def swapped(text: str) -> str:
            for there, missing in self.absent:
                text = text.replace(there, missing)
            return text

        body = None if self.body is None else json.loads(swapped(json.dumps(self.body)))
        return replace(self, target=swapped(self.target), body=body)


@dataclass
class _Draft:
    """A request that is not finished: the names in it, and by default the rights for the namespace in its path."""

    token: Token
    operation: Operation
    world: World
    namespace: str
    name: str
    body: Any = None
    query: str = ""
    needs: list[Need] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.needs = [(self.operation.scope, self.namespace)]


class Requests:
    """Random requests for every operation, to every form of warehouse."""

    def __init__(self, random_: random.Random, worlds: Sequence[World], *, is_alone: bool):
        self._random, self._worlds, self._is_alone = random_, worlds, is_alone
        self._keys = [new_key() for _ in range(6)]
        #: Parts of plans, each with the table that it is of.
        self.tasks = [((world.namespaces[0], "x"), "x") for world in worlds]

    def one(self, token: Token) -> Asked:
        """Return a request, of which the token names what it likes."""
        chosen = self._random.randrange(len(OPERATIONS) + 1)
        return self._for(token, OPERATIONS[chosen]) if chosen < len(OPERATIONS) else self._other()

    def _other(self) -> Asked:
        world, name = self._random.choice(self._worlds), self._random.choice(_OTHERS)
        if name == "config":
            prefix, lakehouse = self._prefix(world, self._random.choice(world.forms))
            target = f"/v1/config?warehouse={quote(prefix, safe='')}"
            return Asked(name, "GET", target, None, {}, lakehouse, (), absent=self._absent(world, lakehouse))
        target = "/metrics" if name == "metrics" else "/"
        return Asked(name, "GET", target, None, {}, "" if self._is_alone else "*", (), needs_all=True)

    def _prefix(self, world: World, form: str) -> tuple[str, str]:
        """Return the name of a warehouse and its lakehouse, at times one that does not exist."""
        if self._is_alone:
            return form, ONLY
        name = world.name if self._random.random() < 0.95 else f"{world.name[:-1]}x"
        return (f"{name}.{form}" if form else name), name

    def _absent(self, world: World, lakehouse: str) -> list[tuple[str, str]]:
        pairs = [*world.missing.items(), *((one, one.replace("zq9", "mis")) for one in (*world.exports, *world.clones))]
        return [*pairs, *([] if self._is_alone else [(f"{lakehouse}.", f"{lakehouse[:-1]}y.")])]

    def _for(self, token: Token, operation: Operation) -> Asked:
        pick, world = self._random.choice, self._random.choice(self._worlds)
        form = pick(world.forms)
        prefix, lakehouse = self._prefix(world, form)
        namespace = pick([*world.namespaces * 3, *world.missing.values(), pick(_FREE)])
        if operation.name == "dropNamespace":
            namespace = pick([_FREE[0], _FREE[0], namespace])
        own = namespace if namespace in world.namespaces else world.namespaces[0]
        # What is created gets a name that is no secret of another namespace.
        names = [world.view(own) if "iew" in operation.name else world.table(own), *_FREE]
        target_name = pick([*_FREE, world.table(own) if namespace == own else _FREE[0]])
        draft = _Draft(token, operation, world, namespace, pick(names[:1] * 4 + names[1:]))
        if operation.body is not None:
            draft.body = self._body(draft, target_name)
        self._specialize(draft)
        path = operation.path.replace("{prefix}", quote(prefix, safe=""))
        for part, value in (("namespace", draft.namespace), ("table", draft.name), ("view", draft.name), ("plan", "p")):
            path = path.replace(f"{{{part}}}", quote(value, safe=""))
        headers = {"X-Iceberg-Access-Delegation": "vended-credentials"} if operation.name == "loadTable" else {}
        if "Idempotency-Key" in operation.headers and self._random.random() < 0.2:
            headers["Idempotency-Key"] = pick(self._keys)
        reads_main = operation.scope == READ and form in ("main", "") and lakehouse in (ONLY, world.name)
        return Asked(
            operation.name, operation.method, path + draft.query, draft.body, headers, lakehouse, draft.needs,
            reads_main=reads_main, absent=self._absent(world, lakehouse),
        )  # fmt: skip

    def _specialize(self, draft: _Draft) -> None:
        """Change a request whose rights are not those of the namespace in its path alone."""
        name, random_ = draft.operation.name, self._random
        if name == "listNamespaces":
            draft.needs = []
            if random_.random() < 0.3:
                draft.needs, draft.query = [(READ, draft.namespace)], f"?parent={draft.namespace}"
            elif random_.random() < 0.5:
                draft.query = f"?pageSize=2&pageToken={random_.choice(['', 'bnNw', 'enp6'])}"
        elif name == "createNamespace":
            hidden = [one for one in draft.world.namespaces if not draft.token.may(WRITE, one)]
            created = random_.choice([*_FREE, *hidden])
            draft.body, draft.needs = {"namespace": [created], "properties": {"a": "1"}}, [(WRITE, created)]
        elif name in ("renameTable", "renameView"):
            other = random_.choice(draft.world.namespaces)
            if all(draft.token.may(WRITE, one) for one in (draft.namespace, other)):
                other = draft.namespace  # what moves into another namespace would take its texts with it
            draft.body["destination"]["namespace"] = [other]
            draft.needs.append((WRITE, other))
        elif name == "commitTransaction":
            second = random_.choice(draft.world.namespaces)
            draft.body["table-changes"].append(self._commit(second, draft.world.table(second)))
            draft.needs.append((WRITE, second))
        elif name == "fetchScanTasks" and random_.random() < 0.6:
            (draft.namespace, draft.name), draft.body["plan-task"] = random_.choice(self.tasks[-40:])
            draft.needs = [(READ, draft.namespace)]

    def _commit(self, namespace: str, table: str) -> dict[str, Any]:
        updates = [{"action": "set-properties", "updates": {"a": self._random.choice("123")}}]
        return {"identifier": {"namespace": [namespace], "name": table}, "requirements": [], "updates": updates}

    def _body(self, draft: _Draft, target_name: str) -> dict[str, Any]:
        pick, world, namespace, name = self._random.choice, draft.world, draft.namespace, draft.name
        destination = {"namespace": [namespace], "name": target_name}
        source = {"namespace": [namespace], "name": name}
        location = pick([*world.locations, f"{world.lake.root}none.metadata.json"])
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


def random_tokens(random_: random.Random, worlds: Sequence[World]) -> dict[str, Token]:
    """Return tokens by their secrets. A namespace that does not exist has the scope of one that does."""
    tokens = {"everything": Token("everything", OPERATE), "nothing": Token("nothing")}
    for number in range(N_TOKENS):
        scopes = {}
        for world in worlds:
            for namespace, missing in world.missing.items():
                if random_.random() < 0.6:
                    scopes[namespace] = scopes[missing] = random_.choice(_SCOPES)
        seen = random_.choice([None, None, None, *([{one.name} for one in worlds]), set()])
        lakehouses = None if seen is None else frozenset(seen)
        tokens[f"token-{number}"] = Token(f"t{number}", random_.choice(_SCOPES), scopes, lakehouses)
    return tokens


def answer(connection: HTTPConnection, asked: Asked, secret: str) -> Reply:
    body = None if asked.body is None else json.dumps(asked.body).encode()
    connection.request(asked.method, asked.target, body, {**asked.headers, "Authorization": f"Bearer {secret}"})
    response = connection.getresponse()
    return Reply(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())


@dataclass
class Findings:
    """What went wrong, and what was covered: requests that were let in and denied, by operation."""

    faults: list[str] = field(default_factory=list)
    succeeded: Counter[str] = field(default_factory=Counter)
    denied: Counter[str] = field(default_factory=Counter)
    forms: Counter[str] = field(default_factory=Counter)
    n_asked: int = 0
    n_twins: int = 0
    longest_s: float = 0.0
    longest: str = ""

    def fault(self, what: str, asked: Asked, token: Token, reply: Reply) -> None:
        self.faults.append(f"{what}: {token} {asked.method} {asked.text[:400]} -> {reply.status} {reply.body[:400]!r}")


def check(asked: Asked, token: Token, reply: Reply, worlds: Sequence[World], findings: Findings) -> bool:
    """Check one response against the oracle. Returns whether the request was to be denied."""
    allowed = token.allows(asked.lakehouse, asked.needs)
    if asked.needs_all:
        allowed = token.reads_all and (asked.operation == "page" or all(token.sees(one.name) for one in worlds))
    if reply.status >= 500:
        findings.fault("failed", asked, token, reply)
    if not allowed and reply.status not in (400, 403, 404):
        findings.fault("let in", asked, token, reply)
    if allowed and asked.reads_main and reply.status == 403:
        findings.fault("denied", asked, token, reply)
    text = reply.body.decode("utf-8", "replace") + json.dumps(dict(reply.headers))
    for secret in (secret for world in worlds for secret in world.secrets):
        if secret.text in text and not secret.is_shown_to(token, asked.text):
            findings.fault(f"leaks {secret}", asked, token, reply)
    findings.n_asked += 1
    kind = findings.succeeded if reply.status < 400 else findings.denied if not allowed else None
    if kind is not None:
        kind[asked.operation] += 1
    return not allowed


def comparable(reply: Reply, asked: Asked) -> tuple[int, str, dict[str, str]]:
    """Return a response without what differs between equal requests, with missing names for the real ones."""
    text = reply.body.decode("utf-8", "replace")
    for there, missing in asked.absent:
        text = text.replace(there, missing)
    headers = {name: value for name, value in reply.headers.items() if name not in ("date", "x-request-id")}
    return reply.status, text, headers


@contextmanager
def servers(worlds: Sequence[World], tokens: dict[str, Token], folder: Path) -> Iterator[list[tuple[bool, str]]]:
    """Run a server of all lakehouses and one of the first alone; yields whether it is the latter, and its address."""
    path = folder / "tokens.yaml"
    entries = [
        entry(secret, token.name, scope=token.scope, namespaces=dict(token.namespaces))
        | ({} if token.lakehouses is None else {"lakehouses": sorted(token.lakehouses)})
        for secret, token in tokens.items()
    ]
    path.write_text(yaml.safe_dump({"tokens": entries}))
    of = {world.name: allowing(world.lake, folder) for world in worlds}
    with ExitStack() as stack:
        addresses = []
        for is_alone in (False, True):
            served = {ONLY: of[worlds[0].name]} if is_alone else of
            lakehouses = {name: LakehouseSettings(lake.root, lake.storage_options) for name, lake in served.items()}
            settings = settings_for(worlds[0].lake, lakehouses=lakehouses, tokens=path, limits=Limits(scan_files=1))
            addresses.append((is_alone, stack.enter_context(serving(settings)).url))
        yield addresses


def run(lakes: Lakes, folder: Path, n_requests: int, seed: int) -> Findings:
    random_ = random.Random(seed)
    worlds = [built(name, shown, folder, lakes) for name, shown in (("north", "nor"), ("south", "sou"))]
    tokens, findings = random_tokens(random_, worlds), Findings()
    secrets = [*tokens, *["everything"] * 8]
    with servers(worlds, tokens, folder) as addresses, ExitStack() as stack:
        sides = []
        for is_alone, url in addresses:
            of_side = [replace(worlds[0], name=ONLY)] if is_alone else worlds
            if is_alone:
                of_side[0].secrets = [replace(one, lakehouse=ONLY) for one in of_side[0].secrets]
            split = urlsplit(url)
            connection = stack.enter_context(closing(HTTPConnection(split.hostname or "", split.port, timeout=60)))
            requests = Requests(random_, of_side, is_alone=is_alone)
            sides.append((of_side, connection, requests))
        for number in range(n_requests):
            if number % _FURNISHED_EVERY == 0:
                for world in worlds:
                    world.furnish()
            of_side, connection, requests = random_.choice(sides)
            secret = random_.choice(secrets)
            token = tokens[secret]
            asked = requests.one(token)
            begun_s = time.monotonic()
            reply = answer(connection, asked, secret)
            seconds = time.monotonic() - begun_s
            if seconds > findings.longest_s:
                findings.longest_s, findings.longest = seconds, f"{asked.method} {asked.target}"
            findings.forms[_form(asked.target)] += 1
            if check(asked, token, reply, of_side, findings):
                twin = asked.with_absent_names()
                is_comparable = not token.sees(asked.lakehouse) or _same_warehouse(asked, twin)
                if twin.text != asked.text and is_comparable:
                    findings.n_twins += 1
                    other = answer(connection, twin, secret)
                    if comparable(other, twin) != comparable(reply, asked):
                        findings.fault(f"differs from {other.status} {other.body[:300]!r}", asked, token, reply)
            elif asked.operation == "planTableScan" and reply.status == 200:
                parts = asked.target.split("/")
                requests.tasks += [((parts[4], parts[6]), task) for task in reply.document.get("plan-tasks", [])]
    return findings


def _same_warehouse(asked: Asked, twin: Asked) -> bool:
    """Whether two requests are for one warehouse, so that only names in it differ."""
    return asked.target.split("/")[2:3] == twin.target.split("/")[2:3] and "config" not in asked.operation


def _form(target: str) -> str:
    parts = target.split("/")
    prefix = parts[2] if len(parts) > 3 else ""
    _, dot, rest = prefix.partition(".")
    form = rest if dot else prefix
    kind = next((kind for kind in ("main", "export-", "clone-", "at-", "v") if form.startswith(kind)), "other")
    return ("qualified " if dot else "") + kind


def check_findings(findings: Findings) -> None:
    assert findings.faults == [], "\n".join(findings.faults[:10])
    routes = {(route.method, route.template) for route in ROUTES}
    names = {one.name for one in OPERATIONS}
    assert {(one.method, one.path) for one in OPERATIONS} == routes
    assert names | set(_OTHERS) <= findings.denied.keys(), "an operation was denied to no token"
    # On a local disk there are no credentials and no signatures; two operations always reject, and one registers.
    without_success = {one.name for one in OPERATIONS if not one.responses} | {
        "loadCredentials",
        "signRequest",
        "registerTable",
    }
    assert names | set(_OTHERS) <= findings.succeeded.keys() | without_success, "an operation succeeded for no token"
    kinds = {"main", "export-", "clone-", "at-", "v"}
    assert kinds | {f"qualified {kind}" for kind in kinds} <= findings.forms.keys()
    assert findings.n_twins > findings.n_asked // 20


def test_no_token_is_let_in_or_learns_a_name_that_it_may_not_see(lakes: Lakes, tmp_path: Path) -> None:
    check_findings(run(lakes, tmp_path, N_REQUESTS, seed=1))


@pytest.mark.soak
@pytest.mark.timeout(3_600)
def test_no_token_is_let_in_or_learns_a_name_at_length(
    lakes: Lakes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = run(lakes, tmp_path, N_IN_SOAK, seed=2)
    with capsys.disabled():
        print(
            f"\n{findings.n_asked} requests, {findings.n_twins} compared with missing names,"
            f" {findings.succeeded.total()} succeeded, {findings.denied.total()} denied, {len(findings.faults)} faults;"
            f" the longest took {findings.longest_s:.2f} s ({findings.longest}), limit {LONGEST_SECONDS} s"
        )
    check_findings(findings)
