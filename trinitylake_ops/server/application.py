"""The application: who asks, for what, and how long that may take. Requests are carried out by threads.

The engine is synchronous. Its commits of one moment go into one version together, so threads that wait are no loss.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from urllib.parse import parse_qsl, urlsplit

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trinitylake_ops.errors import TrinityLakeError
from trinitylake_ops.server import answers
from trinitylake_ops.server.answers import Answer, RefusedError, bad_request, failed, forbidden
from trinitylake_ops.server.calls import Call, too_large
from trinitylake_ops.server.changes import KEY_LIFETIME_MS
from trinitylake_ops.server.issuers.issuers import Issuers, signed_token
from trinitylake_ops.server.issuers.settings import read_issuers
from trinitylake_ops.server.observed.metrics import Metrics
from trinitylake_ops.server.observed.states import States
from trinitylake_ops.server.observed.traces import change_span, in_this_context, note_answer, request_span
from trinitylake_ops.server.routes import ENDPOINTS, Route, find_route
from trinitylake_ops.server.settings import ServerSettings
from trinitylake_ops.server.tokens import Principal, Tokens, anonymous, bearer_of, unauthorized
from trinitylake_ops.server.tokens import Scope as Granted
from trinitylake_ops.server.warehouses import Warehouse, Warehouses
from trinitylake_ops.storage import MeteredStorage, beside
from trinitylake_ops.storage.options import redact_assignments
from trinitylake_ops.storage.remote.settings import is_loopback
from trinitylake_ops.telemetry.prometheus import CONTENT_TYPE

logger = logging.getLogger(__name__)

_READY_SECONDS = 5.0
#: The page with the state of the lakehouses, and what browsers are told about it: nothing from elsewhere, no copy.
_PAGE = b"/"
_PAGE_HEADERS = {
    "content-type": "text/html; charset=utf-8",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
}
#: Where clients ask for a token that were given a name and a secret instead of one.
_OAUTH = b"/v1/oauth/tokens"
_LOOKS = (b"/v1/config", b"/metrics")
_MAX_QUERY_BYTES = 16 << 10
_MOST_QUERY_FIELDS = 50
_LONGEST_PATH_CHARS = 500
#: Readiness is asked of the storage no more often.
_READY_FOR_SECONDS = 1.0
#: The operation of a request that is for none.
_NO_OPERATION = "other"


@dataclass(slots=True)
class _Held:
    """How many bytes of its body a request holds."""

    n_bytes: int = 0


class Application:
    """A server of lakehouses as an ASGI application. Raises what opening them and reading the tokens raises.

    ``warehouses`` replaces the lakehouses that the settings would open.
    """

    def __init__(self, settings: ServerSettings, warehouses: Warehouses | None = None):
        settings.check()
        self._settings = settings
        self._limits = settings.limits
        self._tokens = None if settings.tokens is None else Tokens(settings.tokens)
        self._issuers = None if settings.issuers is None else Issuers(read_issuers(settings.issuers))
        self._anonymous = anonymous(Granted.OPERATE if settings.anonymous_writes else Granted.READ)
        self.warehouses = warehouses or Warehouses.opened(settings.lakehouses)
        storages = {one.shown: one.lake.storage for one in self.warehouses.served}
        self.metrics = Metrics({name: one for name, one in storages.items() if isinstance(one, MeteredStorage)})
        self._states = States({one.shown: one.lake for one in self.warehouses.served})
        self._threads = ThreadPoolExecutor(self._limits.threads, thread_name_prefix="request")
        self._n_asked = 0
        self._n_body_bytes = 0
        self._ready = (-_READY_FOR_SECONDS, True)
        self._is_stopping = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or take part in the beginning and the end of the process."""
        if scope["type"] == "http":
            request = Request(scope, receive)
            answer = await self._logged(request)
            headers = {"content-type": "application/json"} if answer.body else {}
            response = Response(answer.body, answer.status, {**headers, **answer.headers})
            await response(scope, receive, send)
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
        """Take no more requests, and wait until those that were begun are carried out, commits above all."""
        self._is_stopping = True
        self._threads.shutdown(wait=True)
        self.metrics.close()
        if self._issuers is not None:
            self._issuers.close()
        beside.flush()

    async def _logged(self, request: Request) -> Answer:
        begun_s, request_id = time.monotonic(), secrets.token_hex(8)
        said: dict[str, object] = {"request": request_id, "method": request.method, "path": _path(request)}
        with self.metrics.in_progress(), request_span(request.method, request.headers, request_id) as span:
            answer = await self._answer(request, request_id, said)
            operation = str(said.pop("operation", _NO_OPERATION))
            note_answer(span, operation, answer.status, answer.error)
        seconds = time.monotonic() - begun_s
        self.metrics.note_request(operation, answer.status, seconds)
        said["status"] = answer.status
        said["milliseconds"] = round(seconds * 1_000, 1)
        if answer.error is not None:
            said |= {"error": answer.error, "detail": self._redacted(answer.detail or "")}
        level = logging.WARNING if answer.status >= 500 else logging.INFO
        logger.log(level, "%s %s: %d", request.method, said["path"], answer.status, extra={"fields": said})
        return Answer(answer.status, answer.body, {**answer.headers, "x-request-id": request_id})

    def _redacted(self, text: str) -> str:
        for served in self.warehouses.served:
            text = served.lake.storage_options.redact(text)
        return redact_assignments(text)

    async def _answer(self, request: Request, request_id: str, said: dict[str, object]) -> Answer:
        path, changes, held = request.scope["raw_path"], False, _Held()
        is_look = request.method in ("GET", "HEAD")
        if is_look and path in (b"/healthz", b"/readyz"):
            said["operation"] = f"GET {_path(request)}"
            return answers.ok({"status": "ok"}) if path == b"/healthz" else await self._readiness()
        if path == _OAUTH and request.method == "POST":
            said["operation"] = f"POST {_path(request)}"
            return answers.gives_no_tokens()
        try:
            is_page = path == _PAGE and request.method == "GET"
            principal = await self._principal(request, allows_password=is_page)
            said["principal"] = principal.name
            query = _query(request)
            if is_page or (is_look and path in _LOOKS):
                said["operation"] = f"GET {_path(request)}"
                if path == b"/metrics":
                    return await self._metrics(principal)
                if is_page:
                    return await self._in_thread(lambda: self._page(principal), changes=False)
                return await self._in_thread(lambda: self._configuration(principal, query), changes=False)
            route, names = find_route(request.method, path)
            changes = route.changes
            said["operation"] = f"{route.method} {route.template}"
            body = await self._body(request, held)

            def work() -> Answer:
                warehouse = self._warehouse(principal, names["prefix"])
                if route.changes:
                    warehouse.check_writable()
                headers, name = dict(request.headers.items()), warehouse.served.shown
                call = Call(
                    request.method, _path(request), names, query, headers, body, principal, warehouse, request_id,
                    self._limits, lambda: self.metrics.note_lost(name),
                )  # fmt: skip
                return self._change(route, call) if route.changes else route.handle(call)

            return await self._in_thread(in_this_context(work), changes=changes)
        except ClientDisconnect:
            return failed(bad_request("the client went away before it had sent all"), changes=False, request_id="")
        except Exception as error:  # noqa: BLE001 - each becomes an answer, and the log has what was unforeseen
            return failed(error, changes=changes, request_id=request_id)
        finally:
            self._n_body_bytes -= held.n_bytes

    def _change(self, route: Route, call: Call) -> Answer:
        lakehouse = call.warehouse.served.shown
        with change_span(lakehouse):
            try:
                answer = route.handle(call)
            except Exception as error:  # noqa: BLE001 - it becomes an answer, and is counted
                failure = failed(error, changes=True, request_id=call.request_id)
                self.metrics.note_commit(lakehouse, failure.status)
                return failure
            self.metrics.note_commit(lakehouse, answer.status)
            return answer

    async def _metrics(self, principal: Principal) -> Answer:
        """Return all metrics. Those of lakehouses that do not answer in time are the ones from before."""
        if principal.least_scope < Granted.READ:
            raise forbidden(f"{principal.name} may not read metrics: its scope for all namespaces is less than read")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(self._states.tell), _READY_SECONDS)
        return Answer(200, self.metrics.text(), {"content-type": CONTENT_TYPE})

    def _page(self, principal: Principal) -> Answer:
        if principal.least_scope < Granted.READ:
            raise forbidden(f"{principal.name} may not see the state: its scope for all namespaces is less than read")
        names = {one.shown for one in self.warehouses.served if principal.may_see(one.name)}
        return Answer(200, self._states.page(names), _PAGE_HEADERS)

    async def _principal(self, request: Request, *, allows_password: bool) -> Principal:
        """Return who asks. Browsers send a token as the password of HTTP's basic authentication, for the page alone."""
        authorization = request.headers.get("authorization")
        if allows_password and (self._tokens is not None or self._issuers is not None):
            authorization = bearer_of(authorization)
        if self._issuers is not None and (token := signed_token(authorization)) is not None:
            return await self._issuers.principal(token)
        if self._tokens is not None:
            return self._tokens.principal(authorization)
        if self._issuers is not None:
            raise unauthorized("a bearer token is needed")
        # Pages in a browser of this machine could ask, too, with any name for this machine.
        if "origin" in request.headers or not is_loopback(_host(request)):
            raise forbidden("without tokens only programs on this machine are answered, not pages in a browser")
        return self._anonymous

    def _warehouse(self, principal: Principal, name: str) -> Warehouse:
        if not principal.may_see(self.warehouses.lakehouse_of(name)):
            raise forbidden(f"{principal.name} may not see this lakehouse")
        return self.warehouses.named(name)

    def _configuration(self, principal: Principal, query: dict[str, str]) -> Answer:
        warehouse = self._warehouse(principal, query.get("warehouse", ""))
        if warehouse.is_by_time and warehouse.version is not None:
            warehouse = replace(warehouse, name=f"v{warehouse.version.version}")
        return answers.ok(
            {
                "defaults": {},
                "overrides": {"prefix": warehouse.prefix},
                "endpoints": list(ENDPOINTS),
                "idempotency-key-lifetime": f"PT{KEY_LIFETIME_MS // 60_000}M",
            }
        )

    async def _body(self, request: Request, held: _Held) -> bytes:
        limit = self._limits.body_bytes
        said = request.headers.get("content-length", "0")
        if not said.isdecimal() or len(said) > 15 or int(said) > limit:
            raise too_large(limit)
        parts = []
        try:
            async with asyncio.timeout(self._limits.seconds):
                async for part in request.stream():
                    held.n_bytes += len(part)
                    self._n_body_bytes += len(part)
                    if held.n_bytes > limit:
                        raise too_large(limit)
                    if self._n_body_bytes > self._limits.bodies_bytes:
                        raise answers.too_many("too many bodies are on their way already; try again")
                    parts.append(part)
        except TimeoutError:
            raise RefusedError(408, "BadRequestException", "the body did not arrive in time") from None
        return b"".join(parts)

    async def _in_thread(self, work: Callable[[], Answer], *, changes: bool) -> Answer:
        if self._is_stopping or self._n_asked >= self._limits.threads + self._limits.waiting:
            return answers.busy()
        future = self._threads.submit(work)
        self._n_asked += 1
        future.add_done_callback(self._done(asyncio.get_running_loop()))
        waiting = asyncio.wrap_future(future)
        await asyncio.wait({waiting}, timeout=self._limits.seconds)
        if waiting.done():
            return waiting.result()
        has_begun = not future.cancel()
        if has_begun:
            waiting.add_done_callback(self._ended_late)
        return answers.timed_out(has_begun=has_begun, changes=changes)

    def _ended_late(self, waiting: asyncio.Future[Answer]) -> None:
        error = None if waiting.cancelled() else waiting.exception()
        how = "well" if error is None else f"with {type(error).__name__}: {error}"
        logger.warning("a request that took too long has ended %s", self._redacted(how))

    def _done(self, loop: asyncio.AbstractEventLoop) -> Callable[[Future[Answer]], None]:
        def count() -> None:
            self._n_asked -= 1

        def done(_future: Future[Answer]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(count)

        return done

    async def _readiness(self) -> Answer:
        asked_s, is_ready = self._ready
        if time.monotonic() - asked_s >= _READY_FOR_SECONDS:
            is_ready = not self._is_stopping and await self._lakehouses_answer()
            self._ready = (time.monotonic(), is_ready)
        if is_ready:
            return answers.ok({"status": "ready"})
        return failed(
            RefusedError(503, answers.UNAVAILABLE, "a lakehouse does not answer, or the server stops"),
            changes=False,
            request_id="",
        )

    async def _lakehouses_answer(self) -> bool:
        def ask() -> None:
            for served in self.warehouses.served:
                served.lake.latest_version()

        try:
            await asyncio.wait_for(asyncio.to_thread(ask), _READY_SECONDS)
        except (TimeoutError, TrinityLakeError) as error:
            logger.warning("not ready: %s", self._redacted(str(error)) or "a lakehouse took too long")
            return False
        return True


def _host(request: Request) -> str:
    try:
        return urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    except ValueError:
        return ""


def _path(request: Request) -> str:
    path: bytes = request.scope["raw_path"]
    return path.decode("ascii", "replace")[:_LONGEST_PATH_CHARS]


def _query(request: Request) -> dict[str, str]:
    text: bytes = request.scope["query_string"]
    if len(text) > _MAX_QUERY_BYTES:
        raise bad_request("the query is too long")
    try:
        fields = parse_qsl(
            text.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=_MOST_QUERY_FIELDS
        )
    except ValueError:
        raise bad_request("the query cannot be read") from None
    return dict(fields)
