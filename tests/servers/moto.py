"""moto's S3, in a process of its own: ``python -m tests.servers.moto PORT REQUEST_LOG``.

Writes go one at a time, because moto looks whether a name is free and stores in two steps. Each
request is one line of the log: method, path and query, bytes of the body, If-None-Match or ``-``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

from tests.servers.daemons import Daemons, free_port, listens

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

REQUEST_LOG = "requests.log"


def start_moto(folder: Path, daemons: Daemons) -> str:
    """Start moto; returns its endpoint. Raises ServerStartError."""
    port = free_port()
    daemons.start([sys.executable, "-m", "tests.servers.moto", str(port), str(folder / REQUEST_LOG)])
    daemons.wait_until(lambda: listens(port), "moto")
    return f"http://127.0.0.1:{port}"


class _QuietHandler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_request(self, *arguments: Any, **options: Any) -> None:
        """Say nothing: the request log has it."""


def main(port: int, request_log: str) -> None:
    """Serve until killed."""
    application, write_lock = DomainDispatcherApplication(create_backend_app), threading.RLock()
    log = open(request_log, "a", buffering=1)

    def serve(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        log.write(
            f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ.get('QUERY_STRING', '')} "
            f"{environ.get('CONTENT_LENGTH') or 0} {environ.get('HTTP_IF_NONE_MATCH') or '-'}\n"
        )
        if environ["REQUEST_METHOD"] in ("PUT", "POST", "DELETE"):
            with write_lock:
                return list(application(environ, start_response))
        return application(environ, start_response)

    server = make_server("127.0.0.1", port, serve, threaded=True, request_handler=_QuietHandler)
    server.serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
