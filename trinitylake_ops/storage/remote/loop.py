"""The event loop on which clients of aiohttp run, in a thread of its own: fsspec's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import fsspec.asyn

T = TypeVar("T")

_CLOSE_TIMEOUT_SECONDS = 1.0


def run_on_loop(request: Coroutine[Any, Any, T]) -> T:
    """Run a request on the loop and wait for it, in any other thread. Raises what it raises.

    Raises RuntimeError in the thread of the loop, as when an object collected there sends a request: it would wait for
    itself.
    """
    loop = fsspec.asyn.get_loop()
    if _is_own_thread(loop):
        request.close()
        raise RuntimeError("a request was sent from the thread of the event loop, which would wait for itself")
    answer = asyncio.run_coroutine_threadsafe(request, loop)
    try:
        return answer.result()
    except BaseException:
        answer.cancel()  # after an interrupt no request stays behind
        raise


def close_on_loop(close: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Close a client on the loop, for a moment at most. Without a loop that runs, nothing is left to close."""
    loop = fsspec.asyn.get_loop()
    if loop is None or loop.is_closed():
        return
    closing = asyncio.run_coroutine_threadsafe(close(), loop)
    if _is_own_thread(loop):
        return  # garbage collection on the loop's own thread: the client closes when this returns
    try:
        closing.result(_CLOSE_TIMEOUT_SECONDS)
    except TimeoutError:
        closing.cancel()


def _is_own_thread(loop: asyncio.AbstractEventLoop) -> bool:
    return threading.get_ident() == getattr(loop, "_thread_id", None)
