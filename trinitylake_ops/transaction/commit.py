"""Committing a new root: create-if-absent, read-back, rebase (docs/protocol.md, C)."""

from __future__ import annotations

import functools
import getpass
import logging
import os
import random
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.metadata import version as package_version
from typing import Any, Protocol

from trinitylake_ops.errors import (
    AmbiguousWriteError,
    CommitAttemptsExhaustedError,
    CommitOutcomeUnknownError,
    StorageError,
    TransactionExpiredError,
    TrinityLakeError,
    VersionNotFoundError,
)
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.file_names import MAX_VERSION
from trinitylake_ops.format.node_file import (
    COMMIT_ID,
    COMMIT_INFO,
    CREATED_AT_MILLIS,
    LAKEHOUSE_DEF,
    MAX_TIME_MS,
    PREVIOUS_ROOT,
    ROLLBACK_FROM_ROOT,
    SYSTEM_KEYS,
    NodeFile,
    decode_node,
    decode_system_rows,
    encode_commit_info,
    encode_node,
)
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.storage.write_outcome import create_fresh, create_settled
from trinitylake_ops.transaction.snapshot import LakehouseFiles, Snapshot
from trinitylake_ops.transaction.versions import ProbedRoots, Roots, find_latest_from, read_hint
from trinitylake_ops.tree.write_buffer import EditedTree

logger = logging.getLogger(__name__)

DEFAULT_MAX_ATTEMPTS = 100
_LONGEST_USER_CHARS = 64
_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 1.0


_acting_run: ContextVar[str | None] = ContextVar("acting_run", default=None)


@contextmanager
def acting_for_run(run_id: str) -> Iterator[None]:
    """Record a run of an orchestrator in all commits of this block, in this thread, that name none themselves."""
    token = _acting_run.set(run_id)
    try:
        yield
    finally:
        _acting_run.reset(token)


@dataclass(frozen=True, slots=True)
class CommitInfo:
    """Who commits what, for people: stored in the root as ``commit_info``.

    ``counts`` are numbers an operation wants in the log; ``members`` the ids of the transactions
    that the root commits.
    """

    operation: str
    message: str | None = None
    run_id: str | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    members: tuple[str, ...] = ()

    def encode(self, counts: Mapping[str, int]) -> str:
        """Return the JSON text. Raises InvalidInputError above 4 KiB."""
        info: dict[str, Any] = {
            "operation": self.operation,
            "message": self.message,
            "run_id": self.run_id or _acting_run.get(),
            "user": _user(),
            "host": socket.gethostname(),
            "engine": _engine(),
            "counts": dict(counts),
            "properties": dict(self.properties),
            "members": list(self.members),
        }
        return encode_commit_info({name: value for name, value in info.items() if value})


@functools.cache
def _engine() -> str:
    return f"trinitylake-ops {package_version('trinitylake-ops')}"


def _user() -> str:
    try:
        # From the environment, where anything may stand.
        return getpass.getuser().encode("utf-8", "replace").decode("utf-8")[:_LONGEST_USER_CHARS]
    except (KeyError, OSError):  # a user id without a name, as in containers
        return str(os.getuid())


@dataclass(frozen=True, slots=True)
class Draft:
    """What a commit on a base would write, before its root has a name.

    ``root_system`` holds the system rows that :func:`root_system` gave; ``tree`` the root's other
    rows and all new nodes; ``definition_files`` the new definitions by path, which stay the same
    over rebases. ``definition`` is that of the new version: it says how its root is encoded.
    """

    root_system: dict[str, str]
    tree: EditedTree
    definition_files: Mapping[str, bytes]
    definition: LakehouseDef

    def root_file(self) -> bytes:
        """Return the root. Raises InvalidDefinitionError for a ``node_compression`` that this program cannot write."""
        root = NodeFile(
            self.tree.root.keys, self.tree.root.values, self.tree.root.children, self.tree.root.buffer, self.root_system
        )
        return encode_node(root, self.definition.order, self.definition.node_compression)


class Committable(Protocol):
    """Something that can be committed."""

    def draft(self, base: Snapshot, stamp: RootStamp) -> Draft | None:
        """Return what to write on ``base``, or None when nothing would change."""

    def rebase(self, base: Snapshot, latest: Snapshot) -> None:
        """Check that the change still holds on ``latest``. Raises CommitConflictError or its own errors."""


@dataclass(frozen=True, slots=True)
class RootStamp:
    """What one attempt gives to the root it would create."""

    created_at_ms: int
    commit_id: str

    def system(
        self,
        base: Snapshot,
        info: CommitInfo,
        counts: Mapping[str, int],
        *,
        lakehouse_def: str,
        is_rollback: bool = False,
    ) -> dict[str, str]:
        """Return the system rows of the root that follows ``base``; unknown ones of ``base`` are carried on."""
        previous = base.files.roots.path(base.version)
        unknown = {name: value for name, value in base.root.system.items() if name not in SYSTEM_KEYS}
        return {
            **unknown,
            LAKEHOUSE_DEF: lakehouse_def,
            PREVIOUS_ROOT: previous,
            **({ROLLBACK_FROM_ROOT: previous} if is_rollback else {}),
            CREATED_AT_MILLIS: str(self.created_at_ms),
            COMMIT_ID: self.commit_id,
            COMMIT_INFO: info.encode(counts),
        }


@dataclass(frozen=True, slots=True)
class CommitClock:
    """When the transaction began, by the storage's clock: it must not outlive the lakehouse's TTL."""

    storage: Storage
    begun_at_ms: int

    def check(self, definition: LakehouseDef) -> None:
        """Raise TransactionExpiredError when the transaction is older than its time to live."""
        age_ms = self.storage.now_ms() - self.begun_at_ms
        if age_ms > definition.txn_ttl_millis:
            raise TransactionExpiredError(
                f"the transaction began {age_ms} ms ago, more than txn_ttl_millis ({definition.txn_ttl_millis});"
                " begin a new one"
            )


def latest_snapshot(files: LakehouseFiles, probed: ProbedRoots | None = None) -> Snapshot:
    """Return the latest version, reading what ``probed`` wants on the way.

    Raises LakehouseNotFoundError, CorruptFileError, StorageError.
    """
    hinted = read_hint(files.storage)
    read_at_ms = files.storage.now_ms()  # before any root is read; a storage may know it from the hint's answer
    version, data = find_latest_from(files.roots, hinted, probed)
    path = files.roots.path(version)
    return Snapshot(files, version, path, decode_node(data, path), read_at_ms)


def commit(
    files: LakehouseFiles,
    change: Committable,
    base: Snapshot,
    *,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
) -> int:
    """Commit a change and return its version, or ``base.version`` when nothing would change.

    Raises CommitConflictError, CommitAttemptsExhaustedError, TransactionExpiredError,
    CommitOutcomeUnknownError and what the storage raises. But for an unknown outcome, nothing of
    a failed commit remains, best effort.
    """
    clock = CommitClock(files.storage, base.read_at_ms)
    kept: dict[str, bytes] = {}
    for attempt in range(max_attempts):
        nodes: dict[str, bytes] = {}
        try:
            if base.version == MAX_VERSION:
                raise VersionNotFoundError(
                    f"version {MAX_VERSION} is the last one a lakehouse can have; nothing was committed"
                )
            stamp = RootStamp(_creation_time_ms(files.storage, base), str(uuid.uuid4()))
            draft = change.draft(base, stamp)
            if draft is None:
                discard(files.storage, kept)
                return base.version
            root_file = draft.root_file()
            nodes = draft.tree.node_files
            replaced = kept.keys() - draft.definition_files.keys()
            discard(files.storage, replaced)  # a lakehouse definition from before a merge
            kept = {path: data for path, data in kept.items() if path not in replaced}
            fresh = {path: data for path, data in draft.definition_files.items() if path not in kept}
            kept |= fresh
            create_fresh(files.storage, {**fresh, **nodes})
            in_time = functools.partial(clock.check, base.definition)
            if create_root(base.files.roots, base.version + 1, root_file, stamp.commit_id, in_time):
                break
            discard(files.storage, nodes)
            nodes = {}
            time.sleep(random.uniform(0, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(attempt, 20))))
            latest = latest_snapshot(files)
            change.rebase(base, latest)
            base = latest
        except CommitOutcomeUnknownError:
            raise
        except TrinityLakeError:
            # Typed errors say that no root was created. After any other exception, an interrupt for
            # one, a root may stand: its files must stay, at worst as orphans.
            discard(files.storage, {**kept, **nodes})
            raise
    else:
        discard(files.storage, kept)
        raise CommitAttemptsExhaustedError(
            f"{max_attempts} attempts met other commits each time; nothing was committed, retry later",
            version=base.version,
        )
    files.hint.write(base.version + 1)
    return base.version + 1


def _creation_time_ms(storage: Storage, base: Snapshot) -> int:
    """Return the time of the next version: now, or just after the base where the clock is behind it."""
    time_ms = max(storage.now_ms(), base.created_at_ms + 1)
    check_time(time_ms)
    return time_ms


def check_time(time_ms: int) -> None:
    """Raise StorageError for a time that no node file can hold; such a root could never be read again."""
    if not 0 <= time_ms <= MAX_TIME_MS:
        raise StorageError(
            f"the clock gives {time_ms} ms since 1970, which no version can have; set it right, nothing was committed"
        )


def create_root(
    roots: Roots, version: int, data: bytes, commit_id: str, before_send: Callable[[], None] = lambda: None
) -> bool:
    """Create a root if absent; True when it is ours, False when another's stands there.

    What is not plainly acknowledged is settled by reading the root back: its ``commit_id`` tells
    whose it is. ``before_send`` runs before every send. Raises CommitOutcomeUnknownError when
    nobody can tell now: a delayed request may still create the root. Any other typed error means
    that the root was not created.
    """
    path = roots.path(version)
    try:
        return create_settled(
            roots.storage,
            path,
            data,
            is_ours=lambda found: decode_system_rows(found, path).get(COMMIT_ID) == commit_id,
            before_send=before_send,
        )
    except AmbiguousWriteError as error:
        advice = f"ask later with: trinitylake resolve-commit {version} {commit_id}"
        if version == 0:
            advice = "run init again: it succeeds, or says that the lakehouse is there"
        raise CommitOutcomeUnknownError(
            f"version {version} may or may not have been committed ({error.message}); nothing was deleted; {advice}",
            commit_id=commit_id,
            path=path,
            version=version,
        ) from error


def discard(storage: Storage, paths: Iterable[str]) -> None:
    """Delete files of a failed attempt, best effort: what stays is an orphan."""
    for path, error in storage.delete_many(list(paths)).items():
        logger.warning("file %r of a failed commit could not be deleted: %s", path, error)
