"""The entries of a commit in the log: who, what, and at which cost (docs/internals/protocol.md, C)."""

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

#: Longest name of a person that a commit records.
LONGEST_USER_CHARS = 64

_acting_run: ContextVar[str | None] = ContextVar("acting_run", default=None)
_approver: ContextVar[str | None] = ContextVar("approver", default=None)


@contextmanager
def acting_for_run(run_id: str, approved_by: str | None = None) -> Iterator[None]:
    """Record a run of an orchestrator in all commits of this block.

    It counts for this thread, and for commits without a run of their own. The person who approved its work is recorded
    too, if there is one, cut to LONGEST_USER_CHARS.
    """
    run_token = _acting_run.set(run_id)
    approver_token = _approver.set(None if approved_by is None else approved_by[:LONGEST_USER_CHARS])
    try:
        yield
    finally:
        _approver.reset(approver_token)
        _acting_run.reset(run_token)


def acting_run() -> str | None:
    """The run for which this thread acts now."""
    return _acting_run.get()


@dataclass(frozen=True, slots=True)
class CommitCost:
    """The cost of a commit. ``requests`` create its files, lost attempts and the hint included.

    ``bytes`` counts its new definitions and nodes; the root's own size comes on top.
    """

    attempts: int
    requests: int
    bytes: int


_LARGEST_COST = CommitCost(10**6, 10**9, 10**15)


@dataclass(frozen=True, slots=True)
class CommitInfo:
    """The author and the content of a commit, for people: stored in the root as ``commit_info``.

    ``counts`` are numbers that an operation wants in the log. ``members`` are the ids of the transactions that the root
    commits. If there are several, ``transactions`` has an entry for each, in their order, with the fields that one
    alone would have here. Values from ``acting_for_run`` are taken over.
    """

    operation: str
    message: str | None = None
    run_id: str | None = field(default_factory=acting_run)
    approved_by: str | None = field(default_factory=_approver.get, kw_only=True)
    properties: Mapping[str, str] = field(default_factory=dict)
    members: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    transactions: tuple[CommitInfo, ...] = ()

    def largest(self) -> str:
        """Return the longest JSON text that this can become.

        A root keeps room for the cost, which is known once its nodes are.

        Raises InvalidInputError above 4 KiB.
        """
        return self.encode(_LARGEST_COST, MAX_VERSION)

    def encode(self, cost: CommitCost, version: int) -> str:
        """Return the JSON text for the root of a version. Raises InvalidInputError above 4 KiB."""
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
    """Return the user's name. It is looked up once, as that may read a file or ask a server."""
    del environment
    try:
        # From the environment, which may contain anything.
        return getpass.getuser().encode("utf-8", "replace").decode("utf-8")[:LONGEST_USER_CHARS]
    except (KeyError, OSError):  # a user id without a name, as in containers
        return str(user_id)
