"""Draw docs/images/dashboard.png: the dashboard in deploy/monitoring with the metrics of the demo.

``.venv/bin/python -m scripts.make_dashboard_picture`` runs the demo in this process, and a server for its lakehouse
that Prometheus scrapes every two seconds. Meanwhile one client reads through the server, and afterwards two clients
write. Prometheus then runs the queries of all panels. The script needs Prometheus and the packages that `make setup`
installs.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import uvicorn
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import CommitFailedException, ServerError

from scripts.draw_dashboard import PICTURE, Window, draw, prometheus, query_series
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.demo.walkthrough import main as walkthrough
from trinitylake_ops.server.app import Application
from trinitylake_ops.server.run import configuration_of
from trinitylake_ops.server.settings import LakehouseSettings, ServerSettings

PROJECT = Path(__file__).resolve().parent.parent
DASHBOARD = PROJECT / "deploy" / "monitoring" / "dashboard.json"
SCRAPE_S = 2
_NAME = "flights"
_WRITERS_S = 60.0


@contextmanager
def serving(lake: Lakehouse) -> Iterator[str]:
    """Serve a lakehouse in a thread of this process, and yield the address of the server."""
    settings = ServerSettings(
        {_NAME: LakehouseSettings(lake.root, lake.storage_options)}, port=0, anonymous_writes=True
    )
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(configuration_of(Application(settings), settings))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def read_until(stop: threading.Event, address: str) -> None:
    """Read all tables through the server, repeatedly, until the event is set."""
    catalog = RestCatalog("reader", uri=f"http://{address}", warehouse=_NAME)
    while not stop.wait(1.0):
        for namespace in catalog.list_namespaces():
            for table in catalog.list_tables(namespace)[:4]:
                catalog.load_table(table).scan(limit=10).to_arrow()


def write_until(deadline_s: float, address: str) -> None:
    """Append to one table through the server until the deadline, and retry after conflicts."""
    catalog = RestCatalog("writer", uri=f"http://{address}", warehouse=_NAME)
    rows = pa.table({"n": pa.array(range(10), pa.int64())})
    catalog.create_namespace_if_not_exists("written")
    table = catalog.create_table_if_not_exists("written.rows", rows.schema)
    while time.monotonic() < deadline_s:
        try:
            table.append(rows)
        except (CommitFailedException, ServerError):
            table.refresh()
        time.sleep(0.3)


def operate(lake: Lakehouse) -> None:
    """Verify the lakehouse and expire versions, as an operator does."""
    operations.verify(lake, incremental=True)
    policy = operations.RetentionPolicy(maximum_age_ms=1, minimum_versions=3, protected_ms=1)
    operations.plan_expiration(lake, policy).execute()
    operations.verify(lake, incremental=True)


def main() -> None:
    """Run the demo and draw the dashboard."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        home = folder / "home"
        home.mkdir()
        shutil.copy(PROJECT / "deploy" / "demo" / "dagster.yaml", home)
        os.environ["DAGSTER_HOME"] = str(home)
        lake = Lakehouse.create(str(folder / "lakehouse"))
        with serving(lake) as address, prometheus(folder, address, SCRAPE_S) as url:
            started = time.time()
            stop = threading.Event()
            reader = threading.Thread(target=read_until, args=(stop, address))
            reader.start()
            try:
                walkthrough.main(["--root", lake.root, *sys.argv[1:]], standalone_mode=False)
                operate(lake)
                deadline_s = time.monotonic() + _WRITERS_S
                writers = [threading.Thread(target=write_until, args=(deadline_s, address)) for _ in range(2)]
                for writer in writers:
                    writer.start()
                for writer in writers:
                    writer.join()
            finally:
                stop.set()
                reader.join()
            window = Window(started, time.time(), SCRAPE_S)
            dashboard = json.loads(DASHBOARD.read_text())
            note = "metrics of the demo, drawn by scripts/draw_dashboard.py"
            n_panels = draw(dashboard, lambda target: query_series(url, window, target), window, note, PICTURE)
    print(f"{PICTURE}: {n_panels} panels with data, {window.end - window.begin:.0f} s")


if __name__ == "__main__":
    main()
