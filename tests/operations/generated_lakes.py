"""Random lakehouses, and lists of their nodes and definitions."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.lakes import table
from tests.operations.changes import append_rows, small_sizes
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.format.node_file import NodeFile
from trinitylake_ops.storage import MemoryStorage, drop_memory_root
from trinitylake_ops.tree.shape import VisitedNode, walk

ROOT = "memory://generated/"


def random_step(lake: Lakehouse, rng: random.Random) -> None:
    """Run a random operation that leaves the lakehouse intact."""
    snapshot = lake.snapshot()
    names = snapshot.namespaces()
    tables = [(ns, name) for ns in names for name in snapshot.tables(ns)]
    kind = rng.choice(
        ["many", "many", "alter", "drop", "drop-namespace", "rollback", "subset", "export", "drop-export"]
    )
    with lake.transaction(message="m" * rng.choice([1, 3_400])) as txn:
        if kind == "many" or not tables:
            name = f"n{rng.randrange(6)}"
            if not txn.has_namespace(name):
                txn.create_namespace(name)
            for number in rng.sample(range(20), rng.randrange(1, 12)):
                if not txn.has_table(name, f"t{number}"):
                    txn.create_table(name, f"t{number}", table())
        elif kind in ("alter", "drop"):
            for ns, name in rng.sample(tables, rng.randrange(1, len(tables) + 1)):
                txn.alter_table(ns, name, table(x="y")) if kind == "alter" else txn.drop_table(ns, name)
    if kind == "drop-namespace" and names:
        operations.plan_drop_namespace(lake, rng.choice(names), cascade=True).execute()
    elif kind == "rollback":
        operations.rollback(lake, rng.randrange(lake.latest_version() + 1), message="m" * rng.choice([1, 3_400]))
    elif kind == "subset" and names:
        operations.rollback(lake, rng.randrange(lake.latest_version() + 1), [rng.choice(names)])
    elif kind == "export":
        name = f"e{lake.latest_version()}"
        operations.plan_export(lake, name, version=rng.randrange(lake.latest_version() + 1)).execute()
    elif kind == "drop-export" and (exports := operations.list_exports(lake)):
        operations.drop_export(lake, rng.choice(exports).name)


@functools.cache
def generated_files(seed: int) -> dict[str, bytes]:
    """Return path -> bytes of all files after a few random steps, with a managed table of two snapshots."""
    rng = random.Random(seed)
    order = rng.choice([3, 4, 5, 8])
    with memory_lake({}) as storage:
        lake = Lakehouse.create(ROOT, storage=storage, order=order, **small_sizes(order))
        for _ in range(rng.randrange(3, 8)):
            random_step(lake, rng)
        for _ in range(2):
            append_rows(lake, "managed.t")
        with lake.transaction(message="m" * 3_400) as txn:  # a tree of several levels
            txn.create_namespace("last")
            for number in range(12):
                txn.create_table("last", f"t{number}", table())
        lake.close()
        return {info.path: storage.read(info.path) for info in storage.list()}


@contextmanager
def memory_lake(files: dict[str, bytes]) -> Iterator[MemoryStorage]:
    """Yield a memory storage with these files at their original root, because Iceberg's paths are absolute."""
    drop_memory_root(ROOT)
    storage = MemoryStorage(ROOT)
    for path, data in files.items():
        storage.create(path, data)
    try:
        yield storage
    finally:
        drop_memory_root(ROOT)


@dataclass(frozen=True)
class ReachedNode:
    """A node, and the first version that reaches it."""

    version: int
    visited: VisitedNode

    @property
    def path(self) -> str:
        return self.visited.location

    @property
    def node(self) -> NodeFile:
        return self.visited.node


def nodes_of(lake: Lakehouse) -> list[ReachedNode]:
    """Return each reachable node once, including roots."""
    nodes: dict[str, ReachedNode] = {}
    for version in range(lake.latest_version() + 1):
        snapshot = lake.snapshot(version)
        for visited in walk(lake.files.nodes, snapshot.root, snapshot.location):
            nodes.setdefault(visited.location, ReachedNode(version, visited))
    return list(nodes.values())


def definitions_of(lake: Lakehouse) -> list[str]:
    """Return the paths of all definitions that versions use, including lakehouse definitions."""
    paths: dict[str, None] = {}
    for version in range(lake.latest_version() + 1):
        snapshot = lake.snapshot(version)
        paths[snapshot.definition_location] = None
        for namespace in snapshot.namespaces():
            for key in (
                snapshot.keys.namespace_key(namespace),
                *(snapshot.keys.table_key(namespace, name) for name in snapshot.tables(namespace)),
            ):
                location = snapshot.entry(key)
                assert location is not None
                paths[location] = None
    return list(paths)
