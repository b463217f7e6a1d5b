"""Random changes of a tree, compared with a dict. Invariants are checked after each step."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from tests.tree.trees import Tree
from trinitylake_ops.format.node_file import NodeFile, decode_node, encode_node
from trinitylake_ops.tree.diff import diff_in_parts, diff_trees
from trinitylake_ops.tree.node import TreeLimits
from trinitylake_ops.tree.search import get, prefix_keys, scan
from trinitylake_ops.tree.shape import check_tree, measure_tree

_letters = st.sampled_from(["a", "b", "é", "航", "🦆", "~", "\uffff"])
# A small set of names, so that steps often use the same names, but large enough for trees of several levels.
names = st.tuples(_letters, st.integers(0, 30), _letters | st.just("")).map(
    lambda parts: f"{parts[0]}{parts[1]:02d}{parts[2]}"
)
values = st.integers(0, 99).map(str) | st.just("v" * 60)
messages = st.none() | values
State = tuple[NodeFile, dict[str, str]]


class TreeMachine(RuleBasedStateMachine):
    """Applies the same changes to a tree and to a dict. Earlier states must stay readable."""

    earlier = Bundle("earlier")

    @initialize(
        order=st.integers(3, 16) | st.sampled_from([32, 128]),
        buffer_target_bytes=st.sampled_from([0, 40, 200, 1_000, 10**6]),
        extra_bytes=st.sampled_from([0, 300, 1_500, 10**6]),
    )
    def start(self, order: int, buffer_target_bytes: int, extra_bytes: int) -> None:
        # The smallest limit fits a full node with the longest names of this test, and one message.
        smallest_bytes = 1_400 + order * 150
        self.tree = Tree(
            order, node_file_max_size_bytes=smallest_bytes + extra_bytes, buffer_target_bytes=buffer_target_bytes
        )

    @rule(name=names, value=values)
    def put(self, name: str, value: str) -> None:
        self.tree.apply({name: value})

    @rule(name=names)
    def delete(self, name: str) -> None:
        self.tree.apply({name: None})

    @rule(data=st.data())
    def delete_existing(self, data: st.DataObject) -> None:
        if self.tree.model:
            self.tree.apply({data.draw(st.sampled_from(sorted(self.tree.model))): None})

    @rule(batch=st.dictionaries(names, messages, max_size=40))
    def change_many(self, batch: dict[str, str | None]) -> None:
        self.tree.apply(batch)

    @rule(batch=st.dictionaries(names, values, min_size=30, max_size=80))
    def put_many(self, batch: dict[str, str]) -> None:
        self.tree.apply(batch)

    @rule(lower=names, upper=names)
    def delete_range(self, lower: str, upper: str) -> None:
        self.tree.apply({name: None for name in self.tree.model if lower <= name < upper})

    @rule()
    def delete_root_keys(self) -> None:
        self.tree.apply(dict.fromkeys(self.tree.root.keys))

    @rule(buffer_target_bytes=st.sampled_from([0, 100, 10**6]))
    def continue_as_another_writer(self, buffer_target_bytes: int) -> None:
        """Encode and decode the root, because another writer reads it. Each writer chooses its buffer target."""
        limits = self.tree.limits
        self.tree.limits = TreeLimits(limits.order, limits.node_file_max_size_bytes, buffer_target_bytes)
        self.tree.root = decode_node(encode_node(self.tree.root, limits.order), "root")

    @rule()
    def compact(self) -> None:
        self.tree.compact()
        assert measure_tree(self.tree.store(), self.tree.root, "root", self.tree.limits).messages == 0

    @rule(target=earlier)
    def remember_state(self) -> State:
        return self.tree.root, dict(self.tree.model)

    @rule(state=earlier)
    def compare_with_earlier_state(self, state: State) -> None:
        root, model = state
        current = self.tree.model
        assert scan(self.tree.store(), root) == sorted(model.items()), "an earlier state is unchanged"
        expected = [
            (name, model.get(name), current.get(name))
            for name in sorted(model.keys() | current.keys())
            if model.get(name) != current.get(name)
        ]
        changes = diff_trees(self.tree.store(), root, self.tree.root)
        assert [(change.key, change.before, change.after) for change in changes] == expected
        assert [change for part in diff_in_parts(self.tree.store(), root, self.tree.root) for change in part] == changes

    @rule(state=earlier)
    def restore_earlier_state(self, state: State) -> None:
        self.tree.root, self.tree.model = state[0], dict(state[1])

    @rule(name=names)
    def look_up(self, name: str) -> None:
        assert get(self.tree.store(), self.tree.root, name) == self.tree.model.get(name)

    @rule(lower=st.none() | names, upper=st.none() | names)
    def scan_range(self, lower: str | None, upper: str | None) -> None:
        expected = [
            entry
            for entry in sorted(self.tree.model.items())
            if (lower is None or entry[0] >= lower) and (upper is None or entry[0] < upper)
        ]
        assert scan(self.tree.store(), self.tree.root, lower, upper) == expected

    @rule(prefix=_letters | names)
    def scan_prefix(self, prefix: str) -> None:
        expected = [key for key in sorted(self.tree.model) if key.startswith(prefix)]
        assert prefix_keys(self.tree.store(), self.tree.root, prefix).to_pylist() == expected

    @invariant()
    def tree_is_valid(self) -> None:
        if hasattr(self, "tree"):
            assert check_tree(self.tree.store(), self.tree.root, "root", self.tree.limits) == []

    def teardown(self) -> None:
        if hasattr(self, "tree"):
            self.tree.close()


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.soak
@pytest.mark.timeout(3600)
class TestTreeMachineLong(TreeMachine.TestCase):  # type: ignore[misc]
    """Runs 10,000 steps."""

    settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
