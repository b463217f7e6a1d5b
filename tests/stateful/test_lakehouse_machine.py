"""Random changes of a lakehouse, compared with a dict for each version. Invariants are checked after each step."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.lakes import check_version
from tests.operations.changes import small_sizes
from trinitylake_ops import Lakehouse, TableDef, operations
from trinitylake_ops.storage import MemoryStorage, drop_memory_root
from trinitylake_ops.tree import node

_roots = itertools.count()
_letters = st.sampled_from(["a", "b", "é", "航", "🦆", "~", "."])
# A small set of names, so that steps often use the same names. Each has up to eight bytes.
namespaces = st.sampled_from(["a", "b", "é~", "航", "🦆🦆"])
_few_tables = st.tuples(_letters, st.integers(0, 25)).map(lambda parts: f"{parts[0]}{parts[1]:02d}")
_characters = st.characters(exclude_categories=["C", "Z"])
tables = _few_tables | st.text(_characters, min_size=1, max_size=2).filter(lambda name: name not in (".", ".."))
#: The value of each table, by namespace and table name.
Model = dict[str, dict[str, str]]


class LakehouseMachine(RuleBasedStateMachine):
    """Commits changes and compares all versions with dicts."""

    @initialize(
        order=st.sampled_from([3, 4, 5, 8, 16, 128]), buffer_target_bytes=st.sampled_from([0, 200, 1_000, 48 * 1024])
    )
    def start(self, order: int, buffer_target_bytes: int) -> None:
        self.default_target_bytes = node.DEFAULT_BUFFER_TARGET_BYTES
        node.DEFAULT_BUFFER_TARGET_BYTES = buffer_target_bytes
        self.storage = MemoryStorage(f"memory://machine-{next(_roots)}/")
        self.lake = Lakehouse.create(self.storage.root, storage=self.storage, order=order, **small_sizes(order))
        self.versions: list[Model] = [{}]
        for namespace in ("a", "航"):
            self.create_namespace(namespace)
            self.change_tables(namespace, {f"a{number:02d}": "0" for number in range(25)})

    @property
    def model(self) -> Model:
        return self.versions[-1]

    def record_version(self, model: Model) -> None:
        self.versions.append(model)
        assert self.lake.latest_version() == len(self.versions) - 1

    @rule(namespace=namespaces)
    def create_namespace(self, namespace: str) -> None:
        if namespace not in self.model:
            with self.lake.transaction() as txn:
                txn.create_namespace(namespace)
            self.record_version({**self.model, namespace: {}})

    @rule(namespace=namespaces, batch=st.dictionaries(tables, st.none() | st.integers(0, 9).map(str), max_size=30))
    def change_tables(self, namespace: str, batch: dict[str, str | None]) -> None:
        if namespace not in self.model:
            return
        tables_of_namespace = dict(self.model[namespace])
        with self.lake.transaction() as txn:
            for table, value in batch.items():
                if value is None and table in tables_of_namespace:
                    txn.drop_table(namespace, table)
                    del tables_of_namespace[table]
                elif value is not None:
                    change = txn.alter_table if table in tables_of_namespace else txn.create_table
                    change(namespace, table, TableDef(properties={"value": value}))
                    tables_of_namespace[table] = value
            assert txn.tables(namespace) == sorted(tables_of_namespace, key=_padded)
        if tables_of_namespace != self.model[namespace] or self.lake.latest_version() == len(self.versions):
            self.record_version({**self.model, namespace: tables_of_namespace})

    @rule(namespace=namespaces)
    def drop_namespace(self, namespace: str) -> None:
        if namespace in self.model:
            with self.lake.transaction() as txn:
                txn.drop_namespace(namespace, cascade=True)
            self.record_version(
                {name: tables_of_namespace for name, tables_of_namespace in self.model.items() if name != namespace}
            )

    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        target = data.draw(st.integers(0, len(self.versions) - 1))
        before = len(self.versions) - 1
        if operations.rollback(self.lake, target) != before:
            self.record_version(self.versions[target])
        assert self.model == self.versions[target]

    @rule()
    def compact(self) -> None:
        report = operations.compact(self.lake)
        if report.has_changed:
            self.record_version(self.model)
        assert report.after.messages == 0

    @rule(is_cached=st.booleans())
    def reopen(self, is_cached: bool) -> None:
        self.lake = Lakehouse(self.storage, cache="private" if is_cached else "off")

    @rule(data=st.data())
    def read_earlier_version(self, data: st.DataObject) -> None:
        version = data.draw(st.integers(0, len(self.versions) - 1))
        assert content(self.lake, version) == self.versions[version]

    @rule(data=st.data())
    def compare_two_versions(self, data: st.DataObject) -> None:
        before, after = (data.draw(st.integers(0, len(self.versions) - 1)) for _ in range(2))
        names = [_objects(self.versions[version]) for version in (before, after)]
        changes = {(change.namespace, change.table): change.kind for change in self.lake.diff(before, after)}
        assert {name for name, kind in changes.items() if kind == "added"} == names[1] - names[0]
        assert {name for name, kind in changes.items() if kind == "removed"} == names[0] - names[1]

    @invariant()
    def latest_version_equals_model(self) -> None:
        if hasattr(self, "lake"):
            check_version(self.lake, len(self.versions) - 1)
            assert content(self.lake, None) == self.model

    def teardown(self) -> None:
        if hasattr(self, "default_target_bytes"):
            node.DEFAULT_BUFFER_TARGET_BYTES = self.default_target_bytes
        if hasattr(self, "lake"):
            report = operations.verify(self.lake)
            assert report.is_clean, report
            drop_memory_root(self.storage.root)


def _padded(name: str) -> bytes:
    return name.encode().ljust(8)


def _objects(model: Model) -> set[tuple[str, str | None]]:
    return {(name, None) for name in model} | {
        (name, table) for name, tables_of_namespace in model.items() for table in tables_of_namespace
    }


def content(lake: Lakehouse, version: int | None) -> Model:
    """Return all tables of a version with their values."""
    snapshot = lake.snapshot(version)
    return {
        namespace: {table: snapshot.table(namespace, table).properties["value"] for table in snapshot.tables(namespace)}
        for namespace in snapshot.namespaces()
    }


TestLakehouseMachine = LakehouseMachine.TestCase
TestLakehouseMachine.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)


@pytest.mark.soak
@pytest.mark.timeout(3600)
class TestLakehouseMachineLong(LakehouseMachine.TestCase):  # type: ignore[misc]
    """Runs 10,000 steps."""

    settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
