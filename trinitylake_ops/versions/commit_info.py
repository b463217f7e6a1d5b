"""The commit info of a version: author, content and cost (docs/internals/protocol.md, C)."""

from __future__ import annotations

import functools
import getpass
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.metadata import version as package_version
from typing import Any

from trinitylake_ops.format.file_names import MAX_VERSION
from trinitylake_ops.format.keys import STAMPED_VERSION, encode_commit_info

#: Maximum length of a recorded user name.
MAX_USER_CHARS = 64

_acting_run: ContextVar[str | None] = ContextVar("acting_run", default=None)
_approver: ContextVar[str | None] = ContextVar("approver", default=None)


@contextmanager
def acting_for_run(run_id: str, approved_by: str | None = None) -> Iterator[None]:
    """Record an orchestrator's run in all commits that this thread makes in the block and that do not name another run.

    Args:
        run_id: The id of the run.
        approved_by: The user who approved the run, truncated to MAX_USER_CHARS.
    """
    run_token = _acting_run.set(run_id)
    approver_token = _approver.set(None if approved_by is None else approved_by[:MAX_USER_CHARS])
    try:
        yield
    finally:
        _approver.reset(approver_token)
        _acting_run.reset(run_token)


def acting_run() -> str | None:
    """Return the run for which this thread currently acts, None if there is none."""
    return _acting_run.get()


@dataclass(frozen=True, slots=True)
class CommitCost:
    """The cost of a commit."""

    #: The number of attempts.
    attempts: int
    #: The number of requests that write files, including requests of conflicting attempts and of the hint.
    requests: int
    #: The size of new definitions and nodes, without the root.
    bytes: int


_LARGEST_COST = CommitCost(10**6, 10**9, 10**15)


@dataclass(frozen=True, slots=True)
class CommitInfo:
    """The author and the content of a commit, which the root stores as ``commit_info``."""

    #: The name of the operation.
    operation: str
    #: The message.
    message: str | None = None
    #: The id of the run. Default: the run of ``acting_for_run``.
    run_id: str | None = field(default_factory=acting_run)
    #: The user who approved the run. Default: the approver of ``acting_for_run``.
    approved_by: str | None = field(default_factory=_approver.get, kw_only=True)
    #: Free-form properties.
    properties: Mapping[str, str] = field(default_factory=dict)
    #: The ids of the transactions that the root commits.
    members: tuple[str, ...] = ()
    #: Counts that the operation reports, by name.
    counts: Mapping[str, int] = field(default_factory=dict)
    #: The info of each member in the same order, if there are several.
    transactions: tuple[CommitInfo, ...] = ()

    def largest(self) -> str:
        """Return the longest possible JSON text, because a root reserves room for it before the cost is known.

        Raises InvalidInputError if it exceeds 4 KiB.
        """
        return self.encode(_LARGEST_COST, MAX_VERSION)

    def encode(self, cost: CommitCost, version: int) -> str:
        """Return the JSON text for a root.

        Args:
            cost: The cost of the commit.
            version: The version.

        Raises:
            InvalidInputError: The text exceeds 4 KiB.
        """
        info = {
            "user": _user(),
            "host": socket.gethostname(),
            "engine": _engine(),
            "cost": {"attempts": cost.attempts, "requests": cost.requests, "bytes": cost.bytes},
            **self._own(),
            "members": list(self.members),
            "transactions": [info._own() for info in self.transactions],
        }
        fields = {name: value for name, value in info.items() if value}
        return encode_commit_info({**fields, STAMPED_VERSION: version})

    def _own(self) -> dict[str, Any]:
        info = {
            "operation": self.operation,
            "message": self.message,
            "run_id": self.run_id,
            "approved_by": self.approved_by,
            "counts": dict(self.counts),
            "properties": dict(self.properties),
        }
        return {name: value for name, value in info.items() if value}


@functools.cache
def _engine() -> str:
    return f"trinitylake-ops {package_version('trinitylake-ops')}"


def _user() -> str:
    return _user_of(os.getuid(), os.environ.get("LOGNAME"), os.environ.get("USER"))


@functools.lru_cache(maxsize=8)
def _user_of(user_id: int, *environment: str | None) -> str:
    """Return the user name. Cached, because the lookup may read a file or query a server."""
    del environment
    try:
        # The environment may contain invalid UTF-8.
        return getpass.getuser().encode("utf-8", "replace").decode("utf-8")[:MAX_USER_CHARS]
    except (KeyError, OSError):  # a user id without a name, for example in containers
        return str(user_id)
