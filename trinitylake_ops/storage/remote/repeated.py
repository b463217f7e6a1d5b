"""Requests that only a storage itself can repeat, such as the later pages of a list."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, stop_after_delay, wait_random_exponential

from trinitylake_ops.errors import AmbiguousWriteError, ThrottledError, TransientError

T = TypeVar("T")

#: A repeated request waits so long at most the first time, and then up to twice as long each time.
FIRST_WAIT_SECONDS = 0.1


def sent_again(call: Callable[..., T], *arguments: Any, longest_s: float = math.inf, **options: Any) -> T:
    """Make a call that may be repeated, and repeat it while it fails in passing, but not after ``longest_s``.

    The retries around the storage would begin with all pages or parts anew.
    """
    retrying = Retrying(
        retry=retry_if_exception_type((AmbiguousWriteError, ThrottledError, TransientError)),
        stop=stop_after_attempt(5) | stop_after_delay(longest_s),
        wait=wait_random_exponential(multiplier=FIRST_WAIT_SECONDS, max=5),
        reraise=True,
    )
    return retrying(call, *arguments, **options)
