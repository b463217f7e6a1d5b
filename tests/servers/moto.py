"""moto's S3 in a separate process: ``python -m tests.servers.moto PORT REQUEST_LOG N_FILES``.

The bucket ``many`` contains N_FILES empty files. Writes are serialized, because moto checks for an existing name and
stores the object in two steps. Each request is one line of the log: method, path with query, size of the
body in bytes, and If-None-Match or ``-``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

from tests.servers.daemons import Daemons, free_port, listens
from tests.servers.dynalite import DynamoDBServer
from tests.servers.s3_server import S3Server

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

REQUEST_LOG = "requests.log"
LARGE_BUCKET = "many"


def start_moto(folder: Path, daemons: Daemons, n_files: int = 0) -> str:
    """Start moto and return its endpoint. Raises ServerStartError."""
    port = free_port()
    daemons.start([sys.executable, "-m", "tests.servers.moto", str(port), str(folder / REQUEST_LOG), str(n_files)])
    daemons.wait_until(lambda: listens(port), "moto")
    endpoint = f"http://127.0.0.1:{port}"
    S3Server("moto", endpoint, folder).make_shared_bucket()
    DynamoDBServer("moto", endpoint, folder).make_table()
    return endpoint


class _QuietHandler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_request(self, *arguments: Any, **options: Any) -> None:
        """Do nothing, because the request log contains each request."""


def large_bucket_key(number: int) -> str:
    """Return the key of a file in the bucket ``many``."""
    return f"lake/{number % 100:02}/{number:06}"


def fill_large_bucket(n_files: int) -> None:
    """Add files to the bucket ``many`` without requests."""
    backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
    backend.create_bucket(LARGE_BUCKET, "us-east-1")
    for number in range(n_files):
        backend.put_object(LARGE_BUCKET, large_bucket_key(number), b"")


def main(port: int, request_log: str, n_files: int) -> None:
    """Serve requests until killed."""
    if n_files:
        fill_large_bucket(n_files)
    application, write_lock = DomainDispatcherApplication(create_backend_app), threading.RLock()
    with open(request_log, "a", buffering=1) as log:

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
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
