"""Lakehouses for tests. At the end of a test, all versions of the lakehouses from the fixture are checked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers.gcs import GcsServer
from tests.servers.kinds import Server
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import VersionExpiredError
from trinitylake_ops.format.definitions import LakehouseDef, TableDef
from trinitylake_ops.format.file_names import HINT_PATH, ORPHAN_BARRIER_PATH, ROOT_PREFIX, TABLES_PREFIX, root_path
from trinitylake_ops.format.keys import TABLE_KEY_PREFIX, clock_reset
from trinitylake_ops.format.limits import smallest_node_file_limit_bytes
from trinitylake_ops.format.locations import is_uri
from trinitylake_ops.format.node_file import decode_node, encode_sealed_root
from trinitylake_ops.storage import (
    LocalStorage,
    MemoryStorage,
    Storage,
    background,
    drop_memory_root,
    open_storage,
)
from trinitylake_ops.tree.search import scan
from trinitylake_ops.tree.shape import check_tree, walk
from trinitylake_ops.versions.snapshot import Snapshot

DATA = Path(__file__).resolve().parent / "data"


def entries(lake: Lakehouse, version: int | str | None = None) -> dict[str, str]:
    """Return the locations of all objects in a version by key."""
    snapshot = lake.snapshot(version)
    return dict(scan(snapshot.files.nodes, snapshot.root))


def objects(snapshot: Snapshot) -> dict[tuple[str, ...], str]:
    """Read all definitions of a version. Return their ids by (namespace,) or (namespace, table)."""
    ids: dict[tuple[str, ...], str] = {}
    for namespace in snapshot.namespaces():
        ids[(namespace,)] = snapshot.namespace(namespace).id
        for table in snapshot.tables(namespace):
            ids[(namespace, table)] = snapshot.table(namespace, table).id
    return ids


def check_version(lake: Lakehouse, version: int) -> Snapshot:
    """Assert the invariants of one version: a valid tree and readable definitions."""
    snapshot = lake.snapshot(version)
    assert check_tree(lake.files.nodes, snapshot.root, snapshot.location, snapshot.limits) == []
    objects(snapshot)
    return snapshot


def check_lake(lake: Lakehouse) -> None:
    """Assert the invariants of every version, with empty caches.

    Each definition is read once, because definitions are immutable. Creation times increase strictly, except at
    versions that set the clock back.
    """
    lake = Lakehouse(lake.storage, lake.storage_options)
    before: Snapshot | None = None
    read: set[tuple[str, str]] = set()
    for version in range(lake.latest_version() + 1):
        try:
            snapshot = lake.snapshot(version)
        except VersionExpiredError:
            continue
        assert check_tree(lake.files.nodes, snapshot.root, snapshot.location, snapshot.limits) == []
        for key, location in set(scan(lake.files.nodes, snapshot.root)) - read:
            if key.startswith(TABLE_KEY_PREFIX):
                assert snapshot.has_namespace(snapshot.object_name(key).namespace)
                snapshot.table_at(location)
            else:
                snapshot.namespace_at(location)
            read.add((key, location))
        if before is not None and snapshot.created_at_ms <= before.created_at_ms:
            assert (clock_reset(snapshot.root.system, version) or 0) > before.version
        before = snapshot


def reachable_paths(lake: Lakehouse) -> set[str]:
    """Return the paths of all files that are reachable from a version, including roots."""
    paths: set[str] = set()
    for version in range(lake.latest_version() + 1):
        snapshot = lake.snapshot(version)
        paths |= {snapshot.location, snapshot.definition_location}
        for visited in walk(lake.files.nodes, snapshot.root, snapshot.location):
            values = [*visited.node.values, *visited.node.buffer.values()]
            paths |= {visited.location, *(value for value in values if value is not None)}
    return {path for path in paths if not is_uri(path)}


def allowing(lake: Lakehouse, *external_roots: Path | str) -> Lakehouse:
    """Return the same lakehouse with read access to other folders or roots."""
    roots = " ".join(
        external_root if isinstance(external_root, str) else f"file://{external_root}/"
        for external_root in external_roots
    )
    return Lakehouse(lake.storage, {**lake.storage_options, "allowed_roots": roots})


def unreferenced_paths(lake: Lakehouse) -> set[str]:
    """Return the paths of files that are not reachable from any version.

    There are none after a commit has succeeded or failed.
    """
    background.drain()
    stored = {info.path for info in lake.storage.list() if not info.path.startswith(TABLES_PREFIX)}
    return stored - reachable_paths(lake) - {HINT_PATH, ORPHAN_BARRIER_PATH}


def listed(storage: Storage) -> set[str]:
    """Wait for background work and return the paths of all files."""
    background.drain()
    return {info.path for info in storage.list()}


def roots(storage: Storage) -> set[str]:
    return {info.path for info in storage.list(ROOT_PREFIX) if info.path.endswith(".arrow")}


def expected_objects(fixture: str) -> dict[int, tuple[int, set[tuple[str, ...]]]]:
    """Return the creation time in ms and the objects of each version of a lakehouse in ``tests/data``."""
    expected = json.loads((DATA / f"{fixture}.expected.json").read_text())
    return {
        int(version): (content["created_at_millis"], {tuple(name) for name in content["objects"]})
        for version, content in expected["versions"].items()
    }


class Lakes:
    """Creates lakehouses, on a server if one is configured, and checks all of them at the end of a test."""

    def __init__(self, folder: Path, server: Server | None = None):
        self.folder = folder
        self.server = server
        self._lakes_to_check: list[Lakehouse] = []
        self._memory_roots: list[str] = []
        self._server_roots: list[str] = []
        self._named_roots: dict[str, str] = {}

    def local(self, name: str = "lake", *, fsync: bool = False, is_watched: bool = True, **fields: Any) -> Lakehouse:
        """Create a lakehouse in a folder. With ``is_watched=False``, its versions are not checked at the end."""
        if self.server is not None:
            lake = self._on_server(self.server, name, **fields)
        else:
            lake = Lakehouse.create(str(self.folder / name), {"fsync": "true" if fsync else "false"}, **fields)
        return self.watch(lake) if is_watched else lake

    def memory(self, name: str = "lake", **fields: Any) -> Lakehouse:
        """Create a lakehouse in memory that only this test uses."""
        if self.server is not None:
            return self.watch(self._on_server(self.server, name, **fields))
        storage = self.storage(name)
        return self.watch(Lakehouse.create(storage.root, storage=storage, **fields))

    def storage(self, name: str = "lake") -> Storage:
        """Return an empty storage in memory that only this test uses."""
        if self.server is not None:
            return open_storage(self._server_root(self.server, name), self.server.storage_options)
        root = f"memory://{self.folder.name}-{name}/"
        self._memory_roots.append(root)
        return MemoryStorage(root)

    def named_root(self, name: str) -> str:
        """Return a root in memory or on the server. The same name returns the same root."""
        if name not in self._named_roots:
            self._named_roots[name] = self.storage(name).root
        return self._named_roots[name]

    def drop(self, root: str) -> None:
        """Delete all files below a root of :meth:`named_root`."""
        if self.server is None:
            drop_memory_root(root)
        else:
            self.server.delete_all(root)

    def root(self, name: str) -> str:
        """Return an unused root, in a folder or on the server."""
        return f"file://{self.folder}/{name}/" if self.server is None else self._server_root(self.server, name)

    def _on_server(self, server: Server, name: str, **fields: Any) -> Lakehouse:
        return Lakehouse.create(self._server_root(server, name), server.storage_options, **fields)

    def _server_root(self, server: Server, name: str) -> str:
        root = server.fresh_root(name)
        self._server_roots.append(root)
        return root

    def watch(self, lake: Lakehouse) -> Lakehouse:
        """Also check this lakehouse at the end of the test."""
        self._lakes_to_check.append(Lakehouse(lake.storage))
        return lake

    def finish(self) -> None:
        try:
            for lake in self._lakes_to_check:
                check_lake(lake)
        finally:
            for root in self._memory_roots:
                drop_memory_root(root)
            for root in self._server_roots:
                if self.server is not None:
                    self.server.delete_all(root)


@pytest.fixture
def lakes(tmp_path: Path, lakes_server: Server | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lakes]:
    """Lakehouses whose invariants are checked in every version at the end of the test.

    If a server is configured, its environment variables are set, so that tests can open its roots without options.
    """
    if lakes_server is not None:
        for name, value in lakes_server.environment.items():
            monkeypatch.setenv(name, value)
    if isinstance(lakes_server, GcsServer):  # no default credentials are available, and the emulator needs none
        import google.auth
        from google.auth.credentials import AnonymousCredentials

        monkeypatch.setattr(google.auth, "default", lambda *_, **__: (AnonymousCredentials(), None))
    fixture_lakes = Lakes(tmp_path, lakes_server)
    yield fixture_lakes
    fixture_lakes.finish()


@pytest.fixture
def lake(lakes: Lakes) -> Lakehouse:
    """A lakehouse in memory with order 4 and small nodes."""
    sizes = {"order": 4, "namespace_name_max_size_bytes": 16, "table_name_max_size_bytes": 16}
    limit_bytes = smallest_node_file_limit_bytes(LakehouseDef(id="", **sizes))
    return lakes.memory(node_file_max_size_bytes=limit_bytes, **sizes)


def local_storage(folder: Path) -> LocalStorage:
    return LocalStorage(f"file://{folder}/", fsync=False)


def table(**properties: str) -> TableDef:
    """Return a small table definition."""
    return TableDef(properties=properties)


def seal(lake: Lakehouse, version: int) -> None:
    """Overwrite a root with a sealed one, as a purge does."""
    path = root_path(version)
    root = decode_node(lake.storage.read(path), path)
    lake.storage.write(path, encode_sealed_root(root.system, root.created_at_ms + 1))
