"""The observations of simulated clients, and a check that a serial history explains them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

from tests.simulator.foreign_writer import ForeignStep
from tests.simulator.model import Key, Operation, State, part_of, replay, with_settings
from trinitylake_ops.versions.history import VersionInfo
from trinitylake_ops.versions.snapshot import epoch_ms

#: Operations that change the records in the lakehouse definition.
_RECORDING = ("export", "drop-export", "expire", "undelete", "purge", "orphans", "reconcile")
#: Operations that restore content of an earlier version.
_RESTORING = ("rollback", "restore")


@dataclass
class TransactionRecord:
    """A transaction as its client saw it; ``results[i]`` is the result of ``operations[i]``.

    A saved transaction has one record for each process that resumed it, with the same id.
    """

    id: str
    isolation: str
    base_version: int
    #: The newest version that any client knew to be committed when the transaction began.
    acknowledged_before: int = 0
    operations: list[Operation] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    #: What was reported to the client; "crashed" if its process died first, or the call was interrupted.
    outcome: Literal[
        "crashed", "committed", "failed", "unknown", "resolved as committed", "resolved as lost", "saved"
    ] = "crashed"
    version: int | None = None
    #: Steps of the world at which the commit was submitted and its outcome reported.
    submitted_at_step: int = 0
    acknowledged_at_step: int = 0
    has_conflicted: bool = False
    n_versions_at_conflict: int = 0  # number of versions when the conflict was reported

    def resumed(self) -> TransactionRecord:
        """Return the record for a process that resumes the transaction."""
        return TransactionRecord(
            self.id, self.isolation, self.base_version, self.acknowledged_before, self.operations, self.results
        )


@dataclass(frozen=True)
class ReadRecord:
    """A version that a reader opened, and its content.

    The reader requested ``requested_version`` or the time ``as_of_ms``; both are None for the latest version.
    """

    version: int
    contents: State
    newest_acknowledged_before: int
    requested_version: int | None = None
    as_of_ms: int | None = None


@dataclass(frozen=True)
class RollbackRecord:
    """An acknowledged rollback."""

    version: int
    target: int
    base_version: int  # the version on which it was planned
    may_reapply: bool
    only: tuple[str, ...] = ()  # the namespaces and tables to which it was limited


@dataclass
class History:
    """All observations of a run."""

    transactions: list[TransactionRecord] = field(default_factory=list)
    reads: list[ReadRecord] = field(default_factory=list)
    rollbacks: list[RollbackRecord] = field(default_factory=list)
    newest_acknowledged: int = 0
    late_roots: list[str] = field(default_factory=list)  # roots that were sent after the time to live
    unreferenced: set[str] = field(default_factory=set)  # unreferenced files of a run without faults
    foreign: Mapping[int, ForeignStep] = field(default_factory=dict)  # steps of another program by version
    exported: Mapping[str, int] = field(default_factory=dict)  # exported version by export name
    has_table_writer: bool = False  # its transactions are identified by the rows that they append
    anomalies: list[str] = field(default_factory=list)  # observations that no client may make

    def acknowledge(self, version: int) -> None:
        self.newest_acknowledged = max(self.newest_acknowledged, version)


def check_history(history: History, infos: Sequence[VersionInfo], states: Sequence[State]) -> list[str]:
    """Return violations. There are none if the versions in their order explain all observations.

    ``infos`` and ``states`` describe all versions, oldest first, and were read after the run.
    """
    return [
        *_time_violations(history, infos),
        *_outcome_violations(history, infos, states),
        *_begin_and_conflict_violations(history, infos, states),
        *_rollback_violations(history, infos, states),
        *_content_violations(history, infos, states),
        *_read_violations(history, infos, states),
        *(f"nothing refers to {path}" for path in sorted(history.unreferenced)),
        *history.anomalies,
        *(f"root sent by a transaction past its time to live: {root}" for root in history.late_roots),
    ]


def _time_violations(history: History, infos: Sequence[VersionInfo]) -> list[str]:
    """Check that our versions are newer than all previous versions. The clock of another program may be behind."""
    times = [info.created_at for info in infos]
    newest = list(accumulate(times, max))
    return [
        f"version {version} was not created after all previous versions"
        for version in range(1, len(times))
        if version not in history.foreign and times[version] <= newest[version - 1]
    ]


def _outcome_violations(history: History, infos: Sequence[VersionInfo], states: Sequence[State]) -> list[str]:
    """Check that each acknowledged transaction is in its version only, and that failed transactions are in none."""
    violations = []
    versions_by_member: dict[str, list[int]] = {}
    for info in infos:
        for member in info.members:
            versions_by_member.setdefault(member, []).append(info.version)
    violations += [
        f"transaction {member} was committed as versions {versions}"
        for member, versions in versions_by_member.items()
        if len(versions) > 1
    ]
    allowed_ids = {
        record.id for record in history.transactions if record.outcome not in ("failed", "resolved as lost", "saved")
    }
    for record in history.transactions:
        versions = versions_by_member.get(record.id, [])
        if record.outcome == "committed" and versions != [record.version] and not _changed_nothing(record, states):
            violations.append(
                f"transaction {record.id} was acknowledged as version {record.version}, but is in {versions}"
            )
        if record.outcome == "resolved as committed" and versions != [record.version]:
            violations.append(
                f"transaction {record.id} was resolved as committed in {record.version}, but is in {versions}"
            )
        if versions and record.id not in allowed_ids:
            violations.append(f"the outcome of transaction {record.id} is {record.outcome!r}, but it is in {versions}")
    return violations


def _begin_and_conflict_violations(
    history: History, infos: Sequence[VersionInfo], states: Sequence[State]
) -> list[str]:
    """Check that each transaction began on an acknowledged or later version and conflicted only with real changes."""
    violations = []
    committed_ids = {member for info in infos for member in info.members}
    for record in history.transactions:
        if record.base_version < record.acknowledged_before:
            violations.append(
                f"transaction {record.id} began on version {record.base_version}, when {record.acknowledged_before} had"
                " been acknowledged"
            )
        others = [other for other in history.transactions if other.id == record.id and other.outcome == "committed"]
        if (
            record.has_conflicted
            and record.id in committed_ids
            and any(other.acknowledged_at_step < record.submitted_at_step for other in others)
        ):
            violations.append(f"transaction {record.id} conflicted with itself, which another process had committed")
        elif record.has_conflicted and not _may_conflict(history, record, infos, states):
            violations.append(f"transaction {record.id} conflicted, although nothing that it touched had changed")
    return violations


def _rollback_violations(history: History, infos: Sequence[VersionInfo], states: Sequence[State]) -> list[str]:
    """Check that each rollback restored its target, or returned an existing version if nothing had to change."""
    violations = []
    for rollback in history.rollbacks:
        version, target = rollback.version, rollback.target
        if version >= len(infos) or part_of(states[version], rollback.only) != part_of(states[target], rollback.only):
            violations.append(f"the rollback to {target} was acknowledged as version {version}, which differs from it")
        if version != rollback.base_version + 1 and not rollback.may_reapply and not rollback.only:
            violations.append(f"the rollback to {target} was reapplied as version {version} without permission")
    return violations


def _may_conflict(
    history: History, record: TransactionRecord, infos: Sequence[VersionInfo], states: Sequence[State]
) -> bool:
    """Whether a later version changed anything that a transaction read, wrote or depends on.

    Reading a setting reads the whole lakehouse definition, including the records of operations.
    """
    before = states[record.base_version]
    since = range(record.base_version + 1, min(record.n_versions_at_conflict, len(states)))
    changed = {key for version in since for key in _differing_keys(before, states[version])}
    namespaces_used = {operation.namespace for operation in record.operations}
    operation_kinds = {operation.kind for operation in record.operations}
    fully_read_kinds = {"namespace"} if "namespaces" in operation_kinds else set()
    if operation_kinds & {"setting", "set", "set time to live"}:
        fully_read_kinds.add("setting")
        if any(infos[version].operation in _RECORDING or version in history.foreign for version in since):
            return True
    return any(key[1] in namespaces_used or key[0] in fully_read_kinds for key in changed)


def _changed_nothing(record: TransactionRecord, states: Sequence[State]) -> bool:
    """Whether a transaction that is in no version had nothing to change in the reported version.

    That version is its base, or a version in which another transaction has set the same values.
    """
    before = states[record.base_version]
    after = dict(before)
    for operation in record.operations:
        replay(operation, after)
    if record.version == record.base_version or record.version not in range(record.base_version, len(states)):
        return record.version == record.base_version and after == before
    reported_state, written = states[record.version], _differing_keys(before, after)
    return bool(written) and all(reported_state.get(key) == after.get(key) for key in written)


def _content_violations(history: History, infos: Sequence[VersionInfo], states: Sequence[State]) -> list[str]:
    """Check that each version is the previous version with its transactions applied in order."""
    violations = []
    records = {record.id: record for record in history.transactions}
    serial: State = dict(states[0])
    for info in infos[1:]:
        if info.version in history.foreign:
            serial = _after_foreign(history.foreign[info.version], serial, states)
        elif info.operation == "rollback":
            serial = _after_rollback(info.message or "", serial, states)
        elif info.operation == "restore":
            name, _, _ = (info.message or "").split()[1].partition("-")  # reconcile may rename it to e1-2
            serial = with_settings(states[history.exported[name]], serial)
        for member in info.members:
            if member in records:
                violations += _transaction_violations(records[member], states, serial)
            elif info.operation not in (*_RECORDING, *_RESTORING) and not history.has_table_writer:
                violations.append(f"version {info.version} contains a transaction {member} that no client began")
        if differing_keys := _differing_keys(serial, states[info.version]):
            violations.append(
                f"version {info.version} ({info.operation}) differs from its transactions in {differing_keys}"
            )
            serial = dict(states[info.version])
    return violations


def _after_rollback(message: str, serial: State, states: Sequence[State]) -> State:
    """Return the state after a rollback with the message "to version 3" or "to version 3: a, b.t"."""
    version, _, names = message.removeprefix("to version ").partition(": ")
    only = tuple(names.split(", ")) if names else ()
    kept = {key: token for key, token in serial.items() if key not in part_of(serial, only)}
    return {**kept, **part_of(states[int(version)], only)}


def _after_foreign(step: ForeignStep, serial: State, states: Sequence[State]) -> State:
    """Return the state after a step of another program, whose rollback may also restore old settings."""
    if step.target is not None:
        settings = serial if step.carries_definition else states[step.target]
        return with_settings(states[step.target], settings)
    return {**serial, ("table", step.namespace, step.table): step.token}


def _transaction_violations(record: TransactionRecord, states: Sequence[State], serial: State) -> list[str]:
    """Apply a transaction to ``serial``. Return the reads and writes that its isolation level does not allow."""
    before = states[record.base_version]
    after = dict(before)
    violations = [f"on its base version: {violation}" for violation in _result_violations(record, after)]
    if record.isolation == "serializable":
        in_order = _result_violations(record, dict(serial))
        violations += [f"in the order of commits: {violation}" for violation in in_order]
    written = _differing_keys(before, after)
    violations += [
        f"overwrote a change of {key} that it had not seen: a lost update"
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
            violations.append(f"left {key} without a namespace")
        elif key[0] == "table" and key in written and after["namespace", key[1]] != serial["namespace", key[1]]:
            violations.append(f"wrote {key} into another namespace with the same name")
    return [f"transaction {record.id} ({record.isolation}) {violation}" for violation in violations]


def _result_violations(record: TransactionRecord, state: State) -> list[str]:
    """Apply a transaction's operations to ``state``. Return the results that differ."""
    violations = []
    for operation, result in zip(record.operations, record.results, strict=True):
        expected = replay(operation, state)
        if expected != result:
            violations.append(f"{operation} returns {expected}, but the transaction saw {result}")
    return violations


def _differing_keys(first: State, second: State) -> list[Key]:
    return sorted(key for key in first.keys() | second.keys() if first.get(key) != second.get(key))


def _read_violations(history: History, infos: Sequence[VersionInfo], states: Sequence[State]) -> list[str]:
    violations = []
    latest = 0  # there is one reader, which reads sequentially
    for read in history.reads:
        if read.version >= len(states):
            violations.append(f"a reader saw version {read.version}, which was never committed")
            continue
        if read.contents != states[read.version]:
            violations.append(f"a reader saw different content in version {read.version}")
        if read.as_of_ms is not None:
            violations += _time_travel_violations(read, [epoch_ms(info.created_at) for info in infos])
        elif read.requested_version is not None:
            if read.requested_version != read.version:
                violations.append(f"a reader requested version {read.requested_version} and got {read.version}")
        elif read.version < max(latest, read.newest_acknowledged_before):
            violations.append(
                f"a reader got version {read.version} as the latest, when {read.newest_acknowledged_before}"
                f" had been acknowledged and the reader had already got {latest}"
            )
        else:
            latest = read.version
    return violations


def _time_travel_violations(read: ReadRecord, times_ms: Sequence[int]) -> list[str]:
    """Check that a read by time returned the newest version that was created at or before that time."""
    assert read.as_of_ms is not None
    following = read.version + 1
    is_known = following < min(len(times_ms), read.newest_acknowledged_before + 1)
    has_missed = is_known and times_ms[following] <= read.as_of_ms
    if max(times_ms[:following]) > read.as_of_ms or has_missed:
        return [f"a reader as of {read.as_of_ms} ms got version {read.version}, created at {times_ms[read.version]} ms"]
    return []
