"""What happens in one simulated run: writers, readers, an operator, and then the verdict."""

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

from tests.lakes import left_over_paths
from tests.simulator import foreigner, tables
from tests.simulator import history as seen
from tests.simulator.elsewhere import LEVELS, Elsewhere
from tests.simulator.history import History, ReadRecord, RollbackRecord, TransactionRecord
from tests.simulator.model import TIME_TO_LIVE, Operation, contents, run
from tests.simulator.upkeep import LEAPS, OPERATIONS, Upkeep, all_states, archive
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

WRITERS = ((3, 1), (3, 1), (2, 2), (3, 3))  # threads of each process that writes
N_TRANSACTIONS = 10  # of each writer
N_READS = 8
N_ROLLBACKS = 2
N_KEEPERS = 2
N_UPKEEPS = 7  # of each keeper
N_APPENDS = 4
N_FOREIGN_STEPS = 4
TIME_TO_LIVE_MS = 10_000
#: What transactions set the time to live to, times what it was at first.
TIMES_TO_LIVE = (0.5, 1, 2)
#: What transactions change, and how often of so many times.
CHANGES = {"put": 24, "drop": 6, "create namespace": 6, "drop namespace": 2, "set": 2, "set time to live": 1}

_NAMESPACES = ("a", "b")
_TABLES = ("t", "u", "v", "w")
_SETTINGS = ("x", "y")
_ATTEMPTS = 30
_RESOLVES = 4
_ERRORS_OF_RESUMING = (TransactionNotFoundError, TransactionExpiredError, VersionExpiredError)
_ERRORS_OF_ROLLING_BACK = (CommitConflictError, TransactionExpiredError, VersionExpiredError)
_NOT_FOUND = (NamespaceNotFoundError, TableNotFoundError)
_WITH_TABLE = 0.08  # of all runs: an Iceberg table is written, and trimmed
_WITH_FOREIGNER = 0.12  # of all runs: another program commits, and rolls back
_VERIFIED = 0.2  # of all runs: what all versions hold is read in each


@dataclass(frozen=True)
class Outcome:
    """How a run ended: what is wrong with it, and what happened."""

    seed: int
    wrong: list[str]
    log: list[tuple[str, str, str, str]]
    injected: Counter[tuple[str, str]]
    happened: Counter[str]


def digest(outcome: Outcome) -> str:
    """Return a digest of all that happened in a run."""
    return hashlib.sha256(repr((outcome.log, outcome.wrong)).encode()).hexdigest()


def simulate(
    seed: int,
    mutation: Callable[[], AbstractContextManager[object]] = nullcontext,
    *,
    writers: Sequence[int] | None = None,
    fault_rate: float | None = None,
    interrupt_rate: float | None = None,
    time_to_live_ms: int = TIME_TO_LIVE_MS,
    upkeep: Sequence[str] | None = None,
    with_table: bool | None = None,
    n_foreign_steps: int | None = None,
    times_to_live: Sequence[float] = TIMES_TO_LIVE,
    changes: Mapping[str, int] = CHANGES,
    stop_rate: float | None = None,
    leaps: float = LEAPS,
) -> Outcome:
    """Run the scenario of a seed, with a mutation of the engine; the verdict is always that of the true engine.

    The same seed gives the same run, to the last request.
    """
    chance = random.Random(f"scenario {seed}")
    clear_process_caches()  # the same seed has the same names again
    clear_manifest_cache()
    chosen_rate = chance.choice([0, 0.02, 0.05, 0.1])
    fault_rate = chosen_rate if fault_rate is None else fault_rate
    chosen_rate = chance.choice([0.001, 0.001, 0.02]) if fault_rate else 0
    interrupt_rate = chosen_rate if interrupt_rate is None else interrupt_rate
    foreign_steps = N_FOREIGN_STEPS if chance.random() < _WITH_FOREIGNER else 0
    world = World(seed, fault_rate, interrupt_rate, stop_rate)
    buffer_target = mock.patch.object(node, "DEFAULT_BUFFER_TARGET_BYTES", chance.choice([0, 200, 1_000, 48 * 1024]))
    with world.surroundings(), buffer_target:
        scenario = _Scenario(
            world,
            chance,
            writers or chance.choice(WRITERS),
            is_harmless=fault_rate == 0,
            time_to_live_ms=time_to_live_ms,
            upkeep=upkeep,
            with_table=chance.random() < _WITH_TABLE if with_table is None else with_table,
            n_foreign_steps=foreign_steps if n_foreign_steps is None else n_foreign_steps,
            times_to_live=times_to_live,
            changes=changes,
            leaps=leaps,
        )
        try:
            with mutation():
                world.run()
            wrong = scenario.verdict()
        except TrinityLakeError as error:
            wrong = [f"the lakehouse cannot be read: {type(error).__name__}: {error}"]
        except AssertionError as error:
            wrong = [f"{type(error).__name__}: {error}"]
        finally:
            world.end()
    return Outcome(seed, wrong, world.log, world.injected, scenario.happened)


class _Scenario:
    """The clients of one run."""

    def __init__(
        self,
        world: World,
        chance: random.Random,
        writers: Sequence[int],
        *,
        is_harmless: bool,
        time_to_live_ms: int,
        upkeep: Sequence[str] | None,
        with_table: bool,
        n_foreign_steps: int,
        times_to_live: Sequence[float],
        changes: Mapping[str, int],
        leaps: float,
    ):
        self.world = world
        self.history = History()
        self.happened: Counter[str] = Counter()
        self._tokens = itertools.count()
        self._verifies = chance.random() < _VERIFIED
        self._is_harmless = is_harmless
        self._has_keepers = upkeep is None or bool(upkeep)
        self._times_to_live_ms = [int(time_to_live_ms * factor) for factor in times_to_live]
        self._changes = dict(changes)
        self._begun_ms: dict[str, int] = {}  # by transaction
        self._definitions: dict[str, LakehouseDef] = {}
        self._saved: list[TransactionRecord] = []
        self._sent_together: dict[frozenset[str], int] = {}
        self._storage = SimulatedStorage(world, Process("test", [], lambda storage: None))
        lake = Lakehouse.create(
            self._storage.root, storage=self._storage, order=3, txn_ttl_millis=time_to_live_ms,
            maximum_version_age_millis=0, minimum_versions_to_keep=chance.randint(1, 4),
            namespace_name_max_size_bytes=8, table_name_max_size_bytes=8, node_file_max_size_bytes=7_000,
        )  # fmt: skip
        txn = lake.transaction()
        record = TransactionRecord(txn.id, "snapshot", txn.base.version)
        self.history.transactions.append(record)
        for namespace in (*_NAMESPACES, *([tables.NAMESPACE] if with_table else [])):
            self._step(txn, record, Operation("create namespace", namespace, token=self._token()))
        for namespace in _NAMESPACES:
            for table in _TABLES[:2]:
                self._step(txn, record, Operation("put", namespace, table, self._token()))
        record.outcome, record.version = "committed", txn.commit()
        world.observers.append(self._observe)
        self._tables = tables.Tables(world, self.happened, self._note) if with_table else None
        if self._tables is not None:
            self.history.has_table_writer = True
            self._tables.create(lake)
            writer = [self._thread("table writer", N_APPENDS, self._tables.append)]
            world.add(Process("table writer", writer, _opened))
        for number, n_threads in enumerate(writers):
            names = [f"writer {number}.{thread}" for thread in range(n_threads)]
            threads = [self._thread(name, N_TRANSACTIONS, self._write) for name in names]
            world.add(Process(f"writers {number}", threads, _opened, is_interrupted=True))
        world.add(Process("reader", [self._thread("reader", N_READS, self._read)], _opened))
        world.add(Process("operator", [self._thread("operator", N_ROLLBACKS, self._roll_back)], _opened))
        has_reconciler = upkeep is None or "reconcile" in upkeep
        self._foreigner = None
        if n_foreign_steps and has_reconciler:
            self._foreigner = foreigner.Foreigner(world, self.happened, self._token)
            foreign = [self._thread(foreigner.NAME, n_foreign_steps, self._foreigner.work)]
            world.add(Process(foreigner.NAME, foreign, lambda storage: storage))
        leap_ms = 2 * (time_to_live_ms + CLOCK_MARGIN_MS)
        every = [name for name in OPERATIONS if name != "reconcile" or self._foreigner is not None]
        chosen = every if upkeep is None else [name for name in every if name in upkeep]
        elsewhere = Elsewhere(world, chance.choice(LEVELS), leap_ms)
        self._upkeep = Upkeep(world, self.happened, self._note, self._tables, chosen, leap_ms, leaps, elsewhere)
        self.history.exported = self._upkeep.exported_versions
        for number in range(N_KEEPERS if self._has_keepers else 0):
            threads = [self._thread(f"keeper {number}", N_UPKEEPS, self._upkeep.work)]
            world.add(Process(f"keeper {number}", threads, _opened))
        world.add(Process("vandal", [self._thread("vandal", chance.randrange(8), self._spoil_hint)], _opened))

    def verdict(self) -> list[str]:
        """Read every version anew, and return what is wrong."""
        lake, past = Lakehouse(self._storage), Lakehouse(archive(self.world))
        if self._foreigner is not None:
            self.world.clock_ms += LEASE_MS + CLOCK_MARGIN_MS  # the lease of whoever was cut off, by whatever clock
            maintenance.reconcile(lake)
            past = Lakehouse(archive(self.world))
        infos = sorted(past.history(), key=lambda info: info.version)
        states = all_states(past)
        if self._foreigner is not None:
            self.history.foreign = self._foreigner.steps(len(infos))
        self.happened["versions"] += len(infos)
        self.happened["groups"] += sum(1 for info in infos if len(info.members) > 1)
        if self._is_harmless and not self._has_keepers:  # nothing went wrong, and nobody tidied up
            saved = {saved_transaction_path(record.id) for record in self._saved}
            self.history.left_over = left_over_paths(lake) - saved
        wrong = seen.check(self.history, infos, states) + self._upkeep.wrong(lake, past, states)
        ahead = self._upkeep.behind - set(self.history.foreign)
        wrong += [f"verify: version {version} of ours is older than those before it" for version in ahead]
        if self._verifies:
            wrong += self._upkeep.wrong_in_the_end(lake, past, states)
            report = verify(lake)
            behind = {("time-not-rising", version) for version in self.history.foreign}  # by a clock that is
            wrong += [
                f"verify: {finding}"
                for finding in report.findings
                if finding.severity == "error" and (finding.code, finding.version) not in behind
            ]
        return wrong

    # Threads

    def _thread(
        self, name: str, n_rounds: int, work: Callable[[Lakehouse, random.Random], None]
    ) -> Callable[[Process], None]:
        """Return a thread that does its work so many times; where its process starts again, it goes on."""
        chance = random.Random(f"{name} {self.world.random.random()}")
        remaining = iter(range(n_rounds))

        def body(process: Process) -> None:
            for _ in remaining:
                work(process.shared, chance)

        return body

    def _write(self, lake: Lakehouse, chance: random.Random) -> None:
        try:
            self._transact(lake, chance)
        except KeyboardInterrupt:
            self.happened["interrupted"] += 1

    def _transact(self, lake: Lakehouse, chance: random.Random) -> None:
        """Begin or resume a transaction, and commit or save it."""
        if self._saved and chance.random() < 0.2:
            record = chance.choice(self._saved).resumed()
            begin = functools.partial(lake.resume_transaction, record.id)
            operations = []
        else:
            acknowledged = self.history.newest_acknowledged
            record = TransactionRecord("", chance.choice(["snapshot", "serializable"]), 0, acknowledged)
            begin = functools.partial(lake.transaction, record.isolation)
            operations = self._operations(chance)
        begin_ms = self.world.clock_ms
        try:
            txn = begin()
        except TrinityLakeError as error:
            self._note(error, "begin", *(_ERRORS_OF_RESUMING if not operations else ()))
            self.happened[f"could not {'begin' if operations else 'resume'}: {type(error).__name__}"] += 1
            return
        if operations:
            record.id, record.base_version = txn.id, txn.base.version
            self._begun_ms[txn.id] = txn.base.read_at_ms
            if self._is_harmless and not begin_ms <= txn.base.read_at_ms <= self.world.clock_ms:
                self.history.untoward.append(f"transaction {txn.id} has another age than the clock says")
        else:
            self.happened["resumed"] += 1
        self.history.transactions.append(record)
        try:
            for operation in operations:
                self._step(txn, record, operation)
            if operations and chance.random() < 0.15 and self._save(txn, record):
                return
            record.asked_at = self.world.n_steps
            record.version = txn.commit(max_attempts=_ATTEMPTS)
        except CommitConflictError:
            record.outcome, record.has_conflicted = "failed", True
            record.n_versions_then = sum(parse_root_path(path) is not None for path in self.world.created)
            self.happened["conflicted"] += 1
        except CommitOutcomeUnknownError as error:
            self._note(error, "commit")
            record.outcome = "unknown"
            self.happened["unknown"] += 1
            self._resolve(lake, record, error, chance)
        except TrinityLakeError as error:
            self._note(error, "commit", TransactionExpiredError, CommitAttemptsExhaustedError)
            record.outcome = "failed"
            self.happened[type(error).__name__] += 1
        else:
            record.outcome, record.told_at = "committed", self.world.n_steps
            self.history.acknowledge(record.version)
            self.happened["committed"] += 1

    def _save(self, txn: Transaction, record: TransactionRecord) -> bool:
        """Save a transaction for whoever resumes it; where that fails its client may tell others of it, and goes on."""
        self._saved.append(record)
        try:
            txn.save()
        except TrinityLakeError as error:
            self._note(error, "save")
            self.happened["could not save"] += 1
            return False
        record.outcome = "saved"
        self.happened["saved"] += 1
        return True

    def _resolve(
        self, lake: Lakehouse, record: TransactionRecord, error: CommitOutcomeUnknownError, chance: random.Random
    ) -> None:
        assert error.version is not None
        for _ in range(_RESOLVES):
            try:
                resolution = lake.resolve_commit(error.version, error.commit_id, fence=chance.random() < 0.5)
                break
            except TrinityLakeError as failure:
                self._note(failure, "resolve", CommitOutcomeUnknownError, TransactionExpiredError)
                self.happened["could not resolve"] += 1
        else:
            return
        self.happened[f"resolved as {resolution}"] += 1
        if resolution is CommitResolution.COMMITTED:
            record.outcome, record.version = "resolved as committed", error.version
        elif resolution is CommitResolution.LOST:
            record.outcome = "resolved as lost"
        self._wait(chance, 300)  # a request that is still on its way may arrive

    def _read(self, lake: Lakehouse, chance: random.Random) -> None:
        before = self.history.newest_acknowledged
        asked_for, as_of_ms = None, None
        kind = chance.random()
        if kind < 0.25:
            asked_for = chance.randrange(before + 1)
        elif kind < 0.5:
            as_of_ms = chance.randint(*sorted((START_MS, self.world.clock_ms)))
        begin_ms = self.world.clock_ms
        try:
            snapshot = lake.snapshot(asked_for, as_of_ms)
            found = contents(snapshot)
        except TrinityLakeError as error:
            # The latest version can be purged, too, while it is read for longer than what protects it.
            was_slow = self.world.clock_ms - begin_ms > CLOCK_MARGIN_MS
            is_latest = asked_for is None and as_of_ms is None
            expected = () if is_latest and not was_slow else (VersionExpiredError,)
            self._note(error, "read", *expected, *((VersionNotFoundError,) if as_of_ms is not None else ()))
            self.happened[f"could not read: {type(error).__name__}"] += 1
            return
        self.happened["read" if as_of_ms is None else "read as of a time"] += 1
        self.history.reads.append(ReadRecord(snapshot.version, found, before, asked_for, as_of_ms))

    def _roll_back(self, lake: Lakehouse, chance: random.Random) -> None:
        self._wait(chance, 200)
        namespaces, tables = self._choice(chance)
        try:
            target = chance.randrange(1, lake.latest_version() + 1)
            plan = maintenance.plan_rollback(lake, target, namespaces, tables)
            may_reapply = chance.random() < 0.8
            version = plan.execute(reapply=may_reapply).version
        except TrinityLakeError as error:
            self._note(error, "roll back", *_ERRORS_OF_ROLLING_BACK, *(_NOT_FOUND if namespaces or tables else ()))
            self.happened[f"rollback: {type(error).__name__}"] += 1
            return
        if version != plan.base_version:
            record = RollbackRecord(version, target, plan.base_version, may_reapply, plan.only)
            self.history.rollbacks.append(record)
            self.history.acknowledge(version)
            self.happened["rolled back a choice" if plan.only else "rolled back"] += 1

    def _choice(self, chance: random.Random) -> tuple[list[str], list[str]]:
        """Return namespaces and tables to roll back: none, which is all, or one of them."""
        kind = chance.random()
        if kind < 0.5:
            return [], []
        namespace = chance.choice(_NAMESPACES)
        return ([namespace], []) if kind < 0.8 else ([], [f"{namespace}.{chance.choice(_TABLES)}"])

    def _spoil_hint(self, lake: Lakehouse, chance: random.Random) -> None:
        self._wait(chance, 80)
        content = chance.choice([b"", b"garbage", b"0", b"999999", b"-1", None])
        try:
            if content is None:
                lake.storage.delete(HINT_PATH)
            else:
                lake.storage.write(HINT_PATH, content)
        except TrinityLakeError:
            return

    def _wait(self, chance: random.Random, most_steps: int) -> None:
        for _ in range(chance.randrange(most_steps)):
            self.world.hand_over()

    def _note(self, error: TrinityLakeError, what: str, *expected: type[TrinityLakeError]) -> None:
        """Note an error that should not come: one of the storage can, where something went wrong with a request."""
        if isinstance(error, expected):
            return
        could_come = (ThrottledError, TransientError, AmbiguousWriteError, CommitOutcomeUnknownError)
        if self._is_harmless or not isinstance(error, could_come):
            self.history.untoward.append(f"could not {what}: {type(error).__name__}: {error}")

    # What they do

    def _step(self, txn: Transaction, record: TransactionRecord, operation: Operation) -> None:
        learnt = run(operation, txn)
        record.operations.append(operation)
        record.learnt.append(learnt)

    def _operations(self, chance: random.Random) -> list[Operation]:
        return [self._operation(chance) for _ in range(chance.randint(1, 3))] + [self._change(chance)]

    def _operation(self, chance: random.Random) -> Operation:
        kind = chance.choices(["read", "list", "namespaces", "setting", "change"], [6, 3, 2, 1, 3])[0]
        if kind == "change":
            return self._change(chance)
        if kind == "setting":
            return Operation(kind, chance.choice(_SETTINGS))
        return Operation(kind, chance.choice(_NAMESPACES), chance.choice(_TABLES))

    def _change(self, chance: random.Random) -> Operation:
        kind = chance.choices(list(self._changes), list(self._changes.values()))[0]
        if kind == "set time to live":
            return Operation(kind, TIME_TO_LIVE, token=str(chance.choice(self._times_to_live_ms)))
        name = chance.choice(_SETTINGS if kind == "set" else _NAMESPACES)
        return Operation(kind, name, chance.choice(_TABLES), self._token())

    def _token(self) -> str:
        return str(next(self._tokens))

    def _observe(self, process: Process, path: str, data: bytes) -> None:
        """Note roots that are sent although one of their transactions is too old, and groups that rebase."""
        version = parse_root_path(path)
        if version is None:
            return
        info = decode_commit_info(decode_system_rows(data, path))
        members = frozenset(info.get("members", ()))
        if len(members) > 1 and self._sent_together.setdefault(members, version) != version:
            self.happened["groups rebased"] += 1
        if version == 0 or process.name == foreigner.NAME:
            return
        known = self._definition_before(version)
        begun_ms = {member: self._begun_ms[member] for member in info.get("members", ()) if member in self._begun_ms}
        self.history.late_roots += [
            f"{path} of {member}"
            for member, at_ms in begun_ms.items()
            if at_ms + known.txn_ttl_millis < self.world.clock_ms or at_ms < known.orphans_removed_before_millis
        ]

    def _definition_before(self, version: int) -> LakehouseDef:
        """Return the lakehouse definition that whoever sends the root of a version must know."""
        path = root_path(version - 1)
        location = decode_system_rows(self.world.created[path][0], path)[LAKEHOUSE_DEF]
        if location not in self._definitions:
            self._definitions[location] = LakehouseDef.from_bytes(self.world.created[location][0], location)
        return self._definitions[location]


def _opened(storage: Storage) -> Lakehouse:
    """Return the lakehouse as a process that starts opens it."""
    world = storage._world  # type: ignore[attr-defined]
    return Lakehouse(RetryStorage(storage, attempts=3, sleep=world.pause))
