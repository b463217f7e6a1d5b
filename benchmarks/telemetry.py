"""Measure the cost of telemetry per commit: disabled, with the API alone, with listeners, with the SDK and an exporter.

Run from the project's root: ``.venv/bin/python -m benchmarks.telemetry``. It writes
``benchmarks/results/telemetry.md`` and fails if a ratio exceeds its bound. Each kind of telemetry has a separate
process. The processes take turns committing to one lakehouse, so that other load on the machine affects all of them.
Ratios compare the median CPU time and the median elapsed time.
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
_BASE = "baseline: telemetry calls replaced by no-ops"


@dataclass(frozen=True)
class Kind:
    """A kind of telemetry, the code that sets it up, and the upper bound of its ratio to the baseline."""

    name: str
    setup_code: str
    bound: float | None = None


_DISABLED = """
from trinitylake_ops.telemetry import hub, spans
_nothing = spans.span("none")
spans.span = lambda *_: _nothing
spans.is_recorded = lambda: False
hub.add = hub.observe = lambda *_, **__: None
hub.is_heard = lambda: False
"""
_EXPORTING = "from trinitylake_ops.telemetry.otel import send\nsend()"
KINDS = (
    Kind(_BASE, _DISABLED),
    Kind("no listener, no library loaded", "", 1.01),
    Kind("OpenTelemetry API loaded, no SDK", "import opentelemetry.trace, opentelemetry.metrics", 1.01),
    Kind(
        "metrics for Prometheus",
        "from trinitylake_ops.telemetry.hub import listen\n"
        "from trinitylake_ops.telemetry.prometheus import PrometheusListener\nlisten(PrometheusListener())",
        1.05,
    ),
    Kind(
        "OpenTelemetry SDK, spans and metrics exported by OTLP",
        _EXPORTING,
        1.25,
    ),
    Kind(
        "the same, one trace in ten sampled",
        "import os\nos.environ['OTEL_TRACES_SAMPLER'] = 'parentbased_traceidratio'\n"
        f"os.environ['OTEL_TRACES_SAMPLER_ARG'] = '0.1'\n{_EXPORTING}",
        1.25,
    ),
)
_LOCAL, _SLOW = "local disk, fsync", f"{1_000 * REQUEST_SECONDS:.0f} ms a request"
TURNS = {_LOCAL: 60, _SLOW: 6}
#: Expressions that open the storages as a lakehouse does. With a listener, they emit telemetry for their requests.
_STORAGES = {
    _LOCAL: "open_storage(sys.argv[1])",
    _SLOW: "SlowStorage(open_storage(sys.argv[1], {'fsync': 'false'}))",
}
_PROGRAM = """
import json, os, sys, time
{setup_code}
from benchmarks.lakes import SlowStorage
from trinitylake_ops import Lakehouse
from trinitylake_ops.storage import open_storage
lake = Lakehouse.open(sys.argv[1], storage={storage})
number = 0
for line in sys.stdin:
    seconds, cpu = [], time.process_time()
    for _ in range(int(line)):
        number += 1
        started = time.perf_counter()
        with lake.transaction() as txn:
            txn.alter_namespace("ns", {{"n": f"{{os.getpid()}} {{number}}"}})
        seconds.append(time.perf_counter() - started)
    print(json.dumps([seconds, (time.process_time() - cpu) / len(seconds)]), flush=True)
"""


class Worker:
    """A process that runs blocks of commits on request."""

    def __init__(self, kind: Kind, root: str, storage: str, environment: dict[str, str]):
        program = _PROGRAM.format(setup_code=kind.setup_code, storage=storage)
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, root],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def run_block(self, n_commits: int) -> tuple[list[float], float]:
        """Return the seconds of each commit, and the CPU seconds per commit, including the threads of the exporter."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{n_commits}\n")
        self._process.stdin.flush()
        seconds, cpu = json.loads(self._process.stdout.readline())
        return seconds, cpu

    def end(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._process.wait() != 0:
            raise RuntimeError("a committing process failed")


class _Receiver(BaseHTTPRequestHandler):
    received = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        type(self).received += 1
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def _measure(storage: str, folder: Path, n_turns: int, environment: dict[str, str]) -> list[tuple[Any, ...]]:
    # One lakehouse for all kinds, because creating a file is slower in some folders of a disk than in others.
    lake = Lakehouse.create(f"{folder.as_uri()}/", {"fsync": "false"})
    with lake.transaction() as txn:
        txn.create_namespace("ns")
    workers = [Worker(kind, lake.root, _STORAGES[storage], environment) for kind in KINDS]
    seconds: list[list[float]] = [[] for _ in KINDS]
    cpus: list[list[float]] = [[] for _ in KINDS]
    for worker in workers:
        worker.run_block(N_COMMITS)  # warm-up
    os.sync()  # pending writes of other processes would slow down some turns
    for turn in range(n_turns):
        order = range(len(KINDS)) if turn % 2 else reversed(range(len(KINDS)))
        for index in order:
            block_seconds, cpu = workers[index].run_block(N_COMMITS)
            seconds[index].append(statistics.median(block_seconds))
            cpus[index].append(cpu)
    for worker in workers:
        worker.end()
    rows = []
    for index, kind in enumerate(KINDS):
        ratio = statistics.median(value / base for value, base in zip(seconds[index], seconds[0], strict=True))
        cpu_ratio = statistics.median(value / base for value, base in zip(cpus[index], cpus[0], strict=True))
        milliseconds = statistics.median(seconds[index]) * 1_000
        rows.append((storage, kind, milliseconds, ratio, cpu_ratio))
    return rows


def main() -> int:
    """Measure, write the result, and return 1 if a ratio exceeds its bound."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            row
            for number, (storage, n_turns) in enumerate(TURNS.items())
            for row in _measure(storage, Path(folder) / str(number), n_turns, environment)
        ]
    server.shutdown()
    if not _Receiver.received:
        raise RuntimeError("the exporter sent nothing")
    cells = [
        (
            storage,
            kind.name,
            f"{milliseconds:.2f}",
            f"{ratio:.3f}",
            "" if kind.bound is None else f"{kind.bound:.2f}",
            f"{cpu_ratio:.3f}",
        )
        for storage, kind, milliseconds, ratio, cpu_ratio in rows
    ]
    columns = ("storage", "telemetry", "ms per commit", "time ratio", "bound", "CPU ratio")
    lines = (
        "# The cost of telemetry per commit",
        "",
        f"{' and '.join(map(str, TURNS.values()))} turns of {N_COMMITS} single-namespace commits, in"
        f" {time.monotonic() - started_s:.0f} s.",
        f"The exporter sent {_Receiver.received} requests. Ratios are medians over the turns, each relative to the",
        "baseline in the same turn.",
        "",
        *table(columns, cells),
    )
    write_result("telemetry", lines)
    return int(any(kind.bound is not None and ratio > kind.bound for _, kind, _, ratio, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
