"""What telemetry costs a commit: untold, with the interface alone, with listeners, with the SDK and an exporter.

Run from the project's root: ``.venv/bin/python -m benchmarks.telemetry``. It writes
``benchmarks/results/telemetry.md``, and ends with an error where a ratio is above its bound. Each kind has a process
of its own. They commit to one lakehouse by turns, a block of commits each, so that what else the machine does meets all
of them. Ratios are of the medians of CPU and of time.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks.lakes import REQUEST_SECONDS
from benchmarks.report import table, write_result
from trinitylake_ops import Lakehouse

N_COMMITS = 15
_BASE = "as it was: told to nobody, its calls taken out"


@dataclass(frozen=True)
class Kind:
    """A way to tell, the bound of its ratio to the first kind, and the program that begins it."""

    name: str
    begin: str
    bound: float | None = None


_SILENT = """
from trinitylake_ops.telemetry import hub, spans
_nothing = spans.span("none")
spans.span = lambda *_: _nothing
spans.is_recorded = lambda: False
hub.add = hub.observe = lambda *_, **__: None
hub.is_heard = lambda: False
"""
_SENDING = "from trinitylake_ops.telemetry.otel import send\nsend()"
KINDS = (
    Kind(_BASE, _SILENT),
    Kind("nobody listens, no library loaded", "", 1.01),
    Kind("OpenTelemetry's interface loaded, no SDK", "import opentelemetry.trace, opentelemetry.metrics", 1.01),
    Kind(
        "counted for Prometheus",
        "from trinitylake_ops.telemetry.hub import listen\n"
        "from trinitylake_ops.telemetry.prometheus import PrometheusListener\nlisten(PrometheusListener())",
        1.05,
    ),
    Kind(
        "OpenTelemetry's SDK, spans and numbers sent by OTLP",
        _SENDING,
        1.25,
    ),
    Kind(
        "the same, one trace of ten kept",
        "import os\nos.environ['OTEL_TRACES_SAMPLER'] = 'parentbased_traceidratio'\n"
        f"os.environ['OTEL_TRACES_SAMPLER_ARG'] = '0.1'\n{_SENDING}",
        1.25,
    ),
)
_LOCAL, _FAR = "local disk, fsync", f"{1_000 * REQUEST_SECONDS:.0f} ms a request"
TURNS = {_LOCAL: 60, _FAR: 6}
#: As a lakehouse opens them: where somebody listens, they tell of their requests.
_STORAGES = {
    _LOCAL: "open_storage(sys.argv[1])",
    _FAR: "SlowStorage(open_storage(sys.argv[1], {'fsync': 'false'}))",
}
_PROGRAM = """
import json, os, sys, time
{begin}
from benchmarks.lakes import SlowStorage
from trinitylake_ops import Lakehouse
from trinitylake_ops.storage import open_storage
lake = Lakehouse.open(sys.argv[1], storage={storage})
number = 0
for line in sys.stdin:
    seconds, cpu = [], time.process_time()
    for _ in range(int(line)):
        number += 1
        begun = time.perf_counter()
        with lake.transaction() as txn:
            txn.alter_namespace("ns", {{"n": f"{{os.getpid()}} {{number}}"}})
        seconds.append(time.perf_counter() - begun)
    print(json.dumps([seconds, (time.process_time() - cpu) / len(seconds)]), flush=True)
"""


class Worker:
    """A process that commits blocks when it is told to."""

    def __init__(self, kind: Kind, root: str, storage: str, environment: dict[str, str]):
        program = _PROGRAM.format(begin=kind.begin, storage=storage)
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, root],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def block(self, n_commits: int) -> tuple[list[float], float]:
        """Return the seconds of each commit, and the CPU seconds of one, the exporter's threads included."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{n_commits}\n")
        self._process.stdin.flush()
        seconds, cpu = json.loads(self._process.stdout.readline())
        return seconds, cpu

    def end(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._process.wait() != 0:
            raise RuntimeError("a process that committed failed")


class _Receiver(BaseHTTPRequestHandler):
    received = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        type(self).received += 1
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def _measured(place: str, folder: Path, n_turns: int, environment: dict[str, str]) -> list[tuple[Any, ...]]:
    # One lakehouse for all: a new file takes longer in some folders of a disk than in others.
    lake = Lakehouse.create(f"{folder.as_uri()}/", {"fsync": "false"})
    with lake.transaction() as txn:
        txn.create_namespace("ns")
    workers = [Worker(kind, lake.root, _STORAGES[place], environment) for kind in KINDS]
    seconds: list[list[float]] = [[] for _ in KINDS]
    cpus: list[list[float]] = [[] for _ in KINDS]
    for worker in workers:
        worker.block(N_COMMITS)  # to be warm
    os.sync()  # what others left to be written would slow some turns down
    for turn in range(n_turns):
        order = range(len(KINDS)) if turn % 2 else reversed(range(len(KINDS)))
        for at in order:
            block, cpu = workers[at].block(N_COMMITS)
            seconds[at].append(statistics.median(block))
            cpus[at].append(cpu)
    for worker in workers:
        worker.end()
    rows = []
    for at, kind in enumerate(KINDS):
        ratio = statistics.median(own / base for own, base in zip(seconds[at], seconds[0], strict=True))
        cpu_ratio = statistics.median(own / base for own, base in zip(cpus[at], cpus[0], strict=True))
        milliseconds = statistics.median(seconds[at]) * 1_000
        rows.append((place, kind, milliseconds, ratio, cpu_ratio))
    return rows


def main() -> int:
    """Measure, write the result, and return whether a bound was passed."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            row
            for number, (place, n_turns) in enumerate(TURNS.items())
            for row in _measured(place, Path(folder) / str(number), n_turns, environment)
        ]
    server.shutdown()
    if not _Receiver.received:
        raise RuntimeError("the exporter sent nothing")
    shown = [
        (
            place,
            kind.name,
            f"{milliseconds:.2f}",
            f"{ratio:.3f}",
            "" if kind.bound is None else f"{kind.bound:.2f}",
            f"{cpu_ratio:.3f}",
        )
        for place, kind, milliseconds, ratio, cpu_ratio in rows
    ]
    columns = ("storage", "telemetry", "ms a commit", "time, to the first", "bound", "CPU, to the first")
    lines = (
        "# What telemetry costs a commit",
        "",
        f"{' and '.join(map(str, TURNS.values()))} turns of {N_COMMITS} commits of one namespace each, in"
        f" {time.monotonic() - begun_s:.0f} s.",
        f"The exporter sent {_Receiver.received} requests. Ratios are medians over the turns, each to the turn of the",
        "first kind beside it.",
        "",
        *table(columns, shown),
    )
    write_result("telemetry", lines)
    return int(any(kind.bound is not None and ratio > kind.bound for _, kind, _, ratio, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
