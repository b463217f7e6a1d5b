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
from dataclasses import asdict, dataclass, field
from importlib.metadata import version as package_version
from typing import Any, Protocol

from trinitylake_ops.errors import (
    AmbiguousWriteError,
    CommitAttemptsExhaustedError,
    CommitOutcomeUnknownError,
    FileMissingError,
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
from trinitylake_ops.tree.node import TreeLimits
from trinitylake_ops.tree.write_buffer import EditedTree, apply_messages

logger = logging.getLogger(__name__)

DEFAULT_MAX_ATTEMPTS = 100
_LONGEST_USER_CHARS = 64
_LONGEST_PAUSE_S = 1.0
_TIMES_AT_ONCE = 16


_acting_run: ContextVar[str | None] = ContextVar("acting_run", default=None)


@contextmanager
def acting_for_run(run_id: str) -> Iterator[None]:
    """Record a run of an orchestrator in all commits of this block, in this thread, that name none themselves."""
    token = _acting_run.set(run_id)
    try:
        yield
    finally:
        _acting_run.reset(token)


def acting_run() -> str | None:
    """The run for which this thread acts now."""
    return _acting_run.get()


@dataclass(frozen=True, slots=True)
class CommitCost:
    """What a commit wrote: ``requests`` that create its files, lost attempts and the hint included.

    ``bytes`` are those of its new definitions and nodes; the root's own size comes on top.
    """

    attempts: int
    requests: int
    bytes: int


#: Room that a root keeps for the cost, which is known only once its nodes are.
LARGEST_COST = CommitCost(10**6, 10**9, 10**15)


@dataclass(frozen=True, slots=True)
class CommitInfo:
    """Who commits what, for people: stored in the root as ``commit_info``.

    ``counts`` are numbers an operation wants in the log; ``members`` the ids of the transactions
    that the root commits. Where those are several, ``transactions`` says of each, in their order, what
    else would stand here for one. A run that was made known by ``acting_for_run`` is taken over.
    """

    operation: str
    message: str | None = None
    run_id: str | None = field(default_factory=acting_run)
    properties: Mapping[str, str] = field(default_factory=dict)
    members: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    transactions: tuple[CommitInfo, ...] = ()

    def encode(self, cost: CommitCost) -> str:
        """Return the JSON text. Raises InvalidInputError above 4 KiB."""
        info = {
            "user": _user(),
            "host": socket.gethostname(),
            "engine": _engine(),
            "cost": asdict(cost),
            **self._own(),
            "members": list(self.members),
            "transactions": [info._own() for info in self.transactions],
        }
        return encode_commit_info({name: value for name, value in info.items() if value})

    def _own(self) -> dict[str, Any]:
        info = {
            "operation": self.operation,
            "message": self.message,
            "run_id": self.run_id,
            "counts": dict(self.counts),
            "properties": dict(self.properties),
        }
        return {name: value for name, value in info.items() if value}


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

    ``root_system`` holds the system rows that :meth:`RootStamp.system` made of ``info``; ``tree`` the
    root's other rows and all new nodes; ``definition_files`` the new definitions by path, which stay
    the same over rebases. ``definition`` is that of the new version: it says how its root is encoded.
    """

    root_system: dict[str, str]
    info: CommitInfo
    tree: EditedTree
    definition_files: Mapping[str, bytes]
    definition: LakehouseDef

    def root_file(self, cost: CommitCost) -> bytes:
        """Return the root. Raises InvalidDefinitionError for a ``node_compression`` that this program cannot write."""
        tree, system = self.tree.root, {**self.root_system, COMMIT_INFO: self.info.encode(cost)}
        root = NodeFile(tree.keys, tree.values, tree.children, tree.buffer, system)
        return encode_node(root, self.definition.order, self.definition.node_compression)


@dataclass(frozen=True, slots=True)
class Writes:
    """What transactions write on a base: messages by key, and new files by path.

    ``lakehouse_def`` and ``definition`` are those of a changed lakehouse definition, else None.
    """

    messages: Mapping[str, str | None]
    files: Mapping[str, bytes]
    info: CommitInfo
    lakehouse_def: str | None = None
    definition: LakehouseDef | None = None

    def draft(self, base: Snapshot, stamp: RootStamp) -> Draft:
        """Return the draft of a version that holds them."""
        system = stamp.system(base, self.info, lakehouse_def=self.lakehouse_def or base.definition_location)
        definition = self.definition or base.definition
        tree = apply_messages(
            base.files.nodes,
            base.root,
            self.messages,
            TreeLimits.of(definition),
            created_at_ms=stamp.created_at_ms,
            root_system=system,
        )
        return Draft(system, self.info, tree, self.files, definition)


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
        *,
        lakehouse_def: str,
        is_rollback: bool = False,
    ) -> dict[str, str]:
        """Return the system rows of the root that follows ``base``, with room for its cost.

        Unknown ones of ``base`` are carried on.
        """
        previous = base.files.roots.path(base.version)
        unknown = {name: value for name, value in base.root.system.items() if name not in SYSTEM_KEYS}
        return {
            **unknown,
            LAKEHOUSE_DEF: lakehouse_def,
            PREVIOUS_ROOT: previous,
            **({ROLLBACK_FROM_ROOT: previous} if is_rollback else {}),
            CREATED_AT_MILLIS: str(self.created_at_ms),
            COMMIT_ID: self.commit_id,
            COMMIT_INFO: info.encode(LARGEST_COST),
        }


class Clock(Protocol):
    """Tells whether a change may still be committed."""

    def check(self, definition: LakehouseDef) -> None:
        """Raise TransactionExpiredError or DraftOutdatedError when that is not so, by the newest definition read."""


@dataclass(frozen=True, slots=True)
class CommitClock:
    """When the transaction began, by the storage's clock: it must not outlive the lakehouse's TTL."""

    storage: Storage
    begun_at_ms: int

    def check(self, definition: LakehouseDef) -> None:
        """Raise TransactionExpiredError when the transaction is older than its time to live."""
        check_age(self.storage.now_ms() - self.begun_at_ms, definition)


def check_age(age_ms: int, definition: LakehouseDef) -> None:
    """Raise TransactionExpiredError for a transaction that is older than its time to live."""
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
    files: LakehouseFiles, change: Committable, base: Snapshot, *, max_attempts: int = DEFAULT_MAX_ATTEMPTS
) -> int:
    """Commit a change and return its version, or ``base.version`` when nothing would change.

    Raises CommitConflictError, CommitAttemptsExhaustedError, TransactionExpiredError,
    CommitOutcomeUnknownError and what the storage raises. But for an unknown outcome, nothing of
    a failed commit remains, best effort.
    """
    clock = CommitClock(files.storage, base.read_at_ms)
    return Commit(files, change, clock, max_attempts).run(base).version


@dataclass(frozen=True, slots=True)
class Committed:
    """The version that holds a change, and the bytes of its root; None where nothing had to be committed."""

    version: int
    root_file: bytes | None


class DraftOutdatedError(TrinityLakeError):
    """Raised before a root is sent by a change that became another one: it is drafted again on the same base."""


class Commit:
    """One change on its way to become a version, over as many attempts as that takes."""

    def __init__(self, files: LakehouseFiles, change: Committable, clock: Clock, max_attempts: int):
        self._files = files
        self._change = change
        self._clock = clock
        self._max_attempts = max_attempts
        self._kept: dict[str, bytes] = {}  # definitions, which stay over attempts
        self._nodes: dict[str, bytes] = {}  # of this attempt
        self._n_lost = 0
        self._n_requests = 0
        #: The last attempt: what its root carries, and the version it would be. None before it is sent.
        self.sent: tuple[int, str] | None = None

    def run(self, base: Snapshot) -> Committed:
        """Commit on ``base`` or a later version. Raises what :func:`commit` raises."""
        try:
            while True:
                began_s = time.monotonic()
                committed = self._attempt(base)
                if committed is not None:
                    break
                self._n_lost += 1
                if self._n_lost >= self._max_attempts:
                    raise attempts_exhausted(self._max_attempts, base.version + 1)
                pause_after_loss(self._n_lost, time.monotonic() - began_s)
                latest = latest_snapshot(self._files)
                self._change.rebase(base, latest)
                base = latest
        except CommitOutcomeUnknownError:
            raise
        except TrinityLakeError:
            # Typed errors say that no root was created. After any other exception, an interrupt for
            # one, a root may stand: its files must stay, at worst as orphans.
            discard(self._files.storage, [*self._kept, *self._nodes])
            raise
        if committed.root_file is None:
            discard(self._files.storage, self._kept)
        else:
            self._files.hint.write(committed.version)
        return committed

    def _attempt(self, base: Snapshot) -> Committed | None:
        """Draft the change on ``base`` and send it; None where another commit was first."""
        version = base.version + 1
        if version > MAX_VERSION:
            raise VersionNotFoundError(
                f"version {MAX_VERSION} is the last one a lakehouse can have; nothing was committed"
            )
        while True:
            stamp = RootStamp(_creation_time_ms(self._files.storage, base), str(uuid.uuid4()))
            draft = self._change.draft(base, stamp)
            if draft is None:
                return Committed(base.version, None)
            root_file = self._write_files(draft)
            in_time = functools.partial(self._clock.check, base.definition)
            self.sent = (version, stamp.commit_id)
            try:
                is_ours = create_root(base.files.roots, version, root_file, stamp.commit_id, in_time)
            except DraftOutdatedError:
                self._discard_nodes()
                continue
            if is_ours:
                return Committed(version, root_file)
            self._discard_nodes()
            return None

    def _write_files(self, draft: Draft) -> bytes:
        """Write all files of an attempt but the root, and return that."""
        # A definition of the lakehouse from before a merge, or those of a transaction that left a group.
        replaced = sorted(self._kept.keys() - draft.definition_files.keys())
        discard(self._files.storage, replaced)
        for path in replaced:
            del self._kept[path]
        fresh = {path: data for path, data in draft.definition_files.items() if path not in self._kept}
        self._kept |= fresh
        nodes = draft.tree.node_files
        self._n_requests += len(fresh) + len(nodes) + 1
        n_bytes = sum(map(len, self._kept.values())) + sum(map(len, nodes.values()))
        root_file = draft.root_file(CommitCost(self._n_lost + 1, self._n_requests + 1, n_bytes))
        self._nodes = nodes
        create_fresh(self._files.storage, {**fresh, **nodes})
        return root_file

    def _discard_nodes(self) -> None:
        discard(self._files.storage, self._nodes)
        self._nodes = {}


def attempts_exhausted(n_attempts: int, version: int) -> CommitAttemptsExhaustedError:
    """Return the error of a change that met another commit each time, at last version ``version``."""
    return CommitAttemptsExhaustedError(
        f"{n_attempts} attempts met other commits each time; nothing was committed, retry later", version=version
    )


def pause_after_loss(n_lost: int, attempt_seconds: float) -> None:
    """Wait a random time before the next attempt: the shorter, the more were lost, so that nobody starves.

    One of all who try wins in any case. Those who lost most wait least, and win most.
    """
    time.sleep(random.uniform(0, min(_LONGEST_PAUSE_S, attempt_seconds) / n_lost))


def _creation_time_ms(storage: Storage, base: Snapshot) -> int:
    """Return the time of the next version: now, or just after all versions before it where the clock is behind."""
    time_ms = max(storage.now_ms(), _newest_time_ms(base) + 1)
    check_time(time_ms)
    return time_ms


def _newest_time_ms(base: Snapshot) -> int:
    """Return the largest time of all versions up to ``base``.

    That is its own where we wrote it. One of another program may be older than those before it: they are
    read, back to one of ours.
    """
    newest_ms, roots = base.created_at_ms, base.files.roots
    if COMMIT_ID in base.root.system:
        return newest_ms
    for last in range(base.version - 1, -1, -_TIMES_AT_ONCE):
        paths = [roots.path(version) for version in range(last, max(-1, last - _TIMES_AT_ONCE), -1)]
        for path, data in zip(paths, roots.storage.read_available(paths), strict=True):
            if isinstance(data, FileMissingError):
                return newest_ms  # deleted by another program, and those before it, too
            if isinstance(data, StorageError):
                raise data
            system = decode_system_rows(data, path)
            newest_ms = max(newest_ms, int(system[CREATED_AT_MILLIS]))
            if COMMIT_ID in system:
                return newest_ms
    return newest_ms


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
        raise outcome_unknown(roots, version, commit_id, error.message) from error


def outcome_unknown(roots: Roots, version: int, commit_id: str, reason: str) -> CommitOutcomeUnknownError:
    """Return the error of a commit whose root may stand now, or later."""
    advice = f"ask later with: trinitylake resolve-commit {version} {commit_id}"
    if version == 0:
        advice = "run init again: it succeeds, or says that the lakehouse is there"
    return CommitOutcomeUnknownError(
        f"version {version} may or may not have been committed ({reason}); nothing was deleted; {advice}",
        commit_id=commit_id,
        path=roots.path(version),
        version=version,
    )


def discard(storage: Storage, paths: Iterable[str]) -> None:
    """Delete files of a failed attempt, best effort: what stays is an orphan."""
    for path, error in storage.delete_many(list(paths)).items():
        logger.warning("file %r of a failed commit could not be deleted: %s", path, error)
