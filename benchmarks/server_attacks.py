"""Measure the latency of one client's reads while another client attacks the server with permitted requests.

Run from the project's root: ``.venv/bin/python -m benchmarks.server_attacks [SECONDS] [NAME...]``. Without names it
writes ``benchmarks/results/server_attacks.md``. The server, the attacker and the reader are separate processes. A
create on the server's storage takes 100 ms, as on some object stores. The token of the attacker allows writes to one
namespace, and the token of the reader allows reads from another namespace. Times depend on the machine and its load, so
compare them with the row without an attack.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml
from pyiceberg.transforms import IdentityTransform

from benchmarks.report import Spread, table, write_result
from tests.iceberg.hostile import change_metadata
from tests.processes import fork
from tests.server.live_server import settings_for
from trinitylake_ops import Lakehouse
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.server.run import serve
from trinitylake_ops.storage.local.storage import LocalStorage

CREATE_SECONDS, READ_PAUSE_SECONDS, BOUND_SECONDS = 0.1, 0.02, 1.0
TABLES = "/v1/main/namespaces/ns/tables"
COMMIT = "/v1/main/transactions/commit"
N_TABLES, N_COLUMNS, N_FILES = 100, 5_000, 500
_LIMIT_SECONDS = 3_000
#: The id of a snapshot that does not exist, so that an attack costs only the size of its body.
SNAPSHOT_ID = 7
N_SNAPSHOTS = 45_000


def field(number: int) -> dict[str, Any]:
    """Return a field of a schema."""
    return {"id": number, "name": f"c{number}", "type": "long", "required": False}


def commit_of(name: str, *updates: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a table commit."""
    return {"identifier": {"namespace": ["ns"], "name": name}, "requirements": [], "updates": list(updates)}


def properties(number: int) -> dict[str, Any]:
    """Return an update of one property."""
    return {"action": "set-properties", "updates": {"key": str(number)}}


def schemas(n: int, n_fields: int) -> list[dict[str, Any]]:
    """Return updates that add ``n`` schemas, which differ in their last field."""
    return [
        {
            "action": "add-schema",
            "schema": {
                "type": "struct",
                "schema-id": number,
                "fields": [*map(field, range(1, n_fields)), field(n_fields + number)],
            },
        }
        for number in range(n)
    ]


def tag(name: str, snapshot_id: int) -> dict[str, Any]:
    """Return an update that adds a tag."""
    return {"action": "set-snapshot-ref", "ref-name": name, "type": "tag", "snapshot-id": snapshot_id}


def any_of(n: int) -> dict[str, Any]:
    """Return a filter of n comparisons."""
    if n == 1:
        return {"type": "eq", "term": "id", "value": 7}
    return {"type": "or", "left": any_of(n // 2), "right": any_of(n - n // 2)}


@dataclass(frozen=True)
class Attack:
    """Requests that several connections repeat without pauses. ``path`` and ``body`` can depend on the connection."""

    n_connections: int
    method: str
    path: str | Callable[[int], str]
    body: Callable[[int], Any] = lambda _: None
    disconnects: bool = False
    #: Whether the body is sent in chunks of one byte.
    in_chunks: bool = False


def _in_filter(n: int) -> dict[str, Any]:
    return {"filter": {"type": "in", "term": "id", "values": list(range(n))}}


ATTACKS: dict[str, Attack] = {
    "150 commits of one table": Attack(150, "POST", f"{TABLES}/t0", lambda n: commit_of("t0", properties(n))),
    "150 commits of one table, whose clients disconnect": Attack(
        150, "POST", f"{TABLES}/t0", lambda n: commit_of("t0", properties(n)), disconnects=True
    ),
    "a commit of each of 100 tables": Attack(
        N_TABLES, "POST", lambda n: f"{TABLES}/t{n}", lambda n: commit_of(f"t{n}", properties(n))
    ),
    "8 transactions over 100 tables": Attack(
        8,
        "POST",
        COMMIT,
        lambda n: {"table-changes": [commit_of(f"t{number}", properties(n)) for number in range(N_TABLES)]},
    ),
    "4 commits of 200 schemas of 200 fields": Attack(
        4, "POST", lambda n: f"{TABLES}/s{n}", lambda n: commit_of(f"s{n}", *schemas(200, 200))
    ),
    "4 commits of 600 schemas of 160 fields": Attack(
        4, "POST", lambda n: f"{TABLES}/s{n}", lambda n: commit_of(f"s{n}", *schemas(600, 160))
    ),
    "16 plans with a set of 45,000 values": Attack(16, "POST", f"{TABLES}/files/plan", lambda _: _in_filter(45_000)),
    "16 plans with a set of 400,000 values": Attack(16, "POST", f"{TABLES}/files/plan", lambda _: _in_filter(400_000)),
    "32 plans with 1,000 comparisons": Attack(32, "POST", f"{TABLES}/files/plan", lambda _: {"filter": any_of(1_000)}),
    "16 plans with 100,000 comparisons": Attack(
        16, "POST", f"{TABLES}/files/plan", lambda _: {"filter": any_of(100_000)}
    ),
    "32 plans of all files with statistics": Attack(
        32, "POST", f"{TABLES}/files/plan", lambda _: {"stats-fields": ["id", "part"]}
    ),
    "100 loads of a table of 5,000 columns": Attack(100, "GET", f"{TABLES}/wide"),
    "300 lists of namespaces": Attack(300, "GET", "/v1/main/namespaces"),
    "100 reports of 1 MB": Attack(
        100, "POST", f"{TABLES}/t0/metrics", lambda _: {"report-type": "scan-report", "pad": ["abcdefgh"] * 90_000}
    ),
    "24 loads of two tables with 25 MiB of metadata": Attack(24, "GET", lambda n: f"{TABLES}/large{n % 2}"),
    "8 plans of two tables with 25 MiB of metadata": Attack(
        8, "POST", lambda n: f"{TABLES}/large{n % 2}/plan", lambda _: {}
    ),
    "24 loads of a table with 100 MiB of metadata": Attack(24, "GET", f"{TABLES}/huge"),
    "8 commits of a tag of 14 MB": Attack(
        8, "POST", f"{TABLES}/files", lambda n: commit_of("files", tag(f"{n}{'x' * (14 << 20)}", SNAPSHOT_ID))
    ),
    "16 bodies of 50,000 chunks": Attack(16, "POST", f"{TABLES}/t0/metrics", lambda _: " " * 50_000, in_chunks=True),
    "16 updates of 10,000 properties": Attack(
        16,
        "POST",
        "/v1/main/namespaces/ns/properties",
        lambda n: {"updates": {f"key{number}": str(n) for number in range(10_000)}},
    ),
}


def create_lake(folder: str) -> tuple[Lakehouse, Path]:
    """Create a lakehouse with the tables of the attacks, and a token file. Return both."""
    lake = Lakehouse.create(f"file://{folder}/lake")
    catalog = catalog_at(lake)
    for namespace in ("ns", "other"):
        catalog.create_namespace(namespace)
    rows = pa.table({"id": pa.array([1, 2, 3], pa.int64())})
    catalog.create_table("other.o", rows.schema).append(rows)
    for name in (*(f"t{number}" for number in range(N_TABLES)), *(f"s{number}" for number in range(4))):
        catalog.create_table(f"ns.{name}", rows.schema)
    catalog.create_table("ns.wide", pa.schema([(f"c{number}", pa.int64()) for number in range(N_COLUMNS)]))
    files = pa.table({"id": range(N_FILES), "part": [f"p{number}" for number in range(N_FILES)]})
    files_table = catalog.create_table("ns.files", files.schema)
    with files_table.update_spec() as update:
        update.add_field("part", IdentityTransform(), "part")
    files_table.append(files)
    for name in ("large0", "large1", "huge"):
        catalog.create_table(f"ns.{name}", rows.schema).append(rows)
        change_metadata(lake, _add_unknown_field if name == "huge" else _add_snapshots, name)
    tokens = Path(folder) / "tokens.yaml"
    entries = [
        {"name": "attacker", "scope": "none", "namespaces": {"ns": "write"}},
        {"name": "reader", "scope": "none", "namespaces": {"other": "read"}},
    ]
    hashed = [{**entry, "sha256": hashlib.sha256(str(entry["name"]).encode()).hexdigest()} for entry in entries]
    tokens.write_text(yaml.safe_dump({"tokens": hashed}))
    return lake, tokens


def _add_snapshots(content: dict[str, Any]) -> None:
    """Add snapshots to the metadata of a table."""
    (snapshot,) = content["snapshots"]
    content["snapshots"] += ({**snapshot, "snapshot-id": number} for number in range(1, N_SNAPSHOTS))


def _add_unknown_field(content: dict[str, Any]) -> None:
    """Add an unknown field to the metadata of a table."""
    content["unknown"] = "x" * (100 << 20)


@contextlib.contextmanager
def serving(lake: Lakehouse, tokens: Path) -> Iterator[int]:
    """Serve a lakehouse on slow storage in another process, and yield its port."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]

    def work(_: Callable[[str], None]) -> None:
        put = LocalStorage._put

        def slow(self: LocalStorage, path: str, data: Any, publish: Any, verb: str) -> Any:
            if verb == "create":
                time.sleep(CREATE_SECONDS)
            return put(self, path, data, publish, verb)

        LocalStorage._put = slow  # type: ignore[method-assign, assignment]
        serve(replace(settings_for(lake, tokens=tokens), port=port))

    child = fork(work, time_limit_seconds=_LIMIT_SECONDS)
    try:
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        yield port
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.finish()


class Client:
    """A persistent connection to the server, which is reopened after a failure."""

    def __init__(self, port: int, token: str):
        self._port = port
        self._headers = {"Authorization": f"Bearer {token}"}
        self._connection: HTTPConnection | None = None

    def request(
        self,
        method: str,
        path: str,
        data: bytes | None = None,
        *,
        disconnects: bool = False,
        in_chunks: bool = False,
    ) -> int:
        """Send a request and return the status of its response, or 0 without a response.

        Args:
            method: The HTTP method.
            path: The path with its query.
            data: The body.
            disconnects: Whether to close the connection instead of reading the response.
            in_chunks: Whether to send the body in chunks of one byte.
        """
        connection = self._connection or HTTPConnection("127.0.0.1", self._port, timeout=120)
        try:
            self._connection = connection
            if in_chunks and data is not None:
                chunks = (data[index : index + 1] for index in range(len(data)))
                connection.request(method, path, chunks, self._headers, encode_chunked=True)
            else:
                connection.request(method, path, data, self._headers)
            if not disconnects:
                response = connection.getresponse()
                self.last_body = response.read()[:300]
                return response.status
            time.sleep(0.2)
        except (OSError, HTTPException):
            pass
        connection.close()
        self._connection = None
        return 0


def attack(port: int, kind: Attack, report: Callable[[str], None]) -> None:
    """Send the requests of an attack until this process ends, and report their statuses."""
    counts: Counter[int] = Counter()

    def send(number: int) -> None:
        path = kind.path if isinstance(kind.path, str) else kind.path(number)
        content = kind.body(number)
        data = None if content is None else json.dumps(content).encode()
        client = Client(port, "attacker")
        while True:
            status = client.request(kind.method, path, data, disconnects=kind.disconnects, in_chunks=kind.in_chunks)
            counts[status] += 1
            if status == 503:
                time.sleep(0.05)

    for number in range(kind.n_connections):
        threading.Thread(target=send, args=(number,), daemon=True).start()
    while True:
        time.sleep(0.5)
        report(json.dumps(dict(counts)))


def reads(port: int, seconds: float) -> list[float]:
    """Return the seconds of each read of a client that reads repeatedly."""
    client, durations_s = Client(port, "reader"), []
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(durations_s) < 2:
        started = time.monotonic()
        status = client.request("GET", "/v1/main/namespaces/other/tables/o")
        assert status == 200, (status, client.last_body)
        durations_s.append(time.monotonic() - started)
        time.sleep(READ_PAUSE_SECONDS)
    return durations_s


def measure(lake: Lakehouse, tokens: Path, kind: Attack | None, seconds: float) -> tuple[list[float], str]:
    """Return the seconds of each read during an attack, and the response statuses of the attacker."""
    with serving(lake, tokens) as port:
        reads(port, 0.5)
        if kind is None:
            return reads(port, seconds), ""
        child = fork(lambda report: attack(port, kind, report), time_limit_seconds=_LIMIT_SECONDS)
        try:
            time.sleep(3.0)
            durations_s = reads(port, seconds)
        finally:
            os.kill(child.pid, signal.SIGKILL)
        _, lines = child.finish()
        counts = json.loads(lines[-1]) if lines else {}
        return durations_s, ", ".join(f"{number} x {status}" for status, number in sorted(counts.items()))


def main() -> None:
    """Measure all attacks and write the result."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 15.0
    names = sys.argv[2:]
    lines = []
    with tempfile.TemporaryDirectory(prefix="trinitylake-bench-") as folder:
        lake, tokens = create_lake(folder)
        for name, kind in {"none": None, **ATTACKS}.items():
            if names and not any(part in name for part in names):
                continue
            durations_s, statuses = measure(lake, tokens, kind, seconds)
            spread = Spread.of(durations_s)
            cells = [f"{1_000 * value:.0f}" for value in (spread.median, spread.p99, max(durations_s))]
            lines.append([name, *cells, len(durations_s), statuses])
            print(*lines[-1], sep=" | ", flush=True)
    if not names:
        write_result("server_attacks", _report(lines, seconds))


def _report(lines: list[list[Any]], seconds: float) -> list[str]:
    return [
        "# Reads of one client while another attacks the server",
        "",
        f"Each attack runs for {seconds:.0f} seconds. Server, attacker and reader share {os.cpu_count()} processors. A"
        f" create takes the storage {1_000 * CREATE_SECONDS:.0f} ms. The reader loads one table repeatedly on one"
        " persistent connection. The connections of the attacker are persistent unless they disconnect. Times are"
        " milliseconds. The"
        f" bound of the design is a p99 of {1_000 * BOUND_SECONDS:.0f} ms. The load average of the machine at the end"
        f" was {os.getloadavg()[1]:.0f}.",
        "",
        *table(["attack", "p50", "p99", "max", "reads", "responses to the attacker: number x status"], lines),
    ]


if __name__ == "__main__":
    main()
