"""The rights of a table are those of all its current names, whatever name or version a request uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml

from tests.lakes import Lakes
from tests.server.live_server import LiveServer, Response, serving, settings_for
from tests.server.request_bodies import COMMIT, SCHEMA, commit_of, create_body, properties
from tests.server.test_access_control import FORBIDDEN, entry
from tests.server.test_s3_credentials import client_with, is_rejected
from tests.servers.radosgw import ROLE_ARN
from tests.servers.s3_server import S3Server
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.server.settings import ONLY, LakehouseSettings
from trinitylake_ops.storage.delegation import DelegationSettings
from trinitylake_ops.storage.s3.settings import S3Location

ROWS = pa.table({"id": pa.array([1, 2, 3], pa.int64())})
VENDED = {"X-Iceberg-Access-Delegation": "vended-credentials"}
UNSUPPORTED = (406, "UnsupportedOperationException")
#: Readers of all namespaces except ``secret``, of ``open`` only, and of all namespaces, and two writers of ``open``.
ENTRIES = [
    entry("some", "some", scope="read", namespaces={"secret": "none"}),
    entry("open", "open", scope="none", namespaces={"open": "read"}),
    entry("all", "all", scope="read"),
    entry("writer", "writer", scope="none", namespaces={"open": "write", "other": "write"}),
    entry("both", "both", scope="none", namespaces={"open": "write", "secret": "read"}),
]


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@contextmanager
def serve_with_tokens(lake: Lakehouse, folder: Path, files: DelegationSettings | None = None) -> Iterator[LiveServer]:
    path = folder / "tokens.yaml"
    path.write_text(yaml.safe_dump({"tokens": ENTRIES}))
    lakehouses = {ONLY: LakehouseSettings(lake.root, lake.storage_options, files or DelegationSettings())}
    with serving(settings_for(lake, lakehouses=lakehouses, tokens=path)) as server:
        yield server


def create_tables(lake: Lakehouse) -> int:
    """Create the namespaces and ``open.t`` with rows, and return the version."""
    catalog = catalog_at(lake)
    for name in ("open", "secret", "other"):
        catalog.create_namespace(name)
    catalog.create_table("open.t", ROWS.schema).append(ROWS)
    return lake.latest_version()


def table_path(version: int | str, suffix: str = "", table: str = "open.t") -> str:
    namespace, _, name = table.partition(".")
    return f"/v1/{version if isinstance(version, str) else f'v{version}'}/namespaces/{namespace}/tables/{name}{suffix}"


def read_requests(version: int | str) -> list[tuple[str, str, Any]]:
    """Return all requests that read a table."""
    report = {"report-type": "scan-report"}
    return [
        ("GET", table_path(version), None),
        ("HEAD", table_path(version), None),
        ("POST", table_path(version, "/plan"), {}),
        ("POST", table_path(version, "/metrics"), report),
        ("GET", table_path(version, "/credentials"), None),
        ("POST", table_path(version, "/sign"), {"method": "GET", "uri": "x", "region": "r", "headers": {}}),
    ]


def add_second_name(lake: Lakehouse) -> None:
    """Give ``open.t`` the second name ``secret.t``, as an older program could."""
    snapshot = lake.snapshot()
    with lake.transaction() as txn:
        txn.restore_entry(
            snapshot.keys.table_key("secret", "t"), snapshot.entry(snapshot.keys.table_key("open", "t")), mirrors=True
        )


def test_old_name_does_not_bypass_rights_of_current_name(lake: Lakehouse, tmp_path: Path) -> None:
    version = create_tables(lake)
    with serve_with_tokens(lake, tmp_path) as server:
        assert server.request("GET", table_path(version), headers=bearer("some")).status == 200
        catalog_at(lake).rename_table("open.t", "secret.t")
        for token in ("some", "open"):
            for method, path, body in read_requests(version):
                assert server.request(method, path, body, bearer(token)).status == 403, (method, path)
            at_time = server.request(
                "GET", table_path(f"at-{lake.snapshot(version).created_at_ms}"), headers=bearer(token)
            )
            assert at_time.error == FORBIDDEN
        assert server.request("GET", table_path(version), headers=bearer("all")).status == 200
        catalog_at(lake).rename_table("secret.t", "other.t")
        assert server.request("GET", table_path(version), headers=bearer("some")).status == 200
        assert server.request("GET", table_path(version), headers=bearer("open")).error == FORBIDDEN


def test_export_and_clone_do_not_bypass_rights_of_current_name(lake: Lakehouse, lakes: Lakes, tmp_path: Path) -> None:
    create_tables(lake)
    operations.plan_export(lake, "kept").execute()
    operations.plan_clone(lake, f"file://{tmp_path}/clones/x/", "x").execute()
    with serve_with_tokens(lake, tmp_path) as server:
        for warehouse in ("export-kept", "clone-x"):
            assert server.request("GET", table_path(warehouse), headers=bearer("some")).status == 200
        catalog_at(lake).rename_table("open.t", "secret.t")
        for warehouse in ("export-kept", "clone-x"):
            assert server.request("GET", table_path(warehouse), headers=bearer("some")).error == FORBIDDEN
            assert server.request("GET", table_path(warehouse), headers=bearer("all")).status == 200


def test_dropped_table_requires_access_to_all_namespaces(lake: Lakehouse, tmp_path: Path) -> None:
    version = create_tables(lake)
    catalog_at(lake).rename_table("open.t", "secret.t")
    catalog_at(lake).drop_table("secret.t")
    with serve_with_tokens(lake, tmp_path) as server:
        for method, path, body in read_requests(version):
            assert server.request(method, path, body, bearer("some")).status == 403, path
        assert server.request("GET", table_path(version), headers=bearer("all")).status == 200


def test_new_table_with_old_name_does_not_change_rights(lake: Lakehouse, tmp_path: Path) -> None:
    version = create_tables(lake)
    catalog_at(lake).rename_table("open.t", "secret.t")
    catalog_at(lake).create_table("open.t", ROWS.schema)
    with serve_with_tokens(lake, tmp_path) as server:
        assert server.request("GET", table_path("main"), headers=bearer("some")).status == 200
        assert server.request("GET", table_path(version), headers=bearer("some")).error == FORBIDDEN


def test_table_with_two_names_requires_rights_for_both(lake: Lakehouse, tmp_path: Path) -> None:
    create_tables(lake)
    add_second_name(lake)
    change, path = properties(a="1"), table_path("main")
    identifier = {"identifier": {"namespace": ["open"], "name": "t"}}
    rename = {"source": {"namespace": ["open"], "name": "t"}, "destination": {"namespace": ["other"], "name": "t"}}
    with serve_with_tokens(lake, tmp_path) as server:
        before = lake.latest_version()
        for token in ("writer", "both"):
            assert server.request("POST", path, commit_of(change) | identifier, bearer(token)).error == FORBIDDEN
            body = {"table-changes": [commit_of(change) | identifier]}
            assert server.request("POST", COMMIT, body, bearer(token)).error == FORBIDDEN
            assert server.request("DELETE", path, headers=bearer(token)).error == FORBIDDEN
            assert server.request("POST", "/v1/main/tables/rename", rename, bearer(token)).error == FORBIDDEN
        assert server.request("GET", path, headers=bearer("writer")).error == FORBIDDEN
        assert server.request("GET", path, headers=bearer("both")).status == 200
        assert lake.latest_version() == before


def test_staged_location_becomes_only_one_table(lake: Lakehouse) -> None:
    """A staged location can become only one table, in one commit or in several."""
    create_tables(lake)
    with serving(settings_for(lake)) as server:
        staged = create_body("a", **{"stage-create": True})
        location = server.request("POST", "/v1/main/namespaces/open/tables", staged).document["metadata"]["location"]

        def creation(name: str) -> dict[str, Any]:
            updates: list[dict[str, Any]] = [
                {"action": "assign-uuid", "uuid": "00000000-0000-4000-8000-000000000001"},
                {"action": "upgrade-format-version", "format-version": 2},
                {"action": "add-schema", "schema": SCHEMA, "last-column-id": 1},
                {"action": "set-current-schema", "schema-id": -1},
                {"action": "add-spec", "spec": {"spec-id": 0, "fields": []}},
                {"action": "set-default-spec", "spec-id": -1},
                {"action": "add-sort-order", "sort-order": {"order-id": 0, "fields": []}},
                {"action": "set-default-sort-order", "sort-order-id": -1},
                {"action": "set-location", "location": location},
            ]
            body = commit_of(*updates, requirements=({"type": "assert-create"},))
            return body | {"identifier": {"namespace": ["open"], "name": name}}

        two_creations = server.request("POST", COMMIT, {"table-changes": [creation("a"), creation("b")]})
        assert two_creations.error == (409, "AlreadyExistsException"), two_creations.body
        assert server.request("POST", table_path("main", table="open.a"), creation("a")).status == 200
        assert server.request("POST", table_path("main", table="open.b"), creation("b")).error == FORBIDDEN
    assert lake.snapshot().tables("open") == ["a", "t"]


@pytest.fixture
def s3_lake(radosgw: S3Server, monkeypatch: pytest.MonkeyPatch) -> Lakehouse:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    return Lakehouse.create(radosgw.fresh_root(), {**radosgw.storage_options, "addressing_style": "path"})


def session_of(server: LiveServer, warehouse: int | str, token: str) -> dict[str, str] | None:
    """Return the session that a client gets when it loads ``open.t``, or None. The credentials endpoint must agree."""
    loaded = server.request("GET", table_path(warehouse), headers={**bearer(token), **VENDED})
    endpoint_response = server.request("GET", table_path(warehouse, "/credentials"), headers=bearer(token))
    if "storage-credentials" not in loaded.document:
        assert loaded.status == 403 or not secrets_in(loaded.document["config"])
        assert endpoint_response.error in (FORBIDDEN, UNSUPPORTED)
        return None
    (session,) = loaded.document["storage-credentials"]
    assert endpoint_response.document["storage-credentials"] == [session]
    config: dict[str, str] = session["config"]
    return config


def test_old_version_gives_read_only_session(s3_lake: Lakehouse, radosgw: S3Server, tmp_path: Path) -> None:
    """The session covers only the files that the token may read in the latest version, even if the token may write."""
    version = create_tables(s3_lake)
    for level in ("minimal", "full"):
        operations.plan_export(s3_lake, level, level).execute()
    at_time = f"at-{s3_lake.snapshot(version).created_at_ms}"
    catalog = catalog_at(s3_lake)
    catalog.load_table("open.t").append(ROWS)
    files, folder = files_of_table(s3_lake), S3Location.of(f"{catalog.load_table('open.t').location()}/")
    with serve_with_tokens(s3_lake, tmp_path, DelegationSettings(role=ROLE_ARN, seconds=900)) as server:
        sessions = {token: session_of(server, version, token) for token in ("open", "all", "writer")}
        for warehouse in (at_time, "export-minimal", "export-full"):
            assert session_of(server, warehouse, "writer") == sessions["writer"]
        keys = [uri.removeprefix(f"s3://{folder.bucket}/") for uri in sorted(files)]
        for session in sessions.values():
            assert session is not None
            s3 = client_with(radosgw, session)
            assert all(s3.head_object(Bucket=folder.bucket, Key=key) for key in keys)
            for part in ("data", "metadata"):
                key = f"{folder.key_prefix}{part}/new"
                assert is_rejected(s3.put_object, Bucket=folder.bucket, Key=key, Body=b"x")
            assert is_rejected(s3.delete_object, Bucket=folder.bucket, Key=keys[0])
        catalog.rename_table("open.t", "other.t")
        assert session_of(server, version, "writer") is not None
        assert session_of(server, version, "all") is not None
        catalog.create_table("open.t", ROWS.schema)
        assert session_of(server, version, "all") is not None


def test_old_version_gives_session_only_within_rights_at_latest(s3_lake: Lakehouse, tmp_path: Path) -> None:
    version = create_tables(s3_lake)
    for level in ("minimal", "full"):
        operations.plan_export(s3_lake, level, level).execute()
    warehouses = (version, f"at-{s3_lake.snapshot(version).created_at_ms}", "export-minimal", "export-full")
    catalog = catalog_at(s3_lake)
    with serve_with_tokens(s3_lake, tmp_path, DelegationSettings(role=ROLE_ARN, seconds=900)) as server:
        catalog.rename_table("open.t", "secret.t")
        for warehouse in warehouses:
            assert [session_of(server, warehouse, token) for token in ("some", "open", "writer")] == [None] * 3
            assert session_of(server, warehouse, "all") is not None
        catalog.drop_table("secret.t")
        catalog.create_table("open.t", ROWS.schema)  # another table
        for warehouse in warehouses:
            assert server.request("GET", table_path(warehouse), headers=bearer("all")).status == 200
            assert [session_of(server, warehouse, token) for token in ("all", "open", "writer")] == [None] * 3


def test_folders_of_exports_and_clones_give_no_session(s3_lake: Lakehouse, radosgw: S3Server, tmp_path: Path) -> None:
    """Other writers may have access to an export at another root, and a clone shares files with its parent."""
    create_tables(s3_lake)
    for level in ("minimal", "partial", "full"):
        operations.plan_export(s3_lake, level, level, target=radosgw.fresh_root()).execute()
    operations.plan_clone(s3_lake, clone_root := radosgw.fresh_root(), "x").execute()
    files = DelegationSettings(role=ROLE_ARN, seconds=900)
    with serve_with_tokens(s3_lake, tmp_path, files) as server:
        for warehouse in ("export-minimal", "export-partial", "export-full", "clone-x"):
            assert server.request("GET", table_path(warehouse), headers=bearer("all")).status == 200
            assert session_of(server, warehouse, "all") is None
    clone = Lakehouse.open(clone_root, s3_lake.storage_options)
    with serve_with_tokens(clone, tmp_path, files) as server:
        assert [session_of(server, warehouse, "all") for warehouse in ("main", "v0")] == [None, None]


def test_old_version_gives_signatures_for_its_files_only(s3_lake: Lakehouse, radosgw: S3Server, tmp_path: Path) -> None:
    version = create_tables(s3_lake)
    old = files_of_table(s3_lake)
    catalog_at(s3_lake).load_table("open.t").append(ROWS)
    new = files_of_table(s3_lake) - old
    with serve_with_tokens(s3_lake, tmp_path, DelegationSettings(role=ROLE_ARN, seconds=900, sign=True)) as server:
        headers = bearer("open")

        def sign(warehouse: int | str, method: str, uri: str) -> Response:
            path = f"{radosgw.endpoint}/{uri.removeprefix('s3://')}"
            body = {"method": method, "uri": path, "region": radosgw.region, "headers": {}}
            return server.request("POST", table_path(warehouse, "/sign"), body, headers)

        assert {sign(version, "GET", uri).status for uri in old} == {200}
        assert {sign(version, "GET", uri).status for uri in new} == {403}
        assert {sign(version, method, sorted(old)[0]).status for method in ("PUT", "DELETE")} == {403}
        folder = catalog_at(s3_lake).load_table("open.t").location()
        listing = f"{folder.partition('/tables/')[0].rpartition('/')[0]}/?list-type=2&prefix={folder.split('/', 3)[3]}/"
        assert sign(version, "GET", listing).status == 403
        assert {sign("main", "GET", uri).status for uri in old | new} == {200}
        assert session_of(server, "main", "open") is not None
        catalog_at(s3_lake).rename_table("open.t", "secret.t")
        assert {sign(version, "GET", uri).status for uri in old | new} == {403}
        headers = bearer("all")
        catalog_at(s3_lake).drop_table("secret.t")
        assert {sign(version, "GET", uri).status for uri in old} == {200}
        assert {sign(version, "GET", uri).status for uri in new} == {403}


def secrets_in(config: Mapping[str, str]) -> set[str]:
    return {name for name in config if "key" in name or "token" in name}


def files_of_table(lake: Lakehouse) -> set[str]:
    """Return the URIs of the manifest lists, manifests and data files of ``open.t``."""
    table = catalog_at(lake).load_table("open.t")
    uris = {table.metadata_location, *(snapshot.manifest_list for snapshot in table.metadata.snapshots)}
    for snapshot in table.metadata.snapshots:
        for manifest in snapshot.manifests(table.io):
            uris.add(manifest.manifest_path)
            uris |= {entry.data_file.file_path for entry in manifest.fetch_manifest_entry(table.io)}
    return uris
