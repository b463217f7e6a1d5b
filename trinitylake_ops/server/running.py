"""Runs a server until a signal ends it."""

from __future__ import annotations

import contextlib
import logging
import resource
import signal
import socket
import ssl
from collections.abc import Iterator
from types import FrameType

import uvicorn

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.server.application import Application
from trinitylake_ops.server.settings import ServerSettings

logger = logging.getLogger(__name__)

_BACKLOG = 2_048
_IDLE_SECONDS = 75
_MOST_FILES = 65_536
_MOST_HEADER_BYTES = 64 << 10


def serve(settings: ServerSettings) -> None:
    """Serve lakehouses until SIGTERM or SIGINT. Requests that were begun are carried out before it returns.

    Raises InvalidInputError when address or certificate cannot be had, and what :class:`Application` raises.
    """
    settings.check()
    _check_certificate(settings)
    _allow_many_connections()
    with contextlib.closing(_listening(settings.host, settings.port)) as listener:
        application = Application(settings)
        server = uvicorn.Server(configuration_of(application, settings))
        scheme = "http" if settings.tls_certificate is None else "https"
        shown = f"[{settings.host}]" if ":" in settings.host else settings.host
        logger.info(
            "serving",
            extra={
                "fields": {
                    "address": f"{scheme}://{shown}:{listener.getsockname()[1]}",
                    "lakehouses": {one.name or "main": one.lake.root for one in application.warehouses.served},
                    "authentication": _authentication(settings),
                }
            },
        )
        try:
            with _stopped_by_signals(server):
                server.run(sockets=[listener])
        finally:
            application.stop()
        logger.info("stopped")


def _authentication(settings: ServerSettings) -> str:
    kinds = [name for name, path in (("tokens", settings.tokens), ("issuers", settings.issuers)) if path is not None]
    return " and ".join(kinds) or "none"


def _allow_many_connections() -> None:
    """Let the process have as many open files as the system lets it: each connection is one, and often 1,024 may be."""
    try:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        logger.warning("the limit on open files stays as it is: %s", error)


def _check_certificate(settings: ServerSettings) -> None:
    if settings.tls_certificate is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_certificate, settings.tls_key)
    except (OSError, ValueError) as error:  # among them those of SSL
        raise InvalidInputError(f"the certificate for TLS, or its key, cannot be used: {error}") from error


@contextlib.contextmanager
def _stopped_by_signals(server: uvicorn.Server) -> Iterator[None]:
    """Let a signal stop a server, and nothing more: uvicorn raises it again when all is done."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        server.should_exit = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidInputError(f"cannot listen at {host[:64]} port {port}: {reason}") from error


def configuration_of(application: Application, settings: ServerSettings) -> uvicorn.Config:
    """Return how uvicorn serves an application."""
    return uvicorn.Config(
        application,
        http="h11",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_IDLE_SECONDS,
        h11_max_incomplete_event_size=_MOST_HEADER_BYTES,
        ssl_certfile=None if settings.tls_certificate is None else str(settings.tls_certificate),
        ssl_keyfile=None if settings.tls_key is None else str(settings.tls_key),
    )
