"""Commits through the server: requirements, transactions, conflicts, lost responses and foreign files."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import CommitFailedException, ForbiddenError
from pyiceberg.table.metadata import TableMetadataUtil, TableMetadataV2

from tests.faults import FaultyStorage, fail, lose_response
from tests.lakes import Lakes
from tests.server.live_server import LiveServer, serving, settings_for
from tests.server.request_bodies import COMMIT, TABLE, TABLES, WIDER_SCHEMA, commit_of, create_body, new_key, properties
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import AmbiguousWriteError, StorageFullError, TransientError
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.server import calls
from trinitylake_ops.server.settings import ONLY
from trinitylake_ops.server.warehouses import Warehouses
from trinitylake_ops.storage import Storage, StorageWrapper

pytestmark = pytest.mark.usefixtures("fixed_requests")

ROWS = pa.table({"id": pa.array([1, 2], pa.int64())})
CONFLICT = (409, "CommitFailedException")
UNKNOWN = (500, "CommitStateUnknownException")
FORBIDDEN = (403, "ForbiddenException")


@pytest.fixture
def client(server: LiveServer, lake: Lakehouse) -> RestCatalog:
    """A pyiceberg client of a server whose namespace ``ns`` has the tables ``t`` and ``u``."""
    catalog = server.catalog()
    catalog.create_namespace("ns")
    for name in ("ns.t", "ns.u"):
        catalog.create_table(name, ROWS.schema)
    return catalog


def require_main_at(snapshot_id: int | None) -> dict[str, Any]:
    return {"type": "assert-ref-snapshot-id", "ref": "main", "snapshot-id": snapshot_id}


def test_requirements_are_checked(server: LiveServer, client: RestCatalog, lake: Lakehouse) -> None:
    uuid = server.request("GET", TABLE).document["metadata"]["table-uuid"]
    satisfied = (
        {"type": "assert-table-uuid", "uuid": uuid},
        require_main_at(None),
        {"type": "assert-current-schema-id", "current-schema-id": 0},
        {"type": "assert-last-assigned-field-id", "last-assigned-field-id": 1},
        {"type": "assert-default-spec-id", "default-spec-id": 0},
        {"type": "assert-default-sort-order-id", "default-sort-order-id": 0},
    )
    assert server.request("POST", TABLE, commit_of(properties(a="1"), requirements=satisfied)).status == 200
    before = lake.latest_version()
    violated = (
        {"type": "assert-create"},
        {"type": "assert-table-uuid", "uuid": "017f22e2-79b0-7cc3-98c4-dc0c0c07398f"},
        require_main_at(5),
        {"type": "assert-current-schema-id", "current-schema-id": 3},
    )
    for requirement in violated:
        response = server.request("POST", TABLE, commit_of(properties(a="2"), requirements=(requirement,)))
        assert response.error == CONFLICT
    assert lake.latest_version() == before


def test_transaction_commits_one_version_or_nothing(server: LiveServer, client: RestCatalog, lake: Lakehouse) -> None:
    before = lake.latest_version()
    commits = [commit_of(properties(a="1")), commit_of(properties(a="1"), name="u")]
    assert server.request("POST", COMMIT, {"table-changes": commits}).status == 204
    assert lake.latest_version() == before + 1
    assert [change.table for change in lake.diff(before, before + 1)] == ["t", "u"]
    commits = [commit_of(properties(a="2")), commit_of(properties(a="2"), name="u", requirements=(require_main_at(5),))]
    assert server.request("POST", COMMIT, {"table-changes": commits}).error == CONFLICT
    commits = [commit_of(properties(a="2")), commit_of(properties(a="2"), name="none")]
    assert server.request("POST", COMMIT, {"table-changes": commits}).error == (404, "NoSuchTableException")
    assert server.request("POST", COMMIT, {"table-changes": [commits[0]] * 2}).error == (400, "BadRequestException")
    assert lake.latest_version() == before + 1


def test_changes_that_other_engines_cannot_read_are_rejected(
    server: LiveServer, client: RestCatalog, lake: Lakehouse
) -> None:
    before = lake.latest_version()
    fields = [{"id": 1, "name": "id", "type": "long", "required": False}]
    with_default = {"id": 2, "name": "n", "type": "long", "required": False, "initial-default": 1, "write-default": 1}
    other_case = {"id": 2, "name": "ID", "type": "long", "required": False}
    for field in (with_default, other_case):
        schema = {"type": "struct", "schema-id": 9, "fields": [*fields, field]}
        update = {"action": "add-schema", "schema": schema, "last-column-id": 2}
        current = {"action": "set-current-schema", "schema-id": -1}
        assert server.request("POST", TABLE, commit_of(update, current)).error == (400, "BadRequestException")
        for is_staged in (False, True):
            new = {"name": "new", "schema": schema, "stage-create": is_staged}
            response = server.request("POST", TABLE.rpartition("/")[0], new)
            assert response.error == (400, "BadRequestException")
    response = server.request("POST", TABLE, commit_of(properties(**{"format-version": "2"})))
    assert response.error == (400, "BadRequestException")
    report = {"report-type": "unknown-report"}
    assert server.request("POST", f"{TABLE}/metrics", report).error == (400, "BadRequestException")
    assert server.request("POST", f"{TABLE}/metrics", {"report-type": "scan-report"}).status == 204
    assert lake.latest_version() == before


def test_commit_records_principal_and_client(server: LiveServer, client: RestCatalog, lake: Lakehouse) -> None:
    response = server.request("POST", TABLE, commit_of(properties(a="1")))
    (latest,) = lake.history(1)
    assert dict(latest.properties) == {"principal": "anonymous", "request": response.headers["x-request-id"]}
    assert latest.message == "update ns.t"


def inject_conflicts(
    lake: Lakehouse, monkeypatch: pytest.MonkeyPatch, conflicting_writes: list[Callable[[], None]]
) -> None:
    """Make each of the server's next transactions conflict with a commit of another writer."""
    begin = lake.transaction

    def transaction(*arguments: Any, **keywords: Any) -> Any:
        txn = begin(*arguments, **keywords)
        if conflicting_writes:
            conflicting_writes.pop(0)()
        return txn

    monkeypatch.setattr(lake, "transaction", transaction)


@pytest.fixture
def server_lake(server: LiveServer) -> Lakehouse:
    """The lakehouse as opened by the server."""
    assert server.application is not None
    return server.application.warehouses.served[0].lake


def test_conflicting_commit_is_retried_if_requirements_are_satisfied(
    server: LiveServer, client: RestCatalog, lake: Lakehouse, server_lake: Lakehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    external_catalog = catalog_at(lake)

    def alter(name: str, value: str) -> None:
        with external_catalog.load_table(name).transaction() as txn:
            txn.set_properties(other=value)

    inject_conflicts(
        server_lake, monkeypatch, [lambda: alter("ns.u", "1"), lambda: alter("ns.t", "2"), lambda: alter("ns.t", "3")]
    )
    for number, requirement in enumerate((require_main_at(None), require_main_at(None))):
        response = server.request("POST", TABLE, commit_of(properties(a=str(number)), requirements=(requirement,)))
        assert response.status == 200
    assert response.document["metadata"]["properties"].items() >= {"a": "1", "other": "3"}.items()
    inject_conflicts(server_lake, monkeypatch, [lambda: external_catalog.load_table("ns.t").append(ROWS)])
    response = server.request("POST", TABLE, commit_of(properties(a="9"), requirements=(require_main_at(None),)))
    assert response.error == CONFLICT
    assert external_catalog.load_table("ns.t").properties["a"] == "1"


def test_other_conflicting_changes_are_retried(
    server: LiveServer, client: RestCatalog, lake: Lakehouse, server_lake: Lakehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    def alter(**values: str) -> None:
        with lake.transaction() as txn:
            txn.alter_namespace("ns", values)

    inject_conflicts(server_lake, monkeypatch, [lambda: alter(a="1"), lambda: alter(a="2")])
    changed = server.request("POST", "/v1/main/namespaces/ns/properties", {"updates": {"b": "3"}})
    assert changed.document["updated"] == ["b"]
    assert dict(lake.snapshot().namespace("ns").properties) == {"a": "2", "b": "3"}


def test_commit_fails_after_too_many_conflicts(
    server: LiveServer, client: RestCatalog, lake: Lakehouse, server_lake: Lakehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trinitylake_ops.server.calls.MAX_ATTEMPTS", 3)
    count = iter(range(100))

    def alter() -> None:
        with catalog_at(lake).load_table("ns.t").transaction() as txn:
            txn.set_properties(n=str(next(count)))

    inject_conflicts(server_lake, monkeypatch, [alter] * 4)
    assert server.request("POST", TABLE, commit_of(properties(a="1"))).error == CONFLICT


def test_concurrent_clients_lose_no_append(server: LiveServer, client: RestCatalog, lake: Lakehouse) -> None:
    """Two clients write to one table and one to another. They retry conflicts, and each row exists exactly once."""
    n_each, first_version = 4, lake.latest_version()

    def append(name: str, row_ids: range) -> None:
        catalog = server.catalog()
        for row_id in row_ids:
            while True:
                try:
                    catalog.load_table(name).append(pa.table({"id": pa.array([row_id], pa.int64())}))
                    break
                except CommitFailedException:
                    continue

    appends = [("ns.t", range(n_each)), ("ns.t", range(10, 10 + n_each)), ("ns.u", range(n_each))]
    threads = [threading.Thread(target=append, args=arguments) for arguments in appends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(client.load_table("ns.t").scan().to_arrow()["id"].to_pylist()) == [0, 1, 2, 3, 10, 11, 12, 13]
    assert sorted(client.load_table("ns.u").scan().to_arrow()["id"].to_pylist()) == [0, 1, 2, 3]
    assert lake.latest_version() - first_version <= 3 * n_each
    assert operations.verify(lake, deep=True).findings == ()


def test_request_with_idempotency_key_is_applied_once(server: LiveServer, client: RestCatalog, lake: Lakehouse) -> None:
    requests = (
        ("POST", TABLE, commit_of(properties(a="1"))),
        ("POST", COMMIT, {"table-changes": [commit_of(properties(b="1"))]}),
        ("POST", "/v1/main/namespaces", {"namespace": ["new"]}),
        ("POST", "/v1/main/namespaces/new/properties", {"updates": {"a": "1"}, "removals": ["b"]}),
        ("POST", "/v1/main/namespaces/new/tables", create_body()),
        ("DELETE", "/v1/main/namespaces/new/tables/t", None),
        ("DELETE", "/v1/main/namespaces/new", None),
    )
    for method, path, body in requests:
        headers, before = {"Idempotency-Key": new_key()}, lake.latest_version()
        first = server.request(method, path, body, headers)
        assert first.status in (200, 204)
        repeated = server.request(method, path, body, {"Idempotency-Key": headers["Idempotency-Key"].upper()})
        assert repeated.status == first.status
        if first.body and "properties" not in path:
            assert repeated.document == first.document
        assert lake.latest_version() == before + 1
    assert (
        server.request("POST", "/v1/main/namespaces", {"namespace": ["new"]}, {"Idempotency-Key": new_key()}).status
        == 200
    )


def test_idempotency_key_is_known_to_another_server(server: LiveServer, client: RestCatalog, lake: Lakehouse) -> None:
    headers = {"Idempotency-Key": new_key()}
    body = {"source": {"namespace": ["ns"], "name": "t"}, "destination": {"namespace": ["ns"], "name": "v"}}
    with serving(settings_for(lake)) as replica:
        assert server.request("POST", "/v1/main/tables/rename", body, headers).status == 204
        for _ in range(3):
            lake.alter_definition(message="unrelated")
        assert replica.request("POST", "/v1/main/tables/rename", body, headers).status == 204
        assert replica.request("POST", "/v1/main/tables/rename", body).error == (404, "NoSuchTableException")


def test_invalid_idempotency_keys_are_rejected(server: LiveServer, client: RestCatalog, lake: Lakehouse) -> None:
    before, body = lake.latest_version(), commit_of(properties(a="1"))
    version_4 = "1b4e28ba-2fa1-41d2-883f-0016d3cca427"
    for key in ("x", version_4, new_key().replace("-", ""), new_key(age_ms=36 * 60_000)):
        assert server.request("POST", TABLE, body, {"Idempotency-Key": key}).error == (400, "BadRequestException")
    assert lake.latest_version() == before
    key = {"Idempotency-Key": new_key(age_ms=-20 * 60_000)}  # from a client whose clock is ahead
    assert [server.request("POST", TABLE, body, key).status for _ in range(2)] == [200, 200]
    assert lake.latest_version() == before + 1
    reused = server.request("POST", f"{TABLES}/u", commit_of(properties(a="1"), name="u"), key)
    assert reused.error == (422, "UnprocessableEntityException")


def test_idempotency_key_of_fast_clock_is_found_after_other_commits(
    server: LiveServer, client: RestCatalog, lake: Lakehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "CLOCK_MARGIN_MS", 0)
    key, body = {"Idempotency-Key": new_key(age_ms=-10 * 60_000)}, commit_of(properties(a="1"))
    assert server.request("POST", TABLE, body, key).status == 200
    for value in "23":
        time.sleep(0.01)  # the storage's clock advances
        assert server.request("POST", TABLE, commit_of(properties(a=value))).status == 200
    before = lake.latest_version()
    assert server.request("POST", TABLE, body, key).document["metadata"]["properties"]["a"] == "3"
    assert lake.latest_version() == before


def test_idempotency_key_belongs_to_one_body(server: LiveServer, client: RestCatalog, lake: Lakehouse) -> None:
    key = {"Idempotency-Key": new_key()}
    assert server.request("POST", TABLE, commit_of(properties(a="1")), key).status == 200
    before = lake.latest_version()
    response = server.request("POST", TABLE, commit_of(properties(a="2")), key)
    assert response.error == (422, "UnprocessableEntityException")
    assert lake.latest_version() == before


def append_body(client: RestCatalog, name: str) -> dict[str, Any]:
    """Write the files of an append, and return the request body that pyiceberg would send."""
    table = client.load_table(name)
    txn = table.transaction()
    txn.append(ROWS)
    body = commit_of(name=name.partition(".")[2])
    body["updates"] = [update.model_dump(mode="json") for update in txn._updates]
    body["requirements"] = [requirement.model_dump(mode="json") for requirement in txn._requirements]
    return body


def test_repeated_append_is_applied_once(server: LiveServer, client: RestCatalog, lake: Lakehouse) -> None:
    body = append_body(client, "ns.t")
    first = server.request("POST", TABLE, body)
    before = lake.latest_version()
    repeated = server.request("POST", TABLE, body)
    assert (first.status, repeated.status) == (200, 200)
    assert repeated.document == first.document
    assert server.request("POST", COMMIT, {"table-changes": [body, commit_of(name="u")]}).status == 204
    assert lake.latest_version() == before
    assert client.load_table("ns.t").scan().to_arrow().num_rows == 2


def test_partly_applied_request_is_not_reported_as_done(
    server: LiveServer, client: RestCatalog, lake: Lakehouse
) -> None:
    """The snapshots exist, but another requested change does not. A conflict would make the client delete the files."""
    body = append_body(client, "ns.t")
    assert server.request("POST", TABLE, body).status == 200
    before = lake.latest_version()

    def renamed(update: dict[str, Any]) -> dict[str, Any]:
        return {**update, "ref-name": "other"} if "ref-name" in update else update

    other_uuid = {"type": "assert-table-uuid", "uuid": "017f22e2-79b0-7cc3-98c4-dc0c0c07398f"}
    partly_applied = (
        {**body, "updates": [*body["updates"], properties(want="1")]},
        {**body, "updates": [renamed(update) for update in body["updates"]]},
        {**body, "requirements": [other_uuid]},
    )
    for request_body in partly_applied:
        response = server.request("POST", TABLE, request_body)
        assert response.error == UNKNOWN, response.body
    for change in (commit_of(properties(want="1"), name="u"), append_body(client, "ns.u")):
        assert server.request("POST", COMMIT, {"table-changes": [body, change]}).error == UNKNOWN
    assert lake.latest_version() == before


def test_repeated_transaction_is_applied_once(server: LiveServer, client: RestCatalog, lake: Lakehouse) -> None:
    changed = commit_of(properties(want="1"), name="u")
    changed["updates"].append({"action": "remove-properties", "removals": ["gone"]})
    request_body = {"table-changes": [append_body(client, "ns.t"), changed]}
    assert server.request("POST", COMMIT, request_body).status == 204
    before = lake.latest_version()
    assert server.request("POST", COMMIT, request_body).status == 204
    assert lake.latest_version() == before


def test_table_is_loaded_when_folder_cannot_be_created(server: LiveServer, lake: Lakehouse) -> None:
    with lake.transaction() as txn:
        txn.create_namespace("ns")
    table = catalog_at(lake).create_table("ns.t", ROWS.schema)
    folder = Path(table.location().removeprefix("file://")) / "data"
    folder.symlink_to("/missing/folder")
    assert server.request("GET", TABLE).status == 200


def test_files_outside_of_table_location_are_rejected(server: LiveServer, client: RestCatalog, lake: Lakehouse) -> None:
    before = lake.latest_version()
    body = append_body(client, "ns.u")
    assert server.request("POST", TABLE, {**body, "identifier": commit_of()["identifier"]}).error == FORBIDDEN
    body["requirements"] = []
    assert server.request("POST", TABLE, {**body, "identifier": commit_of()["identifier"]}).error == FORBIDDEN
    for location in ("file:///etc/passwd", "s3://other/list.avro", "../list.avro"):
        body["updates"][0]["snapshot"]["manifest-list"] = location
        assert server.request("POST", f"{TABLES}/u", body).error == FORBIDDEN
    table_location = server.request("GET", f"{TABLES}/u").document["metadata"]["location"]
    body["updates"][0]["snapshot"]["manifest-list"] = f"{table_location}/metadata/none.avro"
    assert server.request("POST", f"{TABLES}/u", body).error == (400, "BadRequestException")
    statistics = {
        "snapshot-id": 1, "statistics-path": "file:///etc/passwd", "file-size-in-bytes": 1,
        "file-footer-size-in-bytes": 1, "blob-metadata": [],
    }  # fmt: skip
    update = {"action": "set-statistics", "snapshot-id": 1, "statistics": statistics}
    assert server.request("POST", TABLE, commit_of(update)).error == FORBIDDEN
    assert lake.latest_version() == before


def test_hadoop_file_uris_are_accepted(server: LiveServer, client: RestCatalog) -> None:
    """Iceberg's Java runtime writes ``file:/path`` with one slash. Such URIs outside of the table are rejected, too."""
    body = append_body(client, "ns.u")
    snapshot = body["updates"][0]["snapshot"]
    manifest_list = snapshot["manifest-list"]
    for location in ("file:/etc/passwd", manifest_list.replace("/metadata/", "/../x/").replace("file:///", "file:/")):
        snapshot["manifest-list"] = location
        assert server.request("POST", f"{TABLES}/u", body).error == FORBIDDEN
    snapshot["manifest-list"] = manifest_list.replace("file:///", "file:/")
    assert server.request("POST", f"{TABLES}/u", body).status == 200
    assert client.load_table("ns.u").scan().to_arrow().num_rows == 2


def test_data_files_of_other_tables_are_rejected(server: LiveServer, client: RestCatalog, lake: Lakehouse) -> None:
    client.load_table("ns.u").append(ROWS)
    (task,) = client.load_table("ns.u").scan().plan_files()
    before = lake.latest_version()
    with pytest.raises(ForbiddenError, match="copy data files to"):
        client.load_table("ns.t").add_files([task.file.file_path])
    assert lake.latest_version() == before


def test_error_for_data_file_outside_lakehouse_does_not_suggest_allowed_root(
    server: LiveServer, client: RestCatalog, lake: Lakehouse, tmp_path: Path
) -> None:
    """A commit cannot add files below an allowed root, which makes them readable only."""
    pq.write_table(ROWS, tmp_path / "a.parquet")
    table, before = client.load_table("ns.t"), lake.latest_version()
    with pytest.raises(ForbiddenError, match="copy data files to") as caught:
        table.add_files([f"file://{tmp_path}/a.parquet"])
    assert "allow-root" not in str(caught.value)
    assert lake.latest_version() == before
    copied_uri = f"{table.location()}/data/a.parquet"
    pq.write_table(ROWS, copied_uri.removeprefix("file://"))
    table.add_files([copied_uri])
    assert client.load_table("ns.t").scan().to_arrow().equals(ROWS)


def test_error_for_snapshot_removal_names_trim_command(
    server: LiveServer, client: RestCatalog, lake: Lakehouse
) -> None:
    """Iceberg's Java client sends the same request before it deletes files, unless ``gc.enabled`` is false."""
    table = client.load_table("ns.t")
    table.append(ROWS)
    table.append(ROWS)
    before, first = lake.latest_version(), table.metadata.snapshots[0]
    with pytest.raises(Exception, match=r"'trinitylake trim' .* 'trinitylake expire' and 'trinitylake purge'"):
        table.maintenance.expire_snapshots().by_id(first.snapshot_id).commit()
    assert table.metadata.properties["gc.enabled"] == "false"
    assert lake.latest_version() == before
    assert server.catalog().load_table("ns.t").snapshot_by_id(first.snapshot_id) == first


def test_registered_table_cannot_be_written(server: LiveServer, client: RestCatalog, lake: Lakehouse) -> None:
    client.load_table("ns.u").append(ROWS)
    with lake.transaction() as txn:
        txn.create_table("ns", "external", replace(txn.table("ns", "u"), id="", table_type="EXTERNAL"))
    before = lake.latest_version()
    body = {**commit_of(properties(a="1")), "identifier": {"namespace": ["ns"], "name": "external"}}
    response = server.request("POST", f"{TABLES}/external", body)
    assert response.error == FORBIDDEN
    assert "is registered and cannot be changed here" in response.document["error"]["message"]
    assert lake.latest_version() == before


def test_data_file_is_added_once(server: LiveServer, client: RestCatalog, lake: Lakehouse) -> None:
    table = client.load_table("ns.t")
    table.append(ROWS)
    (task,) = table.scan().plan_files()
    txn = table.transaction()
    with txn.update_snapshot().fast_append() as append:
        append.append_data_file(task.file)
        append.append_data_file(task.file)
    body = commit_of()
    body["updates"] = [update.model_dump(mode="json") for update in txn._updates]
    before = lake.latest_version()
    assert server.request("POST", TABLE, body).status == 400
    future_append = append_body(client, "ns.t")
    for update in future_append["updates"]:
        if update["action"] == "add-snapshot":
            update["snapshot"]["sequence-number"] = 2**62
    assert server.request("POST", TABLE, future_append).status == 400
    assert lake.latest_version() == before
    assert server.request("POST", TABLE, append_body(client, "ns.t")).status == 200


def test_commit_with_old_statistics_file_is_rejected(server: LiveServer, client: RestCatalog, lake: Lakehouse) -> None:
    client.load_table("ns.t").append(ROWS)
    table = client.load_table("ns.t")
    path = f"{table.location()}/metadata/old.stats"
    statistics = {
        "snapshot-id": table.metadata.current_snapshot_id, "statistics-path": path, "file-size-in-bytes": 4,
        "file-footer-size-in-bytes": 1, "blob-metadata": [],
    }  # fmt: skip
    update = {"action": "set-statistics", "snapshot-id": statistics["snapshot-id"], "statistics": statistics}
    before = lake.latest_version()
    assert server.request("POST", TABLE, commit_of(update)).status >= 400, "the file does not exist"
    lake.storage.create(path.removeprefix(lake.root), b"old!")
    long_ago_s = time.time() - 10 * 24 * 3_600
    os.utime(path.removeprefix("file://"), (long_ago_s, long_ago_s))
    assert "txn_ttl_millis" in server.request("POST", TABLE, commit_of(update)).document["error"]["message"]
    assert lake.latest_version() == before
    os.utime(path.removeprefix("file://"))
    assert server.request("POST", TABLE, commit_of(update)).status == 200


def test_new_table_requires_schema(server: LiveServer, client: RestCatalog, lake: Lakehouse) -> None:
    before = lake.latest_version()
    schema = {"action": "add-schema", "schema": WIDER_SCHEMA}
    for updates in ([], [properties(a="1")], [schema], [schema, {"action": "set-current-schema", "schema-id": 5}]):
        body = commit_of(*updates, requirements=({"type": "assert-create"},), name="new")
        assert server.request("POST", f"{TABLES}/new", body).error == (400, "BadRequestException"), updates
    body = {**commit_of(requirements=({"type": "assert-create"},)), "identifier": {"namespace": ["no"], "name": "t"}}
    missing = server.request("POST", "/v1/main/namespaces/no/tables/t", body)
    assert missing.error == (404, "NoSuchNamespaceException")
    assert lake.latest_version() == before


def staged_commit(server: LiveServer, location: str | None, name: str = "new") -> Any:
    body = commit_of(
        {"action": "assign-uuid", "uuid": "017f22e2-79b0-7cc3-98c4-dc0c0c07398f"},
        {"action": "upgrade-format-version", "format-version": 2},
        {"action": "add-schema", "schema": WIDER_SCHEMA},
        {"action": "set-current-schema", "schema-id": -1},
        {"action": "add-spec", "spec": {"spec-id": 0, "fields": []}},
        {"action": "set-default-spec", "spec-id": -1},
        {"action": "add-sort-order", "sort-order": {"order-id": 0, "fields": []}},
        {"action": "set-default-sort-order", "sort-order-id": -1},
        requirements=({"type": "assert-create"},),
        name=name,
    )
    if location is not None:
        body["updates"].append({"action": "set-location", "location": location})
    return server.request("POST", f"{TABLES}/{name}", body)


def test_staged_table_is_created_by_its_commit(server: LiveServer, client: RestCatalog, lake: Lakehouse) -> None:
    before = lake.latest_version()
    staged = server.request("POST", TABLES, create_body("new", **{"stage-create": True})).document
    assert "metadata-location" not in staged
    assert lake.latest_version() == before
    location = staged["metadata"]["location"]
    committed_table = staged_commit(server, location)
    assert committed_table.document["metadata"]["location"] == location
    assert committed_table.document["metadata"]["properties"]["gc.enabled"] == "false"
    assert staged_commit(server, location).error == CONFLICT
    assert client.load_table("ns.new").schema().column_names == ["id", "name"]
    assert staged_commit(server, None, "other").status == 200
    assert lake.latest_version() == before + 2
    assert operations.verify(lake, deep=True).findings == ()


def test_new_table_cannot_use_location_of_another(server: LiveServer, client: RestCatalog, lake: Lakehouse) -> None:
    used_location = client.load_table("ns.t").location()
    dropped_location = client.load_table("ns.u").location()
    client.drop_table("ns.u")
    before = lake.latest_version()
    unused_location = f"{lake.root}tables/017f22e2-79b0-4cc3-98c4-dc0c0c07398f"
    for location in (
        used_location,
        dropped_location,
        unused_location,
        f"{used_location}/data",
        f"{lake.root}_ops",
        "file:///other/t",
        f"{used_location}/../x",
    ):
        assert staged_commit(server, location).error == FORBIDDEN
    assert lake.latest_version() == before


class UnreadableRootStorage(StorageWrapper):
    """A storage that creates one root, loses the response, and then fails to read the root."""

    def __init__(self, inner: Storage, root: str):
        super().__init__(inner)
        self._root = root
        self._has_created_root = False

    def create(self, path: str, data: bytes) -> None:
        super().create(path, data)
        if path == self._root:
            self._has_created_root = True
            raise AmbiguousWriteError("no response", path=path)

    def read(self, path: str, **part: Any) -> bytes:
        if path == self._root and self._has_created_root:
            raise TransientError("no response", path=path)
        return super().read(path, **part)


def faulty(lake: Lakehouse, *faults: Any) -> Warehouses:
    return Warehouses({ONLY: Lakehouse(FaultyStorage(lake.storage, list(faults)), lake.storage_options)})


def test_commit_with_unknown_outcome_gets_500(lakes: Lakes) -> None:
    """The outcome is unknown if the response for the root was lost and the root cannot be read. Failures get 503."""
    lake = lakes.local()
    with serving(settings_for(lake)) as server:
        server.catalog().create_namespace("ns")
        assert server.request("POST", TABLES, create_body()).status == 200
    key, body = {"Idempotency-Key": new_key()}, commit_of(properties(a="1"))
    version = lake.latest_version()
    root = lake.files.roots.path(version + 1)
    unreadable_root = UnreadableRootStorage(lake.storage, root)
    with serving(settings_for(lake), Warehouses({ONLY: Lakehouse(unreadable_root, lake.storage_options)})) as server:
        assert server.request("POST", TABLE, body, key).error == UNKNOWN
    with serving(settings_for(lake)) as server:
        assert server.request("POST", TABLE, body, key).status == 200
    assert lake.latest_version() == version + 1
    full = fail(1, StorageFullError, kind="create", times=50)
    with serving(settings_for(lake), faulty(lake, full)) as server:
        response = server.request("POST", TABLE, commit_of(properties(a="2")))
        assert response.error == (503, "ServiceUnavailableException")
    assert lake.latest_version() == version + 1
    lost = lose_response(1, kind="create", path_part=lake.files.roots.path(version + 2))
    with serving(settings_for(lake), faulty(lake, lost)) as server:
        assert server.request("POST", TABLE, commit_of(properties(a="3"))).status == 200
    assert lake.latest_version() == version + 2


def count_metadata_operations(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often table metadata is parsed and encoded from now on."""
    counts: Counter[str] = Counter()
    parse, encode = TableMetadataUtil.parse_obj, TableMetadataV2.model_dump_json

    def parsing(content: dict[str, Any]) -> Any:
        counts["parsed"] += 1
        return parse(content)

    def encoding(metadata: TableMetadataV2, **options: Any) -> str:
        counts["encoded"] += 1
        return encode(metadata, **options)

    monkeypatch.setattr(TableMetadataUtil, "parse_obj", staticmethod(parsing))
    monkeypatch.setattr(TableMetadataV2, "model_dump_json", encoding)
    return counts


def test_metadata_is_encoded_and_parsed_once(
    server: LiveServer, lake: Lakehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit parses the bytes that it writes and returns them, and the next request reuses the parsed metadata."""
    catalog_at(lake).create_namespace("ns")
    assert server.request("POST", TABLES, create_body()).status == 200
    counts = count_metadata_operations(monkeypatch)
    loaded = server.request("GET", TABLE).document
    counts.clear()
    for number in range(3):
        before = loaded
        committed = server.request("POST", TABLE, commit_of(properties(a=str(number)))).document
        assert counts == {"parsed": 1, "encoded": 1}, number
        for _ in range(3):
            loaded = server.request("GET", TABLE).document
        assert counts == {"parsed": 1, "encoded": 2}, number
        assert committed["metadata"] == loaded["metadata"] != before["metadata"]
        assert committed["metadata-location"] == loaded["metadata-location"] != before["metadata-location"]
        counts.clear()


def test_large_metadata_is_encoded_and_parsed_once(
    server: LiveServer, lake: Lakehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metadata exceeds an eighth of the cache's capacity, and is cached separately with other large metadata."""
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    catalog.create_table("ns.t", ROWS.schema, properties={"large": "x" * (3 << 20)})
    counts = count_metadata_operations(monkeypatch)
    for _ in range(3):
        assert server.request("GET", TABLE).status == 200
        assert server.request("POST", f"{TABLE}/plan", {}).status == 200
    assert counts == {"parsed": 1, "encoded": 1}


def test_compressed_metadata_is_returned_as_json(server: LiveServer, lake: Lakehouse) -> None:
    catalog_at(lake).create_namespace("ns")
    compressed = {"write.metadata.compression-codec": "gzip"}
    assert server.request("POST", TABLES, create_body(properties=compressed)).status == 200
    committed = server.request("POST", TABLE, commit_of(properties(a="1")))
    assert committed.document["metadata"]["properties"]["a"] == "1"
    assert committed.document["metadata-location"].endswith(".metadata.json")
    assert server.request("GET", TABLE).document["metadata"] == committed.document["metadata"]
