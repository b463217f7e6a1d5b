"""Change sets of transactions: saving and resuming preserves them, and a commit does not modify them."""

from __future__ import annotations

import copy

from hypothesis import given
from hypothesis import strategies as st

from trinitylake_ops import Lakehouse, TableDef
from trinitylake_ops.format.definitions import IsolationLevel, LakehouseDef, NamespaceDef, SavedTransaction
from trinitylake_ops.format.file_names import saved_transaction_path
from trinitylake_ops.format.keys import KeyCodec
from trinitylake_ops.transaction.change_set import ChangeSet
from trinitylake_ops.transaction.submission import Submission
from trinitylake_ops.transaction.transaction import Transaction
from trinitylake_ops.versions.commit_info import CommitInfo
from trinitylake_ops.versions.snapshot import Entry

_KEYS = KeyCodec(100, 100)
_ID = "7d1f3c5e-6f0a-4c1b-9a57-0a4d2c9e8b10"
_PATH = saved_transaction_path(_ID)
_NAMES = st.text("abc", min_size=1, max_size=3)
_PROPERTIES = st.dictionaries(_NAMES, _NAMES, max_size=2)
_NAMESPACES = st.sets(_NAMES, max_size=3)
_TABLES = st.tuples(_NAMES, _NAMES).map(lambda names: _KEYS.table_key(*names))


def _writes() -> st.SearchStrategy[dict[str, Entry | None]]:
    unchanged: st.SearchStrategy[Entry | None] = st.one_of(st.none(), _NAMES.map(lambda name: f"{name}.binpb"))
    namespaces = st.one_of(unchanged, _PROPERTIES.map(lambda properties: NamespaceDef(id=_ID, properties=properties)))
    tables = st.one_of(unchanged, _PROPERTIES.map(lambda properties: TableDef(id=_ID, properties=properties)))
    return st.builds(
        lambda namespaces, tables: {**namespaces, **tables},
        st.dictionaries(_NAMES.map(_KEYS.namespace_key), namespaces, max_size=3),
        st.dictionaries(_TABLES, tables, max_size=3),
    )


_CHANGES = st.builds(
    ChangeSet,
    writes=_writes(),
    definition=st.one_of(st.none(), _PROPERTIES.map(lambda properties: LakehouseDef(id=_ID, properties=properties))),
    relied_namespaces=_NAMESPACES,
    replaced_namespaces=_NAMESPACES,
    read_keys=st.sets(_TABLES, max_size=3),
    read_prefixes=_NAMESPACES,
    has_read_definition=st.booleans(),
)


@given(_CHANGES)
def test_resumed_changes_equal_saved_changes(changes: ChangeSet) -> None:
    identity = SavedTransaction(
        id=_ID, base_version=7, base_commit_id=_ID, begun_at_millis=1, isolation_level=IsolationLevel.SERIALIZABLE
    )
    data = changes.saved_in(identity).to_bytes(_PATH)
    assert ChangeSet.of_saved(SavedTransaction.from_bytes(data, _PATH), _PATH) == changes


@given(_CHANGES)
def test_reads_conflict_only_for_serializable_transactions(changes: ChangeSet) -> None:
    snapshot_footprint = changes.footprint(_KEYS, IsolationLevel.SNAPSHOT)
    serializable_footprint = changes.footprint(_KEYS, IsolationLevel.SERIALIZABLE)
    assert set(snapshot_footprint.writes) == set(serializable_footprint.writes) == set(changes.writes)
    keys, prefixes = set(serializable_footprint.keys), set(serializable_footprint.prefixes)
    assert keys - set(snapshot_footprint.keys) <= changes.read_keys <= keys
    assert prefixes - set(snapshot_footprint.prefixes) <= changes.read_prefixes <= prefixes


def test_commit_without_conflict_does_not_modify_changes(lake: Lakehouse) -> None:
    base = lake.snapshot()
    changes = ChangeSet(writes={base.keys.namespace_key("ns"): NamespaceDef(id=_ID, properties={"a": "b"})})
    writes = copy.deepcopy(changes.writes)
    submission = Submission(
        _ID, base, changes, IsolationLevel.SNAPSHOT, CommitInfo("create"), begun_at_ms=lake.storage.now_ms()
    )
    assert lake.commit_queue.commit(submission, max_attempts=1) == 1
    assert (changes.writes, changes.definition) == (writes, None)
    assert lake.snapshot().namespaces() == ["ns"]


def test_transaction_does_not_expose_commit_internals() -> None:
    public_names = {name for name in dir(Transaction) if not name.startswith("_")}
    assert public_names == {
        "add_file", "added_file", "alter_definition", "alter_namespace", "alter_table", "begun_at_ms", "commit",
        "create_namespace", "create_table", "backdate", "reset_age", "definition", "drop_namespace", "drop_table",
        "entry", "expect", "has_namespace", "has_table", "keys", "namespace", "namespace_at", "namespaces",
        "object_name", "prefix_keys", "put_staged", "require", "restore_entry", "resumed", "rollback", "save",
        "table", "table_at", "table_names", "tables",
    }  # fmt: skip
