"""The ASGI application: authenticates requests, limits them, and runs them in threads.

The engine is synchronous, so a request occupies a thread while it runs, but not while it waits in a queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from urllib.parse import parse_qsl, urlsplit

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trinitylake_ops.iceberg.validation.metadata_size import PARSE_GATE
from trinitylake_ops.server import responses
from trinitylake_ops.server.calls import KEY_LIFETIME_MS, Call, too_large
from trinitylake_ops.server.issuers import Issuers, read_issuers, signed_token
from trinitylake_ops.server.responses import JsonResponse, RejectedError, bad_request, failed, forbidden
from trinitylake_ops.server.routes import ENDPOINTS, Route, find_route
from trinitylake_ops.server.scheduling import LARGE_BODY_BYTES, Execution, Readiness, Scheduler
from trinitylake_ops.server.settings import ServerSettings
from trinitylake_ops.server.telemetry import (
    Metrics,
    States,
    change_span,
    in_this_context,
    record_response,
    request_span,
)
from trinitylake_ops.server.tokens import Principal, Tokens, anonymous, bearer_of, unauthorized_error
from trinitylake_ops.server.tokens import Scope as Granted
from trinitylake_ops.server.warehouses import Warehouse, Warehouses
from trinitylake_ops.server.workers import TableKey, Work
from trinitylake_ops.storage import MeteredStorage, background
from trinitylake_ops.storage.http.settings import is_loopback
from trinitylake_ops.storage.options import redact_assignments
from trinitylake_ops.telemetry.prometheus import CONTENT_TYPE

logger = logging.getLogger(__name__)

#: The values of ``Sec-Fetch-Site`` that a server without tokens accepts.
_SITES = frozenset({"none", "same-origin"})
#: How long a request for metrics waits for the lakehouses. For slower lakehouses, the previous values are used.
_METRICS_SECONDS = 5.0
#: The status page, and its headers: browsers must not load external content or keep a copy.
_PAGE = b"/"
_PAGE_HEADERS = {
    "content-type": "text/html; charset=utf-8",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
}
#: The endpoint for OAuth tokens, used by clients that are configured with a client id and a secret.
_OAUTH = b"/v1/oauth/tokens"
_READ_ENDPOINTS = (b"/v1/config", b"/metrics")
_MAX_QUERY_BYTES = 16 << 10
_MAX_QUERY_FIELDS = 50
_MAX_PATH_CHARS = 500
#: The operation name of requests that match no operation.
_NO_OPERATION = "other"


@dataclass(slots=True)
class _HeldBody:
    """The part of a request body that is held in memory."""

    #: The name of the principal.
    principal: str = ""
    #: The number of bytes in memory.
    n_bytes: int = 0


class Application:
    """A server of lakehouses as an ASGI application.

    The constructor raises an error if a lakehouse cannot be opened, or if the token or issuer file cannot be read.

    Args:
        settings: The settings of the server.
        warehouses: The lakehouses to serve. None opens the lakehouses in the settings.
    """

    def __init__(self, settings: ServerSettings, warehouses: Warehouses | None = None):
        settings.check()
        self._settings = settings
        self._limits = settings.limits
        self._tokens = None if settings.tokens is None else Tokens(settings.tokens)
        self._issuers = None if settings.issuers is None else Issuers(read_issuers(settings.issuers))
        self._anonymous = anonymous(Granted.OPERATE if settings.anonymous_writes else Granted.READ)
        self.warehouses = warehouses or Warehouses.opened(settings.lakehouses)
        storages = {served.shown: served.lake.storage for served in self.warehouses.served}
        self.metrics = Metrics(
            {name: storage for name, storage in storages.items() if isinstance(storage, MeteredStorage)}
        )
        self._states = States({served.shown: served.lake for served in self.warehouses.served})
        is_shared = self._tokens is not None or self._issuers is not None
        self.scheduler = Scheduler(self._limits, is_shared=is_shared, ended_late=self._ended_late)
        self._readiness = Readiness(
            [served.lake for served in self.warehouses.served], self.scheduler.workers, self._redact
        )
        self._reading_metrics: asyncio.Task[None] | None = None
        self._max_bytes_per_principal = self._limits.bodies_bytes // (2 if is_shared else 1)
        #: Bytes of request bodies that are being received or processed.
        self.n_body_bytes = 0
        self._n_bytes_of: Counter[str] = Counter()
        self._is_stopping = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, or an ASGI lifespan event."""
        if scope["type"] == "http":
            request = Request(scope, receive)
            response = await self._serve_logged(request)
            headers = {"content-type": "application/json"} if response.body else {}
            await _response(response, {**headers, **response.headers})(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._live(receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            event = (await receive())["type"]
            if event == "lifespan.shutdown":
                await asyncio.to_thread(self.stop)
            await send({"type": f"{event}.complete"})
            if event == "lifespan.shutdown":
                return

    def stop(self) -> None:
        """Reject new requests, and wait until requests that have begun, especially commits, are finished."""
        self._is_stopping = True
        self.scheduler.workers.close()
        self.metrics.close()
        if self._issuers is not None:
            self._issuers.close()
        background.drain()

    async def _serve_logged(self, request: Request) -> JsonResponse:
        begun_s, request_id = time.monotonic(), secrets.token_hex(8)
        log_fields: dict[str, object] = {"request": request_id, "method": request.method, "path": _path(request)}
        with self.metrics.in_progress(), request_span(request.method, request.headers, request_id) as span:
            response = await self._respond(request, request_id, log_fields)
            operation = str(log_fields.pop("operation", _NO_OPERATION))
            record_response(span, operation, response.status, response.error)
        seconds = time.monotonic() - begun_s
        self.metrics.note_request(operation, response.status, seconds)
        log_fields["status"] = response.status
        log_fields["milliseconds"] = round(seconds * 1_000, 1)
        if response.error is not None:
            log_fields |= {"error": response.error, "detail": self._redact(response.detail or "")}
        level = logging.WARNING if response.status >= 500 else logging.INFO
        logger.log(
            level, "%s %s: %d", request.method, log_fields["path"], response.status, extra={"fields": log_fields}
        )
        return replace(response, headers={**response.headers, "x-request-id": request_id})

    def _redact(self, text: str) -> str:
        for served in self.warehouses.served:
            text = served.lake.storage_options.redact(text)
        return redact_assignments(text)

    async def _respond(self, request: Request, request_id: str, log_fields: dict[str, object]) -> JsonResponse:
        path, changes, held_body = request.scope["raw_path"], False, _HeldBody()
        is_look = request.method in ("GET", "HEAD")
        if "transfer-encoding" in request.headers and "content-length" in request.headers:
            # A proxy may determine the length from the other header, and forward the rest of the body as another
            # request.
            error = RejectedError(
                400,
                "BadRequestException",
                "the request has both Transfer-Encoding and Content-Length; send one of them",
                headers={"Connection": "close"},
            )
            return failed(error, changes=False, request_id=request_id)
        if is_look and path in (b"/healthz", b"/readyz"):
            log_fields["operation"] = f"GET {_path(request)}"
            return responses.ok({"status": "ok"}) if path == b"/healthz" else await self._is_ready()
        if path == _OAUTH and request.method == "POST":
            log_fields["operation"] = f"POST {_path(request)}"
            return responses.token_rejection()
        try:
            is_page = path == _PAGE and request.method == "GET"
            principal = await self._principal(request, allows_password=is_page)
            log_fields["principal"] = principal.name
            query = _query(request)
            held_body.principal = principal.name
            if is_page or (is_look and path in _READ_ENDPOINTS):
                log_fields["operation"] = f"GET {_path(request)}"
                if path == b"/metrics":
                    return await self._metrics(principal)
                show = (lambda: self._page(principal)) if is_page else (lambda: self._configuration(principal, query))
                with self._execution(principal, request) as execution:
                    return await execution.run(Work.READ, show, changes=False)
            route, names = find_route(request.method, path)
            changes = route.changes
            log_fields["operation"] = f"{route.method} {route.template}"
            body = await self._body(request, held_body)

            def call() -> Call:
                warehouse = self._warehouse(principal, names["prefix"])
                if route.changes:
                    warehouse.check_writable()
                headers, name = dict(request.headers.items()), warehouse.served.shown
                return Call(
                    request.method, _path(request), names, query, headers, body, principal, warehouse, request_id,
                    self._limits, lambda: self.metrics.note_conflict(name),
                )  # fmt: skip

            with self._execution(principal, request) as execution:
                return await self._execute(execution, route, call, is_large=len(body) > LARGE_BODY_BYTES)
        except ClientDisconnect:
            return failed(bad_request("the client disconnected before the request began"), changes=False, request_id="")
        except Exception as error:  # noqa: BLE001 - each error becomes a response, and unexpected errors are logged
            return failed(error, changes=changes, request_id=request_id)
        finally:
            self.n_body_bytes -= held_body.n_bytes
            self._n_bytes_of -= Counter({held_body.principal: held_body.n_bytes})

    @contextlib.contextmanager
    def _execution(self, principal: Principal, request: Request) -> Iterator[Execution]:
        if self._is_stopping:
            raise responses.busy_error()
        execution = self.scheduler.begin(principal.name, request)
        try:
            yield execution
        finally:
            execution.close()

    async def _execute(
        self, execution: Execution, route: Route, make_call: Callable[[], Call], *, is_large: bool
    ) -> JsonResponse:
        """Run a request. A request that changes tables waits in their queues between two steps, without a thread."""
        kind = Work.LARGE if is_large else route.work
        if route.tables is None:

            def work() -> JsonResponse:
                call = make_call()
                if route.changes:
                    return self._change(route, call)
                with PARSE_GATE.request():
                    return route.handle(call)

            return await execution.run(kind, in_this_context(work), changes=route.changes)
        tables_of = route.tables

        def prepare() -> JsonResponse | tuple[Call, frozenset[TableKey]]:
            call = make_call()
            lakehouse = call.warehouse.served
            try:
                return call, frozenset((lakehouse.name, *name) for name in tables_of(call))
            except Exception as error:  # noqa: BLE001 - the error becomes a response, and is counted
                return self._failed_change(call, error)

        prepared = await execution.run(kind, in_this_context(prepare), changes=False)
        if isinstance(prepared, JsonResponse):
            return prepared
        call, tables = prepared
        return await execution.run(
            kind, in_this_context(lambda: self._change(route, call)), changes=True, tables=tables
        )

    def _change(self, route: Route, call: Call) -> JsonResponse:
        lakehouse = call.warehouse.served.shown
        with change_span(lakehouse):
            try:
                response = route.handle(call)
            except Exception as error:  # noqa: BLE001 - the error becomes a response, and is counted
                return self._failed_change(call, error)
            self.metrics.note_commit(lakehouse, response.status)
            return response

    def _failed_change(self, call: Call, error: Exception) -> JsonResponse:
        failure = failed(error, changes=True, request_id=call.request_id)
        self.metrics.note_commit(call.warehouse.served.shown, failure.status)
        return failure

    async def _metrics(self, principal: Principal) -> JsonResponse:
        """Return all metrics, with the previous values of lakehouses that do not respond in time."""
        if principal.min_scope < Granted.READ:
            raise forbidden(
                f"{principal.name} is not allowed to read metrics: that needs scope read in every namespace"
            )
        if not all(principal.may_see(served.name) for served in self.warehouses.served):
            raise forbidden(
                f"{principal.name} is not allowed to read metrics: that needs access to all lakehouses of the server"
            )
        if self._reading_metrics is None or self._reading_metrics.done():  # at most one thread reads metrics
            self._reading_metrics = asyncio.create_task(asyncio.to_thread(self._states.emit))
        await asyncio.wait({self._reading_metrics}, timeout=_METRICS_SECONDS)
        return JsonResponse(200, self.metrics.text(), {"content-type": CONTENT_TYPE})

    def _page(self, principal: Principal) -> JsonResponse:
        if principal.min_scope < Granted.READ:
            raise forbidden(
                f"{principal.name} is not allowed to read the status page: that needs scope read in every namespace"
            )
        names = {served.shown for served in self.warehouses.served if principal.may_see(served.name)}
        return JsonResponse(200, self._states.page(names), _PAGE_HEADERS)

    async def _principal(self, request: Request, *, allows_password: bool) -> Principal:
        """Return the principal. For the status page, browsers send the token as the basic authentication password."""
        authorization = request.headers.get("authorization")
        if allows_password and (self._tokens is not None or self._issuers is not None):
            authorization = bearer_of(authorization)
        if self._issuers is not None and (token := signed_token(authorization)) is not None:
            return await self._issuers.principal(token)
        if self._tokens is not None:
            return await self._tokens.principal(authorization)
        if self._issuers is not None:
            raise unauthorized_error("the bearer token is missing")
        # Any web page in a browser on this machine could send requests to a loopback name. Some requests, for example
        # for images and links, have no origin; Sec-Fetch-Site is "none" if the user opened the address directly.
        site = request.headers.get("sec-fetch-site", "none")
        if "origin" in request.headers or site not in _SITES or not is_loopback(_host(request)):
            raise forbidden("a server without tokens accepts requests of local programs only, not of web pages")
        return self._anonymous

    def _warehouse(self, principal: Principal, name: str) -> Warehouse:
        # Check this first, so that the response does not reveal whether a lakehouse or a warehouse exists.
        if not principal.may_see(self.warehouses.lakehouse_of(name)) or principal.max_scope < Granted.READ:
            raise forbidden(f"{principal.name} is not allowed to access this lakehouse")
        return self.warehouses.named(name)

    def _configuration(self, principal: Principal, query: dict[str, str]) -> JsonResponse:
        warehouse = self._warehouse(principal, query.get("warehouse", ""))
        if warehouse.is_by_time and warehouse.version is not None:
            warehouse = replace(warehouse, name=f"v{warehouse.version.version}")
        return responses.ok(
            {
                "defaults": {},
                "overrides": {"prefix": warehouse.prefix},
                "endpoints": list(ENDPOINTS),
                "idempotency-key-lifetime": f"PT{KEY_LIFETIME_MS // 60_000}M",
            }
        )

    async def _body(self, request: Request, held_body: _HeldBody) -> bytes:
        limit = self._limits.body_bytes
        length_text = request.headers.get("content-length", "0")
        if not length_text.isdecimal() or len(length_text) > 15 or int(length_text) > limit:
            raise too_large(limit)
        parts = []
        try:
            async with asyncio.timeout(self._limits.seconds):
                async for part in request.stream():
                    held_body.n_bytes += len(part)
                    self.n_body_bytes += len(part)
                    self._n_bytes_of[held_body.principal] += len(part)
                    if held_body.n_bytes > limit:
                        raise too_large(limit)
                    is_too_many = self._n_bytes_of[held_body.principal] > self._max_bytes_per_principal
                    if is_too_many or self.n_body_bytes > self._limits.bodies_bytes:
                        raise responses.too_many("too many request bodies are in transit; retry later")
                    parts.append(part)
        except TimeoutError:
            raise RejectedError(408, "BadRequestException", "the body did not arrive in time") from None
        return b"".join(parts)

    def _ended_late(self, ended: asyncio.Future[object]) -> None:
        error = None if ended.cancelled() else ended.exception()
        outcome = "successfully" if error is None else f"with {type(error).__name__}: {error}"
        logger.warning("a request that exceeded its time limit has ended %s", self._redact(outcome))

    async def _is_ready(self) -> JsonResponse:
        failures = ["stopping"] if self._is_stopping else await self._readiness.failures()
        if not failures:
            return responses.ok({"status": "ready"})
        error = RejectedError(503, responses.UNAVAILABLE, f"not ready: {', '.join(failures)}")
        return failed(error, changes=False, request_id="")


class _TwoPartResponse(Response):
    """A response whose second part is sent without copying, so that unread responses share its memory."""

    def __init__(self, response: JsonResponse, headers: dict[str, str]):
        length = str(len(response.body) + len(response.shared))
        super().__init__(response.body, response.status, {**headers, "content-length": length})
        self._shared = response.shared

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        await send({"type": "http.response.body", "body": self._shared})


def _response(response: JsonResponse, headers: dict[str, str]) -> Response:
    return _TwoPartResponse(response, headers) if response.shared else Response(response.body, response.status, headers)


def _host(request: Request) -> str:
    try:
        return urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    except ValueError:
        return ""


def _path(request: Request) -> str:
    path: bytes = request.scope["raw_path"]
    return path.decode("ascii", "replace")[:_MAX_PATH_CHARS]


def _query(request: Request) -> dict[str, str]:
    text: bytes = request.scope["query_string"]
    if len(text) > _MAX_QUERY_BYTES:
        raise bad_request("the query is too long")
    try:
        fields = parse_qsl(
            text.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=_MAX_QUERY_FIELDS
        )
    except ValueError:
        raise bad_request("the query is not valid") from None
    return dict(fields)
