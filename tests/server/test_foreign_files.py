"""Commits and scans of a table whose snapshots refer to files of another table."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.manifest import DataFile, ManifestEntryStatus, ManifestFile
from pyiceberg.table import Table
from pyiceberg.types import LongType

from tests.foreign_files import (
    commit_unchecked,
    data_files_of,
    manifests_of,
    snapshot_of,
    updates_of,
    write_list_file,
    write_manifest_of,
)
from tests.lakes import Lakes, allowing
from tests.server.live_server import LiveServer, Response, serving, settings_for
from tests.server.request_bodies import TABLE, TABLES, commit_of
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.iceberg import catalog_at, new_files
from trinitylake_ops.iceberg.io.file_io import writing_io

ROWS = pa.table({"id": pa.array([424242, 777777], pa.int64())})
FORBIDDEN = (403, "ForbiddenException")
ADDED, EXISTING, DELETED = ManifestEntryStatus.ADDED, ManifestEntryStatus.EXISTING, ManifestEntryStatus.DELETED


@pytest.fixture
def lake(lake: Lakehouse) -> Lakehouse:
    """A lakehouse with two tables, of which ``secret.s`` has rows."""
    catalog = catalog_at(lake)
    for namespace in ("ns", "secret"):
        catalog.create_namespace(namespace)
    catalog.create_table("ns.t", ROWS.schema)
    catalog.create_table("secret.s", ROWS.schema).append(ROWS)
    return lake


def table_of(lake: Lakehouse, name: str = "ns.t") -> Table:
    return catalog_at(lake).load_table(name)


def commit(server: LiveServer, lake: Lakehouse, manifests: list[ManifestFile], snapshot_id: int = 11) -> Response:
    """Request a commit of a snapshot with manifests, whose parent is the current snapshot."""
    table = table_of(lake)
    manifest_list = write_list_file(writing_io(lake), table, manifests, snapshot_id)
    parent_id = table.metadata.current_snapshot_id
    return server.request(
        "POST", TABLE, commit_of(*updates_of(snapshot_of(table, snapshot_id, manifest_list, parent_id)))
    )


def with_path(file: DataFile, path: str) -> DataFile:
    file._data[1] = path
    assert file.file_path == path
    return file


@pytest.mark.parametrize("status", [ADDED, EXISTING, DELETED])
@pytest.mark.parametrize("snapshot_id", [11, 12])
def test_entry_of_another_tables_file_is_rejected(
    server: LiveServer, lake: Lakehouse, status: ManifestEntryStatus, snapshot_id: int
) -> None:
    before = lake.latest_version()
    manifest = write_manifest_of(lake, table_of(lake), data_files_of(lake, "secret.s"), status, snapshot_id)
    assert commit(server, lake, [manifest]).error == FORBIDDEN
    assert lake.latest_version() == before


def test_manifest_of_another_table_is_rejected(server: LiveServer, lake: Lakehouse) -> None:
    before = lake.latest_version()
    assert commit(server, lake, manifests_of(lake, "secret.s")).error == FORBIDDEN
    table, secret = table_of(lake), table_of(lake, "secret.s").current_snapshot()
    assert secret is not None
    body = commit_of(*updates_of(snapshot_of(table, secret.snapshot_id, secret.manifest_list)))
    assert server.request("POST", TABLE, body).error == FORBIDDEN
    assert lake.latest_version() == before


SPELLINGS: dict[str, Callable[[str, str, str, str], str]] = {
    "dots": lambda root, own_id, other, name: f"{root}tables/{own_id}/data/../../{other}/data/{name}",
    "slashes": lambda root, own_id, other, name: f"{root}tables//{other}/data/{name}",
    "scheme": lambda root, own_id, other, name: f"{root.replace('file:', 'FILE:')}tables/{other}/data/{name}",
    "hadoop": lambda root, own_id, other, name: f"{root.replace('file://', 'file:')}tables/{other}/data/{name}",
    "plain path": lambda root, own_id, other, name: f"{root.removeprefix('file://')}tables/{other}/data/{name}",
    "another lakehouse": lambda root, own_id, other, name: f"s3://bucket/lake/tables/{other}/data/{name}",
    "longer id": lambda root, own_id, other, name: f"{root}tables/{own_id}1/data/{name}",
    "no table": lambda root, own_id, other, name: f"{root}data/{name}",
    "escapes": lambda root, own_id, other, name: f"{root}tables/{own_id}/%2e%2e/../{other}/data/{name}",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_other_spellings_of_foreign_file_are_rejected(server: LiveServer, lake: Lakehouse, spelling: str) -> None:
    (file,) = data_files_of(lake, "secret.s")
    own_id, other = (table_of(lake, name).location().rpartition("/")[2] for name in ("ns.t", "secret.s"))
    path = SPELLINGS[spelling](lake.root, own_id, other, file.file_path.rpartition("/")[2])
    manifest = write_manifest_of(lake, table_of(lake), [with_path(file, path)], EXISTING, 11)
    assert commit(server, lake, [manifest]).error == FORBIDDEN
    commit_unchecked(lake, "ns.t", [manifest], 11)
    assert server.request("POST", f"{TABLE}/plan", {"stats-fields": ["id"]}).error == FORBIDDEN


def test_missing_manifest_is_rejected(server: LiveServer, lake: Lakehouse) -> None:
    table_of(lake).append(ROWS)
    before = lake.latest_version()
    deleted_manifest = write_manifest_of(lake, table_of(lake), data_files_of(lake, "ns.t"), EXISTING, 7)
    lake.storage.delete(deleted_manifest.manifest_path.removeprefix(lake.root))
    assert commit(server, lake, [*manifests_of(lake, "ns.t"), deleted_manifest]).error == (400, "BadRequestException")
    assert lake.latest_version() == before


BAD_REQUEST = (400, "BadRequestException")


def test_manifest_is_listed_once(server: LiveServer, lake: Lakehouse) -> None:
    """Readers return the rows of a manifest once for each time that the list contains the manifest."""
    table_of(lake).append(ROWS)
    before, parent = lake.latest_version(), manifests_of(lake, "ns.t")
    own_files = [
        with_path(file, file.file_path.replace("/data/", "/data/own-")) for file in data_files_of(lake, "ns.t")
    ]
    lake.storage.create(own_files[0].file_path.removeprefix(lake.root), b"PAR1PAR1")
    new_manifest = write_manifest_of(lake, table_of(lake), own_files, ADDED, 11)
    assert commit(server, lake, [new_manifest, new_manifest, *parent]).error == BAD_REQUEST
    assert commit(server, lake, [*parent, *parent]).error == BAD_REQUEST
    assert commit(server, lake, [new_manifest, *parent, *parent]).error == BAD_REQUEST
    (other,) = data_files_of(lake, "ns.t")
    with_path(other, own_files[0].file_path.replace("file:///", "file:/"))
    duplicate_manifest = write_manifest_of(lake, table_of(lake), [*own_files, other], ADDED, 11)
    assert commit(server, lake, [duplicate_manifest, *parent]).error == BAD_REQUEST
    assert lake.latest_version() == before
    assert commit(server, lake, [new_manifest, *parent]).status == 200


def test_owner_file_is_rejected_as_data_file(server: LiveServer, lake: Lakehouse) -> None:
    """Otherwise a compaction would delete the owner file, and the folder would no longer belong to the lakehouse."""
    table_of(lake).append(ROWS)
    before, parent = lake.latest_version(), manifests_of(lake, "ns.t")
    (file,) = data_files_of(lake, "ns.t")
    owner_file = with_path(file, f"{table_of(lake).location()}/_owner.json")
    new_manifest = write_manifest_of(lake, table_of(lake), [owner_file], ADDED, 11)
    assert commit(server, lake, [new_manifest, *parent]).error == BAD_REQUEST
    assert lake.latest_version() == before


@pytest.mark.parametrize(
    ("bound", "value"), [("MAX_MANIFEST_ENTRIES", 2), ("MAX_COMMIT_ENTRIES", 5), ("MAX_COMMIT_BYTES", 6_000)]
)
def test_new_manifests_are_bounded(
    server: LiveServer, lake: Lakehouse, monkeypatch: pytest.MonkeyPatch, bound: str, value: int
) -> None:
    """The limits of each manifest and of all manifests of a commit are checked before manifests are decoded."""
    table_of(lake).append(ROWS)
    table, before = table_of(lake), lake.latest_version()

    def manifest(number: int) -> ManifestFile:
        files = [file for _ in range(3) for file in data_files_of(lake, "ns.t")]
        files = [
            with_path(file, f"{table.location()}/data/{number}-{index}.parquet") for index, file in enumerate(files)
        ]
        return write_manifest_of(lake, table, files, EXISTING, 11)

    first_manifest, second_manifest = manifest(1), manifest(2)
    monkeypatch.setattr(new_files, bound, value)
    assert commit(server, lake, [first_manifest, second_manifest]).error == BAD_REQUEST
    assert lake.latest_version() == before
    monkeypatch.setattr(
        new_files, "LARGE_ENTRIES", 2
    )  # large commits run one at a time, and each must release its slot
    monkeypatch.setattr(new_files, bound, 1_000_000)
    assert commit(server, lake, [first_manifest, second_manifest]).status == 200
    assert commit(server, lake, [manifest(3), first_manifest], 12).status == 200


def test_manifest_with_wrong_listed_size_is_not_decoded(server: LiveServer, lake: Lakehouse) -> None:
    """Limits are checked against the sizes in the manifest list."""
    table_of(lake).append(ROWS)
    before = lake.latest_version()
    manifest = write_manifest_of(lake, table_of(lake), data_files_of(lake, "ns.t") * 3, EXISTING, 11)
    for field, value in ((1, 10), (8, 1)):  # length, and count of existing files
        mislisted = copy.copy(manifest)
        mislisted._data = list(manifest._data)
        mislisted[field] = value
        assert commit(server, lake, [mislisted]).error == BAD_REQUEST
    assert lake.latest_version() == before


@pytest.mark.parametrize("spec_id", [9, -1])
def test_manifest_requires_partition_spec_of_its_table(server: LiveServer, lake: Lakehouse, spec_id: int) -> None:
    table_of(lake).append(ROWS)
    before = lake.latest_version()
    manifest = write_manifest_of(lake, table_of(lake), data_files_of(lake, "ns.t"), EXISTING, 11)
    manifest[2] = spec_id
    assert manifest.partition_spec_id == spec_id
    assert commit(server, lake, [manifest]).error == BAD_REQUEST
    assert lake.latest_version() == before


@pytest.mark.parametrize("name", ["added-data-files", "total-data-files"])
def test_empty_manifest_list_requires_zero_totals(server: LiveServer, lake: Lakehouse, name: str) -> None:
    """A table whose totals contradict its manifest list can be neither planned nor changed."""
    table_of(lake).append(ROWS)
    table, before = table_of(lake), lake.latest_version()
    snapshot = snapshot_of(
        table, 11, write_list_file(writing_io(lake), table, [], 11), table.metadata.current_snapshot_id
    )
    inconsistent = {**snapshot, "summary": {"operation": "append", name: "1"}}
    assert server.request("POST", TABLE, commit_of(*updates_of(inconsistent))).error == BAD_REQUEST
    assert lake.latest_version() == before
    assert server.request("POST", TABLE, commit_of(*updates_of(snapshot))).status == 200
    assert server.request("POST", f"{TABLE}/plan", {}).document["file-scan-tasks"] == []
    table_of(lake).append(ROWS)
    assert table_of(lake).scan().to_arrow().num_rows == ROWS.num_rows


def test_used_schemas_and_partition_specs_cannot_be_removed(server: LiveServer, lake: Lakehouse) -> None:
    with table_of(lake).update_schema() as schema:
        schema.add_column("unused", LongType())
    with table_of(lake).update_schema() as schema:
        schema.delete_column("unused")
    table_of(lake).append(ROWS)
    with table_of(lake).update_spec() as spec:
        spec.add_identity("id")
    with table_of(lake).update_schema() as schema:
        schema.add_column("more", LongType())
    metadata = table_of(lake).metadata
    assert metadata.current_snapshot_id is not None
    used_schema_id = metadata.snapshots[-1].schema_id
    for update in (
        {"action": "remove-partition-specs", "spec-ids": [0]},
        {"action": "remove-schemas", "schema-ids": [used_schema_id]},
    ):
        assert server.request("POST", TABLE, commit_of(update)).error == BAD_REQUEST
    unused_schema_id = next(
        schema.schema_id
        for schema in metadata.schemas
        if schema.schema_id not in (used_schema_id, metadata.current_schema_id)
    )
    assert (
        server.request("POST", TABLE, commit_of({"action": "remove-schemas", "schema-ids": [unused_schema_id]})).status
        == 200
    )
    body = {"snapshot-id": metadata.current_snapshot_id, "use-snapshot-schema": True}
    assert len(server.request("POST", f"{TABLE}/plan", body).document["file-scan-tasks"]) == 1


@pytest.mark.parametrize("kind", ["manifest", "entry"])
def test_plan_rejects_files_of_another_table(server: LiveServer, lake: Lakehouse, kind: str) -> None:
    """A client can overwrite a manifest after its commit, so a plan checks it again."""
    secret = manifests_of(lake, "secret.s")
    if kind == "entry":
        secret = [write_manifest_of(lake, table_of(lake), data_files_of(lake, "secret.s"), EXISTING, 11)]
    commit_unchecked(lake, "ns.t", secret, 11)
    assert server.request("POST", f"{TABLE}/plan", {"stats-fields": ["id"]}).error == FORBIDDEN
    if kind == "entry":  # commits do not read the manifests of the parent snapshot again, but each scan does
        commit(server, lake, secret, 12)
    else:
        assert commit(server, lake, secret, 12).error == FORBIDDEN
    assert server.request("POST", f"{TABLE}/plan", {"stats-fields": ["id"]}).error == FORBIDDEN


def test_files_of_parent_snapshot_can_be_committed_again(server: LiveServer, lake: Lakehouse) -> None:
    """Some engines append to the manifest list, and others rewrite manifests."""
    table_of(lake).append(ROWS)
    files, manifests = data_files_of(lake, "ns.t"), manifests_of(lake, "ns.t")
    assert commit(server, lake, manifests, 11).status == 200
    rewritten = write_manifest_of(lake, table_of(lake), files, EXISTING, 12)
    assert commit(server, lake, [rewritten], 12).status == 200
    assert table_of(lake).scan().to_arrow().num_rows == 2


def test_files_below_allowed_root_are_kept_but_not_added(lake: Lakehouse, tmp_path: Path) -> None:
    folder = tmp_path / "incoming"
    folder.mkdir()
    pq.write_table(ROWS, folder / "a.parquet")
    lake = allowing(lake, folder)
    table = table_of(lake)
    table.add_files([f"file://{folder}/a.parquet"])
    files = data_files_of(lake, "ns.t")
    with serving(settings_for(lake)) as server:
        assert len(server.request("POST", f"{TABLE}/plan", {}).document["file-scan-tasks"]) == 1
        manifest = write_manifest_of(lake, table_of(lake), files, EXISTING, 11)
        assert commit(server, lake, [manifest], 11).status == 200
        new_file = with_path(files[0], f"file://{folder}/b.parquet")
        manifest = write_manifest_of(lake, table_of(lake), [new_file], EXISTING, 12)
        assert commit(server, lake, [manifest], 12).error == FORBIDDEN


def test_registered_table_cannot_use_files_of_managed_table(lake: Lakehouse, tmp_path: Path) -> None:
    """A program that can write a registered table may have no access to the lakehouse."""
    (tmp_path / "external").mkdir()
    external_catalog = SqlCatalog("x", uri=f"sqlite:///{tmp_path}/x.db", warehouse=f"file://{tmp_path}/theirs")
    external_catalog.create_namespace("e")
    table = external_catalog.create_table("e.t", ROWS.schema)
    table.add_files([file.file_path for file in data_files_of(lake, "secret.s")])
    lake = allowing(lake, tmp_path / "external")
    operations.register_table(lake, "ns", "external", table.metadata_location)
    with serving(settings_for(lake)) as server:
        response = server.request("POST", f"{TABLES}/external/plan", {"stats-fields": ["id"]})
    assert response.error == FORBIDDEN
    with pytest.raises(PermissionError):
        catalog_at(lake).load_table("ns.external").scan().to_arrow()


@pytest.fixture
def local_lake(lakes: Lakes) -> Lakehouse:
    """A lakehouse on local disk with two tables that have rows."""
    lake = lakes.local()
    catalog = catalog_at(lake)
    for name in ("ns.t", "secret.s"):
        catalog.create_namespace(name.partition(".")[0])
        catalog.create_table(name, ROWS.schema).append(ROWS)
    return lake


def files_in(*folders: Path) -> set[Path]:
    return {path for folder in folders for path in folder.rglob("*")}


@pytest.mark.parametrize("link", ["metadata", "folder"])
@pytest.mark.parametrize("target_kind", ["another table", "outside the root"])
def test_writes_do_not_follow_links(local_lake: Lakehouse, tmp_path: Path, link: str, target_kind: str) -> None:
    """A client with access to its own table may create a link to a folder that only the operator may write."""
    own_id, other = (
        Path(table_of(local_lake, name).location().removeprefix("file://")) for name in ("ns.t", "secret.s")
    )
    if target_kind == "outside the root":
        other = tmp_path / "outside"
        shutil.copytree(own_id, other)
    source, target = (own_id, other) if link == "folder" else (own_id / "metadata", other / "metadata")
    with serving(settings_for(local_lake)) as server:
        version, change = local_lake.latest_version(), {"action": "set-properties", "updates": {"acme.x": "y"}}
        source.rename(tmp_path / "away")
        source.symlink_to(target)
        before = files_in(other)
        assert server.request("POST", TABLE, commit_of(change)).error == FORBIDDEN
        for write in (
            lambda: table_of(local_lake).append(ROWS),
            lambda: writing_io(local_lake).delete(f"file://{own_id}/metadata/x"),
        ):
            with pytest.raises(PermissionError):
                write()
        assert files_in(other) == before
        assert local_lake.latest_version() == version
        source.unlink()
        (tmp_path / "away").rename(source)
        assert server.request("POST", TABLE, commit_of(change)).status == 200


@pytest.mark.parametrize("kind", ["manifest list", "manifest"])
def test_circular_link_is_not_a_storage_failure(local_lake: Lakehouse, kind: str) -> None:
    """With status 503, a client would retry the commit."""
    table = table_of(local_lake)
    link_path = Path(table.location().removeprefix("file://")) / "metadata" / "loop.avro"
    link_path.symlink_to(link_path)
    with serving(settings_for(local_lake)) as server:
        version = local_lake.latest_version()
        if kind == "manifest":
            manifest = write_manifest_of(local_lake, table, data_files_of(local_lake, "ns.t"), EXISTING, 11)
            Path(manifest.manifest_path.removeprefix("file://")).rename(link_path.with_name("moved"))
            Path(manifest.manifest_path.removeprefix("file://")).symlink_to(
                manifest.manifest_path.removeprefix("file://")
            )
            response = commit(server, local_lake, [manifest])
        else:
            snapshot = snapshot_of(table, 11, f"file://{link_path}")
            response = server.request("POST", TABLE, commit_of(*updates_of(snapshot)))
        assert response.error == FORBIDDEN
        assert local_lake.latest_version() == version


def test_links_cannot_escape_allowed_root(local_lake: Lakehouse, tmp_path: Path) -> None:
    """Links are checked when a table is registered, and again when its files are read."""
    for folder in ("allowed", "foreign"):
        external_catalog = SqlCatalog(
            folder, uri=f"sqlite:///{tmp_path}/{folder}.db", warehouse=f"file://{tmp_path}/{folder}"
        )
        external_catalog.create_namespace("e")
        external_catalog.create_table("e.t", ROWS.schema, properties={"acme.note": folder}).append(ROWS)
    allowed_metadata, foreign = (
        next((tmp_path / name).rglob("00001*.metadata.json")) for name in ("allowed", "foreign")
    )
    managed = Path(table_of(local_lake, "secret.s").metadata_location.removeprefix("file://"))
    allowed = allowing(local_lake, tmp_path / "allowed")
    register = "/v1/main/namespaces/ns/register"

    def registered(server: LiveServer, name: str, path: Path) -> Response:
        return server.request("POST", register, {"name": name, "metadata-location": f"file://{path}"})

    with serving(settings_for(allowed)) as server:
        for number, target in enumerate((foreign, managed, foreign.parent, managed.parent)):
            link = allowed_metadata.parent / f"{number}.metadata.json"
            link.symlink_to(target)
            path = link / foreign.name if target.is_dir() else link
            assert registered(server, "linked", path).error == FORBIDDEN
        within = allowed_metadata.parent / "within.metadata.json"
        within.symlink_to(allowed_metadata)
        assert registered(server, "within", within).status == 200
        assert registered(server, "r", allowed_metadata).status == 200
        moved = allowed_metadata.rename(foreign.parent / "moved.metadata.json")
        allowed_metadata.symlink_to(moved)
    with serving(settings_for(allowed)) as server:
        assert server.request("GET", f"{TABLES}/r").error == FORBIDDEN
    allowing_both = allowing(local_lake, tmp_path / "allowed", tmp_path / "foreign")
    assert catalog_at(allowing_both).load_table("ns.r").properties["acme.note"] == "allowed"
