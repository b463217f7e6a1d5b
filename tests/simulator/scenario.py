"""The scenario of a simulated run: writers, readers, maintenance and the final check."""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from unittest import mock

from pyiceberg.manifest import clear_manifest_cache

from tests.lakes import unreferenced_paths
from tests.simulator import foreign_writer, tables
from tests.simulator.export_target import LEVELS, ExportTarget
from tests.simulator.history import History, ReadRecord, RollbackRecord, TransactionRecord, check_history
from tests.simulator.maintenance import LEAP_RATE, OPERATIONS, Maintenance, all_states, archive
from tests.simulator.model import TIME_TO_LIVE, Operation, contents, run
from tests.simulator.world import CLOCK_MARGIN_MS, LEASE_MS, START_MS, Process, SimulatedStorage, World
from trinitylake_ops import Lakehouse
from trinitylake_ops import operations as maintenance
from trinitylake_ops.errors import (
    AmbiguousWriteError,
    CommitAttemptsExhaustedError,
    CommitConflictError,
    CommitOutcomeUnknownError,
    NamespaceNotFoundError,
    TableNotFoundError,
    ThrottledError,
    TransactionExpiredError,
    TransactionNotFoundError,
    TransientError,
    TrinityLakeError,
    VersionExpiredError,
    VersionNotFoundError,
)
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.file_names import HINT_PATH, parse_root_path, root_path, saved_transaction_path
from trinitylake_ops.format.keys import LAKEHOUSE_DEF, decode_commit_info
from trinitylake_ops.format.node_file import decode_system_rows
from trinitylake_ops.operations.verification.verify import verify
from trinitylake_ops.storage import RetryStorage, Storage
from trinitylake_ops.storage.cache.storage import clear_process_caches
from trinitylake_ops.transaction.publish import CommitResolution
from trinitylake_ops.transaction.transaction import Transaction
from trinitylake_ops.tree import node

WRITERS = ((3, 1), (3, 1), (2, 2), (3, 3))  # the number of threads of each writing process
N_TRANSACTIONS = 10  # of each writing thread
N_READS = 8
N_ROLLBACKS = 2
N_KEEPERS = 2
N_KEEPER_ROUNDS = 7  # of each maintenance process
N_APPENDS = 4
N_FOREIGN_STEPS = 4
TIME_TO_LIVE_MS = 10_000
#: Times to live that transactions set, as factors of the initial one.
TIMES_TO_LIVE = (0.5, 1, 2)
#: The weights of the changes that transactions make.
CHANGES = {"put": 24, "drop": 6, "create namespace": 6, "drop namespace": 2, "set": 2, "set time to live": 1}

_NAMESPACES = ("a", "b")
_TABLES = ("t", "u", "v", "w")
_SETTINGS = ("x", "y")
_MAX_ATTEMPTS = 30
_MAX_RESOLVES = 4
_RESUME_ERRORS = (TransactionNotFoundError, TransactionExpiredError, VersionExpiredError)
_ROLLBACK_ERRORS = (CommitConflictError, TransactionExpiredError, VersionExpiredError)
_NOT_FOUND_ERRORS = (NamespaceNotFoundError, TableNotFoundError)
_TABLE_RATE = 0.08  # the share of runs that write and trim an Iceberg table
_FOREIGN_WRITER_RATE = 0.12  # the share of runs in which another program commits and rolls back
_VERIFY_RATE = 0.2  # the share of runs that verify the content of all versions at the end


@dataclass(frozen=True)
class Outcome:
    """The result of a run: violations, requests, injected faults and events."""

    seed: int
    violations: list[str]
    log: list[tuple[str, str, str, str]]
    injected: Counter[tuple[str, str]]
    events: Counter[str]


def digest(outcome: Outcome) -> str:
    """Return a digest of the requests and violations of a run."""
    return hashlib.sha256(repr((outcome.log, outcome.violations)).encode()).hexdigest()


def simulate(
    seed: int,
    mutation: Callable[[], AbstractContextManager[object]] = nullcontext,
    *,
    writers: Sequence[int] | None = None,
    fault_rate: float | None = None,
    interrupt_rate: float | None = None,
    time_to_live_ms: int = TIME_TO_LIVE_MS,
    maintenance_operations: Sequence[str] | None = None,
    with_table: bool | None = None,
    n_foreign_steps: int | None = None,
    times_to_live: Sequence[float] = TIMES_TO_LIVE,
    changes: Mapping[str, int] = CHANGES,
    stop_rate: float | None = None,
    leap_rate: float = LEAP_RATE,
) -> Outcome:
    """Run the scenario of a seed, optionally with a mutated engine. The final check uses the real engine.

    The same seed produces the same run, down to the last request.
    """
    rng = random.Random(f"scenario {seed}")
    clear_process_caches()  # runs of the same seed use the same paths
    clear_manifest_cache()
    chosen_rate = rng.choice([0, 0.02, 0.05, 0.1])
    fault_rate = chosen_rate if fault_rate is None else fault_rate
    chosen_rate = rng.choice([0.001, 0.001, 0.02]) if fault_rate else 0
    interrupt_rate = chosen_rate if interrupt_rate is None else interrupt_rate
    foreign_steps = N_FOREIGN_STEPS if rng.random() < _FOREIGN_WRITER_RATE else 0
    world = World(seed, fault_rate, interrupt_rate, stop_rate)
    buffer_target = mock.patch.object(node, "DEFAULT_BUFFER_TARGET_BYTES", rng.choice([0, 200, 1_000, 48 * 1024]))
    with world.patched(), buffer_target:
        scenario = _Scenario(
            world,
            rng,
            writers or rng.choice(WRITERS),
            is_fault_free=fault_rate == 0,
            time_to_live_ms=time_to_live_ms,
            maintenance_operations=maintenance_operations,
            with_table=rng.random() < _TABLE_RATE if with_table is None else with_table,
            n_foreign_steps=foreign_steps if n_foreign_steps is None else n_foreign_steps,
            times_to_live=times_to_live,
            changes=changes,
            leap_rate=leap_rate,
        )
        try:
            with mutation():
                world.run()
            violations = scenario.verdict()
        except TrinityLakeError as error:
            violations = [f"the lakehouse cannot be read: {type(error).__name__}: {error}"]
        except AssertionError as error:
            violations = [f"{type(error).__name__}: {error}"]
        finally:
            world.stop()
    return Outcome(seed, violations, world.log, world.injected, scenario.events)


class _Scenario:
    """The clients of a run and their observations."""

    def __init__(
        self,
        world: World,
        rng: random.Random,
        writers: Sequence[int],
        *,
        is_fault_free: bool,
        time_to_live_ms: int,
        maintenance_operations: Sequence[str] | None,
        with_table: bool,
        n_foreign_steps: int,
        times_to_live: Sequence[float],
        changes: Mapping[str, int],
        leap_rate: float,
    ):
        self.world = world
        self.history = History()
        self.events: Counter[str] = Counter()
        self._tokens = itertools.count()
        self._verifies_content = rng.random() < _VERIFY_RATE
        self._is_fault_free = is_fault_free
        self._has_keepers = maintenance_operations is None or bool(maintenance_operations)
        self._times_to_live_ms = [int(time_to_live_ms * factor) for factor in times_to_live]
        self._changes = dict(changes)
        self._begun_ms: dict[str, int] = {}  # when each transaction began
        self._definitions: dict[str, LakehouseDef] = {}
        self._saved_records: list[TransactionRecord] = []
        self._version_by_group: dict[frozenset[str], int] = {}
        self._storage = SimulatedStorage(world, Process("test", [], lambda storage: None))
        lake = Lakehouse.create(
            self._storage.root, storage=self._storage, order=3, txn_ttl_millis=time_to_live_ms,
            maximum_version_age_millis=0, minimum_versions_to_keep=rng.randint(1, 4),
            namespace_name_max_size_bytes=8, table_name_max_size_bytes=8, node_file_max_size_bytes=7_000,
        )  # fmt: skip
        txn = lake.transaction()
        record = TransactionRecord(txn.id, "snapshot", txn.base.version)
        self.history.transactions.append(record)
        for namespace in (*_NAMESPACES, *([tables.NAMESPACE] if with_table else [])):
            self._run_operation(txn, record, Operation("create namespace", namespace, token=self._token()))
        for namespace in _NAMESPACES:
            for table in _TABLES[:2]:
                self._run_operation(txn, record, Operation("put", namespace, table, self._token()))
        record.outcome, record.version = "committed", txn.commit()
        world.observers.append(self._observe)
        self._tables = tables.TableWriter(world, self.events, self._record_error) if with_table else None
        if self._tables is not None:
            self.history.has_table_writer = True
            self._tables.create(lake)
            writer = [self._make_thread("table writer", N_APPENDS, self._tables.append)]
            world.add(Process("table writer", writer, _open_lakehouse))
        for number, n_threads in enumerate(writers):
            names = [f"writer {number}.{thread}" for thread in range(n_threads)]
            threads = [self._make_thread(name, N_TRANSACTIONS, self._write) for name in names]
            world.add(Process(f"writers {number}", threads, _open_lakehouse, is_interrupted=True))
        world.add(Process("reader", [self._make_thread("reader", N_READS, self._read)], _open_lakehouse))
        world.add(Process("operator", [self._make_thread("operator", N_ROLLBACKS, self._roll_back)], _open_lakehouse))
        has_reconciler = maintenance_operations is None or "reconcile" in maintenance_operations
        self._foreign_writer = None
        if n_foreign_steps and has_reconciler:
            self._foreign_writer = foreign_writer.ForeignWriter(world, self.events, self._token)
            foreign = [self._make_thread(foreign_writer.NAME, n_foreign_steps, self._foreign_writer.work)]
            world.add(Process(foreign_writer.NAME, foreign, lambda storage: storage))
        leap_ms = 2 * (time_to_live_ms + CLOCK_MARGIN_MS)
        available = [name for name in OPERATIONS if name != "reconcile" or self._foreign_writer is not None]
        chosen = [name for name in available if maintenance_operations is None or name in maintenance_operations]
        export_target = ExportTarget(world, rng.choice(LEVELS), leap_ms)
        self._maintenance = Maintenance(
            world, self.events, self._record_error, self._tables, chosen, leap_ms, leap_rate, export_target
        )
        self.history.exported = self._maintenance.exported_versions
        for number in range(N_KEEPERS if self._has_keepers else 0):
            threads = [self._make_thread(f"keeper {number}", N_KEEPER_ROUNDS, self._maintenance.work)]
            world.add(Process(f"keeper {number}", threads, _open_lakehouse))
        world.add(
            Process("vandal", [self._make_thread("vandal", rng.randrange(8), self._corrupt_hint)], _open_lakehouse)
        )

    def verdict(self) -> list[str]:
        """Read every version with new caches, and return the violations."""
        lake, past = Lakehouse(self._storage), Lakehouse(archive(self.world))
        if self._foreign_writer is not None:
            # Leases of interrupted processes have then ended on all clocks.
            self.world.clock_ms += LEASE_MS + CLOCK_MARGIN_MS
            maintenance.reconcile(lake)
            past = Lakehouse(archive(self.world))
        infos = sorted(past.history(), key=lambda info: info.version)
        states = all_states(past)
        if self._foreign_writer is not None:
            self.history.foreign = self._foreign_writer.steps(len(infos))
        self.events["versions"] += len(infos)
        self.events["groups"] += sum(1 for info in infos if len(info.members) > 1)
        if self._is_fault_free and not self._has_keepers:  # no faults and no maintenance
            saved = {saved_transaction_path(record.id) for record in self._saved_records}
            self.history.left_over = unreferenced_paths(lake) - saved
        violations = check_history(self.history, infos, states) + self._maintenance.violations(lake, past, states)
        ahead = self._maintenance.behind - set(self.history.foreign)
        violations += [f"verify: version {version} is older than a previous one" for version in ahead]
        if self._verifies_content:
            violations += self._maintenance.final_violations(lake, past, states)
            report = verify(lake)
            # The clock of the other program may be behind.
            behind = {("time-not-rising", version) for version in self.history.foreign}
            violations += [
                f"verify: {finding}"
                for finding in report.findings
                if finding.severity == "error" and (finding.code, finding.version) not in behind
            ]
        return violations

    # Threads

    def _make_thread(
        self, name: str, n_rounds: int, work: Callable[[Lakehouse, random.Random], None]
    ) -> Callable[[Process], None]:
        """Return a thread body that calls ``work`` ``n_rounds`` times in total, also across restarts of its process."""
        rng = random.Random(f"{name} {self.world.random.random()}")
        remaining = iter(range(n_rounds))

        def body(process: Process) -> None:
            for _ in remaining:
                work(process.shared, rng)

        return body

    def _write(self, lake: Lakehouse, rng: random.Random) -> None:
        try:
            self._transact(lake, rng)
        except KeyboardInterrupt:
            self.events["interrupted"] += 1

    def _transact(self, lake: Lakehouse, rng: random.Random) -> None:
        """Begin or resume a transaction, and commit or save it."""
        if self._saved_records and rng.random() < 0.2:
            record = rng.choice(self._saved_records).resumed()
            begin = functools.partial(lake.resume_transaction, record.id)
            operations = []
        else:
            acknowledged = self.history.newest_acknowledged
            record = TransactionRecord("", rng.choice(["snapshot", "serializable"]), 0, acknowledged)
            begin = functools.partial(lake.transaction, record.isolation)
            operations = self._operations(rng)
        begin_ms = self.world.clock_ms
        try:
            txn = begin()
        except TrinityLakeError as error:
            self._record_error(error, "begin", *(_RESUME_ERRORS if not operations else ()))
            self.events[f"could not {'begin' if operations else 'resume'}: {type(error).__name__}"] += 1
            return
        if operations:
            record.id, record.base_version = txn.id, txn.base.version
            self._begun_ms[txn.id] = txn.base.read_at_ms
            if self._is_fault_free and not begin_ms <= txn.base.read_at_ms <= self.world.clock_ms:
                self.history.anomalies.append(f"transaction {txn.id} began at a time that does not match the clock")
        else:
            self.events["resumed"] += 1
        self.history.transactions.append(record)
        try:
            for operation in operations:
                self._run_operation(txn, record, operation)
            if operations and rng.random() < 0.15 and self._save(txn, record):
                return
            record.submitted_at_step = self.world.n_steps
            record.version = txn.commit(max_attempts=_MAX_ATTEMPTS)
        except CommitConflictError:
            record.outcome, record.has_conflicted = "failed", True
            record.n_versions_at_conflict = sum(parse_root_path(path) is not None for path in self.world.created)
            self.events["conflicted"] += 1
        except CommitOutcomeUnknownError as error:
            self._record_error(error, "commit")
            record.outcome = "unknown"
            self.events["unknown"] += 1
            self._resolve(lake, record, error, rng)
        except TrinityLakeError as error:
            self._record_error(error, "commit", TransactionExpiredError, CommitAttemptsExhaustedError)
            record.outcome = "failed"
            self.events[type(error).__name__] += 1
        else:
            record.outcome, record.acknowledged_at_step = "committed", self.world.n_steps
            self.history.acknowledge(record.version)
            self.events["committed"] += 1

    def _save(self, txn: Transaction, record: TransactionRecord) -> bool:
        """Save a transaction for another process, which may try to resume it even if this fails."""
        self._saved_records.append(record)
        try:
            txn.save()
        except TrinityLakeError as error:
            self._record_error(error, "save")
            self.events["could not save"] += 1
            return False
        record.outcome = "saved"
        self.events["saved"] += 1
        return True

    def _resolve(
        self, lake: Lakehouse, record: TransactionRecord, error: CommitOutcomeUnknownError, rng: random.Random
    ) -> None:
        assert error.version is not None
        for _ in range(_MAX_RESOLVES):
            try:
                resolution = lake.resolve_commit(error.version, error.commit_id, fence=rng.random() < 0.5)
                break
            except TrinityLakeError as failure:
                self._record_error(failure, "resolve", CommitOutcomeUnknownError, TransactionExpiredError)
                self.events["could not resolve"] += 1
        else:
            return
        self.events[f"resolved as {resolution}"] += 1
        if resolution is CommitResolution.COMMITTED:
            record.outcome, record.version = "resolved as committed", error.version
        elif resolution is CommitResolution.LOST:
            record.outcome = "resolved as lost"
        self._wait(rng, 300)  # a delayed request may arrive

    def _read(self, lake: Lakehouse, rng: random.Random) -> None:
        before = self.history.newest_acknowledged
        requested_version, as_of_ms = None, None
        kind = rng.random()
        if kind < 0.25:
            requested_version = rng.randrange(before + 1)
        elif kind < 0.5:
            as_of_ms = rng.randint(*sorted((START_MS, self.world.clock_ms)))
        begin_ms = self.world.clock_ms
        try:
            snapshot = lake.snapshot(requested_version, as_of_ms)
            content = contents(snapshot)
        except TrinityLakeError as error:
            # Even the latest version may be purged during a read that takes longer than the clock margin.
            was_slow = self.world.clock_ms - begin_ms > CLOCK_MARGIN_MS
            is_latest = requested_version is None and as_of_ms is None
            expected = () if is_latest and not was_slow else (VersionExpiredError,)
            self._record_error(error, "read", *expected, *((VersionNotFoundError,) if as_of_ms is not None else ()))
            self.events[f"could not read: {type(error).__name__}"] += 1
            return
        self.events["read" if as_of_ms is None else "read as of a time"] += 1
        self.history.reads.append(ReadRecord(snapshot.version, content, before, requested_version, as_of_ms))

    def _roll_back(self, lake: Lakehouse, rng: random.Random) -> None:
        self._wait(rng, 200)
        namespaces, tables = self._choose_scope(rng)
        try:
            target = rng.randrange(1, lake.latest_version() + 1)
            plan = maintenance.plan_rollback(lake, target, namespaces, tables)
            may_reapply = rng.random() < 0.8
            version = plan.execute(reapply=may_reapply).version
        except TrinityLakeError as error:
            self._record_error(
                error, "roll back", *_ROLLBACK_ERRORS, *(_NOT_FOUND_ERRORS if namespaces or tables else ())
            )
            self.events[f"rollback: {type(error).__name__}"] += 1
            return
        if version != plan.base_version:
            record = RollbackRecord(version, target, plan.base_version, may_reapply, plan.only)
            self.history.rollbacks.append(record)
            self.history.acknowledge(version)
            self.events["rolled back a selection" if plan.only else "rolled back"] += 1

    def _choose_scope(self, rng: random.Random) -> tuple[list[str], list[str]]:
        """Return the namespaces and tables to roll back: none, which means everything, or one namespace or table."""
        kind = rng.random()
        if kind < 0.5:
            return [], []
        namespace = rng.choice(_NAMESPACES)
        return ([namespace], []) if kind < 0.8 else ([], [f"{namespace}.{rng.choice(_TABLES)}"])

    def _corrupt_hint(self, lake: Lakehouse, rng: random.Random) -> None:
        self._wait(rng, 80)
        content = rng.choice([b"", b"garbage", b"0", b"999999", b"-1", None])
        try:
            if content is None:
                lake.storage.delete(HINT_PATH)
            else:
                lake.storage.write(HINT_PATH, content)
        except TrinityLakeError:
            return

    def _wait(self, rng: random.Random, max_steps: int) -> None:
        for _ in range(rng.randrange(max_steps)):
            self.world.hand_over()

    def _record_error(self, error: TrinityLakeError, action: str, *expected: type[TrinityLakeError]) -> None:
        """Record an unexpected error. Storage errors are expected in runs with faults."""
        if isinstance(error, expected):
            return
        possible_errors = (ThrottledError, TransientError, AmbiguousWriteError, CommitOutcomeUnknownError)
        if self._is_fault_free or not isinstance(error, possible_errors):
            self.history.anomalies.append(f"could not {action}: {type(error).__name__}: {error}")

    # Operations

    def _run_operation(self, txn: Transaction, record: TransactionRecord, operation: Operation) -> None:
        result = run(operation, txn)
        record.operations.append(operation)
        record.results.append(result)

    def _operations(self, rng: random.Random) -> list[Operation]:
        return [self._operation(rng) for _ in range(rng.randint(1, 3))] + [self._change(rng)]

    def _operation(self, rng: random.Random) -> Operation:
        kind = rng.choices(["read", "list", "namespaces", "setting", "change"], [6, 3, 2, 1, 3])[0]
        if kind == "change":
            return self._change(rng)
        if kind == "setting":
            return Operation(kind, rng.choice(_SETTINGS))
        return Operation(kind, rng.choice(_NAMESPACES), rng.choice(_TABLES))

    def _change(self, rng: random.Random) -> Operation:
        kind = rng.choices(list(self._changes), list(self._changes.values()))[0]
        if kind == "set time to live":
            return Operation(kind, TIME_TO_LIVE, token=str(rng.choice(self._times_to_live_ms)))
        name = rng.choice(_SETTINGS if kind == "set" else _NAMESPACES)
        return Operation(kind, name, rng.choice(_TABLES), self._token())

    def _token(self) -> str:
        return str(next(self._tokens))

    def _observe(self, process: Process, path: str, data: bytes) -> None:
        """Record roots that are sent for a transaction past its time to live, and rebases of groups."""
        version = parse_root_path(path)
        if version is None:
            return
        info = decode_commit_info(decode_system_rows(data, path))
        members = frozenset(info.get("members", ()))
        if len(members) > 1 and self._version_by_group.setdefault(members, version) != version:
            self.events["groups rebased"] += 1
        if version == 0 or process.name == foreign_writer.NAME:
            return
        definition = self._definition_before(version)
        begun_ms = {member: self._begun_ms[member] for member in info.get("members", ()) if member in self._begun_ms}
        self.history.late_roots += [
            f"{path} of {member}"
            for member, time_ms in begun_ms.items()
            if time_ms + definition.txn_ttl_millis < self.world.clock_ms
            or time_ms < definition.orphans_removed_before_millis
        ]

    def _definition_before(self, version: int) -> LakehouseDef:
        """Return the lakehouse definition that a writer of this version must respect, that of the previous version."""
        path = root_path(version - 1)
        location = decode_system_rows(self.world.created[path][0], path)[LAKEHOUSE_DEF]
        if location not in self._definitions:
            self._definitions[location] = LakehouseDef.from_bytes(self.world.created[location][0], location)
        return self._definitions[location]


def _open_lakehouse(storage: Storage) -> Lakehouse:
    """Open the lakehouse as a new process would."""
    world = storage.world  # type: ignore[attr-defined]
    return Lakehouse(RetryStorage(storage, attempts=3, sleep=world.pause))
