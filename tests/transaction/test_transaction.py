"""Single transactions: reading their own writes, typed errors, the end of a transaction, size limits and threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.lakes import Lakes, check_lake, listed, objects, table, unreferenced_paths
from trinitylake_ops import Lakehouse, TableDef
from trinitylake_ops.errors import (
    CommitAttemptsExhaustedError,
    CommitConflictError,
    ConflictError,
    InvalidDefinitionError,
    InvalidInputError,
    InvalidNameError,
    NamespaceNotEmptyError,
    NamespaceNotFoundError,
    ObjectExistsError,
    TableNotFoundError,
    TrinityLakeError,
)
from trinitylake_ops.format.definitions import Column, DataType, Schema
from trinitylake_ops.format.file_names import new_table_path
from trinitylake_ops.format.limits import smallest_node_file_limit_bytes
from trinitylake_ops.storage import MeteredStorage
from trinitylake_ops.transaction.transaction import Transaction

pytestmark = pytest.mark.usefixtures("fixed_requests")


@pytest.fixture
def filled_lake(lake: Lakehouse) -> Lakehouse:
    """A lakehouse with the tables ``ns.a`` and ``ns.b`` and the empty namespace ``free`` at version 1."""
    with lake.transaction() as txn:
        txn.create_namespace("ns", {"owner": "me"})
        txn.create_namespace("free")
        txn.create_table("ns", "a", table(name="a"))
        txn.create_table("ns", "b", table(name="b"))
    return lake


# Reading a transaction's own writes


def test_own_writes_are_visible_only_to_transaction(filled_lake: Lakehouse) -> None:
    txn = filled_lake.transaction()
    created = txn.create_namespace("new", {"x": "y"})
    assert txn.namespace("new") == created
    assert txn.has_namespace("new")
    assert txn.namespaces() == ["free", "new", "ns"]
    assert txn.tables("new") == []
    new_table = txn.create_table("new", "t", table(n="1"))
    assert new_table.id
    assert txn.table("new", "t") == new_table
    assert txn.has_table("new", "t")
    assert txn.tables("new") == ["t"]
    altered = txn.alter_table("new", "t", table(n="2"))
    assert altered.id == new_table.id
    assert txn.table("new", "t").properties == {"n": "2"}
    assert txn.alter_namespace("ns", {"owner": "you"}).id == filled_lake.snapshot().namespace("ns").id
    assert txn.namespace("ns").properties == {"owner": "you"}
    txn.drop_table("ns", "a")
    assert not txn.has_table("ns", "a")
    assert txn.tables("ns") == txn.table_names("ns").to_pylist() == ["b"]
    with pytest.raises(TableNotFoundError):
        txn.table("ns", "a")
    recreated = txn.create_table("ns", "a", table(n="3"))
    assert txn.table("ns", "a") == recreated
    txn.drop_namespace("ns", cascade=True)
    assert not txn.has_namespace("ns")
    assert not txn.has_table("ns", "a")
    assert txn.namespaces() == ["free", "new"]
    for read in (txn.tables, txn.table_names):
        with pytest.raises(NamespaceNotFoundError):
            read("ns")
    with pytest.raises(NamespaceNotFoundError):
        txn.table("ns", "b")
    assert objects(filled_lake.snapshot()).keys() == {("ns",), ("free",), ("ns", "a"), ("ns", "b")}
    assert txn.commit() == 2
    assert objects(filled_lake.snapshot()).keys() == {("free",), ("new",), ("new", "t")}
    assert filled_lake.snapshot().table("new", "t") == altered


def test_transaction_reads_its_base(filled_lake: Lakehouse) -> None:
    txn = filled_lake.transaction()
    with filled_lake.transaction() as other:
        other.create_namespace("other")
        other.drop_table("ns", "a")
    assert not txn.has_namespace("other")
    assert txn.tables("ns") == ["a", "b"]


def test_definitions_are_read_back_unchanged(lake: Lakehouse) -> None:
    columns = (
        Column(id=1, name="id", type=DataType.INT8, nullable=False),
        Column(id=2, name="tags", type=DataType.LIST, list_element=Column(id=3, name="x", type=DataType.VARCHAR)),
    )
    definition = TableDef(
        id="my-own-id",
        schema=Schema(columns=columns),
        primary_keys=(1,),
        table_type="EXTERNAL",
        table_format="ICEBERG",
        format_properties={"metadata_location": "s3://elsewhere/x"},
        properties={"é": "航班"},
    )
    with lake.transaction() as txn:
        txn.create_namespace("ns", {"a": ""})
        txn.create_table("ns", "t", definition)
    snapshot = Lakehouse.open(lake.root, storage=lake.storage).snapshot()
    assert snapshot.table("ns", "t") == definition
    assert snapshot.namespace("ns").properties == {"a": ""}


def test_names_are_ordered_by_utf8_bytes(lake: Lakehouse) -> None:
    names = ["é", "a", "Z", "航", "b1", "b", "🦆", "~", "!"]
    with lake.transaction() as txn:
        for name in names:
            txn.create_namespace(name)
            txn.create_table(name, "t" + name, table())
    snapshot = lake.snapshot()
    assert snapshot.namespaces() == sorted(names, key=str.encode)
    assert [snapshot.tables(name) for name in names] == [["t" + name] for name in names]


# Typed errors

ERRORS: list[tuple[type[TrinityLakeError], Callable[[Transaction], Any]]] = [
    (ObjectExistsError, lambda txn: txn.create_namespace("ns")),
    (ObjectExistsError, lambda txn: txn.create_table("ns", "a", table())),
    (NamespaceNotFoundError, lambda txn: txn.namespace("none")),
    (NamespaceNotFoundError, lambda txn: txn.tables("none")),
    (NamespaceNotFoundError, lambda txn: txn.table("none", "a")),
    (NamespaceNotFoundError, lambda txn: txn.alter_namespace("none", {})),
    (NamespaceNotFoundError, lambda txn: txn.drop_namespace("none")),
    (NamespaceNotFoundError, lambda txn: txn.create_table("none", "a", table())),
    (NamespaceNotFoundError, lambda txn: txn.alter_table("none", "a", table())),
    (NamespaceNotFoundError, lambda txn: txn.drop_table("none", "a")),
    (TableNotFoundError, lambda txn: txn.table("ns", "none")),
    (TableNotFoundError, lambda txn: txn.alter_table("ns", "none", table())),
    (TableNotFoundError, lambda txn: txn.drop_table("ns", "none")),
    (NamespaceNotEmptyError, lambda txn: txn.drop_namespace("ns")),
    (InvalidNameError, lambda txn: txn.create_namespace("a b")),
    (InvalidNameError, lambda txn: txn.create_namespace("")),
    (InvalidNameError, lambda txn: txn.create_namespace("x" * 17)),
    (InvalidNameError, lambda txn: txn.has_namespace("a\n")),
    (InvalidNameError, lambda txn: txn.has_table("ns", "")),
    (InvalidNameError, lambda txn: txn.create_table("ns", "\ud800", table())),
    (InvalidNameError, lambda txn: txn.create_table("a b", "t", table())),
    (InvalidNameError, lambda txn: txn.drop_table("ns", "é" * 9)),
    (InvalidDefinitionError, lambda txn: txn.create_table("ns", "t", TableDef(primary_keys=(1,)))),
    (InvalidDefinitionError, lambda txn: txn.create_table("ns", "t", TableDef(id="a/b"))),
    (InvalidDefinitionError, lambda txn: txn.create_table("ns", "t", TableDef(id=".."))),
    (InvalidDefinitionError, lambda txn: txn.create_table("ns", "t", TableDef(properties={"a": 1}))),  # type: ignore[dict-item]
    (InvalidDefinitionError, lambda txn: txn.alter_table("ns", "a", TableDef(properties={"a": "\ud800"}))),
    (InvalidDefinitionError, lambda txn: txn.alter_table("ns", "a", TableDef(id="another"))),
    (InvalidDefinitionError, lambda txn: txn.create_namespace("new", {"a": None})),  # type: ignore[dict-item]
    (InvalidDefinitionError, lambda txn: txn.alter_namespace("ns", {1: "a"})),  # type: ignore[dict-item]
    (InvalidInputError, lambda txn: txn.commit(max_attempts=0)),
]


@pytest.mark.local_only("fails before any request")
@pytest.mark.parametrize(("error_type", "change"), ERRORS)
def test_rejected_change_leaves_transaction_unchanged(
    filled_lake: Lakehouse, error_type: type[TrinityLakeError], change: Callable[[Transaction], Any]
) -> None:
    before = objects(filled_lake.snapshot())
    with filled_lake.transaction() as txn:
        with pytest.raises(error_type) as caught:
            change(txn)
        assert caught.type is error_type
        assert len(str(caught.value).splitlines()) == 1
    assert txn.committed_version == 1, "no change, no commit"
    assert objects(filled_lake.snapshot()) == before
    assert unreferenced_paths(filled_lake) == set()


def test_snapshots_raise_same_errors_as_transactions(filled_lake: Lakehouse) -> None:
    snapshot = filled_lake.snapshot()
    with pytest.raises(NamespaceNotFoundError):
        snapshot.tables("none")
    with pytest.raises(TableNotFoundError):
        snapshot.table("ns", "none")
    with pytest.raises(InvalidNameError):
        snapshot.namespace("a b")


def test_unknown_isolation_and_too_long_text_are_rejected(lake: Lakehouse) -> None:
    with pytest.raises(InvalidInputError, match="'chaos'"):
        lake.transaction(isolation="chaos")
    for arguments in ({"message": "x" * 5000}, {"properties": {"k": "é" * 2100}}, {"run_id": "r" * 4096}):
        with pytest.raises(InvalidInputError, match="4096"):
            lake.transaction(**arguments)
    with pytest.raises(InvalidInputError):
        lake.transaction(message="\ud800")
    assert lake.latest_version() == 0


@pytest.mark.local_only("commits sixty times to find a size limit that is the same on every storage")
def test_too_long_commit_info_is_rejected_without_files(lake: Lakehouse) -> None:
    lengths = range(3600, 4096, 8)
    for length in lengths:
        before = lake.latest_version()
        try:
            with lake.transaction(message="x" * length) as txn:
                txn.create_namespace(f"n{length}")
        except InvalidInputError:
            assert lake.latest_version() == before
            assert unreferenced_paths(lake) == set()
        else:
            assert next(lake.history(1)).message == "x" * length
    assert 0 < lake.latest_version() < len(lengths)


# The end of a transaction


def test_exception_in_block_discards_changes(filled_lake: Lakehouse) -> None:
    before = listed(filled_lake.storage)
    with pytest.raises(ZeroDivisionError), filled_lake.transaction() as txn:
        txn.create_namespace("new")
        _ = 1 / 0
    assert txn.committed_version is None
    assert listed(filled_lake.storage) == before


def test_changes_that_cancel_out_commit_nothing(filled_lake: Lakehouse) -> None:
    metered = MeteredStorage(filled_lake.storage)
    with Lakehouse(metered).transaction() as txn:
        txn.create_namespace("new")
        txn.create_table("new", "t", table())
        txn.drop_namespace("new", cascade=True)
    assert txn.committed_version == 1
    assert set(metered.snapshot().requests) == {"read"}


def test_ended_transaction_rejects_further_calls(filled_lake: Lakehouse) -> None:
    txn = filled_lake.transaction()
    txn.create_namespace("new")
    txn.commit()
    for change in (txn.commit, lambda: txn.create_namespace("more"), lambda: txn.drop_table("ns", "a"), txn.__enter__):
        with pytest.raises(ConflictError):
            change()
    rolled_back = filled_lake.transaction()
    rolled_back.create_namespace("never")
    rolled_back.rollback()
    with pytest.raises(ConflictError):
        rolled_back.commit()
    assert not filled_lake.snapshot().has_namespace("never")


def test_commit_inside_block_ends_transaction(filled_lake: Lakehouse) -> None:
    with filled_lake.transaction() as txn:
        txn.create_namespace("new")
        version = txn.commit()
    assert (version, txn.committed_version, filled_lake.latest_version()) == (2, 2, 2)


# Sizes


@pytest.mark.local_only("tests size limits, which are the same on every storage")
@pytest.mark.parametrize("order", [3, 4, 128])
@pytest.mark.parametrize("char", ["x", "é", "𠮷"])
def test_smallest_node_limit_fits_full_size_names(lakes: Lakes, order: int, char: str) -> None:
    sizes = {"namespace_name_max_size_bytes": 40, "table_name_max_size_bytes": 60, "file_path_max_size_bytes": 160}
    definition = Lakehouse.create(f"memory://probe-{order}-{ord(char)}/", order=order, **sizes).snapshot().definition
    limit_bytes = smallest_node_file_limit_bytes(definition)
    with pytest.raises(InvalidDefinitionError, match=f"at least {limit_bytes}$"):
        lakes.memory("rejected", order=order, node_file_max_size_bytes=limit_bytes - 1, **sizes)
    lake = lakes.memory("accepted", order=order, node_file_max_size_bytes=limit_bytes, **sizes)
    width = len(char.encode())

    def full_size_name(stem: str, size_bytes: int) -> str:
        chars = (size_bytes - len(stem)) // width
        return stem + char * chars + "x" * (size_bytes - len(stem) - chars * width)

    namespace = full_size_name("ns", 40)
    names = [full_size_name(f"{number:04d}", 60) for number in range(300)]
    message = "m" * 3500
    with lake.transaction(message=message) as txn:
        txn.create_namespace(namespace)
        for name in names[:250]:
            txn.create_table(namespace, name, table())
    for name in names[250:260]:
        with lake.transaction(message=message) as txn:
            txn.create_table(namespace, name, table())
    for name in [*names[:4], *names[205:209]]:
        with lake.transaction(message=message) as txn:
            txn.drop_table(namespace, name)
    with lake.transaction(message=message) as txn:
        for name in names[10:200]:
            txn.drop_table(namespace, name)
        txn.create_table(namespace, names[290], table())
    assert lake.snapshot().tables(namespace) == [*names[4:10], *names[200:205], *names[209:260], names[290]]
    sizes_bytes = {info.path: info.size_bytes for info in lake.storage.list() if info.path.endswith(".arrow")}
    assert max(sizes_bytes.values()) <= limit_bytes
    paths = [path for path in listed(lake.storage) if "-table-" in path]
    path_length = len(new_table_path(namespace, names[0], 1_000))  # each non-ASCII letter takes one byte
    assert {len(path.encode()) for path in paths} == {min(160, path_length)}


def test_two_hundred_tables_are_created_and_dropped_in_transactions(lakes: Lakes) -> None:
    lake = lakes.memory(order=5)
    names = [f"table-{number}" for number in range(200)]
    with lake.transaction() as txn:
        txn.create_namespace("ns")
        for name in names:
            txn.create_table("ns", name, table())
    assert lake.snapshot().tables("ns") == sorted(names)
    with lake.transaction() as txn:
        for name in names[::2]:
            txn.alter_table("ns", name, table(changed="yes"))
        for name in names[1::2]:
            txn.drop_table("ns", name)
    assert lake.snapshot().tables("ns") == sorted(names[::2])
    assert {lake.snapshot().table("ns", name).properties["changed"] for name in names[::2]} == {"yes"}
    with lake.transaction() as txn:
        txn.drop_namespace("ns", cascade=True)
    assert lake.snapshot().namespaces() == []
    assert lake.snapshot(1).tables("ns") == sorted(names), "older versions are unchanged"
    assert unreferenced_paths(lake) == set()


# Threads


def run_threads(actions: list[Callable[[], None]]) -> None:
    failures: list[BaseException] = []

    def record_failure(action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread of the test
            failures.append(error)

    threads = [threading.Thread(target=record_failure, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_commits_of_concurrent_threads_are_kept(lakes: Lakes) -> None:
    lake = lakes.local(order=4)
    with lake.transaction() as txn:
        txn.create_namespace("ns")

    def action(worker: int) -> None:
        for number in range(12):
            with lake.transaction() as txn:
                txn.create_table("ns", f"w{worker}-{number}", table())

    run_threads([lambda worker=worker: action(worker) for worker in range(4)])  # type: ignore[misc]
    assert len(lake.snapshot().tables("ns")) == 48
    members = [member for info in lake.history() for member in info.members]
    assert len(members) == len(set(members)) == 49
    assert 1 + 48 / 4 <= lake.latest_version() <= 49, "waiting transactions share versions"
    assert unreferenced_paths(lake) == set()


def test_concurrent_threads_on_one_table_conflict_or_commit(lakes: Lakes) -> None:
    lake = lakes.memory(order=4)
    with lake.transaction() as txn:
        txn.create_namespace("ns")
        txn.create_table("ns", "t", table(n="0"))
    versions: list[int] = []

    def action() -> None:
        for _ in range(10):
            txn = lake.transaction()
            number = int(txn.table("ns", "t").properties["n"])
            txn.alter_table("ns", "t", table(n=str(number + 1)))
            try:
                versions.append(txn.commit())
            except CommitConflictError:
                continue

    run_threads([action] * 4)
    assert len(set(versions)) == len(versions)
    assert lake.latest_version() == 1 + len(versions)
    assert lake.snapshot().table("ns", "t").properties == {"n": str(len(versions))}, "no increment is lost"


def test_commit_fails_after_max_attempts(filled_lake: Lakehouse) -> None:
    txn = filled_lake.transaction()
    txn.create_namespace("ours")
    with Lakehouse(filled_lake.storage).transaction() as other:
        other.create_namespace("theirs")
    with pytest.raises(CommitAttemptsExhaustedError):
        txn.commit(max_attempts=1)
    assert filled_lake.snapshot().namespaces() == ["free", "ns", "theirs"]
    assert unreferenced_paths(filled_lake) == set()
    check_lake(filled_lake)
