"""What simulated clients saw, and whether any serial history explains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

from tests.simulator.foreigner import ForeignStep
from tests.simulator.model import Key, Operation, State, part_of, replay, with_settings
from trinitylake_ops.versions.history import VersionInfo
from trinitylake_ops.versions.snapshot import epoch_ms

#: Operations that change what the lakehouse definition records.
_RECORDING = ("export", "drop-export", "expire", "undelete", "purge", "orphans", "reconcile")
#: Operations that bring back what an earlier version held.
_BRINGING_BACK = ("rollback", "restore")


@dataclass
class TransactionRecord:
    """A transaction as its client saw it; ``learnt[i]`` is what ``operations[i]`` told.

    One that was saved has a record for each process that resumed it, all with its id.
    """

    id: str
    isolation: str
    base_version: int
    #: The newest version that anybody had been told of when it began.
    acknowledged_before: int = 0
    operations: list[Operation] = field(default_factory=list)
    learnt: list[Any] = field(default_factory=list)
    #: What the client was told; "crashed" when its process died first, or it was interrupted.
    outcome: Literal[
        "crashed", "committed", "failed", "unknown", "resolved as committed", "resolved as lost", "saved"
    ] = "crashed"
    version: int | None = None
    #: Steps of the world: when it asked to be committed, and when it was told the outcome.
    asked_at: int = 0
    told_at: int = 0
    has_conflicted: bool = False
    n_versions_then: int = 0  # that there were when it had conflicted

    def resumed(self) -> TransactionRecord:
        """Return the record of a process that resumes it."""
        return TransactionRecord(
            self.id, self.isolation, self.base_version, self.acknowledged_before, self.operations, self.learnt
        )


@dataclass(frozen=True)
class ReadRecord:
    """A version that a reader got, and what it held.

    ``asked_for`` is the number, ``as_of_ms`` the time that it asked for, both None for the latest version.
    """

    version: int
    contents: State
    newest_acknowledged_before: int
    asked_for: int | None = None
    as_of_ms: int | None = None


@dataclass(frozen=True)
class RollbackRecord:
    """A rollback that was acknowledged: the version it made, and what it was planned on and went back to."""

    version: int
    target: int
    base_version: int
    may_reapply: bool
    only: tuple[str, ...] = ()  # namespaces and tables that it was limited to


@dataclass
class History:
    """All that was seen in a run."""

    transactions: list[TransactionRecord] = field(default_factory=list)
    reads: list[ReadRecord] = field(default_factory=list)
    rollbacks: list[RollbackRecord] = field(default_factory=list)
    newest_acknowledged: int = 0
    late_roots: list[str] = field(default_factory=list)  # roots that were sent after the time to live
    left_over: set[str] = field(default_factory=set)  # files that nothing refers to, though nothing went wrong
    foreign: Mapping[int, ForeignStep] = field(default_factory=dict)  # versions that another program made
    exported: Mapping[str, int] = field(default_factory=dict)  # versions, by the names of their exports
    has_table_writer: bool = False  # whose transactions are told apart by the rows that they append
    untoward: list[str] = field(default_factory=list)  # what should not happen to anybody

    def acknowledge(self, version: int) -> None:
        self.newest_acknowledged = max(self.newest_acknowledged, version)


def check(history: History, infos: Sequence[VersionInfo], states: Sequence[State]) -> list[str]:
    """Return what is wrong with a run: nothing where versions, in their order, explain all that was seen.

    ``infos`` and ``states`` are those of all versions, oldest first, read when everything had ended.
    """
    return [
        *_wrong_times(history, infos),
        *_wrong_outcomes(history, infos, states),
        *_wrong_begins_and_conflicts(history, infos, states),
        *_wrong_rollbacks(history, infos, states),
        *_wrong_contents(history, infos, states),
        *_wrong_reads(history, infos, states),
        *(f"nothing refers to {path}" for path in sorted(history.left_over)),
        *history.untoward,
        *(f"root sent by a transaction past its time to live: {root}" for root in history.late_roots),
    ]


def _wrong_times(history: History, infos: Sequence[VersionInfo]) -> list[str]:
    """Each version of ours is younger than all before it; another program's clock may be behind."""
    times = [info.created_at for info in infos]
    newest = list(accumulate(times, max))
    return [
        f"version {version} was not created after all before it"
        for version in range(1, len(times))
        if version not in history.foreign and times[version] <= newest[version - 1]
    ]


def _wrong_outcomes(history: History, infos: Sequence[VersionInfo], states: Sequence[State]) -> list[str]:
    """Every transaction that was acknowledged is there once, in its version; those that failed are not."""
    wrong = []
    places: dict[str, list[int]] = {}
    for info in infos:
        for member in info.members:
            places.setdefault(member, []).append(info.version)
    wrong += [
        f"transaction {member} was committed as versions {found}" for member, found in places.items() if found[1:]
    ]
    may_be_there = {
        record.id for record in history.transactions if record.outcome not in ("failed", "resolved as lost", "saved")
    }
    for record in history.transactions:
        found = places.get(record.id, [])
        if record.outcome == "committed" and found != [record.version] and not _changed_nothing(record, states):
            wrong.append(f"transaction {record.id} was acknowledged as version {record.version}, but is in {found}")
        if record.outcome == "resolved as committed" and found != [record.version]:
            wrong.append(f"transaction {record.id} was resolved as committed as {record.version}, but is in {found}")
        if found and record.id not in may_be_there:
            wrong.append(f"transaction {record.id} {record.outcome}, but is in {found}")
    return wrong


def _wrong_begins_and_conflicts(history: History, infos: Sequence[VersionInfo], states: Sequence[State]) -> list[str]:
    """Each began on what had been acknowledged by then, or later, and conflicted only with what was there."""
    wrong = []
    held = {member for info in infos for member in info.members}
    for record in history.transactions:
        if record.base_version < record.acknowledged_before:
            wrong.append(
                f"transaction {record.id} began on version {record.base_version}, when {record.acknowledged_before} had"
                " been acknowledged"
            )
        others = [other for other in history.transactions if other.id == record.id and other.outcome == "committed"]
        if record.has_conflicted and record.id in held and any(other.told_at < record.asked_at for other in others):
            wrong.append(f"transaction {record.id} conflicted with itself, which another process had committed")
        elif record.has_conflicted and not _may_conflict(history, record, infos, states):
            wrong.append(f"transaction {record.id} conflicted, though nothing that it touched had changed")
    return wrong


def _wrong_rollbacks(history: History, infos: Sequence[VersionInfo], states: Sequence[State]) -> list[str]:
    """Each made what its target was; where nothing was to change, its version is one that was there."""
    wrong = []
    for rollback in history.rollbacks:
        version, target = rollback.version, rollback.target
        if version >= len(infos) or part_of(states[version], rollback.only) != part_of(states[target], rollback.only):
            wrong.append(f"the rollback to {target} was acknowledged as version {version}, which is another")
        if version != rollback.base_version + 1 and not rollback.may_reapply and not rollback.only:
            wrong.append(f"the rollback to {target} was applied again as version {version}, though it must not")
    return wrong


def _may_conflict(
    history: History, record: TransactionRecord, infos: Sequence[VersionInfo], states: Sequence[State]
) -> bool:
    """Whether a version since then differs from the one it began on in something that it read, wrote or relied on.

    Who reads a setting reads the whole definition of the lakehouse, with what operations record there.
    """
    before = states[record.base_version]
    since = range(record.base_version + 1, min(record.n_versions_then, len(states)))
    changed = {key for version in since for key in _differing(before, states[version])}
    named = {operation.namespace for operation in record.operations}
    kinds = {operation.kind for operation in record.operations}
    wholes = {"namespace"} if "namespaces" in kinds else set()
    if kinds & {"setting", "set", "set time to live"}:
        wholes.add("setting")
        if any(infos[version].operation in _RECORDING or version in history.foreign for version in since):
            return True
    return any(key[1] in named or key[0] in wholes for key in changed)


def _changed_nothing(record: TransactionRecord, states: Sequence[State]) -> bool:
    """Whether a transaction that is in no version had nothing to change in the version that it was told.

    That is the one it began on, or one where somebody else had set the same.
    """
    before = states[record.base_version]
    after = dict(before)
    for operation in record.operations:
        replay(operation, after)
    if record.version == record.base_version or record.version not in range(record.base_version, len(states)):
        return record.version == record.base_version and after == before
    told, written = states[record.version], _differing(before, after)
    return bool(written) and all(told.get(key) == after.get(key) for key in written)


def _wrong_contents(history: History, infos: Sequence[VersionInfo], states: Sequence[State]) -> list[str]:
    """Each version holds what its transactions, one after the other, made of the version before."""
    wrong = []
    records = {record.id: record for record in history.transactions}
    serial: State = dict(states[0])
    for info in infos[1:]:
        if info.version in history.foreign:
            serial = _after_foreign(history.foreign[info.version], serial, states)
        elif info.operation == "rollback":
            serial = _after_rollback(info.message or "", serial, states)
        elif info.operation == "restore":
            name, _, _ = (info.message or "").split()[1].partition("-")  # reconcile may call it e1-2
            serial = with_settings(states[history.exported[name]], serial)
        for member in info.members:
            if member in records:
                wrong += _explained(records[member], states, serial)
            elif info.operation not in (*_RECORDING, *_BRINGING_BACK) and not history.has_table_writer:
                wrong.append(f"version {info.version} holds a transaction {member} that nobody began")
        if differing := _differing(serial, states[info.version]):
            wrong.append(f"version {info.version} ({info.operation}) is not what its transactions made: {differing}")
            serial = dict(states[info.version])
    return wrong


def _after_rollback(message: str, serial: State, states: Sequence[State]) -> State:
    """Return what a rollback makes of a state, by its message: "to version 3", or "to version 3: a, b.t"."""
    version, _, names = message.removeprefix("to version ").partition(": ")
    only = tuple(names.split(", ")) if names else ()
    kept = {key: token for key, token in serial.items() if key not in part_of(serial, only)}
    return {**kept, **part_of(states[int(version)], only)}


def _after_foreign(step: ForeignStep, serial: State, states: Sequence[State]) -> State:
    """Return what a step of another program makes of a state; its rollback may bring old settings back, too."""
    if step.target is not None:
        settings = serial if step.carries_definition else states[step.target]
        return with_settings(states[step.target], settings)
    return {**serial, ("table", step.namespace, step.table): step.token}


def _explained(record: TransactionRecord, states: Sequence[State], serial: State) -> list[str]:
    """Apply a transaction to ``serial``; returns what it saw or did that its isolation does not allow."""
    before = states[record.base_version]
    after = dict(before)
    wrong = [f"in the version that it began on: {line}" for line in _reported_differently(record, after)]
    if record.isolation == "serializable":
        wrong += [f"in the order of commits: {line}" for line in _reported_differently(record, dict(serial))]
    written = _differing(before, after)
    wrong += [
        f"overwrote {key}, which it had not seen: a lost update"
        for key in written
        if serial.get(key) != before.get(key) and not (key[0] == "setting" and serial.get(key) == after.get(key))
    ]
    for key in written:
        if key in after:
            serial[key] = after[key]
        else:
            serial.pop(key, None)
    for key in serial:
        if key[0] == "table" and ("namespace", key[1]) not in serial:
            wrong.append(f"left {key} without its namespace")
        elif key[0] == "table" and key in written and after["namespace", key[1]] != serial["namespace", key[1]]:
            wrong.append(f"wrote {key} into another namespace of that name")
    return [f"transaction {record.id} ({record.isolation}) {line}" for line in wrong]


def _reported_differently(record: TransactionRecord, state: State) -> list[str]:
    """Do a transaction's steps on ``state``; returns where it learnt something else."""
    wrong = []
    for operation, learnt in zip(record.operations, record.learnt, strict=True):
        told = replay(operation, state)
        if told != learnt:
            wrong.append(f"{operation} tells {told}, but it learnt {learnt}")
    return wrong


def _differing(one: State, other: State) -> list[Key]:
    return sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))


def _wrong_reads(history: History, infos: Sequence[VersionInfo], states: Sequence[State]) -> list[str]:
    wrong = []
    latest = 0  # of one reader, which reads one after the other
    for read in history.reads:
        if read.version >= len(states):
            wrong.append(f"a reader saw version {read.version}, which was never committed")
            continue
        if read.contents != states[read.version]:
            wrong.append(f"a reader saw version {read.version} otherwise than it is")
        if read.as_of_ms is not None:
            wrong += _wrong_time_travel(read, [epoch_ms(info.created_at) for info in infos])
        elif read.asked_for is not None:
            if read.asked_for != read.version:
                wrong.append(f"a reader asked for version {read.asked_for} and got {read.version}")
        elif read.version < max(latest, read.newest_acknowledged_before):
            wrong.append(
                f"a reader got version {read.version} as the latest, when {read.newest_acknowledged_before}"
                f" had been acknowledged, and after it had got {latest}"
            )
        else:
            latest = read.version
    return wrong


def _wrong_time_travel(read: ReadRecord, times_ms: Sequence[int]) -> list[str]:
    """Check a read by time: the newest version up to which all are of then or before, of those that it had to know."""
    assert read.as_of_ms is not None
    following = read.version + 1
    is_known = following < min(len(times_ms), read.newest_acknowledged_before + 1)
    has_missed = is_known and times_ms[following] <= read.as_of_ms
    if max(times_ms[:following]) > read.as_of_ms or has_missed:
        return [f"a reader as of {read.as_of_ms} ms got version {read.version}, created at {times_ms[read.version]} ms"]
    return []
