"""Committing a new root: create-if-absent, read-back, rebase (docs/protocol.md, C)."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from trinitylake_ops.errors import (
    AmbiguousWriteError,
    CommitAttemptsExhaustedError,
    CommitOutcomeUnknownError,
    FileMissingError,
    TrinityLakeError,
    VersionNotFoundError,
)
from trinitylake_ops.format.file_names import MAX_VERSION
from trinitylake_ops.format.keys import COMMIT_ID
from trinitylake_ops.format.node_file import decode_system_rows
from trinitylake_ops.storage import background
from trinitylake_ops.storage.conditional_create import create_fresh, create_settled
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.telemetry import hub, spans
from trinitylake_ops.telemetry.hub import LOST_ATTEMPTS, VERSION_ATTEMPTS, VERSION_SECONDS
from trinitylake_ops.transaction.draft import Draft, RootStamp
from trinitylake_ops.transaction.pacing import Fairness, SlotRequest, may_request_slot
from trinitylake_ops.transaction.time_to_live import AgeLimit, OperationAge, TransactionAge
from trinitylake_ops.versions.commit_info import CommitCost
from trinitylake_ops.versions.latest import latest_after, reading_bases
from trinitylake_ops.versions.roots import (
    KnownRoot,
    RootProbe,
    Roots,
    count_created_root,
    probe_successors,
    speculative_probe,
)
from trinitylake_ops.versions.snapshot import LakehouseFiles, Snapshot
from trinitylake_ops.versions.time_travel import time_after

logger = logging.getLogger(__name__)

#: On a fast storage, bad luck alone loses a hundred within a fifth of a second.
DEFAULT_MAX_ATTEMPTS = 1_000


class Committable(Protocol):
    """Something that can be committed."""

    def draft(self, base: Snapshot, stamp: RootStamp) -> Draft | None:
        """Return what to write on ``base``, or None when nothing would change."""

    def rebase(self, base: Snapshot, latest: Snapshot) -> None:
        """Check that the change still holds on ``latest``. Raises CommitConflictError or its own errors."""


def commit(
    files: LakehouseFiles,
    change: Committable,
    base: Snapshot,
    *,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    written_since_ms: int | None = None,
) -> int:
    """Commit a change and return its version, or ``base.version`` when nothing would change.

    The time to live of the change counts from ``written_since_ms``, by the storage's clock. That is when the first file
    was written that the change names. By default it counts anew in each attempt, as the files are written then.

    Raises CommitConflictError, CommitAttemptsExhaustedError, TransactionExpiredError, CommitOutcomeUnknownError and
    what the storage raises. Unless the outcome is unknown, no file of a failed commit remains, best effort.
    """
    age_limit = (
        OperationAge(files.storage) if written_since_ms is None else TransactionAge(files.storage, written_since_ms)
    )
    return Commit(files, change, age_limit, max_attempts).run(base).version


@dataclass(frozen=True, slots=True)
class Committed:
    """The version that holds a change, and its root; None where nothing had to be committed."""

    version: int
    root: KnownRoot | None


class DraftOutdatedError(TrinityLakeError):
    """A change raises this before its root is sent, when it became another change.

    It is then drafted again on the same base.
    """


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A draft that is to become ``version``, under an id of its own."""

    version: int
    commit_id: str
    draft: Draft


class Commit:
    """One change on its way to become a version.

    It is drafted, written and sent, and rebased when another commit was first.
    """

    def __init__(
        self,
        files: LakehouseFiles,
        change: Committable,
        age_limit: AgeLimit,
        max_attempts: int,
        fairness: Fairness | None = None,
        written: dict[str, bytes] | None = None,
    ):
        self._files = files
        self._change = change
        self._age_limit = age_limit
        self._max_attempts = max_attempts
        self._fairness = fairness
        # Definitions, which attempts share. Some were written ahead, and each draft may bring more of those.
        self._kept = {} if written is None else written
        self._unwritten: set[str] = set()  # those whose write failed: they may exist or not
        self._nodes: dict[str, bytes] = {}  # files of this attempt
        self._discard_staged: Callable[[], None] | None = (
            None  # of the root of this attempt, where its storage prepares
        )
        #: How many attempts were lost to other commits.
        self.n_conflicts = 0
        self._has_asked = False  # for a turn
        self._root_probe: RootProbe | None = None  # after the version that another commit took
        self._n_requests = 0
        #: The current attempt: the version that it would be, and what its root carries. None before it is sent.
        self.sent: tuple[int, str] | None = None
        #: None until the outcome is known.
        self.committed: Committed | None = None

    def run(self, base: Snapshot) -> Committed:
        """Commit on ``base`` or a later version. Raises what :func:`commit` raises."""
        slot_request = SlotRequest(self._files.storage)
        begun_s = time.monotonic()
        try:
            with spans.span("commit", {"trinitylake.base_version": base.version}) as span:
                committed = self._decided(base, slot_request)
                span.set({"trinitylake.version": committed.version, "trinitylake.lost_attempts": self.n_conflicts})
            self._settle(committed, slot_request)
            if committed.root is not None:
                hub.observe(VERSION_SECONDS, time.monotonic() - begun_s)
                hub.observe(VERSION_ATTEMPTS, self.n_conflicts + 1)
            return committed
        finally:  # also after an interrupt: otherwise writers that wait for this one would wait in vain
            slot_request.end()

    def _decided(self, base: Snapshot, slot_request: SlotRequest) -> Committed:
        """Attempt the commit on one version after the other, until it succeeds or fails for good."""
        try:
            while True:
                began_s = time.monotonic()
                with reading_bases(base), spans.span("attempt", {"trinitylake.base_version": base.version}):
                    self.committed = self._attempt(base)
                if self.committed is not None:
                    return self.committed
                self.sent = None
                base = self._rebase(base, slot_request, began_s)
        except CommitOutcomeUnknownError:
            slot_request.withdraw()
            raise
        except TrinityLakeError:
            # Typed errors say that no root was created. After any other exception, such as an interrupt, a root may
            # exist. So its files must stay, at worst as orphans.
            slot_request.withdraw()
            discard(self._files.storage, [*self._kept, *self._nodes])
            raise

    def _attempt(self, base: Snapshot) -> Committed | None:
        """Draft the change on ``base``, write its files and send its root.

        Returns None where another commit was first.
        """
        while True:
            attempt = self._draft(base)
            if attempt is None:
                return Committed(base.version, None)
            try:
                root = self._write(attempt, base)
                is_ours = not self._is_outrun(root) and self._send(attempt, root.data, base)
            except DraftOutdatedError:
                self._discard_nodes()
                continue
            finally:
                if self._discard_staged is not None:
                    self._discard_staged()
            if is_ours:
                return Committed(attempt.version, root)
            self._discard_nodes()
            return None

    def _draft(self, base: Snapshot) -> _Attempt | None:
        """Return what would be written on ``base``, None where nothing would change."""
        version = base.version + 1
        if version > MAX_VERSION:
            raise VersionNotFoundError(
                f"version {MAX_VERSION} is the last one a lakehouse can have; nothing was committed"
            )
        stamp = RootStamp(time_after(base, self._files.storage.now_ms()), str(uuid.uuid4()))
        draft = self._change.draft(base, stamp)
        return None if draft is None else _Attempt(version, stamp.commit_id, draft)

    def _write(self, attempt: _Attempt, base: Snapshot) -> KnownRoot:
        """Write all files of an attempt except the root, in one round. Returns the root, prepared in that round."""
        draft = attempt.draft
        # Such files are a lakehouse definition from before a merge, or definitions of a transaction that left a group.
        replaced = sorted(self._kept.keys() - draft.definition_files.keys())
        discard(self._files.storage, replaced)
        for path in replaced:
            del self._kept[path]
        if not self._kept:
            self._age_limit.begin_writing()
        fresh = {
            path: data
            for path, data in draft.definition_files.items()
            if path not in self._kept or path in self._unwritten
        }
        self._kept |= fresh
        nodes = draft.tree.node_files
        self._n_requests += len(nodes) + 1
        n_bytes = sum(map(len, self._kept.values())) + sum(map(len, nodes.values()))
        cost = CommitCost(self.n_conflicts + 1, self._n_requests + len(self._kept) + 1, n_bytes)
        root = draft.root(cost, base.files.roots.path(attempt.version), attempt.version)
        self._nodes = nodes
        storage = base.files.roots.storage
        beside_files: list[Callable[[], None]] = list(draft.checks)
        if storage.supports_staging:
            beside_files.append(functools.partial(storage.stage, root.path, root.data))
            self._discard_staged = functools.partial(storage.discard_staged, root.data)
        if fresh or nodes:
            beside_files += self._speculative_reads(attempt, base)
        try:
            create_fresh(self._files.storage, {**fresh, **nodes}, beside_files)
        except TrinityLakeError as error:
            self._unwritten |= fresh.keys()
            if draft.on_write_error is not None:
                draft.on_write_error(error)
            raise
        self._unwritten.clear()
        return root

    def _speculative_reads(self, attempt: _Attempt, base: Snapshot) -> list[Callable[[], None]]:
        """Return reads of the version and the next one for a round of ours, where others commit at the same time."""
        self._root_probe = None
        if self._fairness is None or not self._fairness.is_crowded:
            return []
        self._root_probe, reads = speculative_probe(base.files.roots, attempt.version)
        return reads

    def _is_outrun(self, root: KnownRoot) -> bool:
        """Whether the look beside the files saw another root of this version. Then ours need not be sent."""
        return self._root_probe is not None and self._root_probe.probed.contents.get(root.path) is not None

    def _send(self, attempt: _Attempt, root_file: bytes, base: Snapshot) -> bool:
        """Create the root if absent, within the time to live.

        Returns whether the version is ours. Raises DraftOutdatedError before sending anything.
        """
        in_time = functools.partial(self._age_limit.check, base.definition)
        self.sent = (attempt.version, attempt.commit_id)
        roots = base.files.roots
        read_back = functools.partial(self._read_back, roots, attempt.version)
        # A storage that prepares has short ways: a look costs it more than a refused root.
        also = [] if roots.storage.supports_staging else self._speculative_reads(attempt, base)
        return create_root(roots, attempt.version, root_file, attempt.commit_id, in_time, read_back, also)

    def _read_back(self, roots: Roots, version: int) -> bytes:
        """Read the root that stands there. In the same round, find what follows it, in case that it is not ours.

        Nothing is read where the look beside the root has seen it. A root never changes.
        """
        seen = None if self._root_probe is None else self._root_probe.probed.contents.get(roots.path(version))
        if seen is not None:
            return seen
        self._root_probe = probe_successors(roots, version)
        found = self._root_probe.probed.contents[roots.path(version)]
        if found is None:
            raise FileMissingError(f"there is no root of version {version}", path=roots.path(version))
        return found

    def _rebase(self, base: Snapshot, slot_request: SlotRequest, began_s: float) -> Snapshot:
        """Find the latest version and check the change on it; returns that version."""
        self.n_conflicts += 1
        hub.add(LOST_ATTEMPTS)
        if self._fairness is not None:
            self._fairness.note_other_commit()
        if self.n_conflicts >= self._max_attempts:
            raise attempts_exhausted(self._max_attempts, base.version + 1)
        attempt_s = time.monotonic() - began_s
        if may_request_slot(self.n_conflicts, attempt_s):
            self._has_asked = True
            background.put(functools.partial(slot_request.note_conflicts, self.n_conflicts, attempt_s))
        probe, self._root_probe = self._root_probe, None
        latest = latest_after(self._files, probe or probe_successors(self._files.roots, base.version + 1))
        # The age is checked first: a purge may have deleted what the base of an old change reaches.
        with contextlib.suppress(DraftOutdatedError):  # rebase and draft leave out transactions that are too old
            self._age_limit.check_base(latest.definition)
        with reading_bases(base, latest):
            self._change.rebase(base, latest)
        return latest

    def _settle(self, committed: Committed, slot_request: SlotRequest) -> None:
        """Let the hint follow, or delete the files that were written for nothing."""
        if committed.root is None:
            slot_request.withdraw()
            discard(self._files.storage, self._kept)
            return
        self._files.roots.keep(committed.root)
        self._files.hint.note(committed.version)
        if self._has_asked:
            background.put(slot_request.withdraw)
        if self._fairness is not None:
            self._fairness.poll_periodically(self._files.storage)

    def _discard_nodes(self) -> None:
        """Delete the nodes of a lost attempt, beside the next one."""
        if self._nodes:
            background.put(functools.partial(discard, self._files.storage, list(self._nodes)))
            self._nodes = {}


def attempts_exhausted(n_attempts: int, version: int) -> CommitAttemptsExhaustedError:
    """Return the error of a change that met another commit in each attempt; ``version`` is the last one it met."""
    return CommitAttemptsExhaustedError(
        f"{n_attempts} attempts met other commits each time; nothing was committed, retry later", version=version
    )


def create_root(
    roots: Roots,
    version: int,
    data: bytes,
    commit_id: str,
    before_send: Callable[[], None] = lambda: None,
    read_back: Callable[[], bytes] | None = None,
    also: Sequence[Callable[[], None]] = (),
) -> bool:
    """Create a root if absent. Returns True when it is ours, False when another root has the name.

    Any answer but "created" is settled by reading the root back: its ``commit_id`` tells whose it is. ``before_send``
    runs before every send, and the calls of ``also`` in the round of the first. Raises CommitOutcomeUnknownError when
    this cannot be told now: a delayed request may still create the root. Any other typed error means that the root was
    not created.
    """
    path = roots.path(version)
    count_created_root()
    try:
        return create_settled(
            roots.storage,
            path,
            data,
            is_ours=lambda found: decode_system_rows(found, path).get(COMMIT_ID) == commit_id,
            before_send=before_send,
            read_back=read_back,
            also=also,
        )
    except AmbiguousWriteError as error:
        raise outcome_unknown(roots, version, commit_id, error.message) from error
    finally:
        count_created_root()  # who opened a lakehouse meanwhile may have missed it


def outcome_unknown(roots: Roots, version: int, commit_id: str, reason: str) -> CommitOutcomeUnknownError:
    """Return the error of a commit whose root may exist now, or later."""
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
    """Delete files of a failed attempt, best effort. A file that stays is an orphan."""
    for path, error in storage.delete_many(list(paths)).items():
        logger.warning("file %r of a failed commit could not be deleted: %s", path, error)
