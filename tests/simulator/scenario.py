"""What happens in one simulated run: writers, readers, an operator, and then the verdict."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from tests.simulator import history as seen
from tests.simulator.history import History, ReadRecord, TransactionRecord
from tests.simulator.model import Operation, contents, run
from tests.simulator.world import Process, SimulatedStorage, World
from trinitylake_ops import Lakehouse, maintenance
from trinitylake_ops.errors import CommitOutcomeUnknownError, TrinityLakeError
from trinitylake_ops.format.file_names import HINT_PATH, parse_root_path
from trinitylake_ops.format.node_file import decode_commit_info, decode_system_rows
from trinitylake_ops.maintenance.verify import verify
from trinitylake_ops.storage import RetryStorage, Storage
from trinitylake_ops.storage.cache import clear_process_caches
from trinitylake_ops.transaction.resolve import CommitResolution
from trinitylake_ops.transaction.transaction import Transaction

WRITERS = (3, 1)  # threads of each process that writes
N_TRANSACTIONS = 10  # of each writer
N_READS = 8
N_ROLLBACKS = 2
TIME_TO_LIVE_MS = 30_000

_NAMESPACES = ("a", "b")
_TABLES = ("t", "u", "v", "w")
_SETTINGS = ("x", "y")
_ATTEMPTS = 30
_VERIFIED = 0.2  # of all runs: what all versions hold is read in each


@dataclass(frozen=True)
class Outcome:
    """How a run ended: what is wrong with it, and what happened."""

    seed: int
    wrong: list[str]
    log: list[tuple[str, str, str, str]]
    injected: Counter[tuple[str, str]]
    happened: Counter[str]


def simulate(
    seed: int,
    mutation: Callable[[], AbstractContextManager[object]] = nullcontext,
    *,
    writers: Sequence[int] = WRITERS,
) -> Outcome:
    """Run the scenario of a seed, with a mutation of the engine; the verdict is always that of the true engine.

    The same seed gives the same run, to the last request.
    """
    chance = random.Random(f"scenario {seed}")
    clear_process_caches()  # the same seed has the same names again
    world = World(seed, fault_rate=chance.choice([0, 0.02, 0.05, 0.1]))
    with world.surroundings():
        scenario = _Scenario(world, chance, writers)
        try:
            with mutation():
                world.run()
            wrong = scenario.verdict()
        except TrinityLakeError as error:
            wrong = [f"the lakehouse cannot be read: {type(error).__name__}: {error}"]
        except AssertionError as error:
            wrong = [f"{type(error).__name__}: {error}"]
    return Outcome(seed, wrong, world.log, world.injected, scenario.happened)


class _Scenario:
    """The clients of one run."""

    def __init__(self, world: World, chance: random.Random, writers: Sequence[int]):
        self.world = world
        self.history = History()
        self.happened: Counter[str] = Counter()
        self._tokens = itertools.count()
        self._verifies = chance.random() < _VERIFIED
        self._deadlines: dict[str, int] = {}
        self._storage = SimulatedStorage(world, Process("test", [], lambda storage: None))
        lake = Lakehouse.create(
            self._storage.root, storage=self._storage, order=3, txn_ttl_millis=TIME_TO_LIVE_MS,
            namespace_name_max_size_bytes=8, table_name_max_size_bytes=8, node_file_max_size_bytes=7_000,
        )  # fmt: skip
        txn = lake.transaction()
        record = self._begun(txn.id, "snapshot", txn.base.version)
        for namespace in _NAMESPACES:
            self._step(txn, record, Operation("create namespace", namespace, token=self._token()))
            for table in _TABLES[:2]:
                self._step(txn, record, Operation("put", namespace, table, self._token()))
        record.outcome, record.version = "committed", txn.commit()
        world.observers.append(self._observe)
        for number, n_threads in enumerate(writers):
            names = [f"writer {number}.{thread}" for thread in range(n_threads)]
            threads = [self._thread(name, N_TRANSACTIONS, self._write) for name in names]
            world.add(Process(f"writers {number}", threads, _opened))
        world.add(Process("reader", [self._thread("reader", N_READS, self._read)], _opened))
        world.add(Process("operator", [self._thread("operator", N_ROLLBACKS, self._roll_back)], _opened))
        world.add(Process("vandal", [self._thread("vandal", chance.randrange(8), self._spoil_hint)], _opened))

    def verdict(self) -> list[str]:
        """Read every version anew, and return what is wrong."""
        lake = Lakehouse(self._storage)
        infos = sorted(lake.history(), key=lambda info: info.version)
        states = [contents(lake.snapshot(info.version)) for info in infos]
        self.happened["versions"] += len(infos)
        self.happened["groups"] += sum(1 for info in infos if len(info.members) > 1)
        wrong = seen.check(self.history, infos, states)
        if self._verifies:
            report = verify(lake)
            wrong += [f"verify: {finding}" for finding in report.findings if finding.severity == "error"]
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
        isolation = chance.choice(["snapshot", "serializable"])
        try:
            txn = lake.transaction(isolation)
        except TrinityLakeError:
            self.happened["could not begin"] += 1
            return
        record = self._begun(txn.id, isolation, txn.base.version)
        self._deadlines[txn.id] = txn.base.read_at_ms + TIME_TO_LIVE_MS
        try:
            for operation in self._operations(chance):
                self._step(txn, record, operation)
            record.version = txn.commit(max_attempts=_ATTEMPTS)
        except CommitOutcomeUnknownError as error:
            record.outcome = "unknown"
            self.happened["unknown"] += 1
            self._resolve(lake, record, error, chance)
        except TrinityLakeError as error:
            record.outcome = "failed"
            self.happened[type(error).__name__] += 1
        else:
            record.outcome = "committed"
            self.history.acknowledge(record.version)
            self.happened["committed"] += 1

    def _resolve(
        self, lake: Lakehouse, record: TransactionRecord, error: CommitOutcomeUnknownError, chance: random.Random
    ) -> None:
        assert error.version is not None
        try:
            resolution = lake.resolve_commit(error.version, error.commit_id, fence=chance.random() < 0.5)
        except TrinityLakeError:
            return
        self.happened[f"resolved as {resolution}"] += 1
        if resolution is CommitResolution.COMMITTED:
            record.outcome = "resolved as committed"
        elif resolution is CommitResolution.LOST:
            record.outcome = "resolved as lost"
        self._wait(chance, 100)  # a request that is still on its way may arrive

    def _read(self, lake: Lakehouse, chance: random.Random) -> None:
        before = self.history.newest_acknowledged
        asked_for = chance.randrange(before + 1) if chance.random() < 0.3 else None
        try:
            snapshot = lake.snapshot(asked_for)
            found = contents(snapshot)
        except TrinityLakeError:
            self.happened["could not read"] += 1
            return
        self.happened["read"] += 1
        self.history.reads.append(ReadRecord(snapshot.version, found, before, asked_for, snapshot.created_at_ms))

    def _roll_back(self, lake: Lakehouse, chance: random.Random) -> None:
        self._wait(chance, 200)
        try:
            target = chance.randrange(1, lake.latest_version() + 1)
            plan = maintenance.plan_rollback(lake, target)
            version = plan.execute(reapply=chance.random() < 0.8)
        except TrinityLakeError as error:
            self.happened[f"rollback: {type(error).__name__}"] += 1
            return
        if version != plan.base_version:
            self.history.rollbacks.append((version, target))
            self.history.acknowledge(version)
            self.happened["rolled back"] += 1

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

    # What they do

    def _begun(self, transaction_id: str, isolation: str, base_version: int) -> TransactionRecord:
        record = TransactionRecord(transaction_id, isolation, base_version)
        self.history.transactions.append(record)
        return record

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
        kind = chance.choices(["put", "drop", "create namespace", "drop namespace", "set"], [12, 3, 3, 1, 1])[0]
        name = chance.choice(_SETTINGS if kind == "set" else _NAMESPACES)
        return Operation(kind, name, chance.choice(_TABLES), self._token())

    def _token(self) -> str:
        return str(next(self._tokens))

    def _observe(self, process: Process, kind: str, path: str, data: bytes) -> None:
        """Note roots that are sent although one of their transactions has outlived its time."""
        if parse_root_path(path) is None:
            return
        info = decode_commit_info(decode_system_rows(data, path))
        late = [
            member for member in info.get("members", ()) if self._deadlines.get(member, 1 << 62) < self.world.clock_ms
        ]
        self.history.late_roots += [f"{path} of {member}" for member in late]


def _opened(storage: Storage) -> Lakehouse:
    """Return the lakehouse as a process that starts opens it."""
    world = storage._world  # type: ignore[attr-defined]
    return Lakehouse(RetryStorage(storage, attempts=3, sleep=world.pause))
