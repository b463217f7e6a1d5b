"""Commits through the server: requirements, transactions of tables, lost races and lost answers, foreign files."""

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
from tests.server.requests import COMMIT, TABLE, TABLES, WIDER, commit_of, created, new_key, properties
from tests.server.served import Served, serving, settings_for
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
def rest(served: Served, lake: Lakehouse) -> RestCatalog:
    """The client of pyiceberg for a server whose namespace ``ns`` has the tables ``t`` and ``u``."""
    catalog = served.catalog()
    catalog.create_namespace("ns")
    for name in ("ns.t", "ns.u"):
        catalog.create_table(name, ROWS.schema)
    return catalog


def main_is(snapshot_id: int | None) -> dict[str, Any]:
    return {"type": "assert-ref-snapshot-id", "ref": "main", "snapshot-id": snapshot_id}


def test_requirements_are_checked(served: Served, rest: RestCatalog, lake: Lakehouse) -> None:
    uuid = served.ask("GET", TABLE).document["metadata"]["table-uuid"]
    held = (
        {"type": "assert-table-uuid", "uuid": uuid},
        main_is(None),
        {"type": "assert-current-schema-id", "current-schema-id": 0},
        {"type": "assert-last-assigned-field-id", "last-assigned-field-id": 1},
        {"type": "assert-default-spec-id", "default-spec-id": 0},
        {"type": "assert-default-sort-order-id", "default-sort-order-id": 0},
    )
    assert served.ask("POST", TABLE, commit_of(properties(a="1"), requirements=held)).status == 200
    before = lake.latest_version()
    broken = (
        {"type": "assert-create"},
        {"type": "assert-table-uuid", "uuid": "017f22e2-79b0-7cc3-98c4-dc0c0c07398f"},
        main_is(5),
        {"type": "assert-current-schema-id", "current-schema-id": 3},
    )
    for requirement in broken:
        refused = served.ask("POST", TABLE, commit_of(properties(a="2"), requirements=(requirement,)))
        assert refused.error == CONFLICT
    assert lake.latest_version() == before


def test_a_transaction_is_one_version_or_nothing(served: Served, rest: RestCatalog, lake: Lakehouse) -> None:
    before = lake.latest_version()
    calls = [commit_of(properties(a="1")), commit_of(properties(a="1"), name="u")]
    assert served.ask("POST", COMMIT, {"table-changes": calls}).status == 204
    assert lake.latest_version() == before + 1
    assert [change.table for change in lake.diff(before, before + 1)] == ["t", "u"]
    calls = [commit_of(properties(a="2")), commit_of(properties(a="2"), name="u", requirements=(main_is(5),))]
    assert served.ask("POST", COMMIT, {"table-changes": calls}).error == CONFLICT
    calls = [commit_of(properties(a="2")), commit_of(properties(a="2"), name="none")]
    assert served.ask("POST", COMMIT, {"table-changes": calls}).error == (404, "NoSuchTableException")
    assert served.ask("POST", COMMIT, {"table-changes": [calls[0]] * 2}).error == (400, "BadRequestException")
    assert lake.latest_version() == before + 1


def test_what_other_engines_cannot_use_is_refused(served: Served, rest: RestCatalog, lake: Lakehouse) -> None:
    before = lake.latest_version()
    fields = [{"id": 1, "name": "id", "type": "long", "required": False}]
    with_default = {"id": 2, "name": "n", "type": "long", "required": False, "initial-default": 1, "write-default": 1}
    other_case = {"id": 2, "name": "ID", "type": "long", "required": False}
    for field in (with_default, other_case):
        schema = {"type": "struct", "schema-id": 9, "fields": [*fields, field]}
        update = {"action": "add-schema", "schema": schema, "last-column-id": 2}
        current = {"action": "set-current-schema", "schema-id": -1}
        assert served.ask("POST", TABLE, commit_of(update, current)).error == (400, "BadRequestException")
        for is_staged in (False, True):
            new = {"name": "new", "schema": schema, "stage-create": is_staged}
            answer = served.ask("POST", TABLE.rpartition("/")[0], new)
            assert answer.error == (400, "BadRequestException")
    refused = served.ask("POST", TABLE, commit_of(properties(**{"format-version": "2"})))
    assert refused.error == (400, "BadRequestException")
    report = {"report-type": "unknown-report"}
    assert served.ask("POST", f"{TABLE}/metrics", report).error == (400, "BadRequestException")
    assert served.ask("POST", f"{TABLE}/metrics", {"report-type": "scan-report"}).status == 204
    assert lake.latest_version() == before


def test_a_commit_says_who_asked_for_it(served: Served, rest: RestCatalog, lake: Lakehouse) -> None:
    answer = served.ask("POST", TABLE, commit_of(properties(a="1")))
    (latest,) = lake.history(1)
    assert dict(latest.properties) == {"principal": "anonymous", "request": answer.headers["x-request-id"]}
    assert latest.message == "update ns.t"


def racing(lake: Lakehouse, monkeypatch: pytest.MonkeyPatch, others: list[Callable[[], None]]) -> None:
    """Let each of the server's next transactions lose to a commit of another."""
    begin = lake.transaction

    def transaction(*arguments: Any, **named: Any) -> Any:
        txn = begin(*arguments, **named)
        if others:
            others.pop(0)()
        return txn

    monkeypatch.setattr(lake, "transaction", transaction)


@pytest.fixture
def own(served: Served) -> Lakehouse:
    """The lakehouse as the server has it open."""
    assert served.application is not None
    return served.application.warehouses.served[0].lake


def test_a_lost_race_is_made_again_where_the_requirements_hold(
    served: Served, rest: RestCatalog, lake: Lakehouse, own: Lakehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = catalog_at(lake)

    def alter(name: str, value: str) -> None:
        with other.load_table(name).transaction() as txn:
            txn.set_properties(other=value)

    racing(own, monkeypatch, [lambda: alter("ns.u", "1"), lambda: alter("ns.t", "2"), lambda: alter("ns.t", "3")])
    for at, requirement in enumerate((main_is(None), main_is(None))):
        answer = served.ask("POST", TABLE, commit_of(properties(a=str(at)), requirements=(requirement,)))
        assert answer.status == 200
    assert answer.document["metadata"]["properties"].items() >= {"a": "1", "other": "3"}.items()
    racing(own, monkeypatch, [lambda: other.load_table("ns.t").append(ROWS)])
    refused = served.ask("POST", TABLE, commit_of(properties(a="9"), requirements=(main_is(None),)))
    assert refused.error == CONFLICT
    assert other.load_table("ns.t").properties["a"] == "1"


def test_other_changes_are_made_again_too(
    served: Served, rest: RestCatalog, lake: Lakehouse, own: Lakehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    def alter(**values: str) -> None:
        with lake.transaction() as txn:
            txn.alter_namespace("ns", values)

    racing(own, monkeypatch, [lambda: alter(a="1"), lambda: alter(a="2")])
    changed = served.ask("POST", "/v1/main/namespaces/ns/properties", {"updates": {"b": "3"}})
    assert changed.document["updated"] == ["b"]
    assert dict(lake.snapshot().namespace("ns").properties) == {"a": "2", "b": "3"}


def test_a_client_that_never_wins_is_told(
    served: Served, rest: RestCatalog, lake: Lakehouse, own: Lakehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trinitylake_ops.server.calls.MOST_ATTEMPTS", 3)
    count = iter(range(100))

    def alter() -> None:
        with catalog_at(lake).load_table("ns.t").transaction() as txn:
            txn.set_properties(n=str(next(count)))

    racing(own, monkeypatch, [alter] * 4)
    assert served.ask("POST", TABLE, commit_of(properties(a="1"))).error == CONFLICT


def test_many_clients_lose_nothing(served: Served, rest: RestCatalog, lake: Lakehouse) -> None:
    """Two clients on one table and one on another: each append is there once, and others retry as pyiceberg does."""
    n_each, begun = 4, lake.latest_version()

    def append(name: str, marks: range) -> None:
        catalog = served.catalog()
        for mark in marks:
            while True:
                try:
                    catalog.load_table(name).append(pa.table({"id": pa.array([mark], pa.int64())}))
                    break
                except CommitFailedException:
                    continue

    works = [("ns.t", range(n_each)), ("ns.t", range(10, 10 + n_each)), ("ns.u", range(n_each))]
    threads = [threading.Thread(target=append, args=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(rest.load_table("ns.t").scan().to_arrow()["id"].to_pylist()) == [0, 1, 2, 3, 10, 11, 12, 13]
    assert sorted(rest.load_table("ns.u").scan().to_arrow()["id"].to_pylist()) == [0, 1, 2, 3]
    assert lake.latest_version() - begun <= 3 * n_each
    assert operations.verify(lake, deep=True).findings == ()


def test_a_request_with_a_key_is_carried_out_once(served: Served, rest: RestCatalog, lake: Lakehouse) -> None:
    requests = (
        ("POST", TABLE, commit_of(properties(a="1"))),
        ("POST", COMMIT, {"table-changes": [commit_of(properties(b="1"))]}),
        ("POST", "/v1/main/namespaces", {"namespace": ["new"]}),
        ("POST", "/v1/main/namespaces/new/properties", {"updates": {"a": "1"}, "removals": ["b"]}),
        ("POST", "/v1/main/namespaces/new/tables", created()),
        ("DELETE", "/v1/main/namespaces/new/tables/t", None),
        ("DELETE", "/v1/main/namespaces/new", None),
    )
    for method, path, body in requests:
        headers, before = {"Idempotency-Key": new_key()}, lake.latest_version()
        first = served.ask(method, path, body, headers)
        assert first.status in (200, 204)
        again = served.ask(method, path, body, {"Idempotency-Key": headers["Idempotency-Key"].upper()})
        assert again.status == first.status
        if first.body and "properties" not in path:
            assert again.document == first.document
        assert lake.latest_version() == before + 1
    assert (
        served.ask("POST", "/v1/main/namespaces", {"namespace": ["new"]}, {"Idempotency-Key": new_key()}).status == 200
    )


def test_another_server_knows_the_key(served: Served, rest: RestCatalog, lake: Lakehouse) -> None:
    headers = {"Idempotency-Key": new_key()}
    body = {"source": {"namespace": ["ns"], "name": "t"}, "destination": {"namespace": ["ns"], "name": "v"}}
    with serving(settings_for(lake)) as replica:
        assert served.ask("POST", "/v1/main/tables/rename", body, headers).status == 204
        for _ in range(3):
            lake.alter_definition(message="others go on")
        assert replica.ask("POST", "/v1/main/tables/rename", body, headers).status == 204
        assert replica.ask("POST", "/v1/main/tables/rename", body).error == (404, "NoSuchTableException")


def test_keys_that_make_no_sense(served: Served, rest: RestCatalog, lake: Lakehouse) -> None:
    before, body = lake.latest_version(), commit_of(properties(a="1"))
    version_4 = "1b4e28ba-2fa1-41d2-883f-0016d3cca427"
    for key in ("x", version_4, new_key().replace("-", ""), new_key(age_ms=36 * 60_000)):
        assert served.ask("POST", TABLE, body, {"Idempotency-Key": key}).error == (400, "BadRequestException")
    assert lake.latest_version() == before
    key = {"Idempotency-Key": new_key(age_ms=-20 * 60_000)}  # a clock that is fast
    assert [served.ask("POST", TABLE, body, key).status for _ in range(2)] == [200, 200]
    assert lake.latest_version() == before + 1
    reused = served.ask("POST", f"{TABLES}/u", commit_of(properties(a="1"), name="u"), key)
    assert reused.error == (422, "UnprocessableEntityException")


def test_a_key_of_a_fast_clock_is_looked_for_as_long_as_any(
    served: Served, rest: RestCatalog, lake: Lakehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "CLOCK_MARGIN_MS", 0)
    key, body = {"Idempotency-Key": new_key(age_ms=-10 * 60_000)}, commit_of(properties(a="1"))
    assert served.ask("POST", TABLE, body, key).status == 200
    for value in "23":
        time.sleep(0.01)  # the storage's clock goes on
        assert served.ask("POST", TABLE, commit_of(properties(a=value))).status == 200
    before = lake.latest_version()
    assert served.ask("POST", TABLE, body, key).document["metadata"]["properties"]["a"] == "3"
    assert lake.latest_version() == before


def test_a_key_is_of_one_body(served: Served, rest: RestCatalog, lake: Lakehouse) -> None:
    key = {"Idempotency-Key": new_key()}
    assert served.ask("POST", TABLE, commit_of(properties(a="1")), key).status == 200
    before = lake.latest_version()
    other = served.ask("POST", TABLE, commit_of(properties(a="2")), key)
    assert other.error == (422, "UnprocessableEntityException")
    assert lake.latest_version() == before


def appended(rest: RestCatalog, name: str) -> dict[str, Any]:
    """Return the body of an append, whose files are written, as pyiceberg would send it."""
    table = rest.load_table(name)
    txn = table.transaction()
    txn.append(ROWS)
    body = commit_of(name=name.partition(".")[2])
    body["updates"] = [update.model_dump(mode="json") for update in txn._updates]
    body["requirements"] = [requirement.model_dump(mode="json") for requirement in txn._requirements]
    return body


def test_an_append_that_is_sent_again_is_applied_once(served: Served, rest: RestCatalog, lake: Lakehouse) -> None:
    body = appended(rest, "ns.t")
    first = served.ask("POST", TABLE, body)
    before = lake.latest_version()
    again = served.ask("POST", TABLE, body)
    assert (first.status, again.status) == (200, 200)
    assert again.document == first.document
    assert served.ask("POST", COMMIT, {"table-changes": [body, commit_of(name="u")]}).status == 204
    assert lake.latest_version() == before
    assert rest.load_table("ns.t").scan().to_arrow().num_rows == 2


def test_a_request_that_was_carried_out_in_part_is_not_told_as_done(
    served: Served, rest: RestCatalog, lake: Lakehouse
) -> None:
    """Its snapshots are there, and something else that it asks for is not. A conflict would let files be deleted."""
    body = appended(rest, "ns.t")
    assert served.ask("POST", TABLE, body).status == 200
    before = lake.latest_version()

    def renamed(update: dict[str, Any]) -> dict[str, Any]:
        return {**update, "ref-name": "other"} if "ref-name" in update else update

    other_uuid = {"type": "assert-table-uuid", "uuid": "017f22e2-79b0-7cc3-98c4-dc0c0c07398f"}
    lacking = (
        {**body, "updates": [*body["updates"], properties(want="1")]},
        {**body, "updates": [renamed(update) for update in body["updates"]]},
        {**body, "requirements": [other_uuid]},
    )
    for asked in lacking:
        answer = served.ask("POST", TABLE, asked)
        assert answer.error == UNKNOWN, answer.body
    for change in (commit_of(properties(want="1"), name="u"), appended(rest, "ns.u")):
        assert served.ask("POST", COMMIT, {"table-changes": [body, change]}).error == UNKNOWN
    assert lake.latest_version() == before


def test_a_transaction_that_is_sent_again_is_applied_once(served: Served, rest: RestCatalog, lake: Lakehouse) -> None:
    changed = commit_of(properties(want="1"), name="u")
    changed["updates"].append({"action": "remove-properties", "removals": ["gone"]})
    asked = {"table-changes": [appended(rest, "ns.t"), changed]}
    assert served.ask("POST", COMMIT, asked).status == 204
    before = lake.latest_version()
    assert served.ask("POST", COMMIT, asked).status == 204
    assert lake.latest_version() == before


def test_a_table_is_loaded_where_no_folder_can_be_made(served: Served, lake: Lakehouse) -> None:
    with lake.transaction() as txn:
        txn.create_namespace("ns")
    table = catalog_at(lake).create_table("ns.t", ROWS.schema)
    folder = Path(table.location().removeprefix("file://")) / "data"
    folder.symlink_to("/nowhere/at/all")
    assert served.ask("GET", TABLE).status == 200


def test_files_beyond_the_tables_place_are_refused(served: Served, rest: RestCatalog, lake: Lakehouse) -> None:
    before = lake.latest_version()
    body = appended(rest, "ns.u")
    assert served.ask("POST", TABLE, {**body, "identifier": commit_of()["identifier"]}).error == FORBIDDEN
    body["requirements"] = []
    assert served.ask("POST", TABLE, {**body, "identifier": commit_of()["identifier"]}).error == FORBIDDEN
    for place in ("file:///etc/passwd", "s3://other/list.avro", "../list.avro"):
        body["updates"][0]["snapshot"]["manifest-list"] = place
        assert served.ask("POST", f"{TABLES}/u", body).error == FORBIDDEN
    inside = served.ask("GET", f"{TABLES}/u").document["metadata"]["location"]
    body["updates"][0]["snapshot"]["manifest-list"] = f"{inside}/metadata/none.avro"
    assert served.ask("POST", f"{TABLES}/u", body).error == (400, "BadRequestException")
    statistics = {
        "snapshot-id": 1, "statistics-path": "file:///etc/passwd", "file-size-in-bytes": 1,
        "file-footer-size-in-bytes": 1, "blob-metadata": [],
    }  # fmt: skip
    update = {"action": "set-statistics", "snapshot-id": 1, "statistics": statistics}
    assert served.ask("POST", TABLE, commit_of(update)).error == FORBIDDEN
    assert lake.latest_version() == before


def test_files_may_be_spelt_as_hadoop_does(served: Served, rest: RestCatalog) -> None:
    """Iceberg's Java runtime writes ``file:/path`` with one slash. Such a name leads nowhere else, either."""
    body = appended(rest, "ns.u")
    snapshot = body["updates"][0]["snapshot"]
    place = snapshot["manifest-list"]
    for elsewhere in ("file:/etc/passwd", place.replace("/metadata/", "/../x/").replace("file:///", "file:/")):
        snapshot["manifest-list"] = elsewhere
        assert served.ask("POST", f"{TABLES}/u", body).error == FORBIDDEN
    snapshot["manifest-list"] = place.replace("file:///", "file:/")
    assert served.ask("POST", f"{TABLES}/u", body).status == 200
    assert rest.load_table("ns.u").scan().to_arrow().num_rows == 2


def test_data_files_of_others_are_refused(served: Served, rest: RestCatalog, lake: Lakehouse) -> None:
    rest.load_table("ns.u").append(ROWS)
    (task,) = rest.load_table("ns.u").scan().plan_files()
    before = lake.latest_version()
    with pytest.raises(ForbiddenError, match="copy data files to"):
        rest.load_table("ns.t").add_files([task.file.file_path])
    assert lake.latest_version() == before


def test_data_files_outside_the_lakehouse_are_rejected_without_advice_to_allow_a_root(
    served: Served, rest: RestCatalog, lake: Lakehouse, tmp_path: Path
) -> None:
    """An allowed root makes files readable. It never lets a commit add them, so the error must not suggest it."""
    pq.write_table(ROWS, tmp_path / "a.parquet")
    table, before = rest.load_table("ns.t"), lake.latest_version()
    with pytest.raises(ForbiddenError, match="copy data files to") as raised:
        table.add_files([f"file://{tmp_path}/a.parquet"])
    assert "allow-root" not in str(raised.value)
    assert lake.latest_version() == before
    copied = f"{table.location()}/data/a.parquet"
    pq.write_table(ROWS, copied.removeprefix("file://"))
    table.add_files([copied])
    assert rest.load_table("ns.t").scan().to_arrow().equals(ROWS)


def test_an_engine_removes_no_snapshots_and_is_told_our_commands(
    served: Served, rest: RestCatalog, lake: Lakehouse
) -> None:
    """A client sends what Iceberg's Java would, if ``gc.enabled`` did not stop it, before it deletes their files."""
    table = rest.load_table("ns.t")
    table.append(ROWS)
    table.append(ROWS)
    before, first = lake.latest_version(), table.metadata.snapshots[0]
    with pytest.raises(Exception, match=r"'trinitylake trim' .* 'trinitylake expire' and 'trinitylake purge'"):
        table.maintenance.expire_snapshots().by_id(first.snapshot_id).commit()
    assert table.metadata.properties["gc.enabled"] == "false"
    assert lake.latest_version() == before
    assert served.catalog().load_table("ns.t").snapshot_by_id(first.snapshot_id) == first


def test_a_registered_table_is_not_written(served: Served, rest: RestCatalog, lake: Lakehouse) -> None:
    rest.load_table("ns.u").append(ROWS)
    with lake.transaction() as txn:
        txn.create_table("ns", "theirs", replace(txn.table("ns", "u"), id="", table_type="EXTERNAL"))
    before = lake.latest_version()
    body = {**commit_of(properties(a="1")), "identifier": {"namespace": ["ns"], "name": "theirs"}}
    answer = served.ask("POST", f"{TABLES}/theirs", body)
    assert answer.error == FORBIDDEN
    assert "is registered and cannot be changed here" in answer.document["error"]["message"]
    assert lake.latest_version() == before


def test_a_data_file_is_added_once(served: Served, rest: RestCatalog, lake: Lakehouse) -> None:
    table = rest.load_table("ns.t")
    table.append(ROWS)
    (task,) = table.scan().plan_files()
    txn = table.transaction()
    with txn.update_snapshot().fast_append() as append:
        append.append_data_file(task.file)
        append.append_data_file(task.file)
    body = commit_of()
    body["updates"] = [update.model_dump(mode="json") for update in txn._updates]
    before = lake.latest_version()
    assert served.ask("POST", TABLE, body).status == 400
    far = appended(rest, "ns.t")
    for update in far["updates"]:
        if update["action"] == "add-snapshot":
            update["snapshot"]["sequence-number"] = 2**62
    assert served.ask("POST", TABLE, far).status == 400
    assert lake.latest_version() == before
    assert served.ask("POST", TABLE, appended(rest, "ns.t")).status == 200


def test_statistics_files_count_for_the_age_of_a_commit(served: Served, rest: RestCatalog, lake: Lakehouse) -> None:
    rest.load_table("ns.t").append(ROWS)
    table = rest.load_table("ns.t")
    path = f"{table.location()}/metadata/old.stats"
    statistics = {
        "snapshot-id": table.metadata.current_snapshot_id, "statistics-path": path, "file-size-in-bytes": 4,
        "file-footer-size-in-bytes": 1, "blob-metadata": [],
    }  # fmt: skip
    update = {"action": "set-statistics", "snapshot-id": statistics["snapshot-id"], "statistics": statistics}
    before = lake.latest_version()
    assert served.ask("POST", TABLE, commit_of(update)).status >= 400, "there is no such file"
    lake.storage.create(path.removeprefix(lake.root), b"old!")
    long_ago_s = time.time() - 10 * 24 * 3_600
    os.utime(path.removeprefix("file://"), (long_ago_s, long_ago_s))
    assert "txn_ttl_millis" in served.ask("POST", TABLE, commit_of(update)).document["error"]["message"]
    assert lake.latest_version() == before
    os.utime(path.removeprefix("file://"))
    assert served.ask("POST", TABLE, commit_of(update)).status == 200


def test_a_new_table_needs_a_schema(served: Served, rest: RestCatalog, lake: Lakehouse) -> None:
    before = lake.latest_version()
    schema = {"action": "add-schema", "schema": WIDER}
    for updates in ([], [properties(a="1")], [schema], [schema, {"action": "set-current-schema", "schema-id": 5}]):
        body = commit_of(*updates, requirements=({"type": "assert-create"},), name="new")
        assert served.ask("POST", f"{TABLES}/new", body).error == (400, "BadRequestException"), updates
    body = {**commit_of(requirements=({"type": "assert-create"},)), "identifier": {"namespace": ["no"], "name": "t"}}
    missing = served.ask("POST", "/v1/main/namespaces/no/tables/t", body)
    assert missing.error == (404, "NoSuchNamespaceException")
    assert lake.latest_version() == before


def staged_commit(served: Served, location: str | None, name: str = "new") -> Any:
    body = commit_of(
        {"action": "assign-uuid", "uuid": "017f22e2-79b0-7cc3-98c4-dc0c0c07398f"},
        {"action": "upgrade-format-version", "format-version": 2},
        {"action": "add-schema", "schema": WIDER},
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
    return served.ask("POST", f"{TABLES}/{name}", body)


def test_a_staged_table_is_created_by_its_commit(served: Served, rest: RestCatalog, lake: Lakehouse) -> None:
    before = lake.latest_version()
    staged = served.ask("POST", TABLES, created("new", **{"stage-create": True})).document
    assert "metadata-location" not in staged
    assert lake.latest_version() == before
    place = staged["metadata"]["location"]
    made = staged_commit(served, place)
    assert made.document["metadata"]["location"] == place
    assert made.document["metadata"]["properties"]["gc.enabled"] == "false"
    assert staged_commit(served, place).error == CONFLICT
    assert rest.load_table("ns.new").schema().column_names == ["id", "name"]
    assert staged_commit(served, None, "other").status == 200
    assert lake.latest_version() == before + 2
    assert operations.verify(lake, deep=True).findings == ()


def test_no_table_takes_the_place_of_another(served: Served, rest: RestCatalog, lake: Lakehouse) -> None:
    taken = rest.load_table("ns.t").location()
    dropped = rest.load_table("ns.u").location()
    rest.drop_table("ns.u")
    before = lake.latest_version()
    fresh = f"{lake.root}tables/017f22e2-79b0-4cc3-98c4-dc0c0c07398f"
    for place in (taken, dropped, fresh, f"{taken}/data", f"{lake.root}_ops", "file:///elsewhere/t", f"{taken}/../x"):
        assert staged_commit(served, place).error == FORBIDDEN
    assert lake.latest_version() == before


class SilentRoot(StorageWrapper):
    """A storage that makes one root, gives no answer, and then does not let it be read."""

    def __init__(self, inner: Storage, root: str):
        super().__init__(inner)
        self._root = root
        self._is_complete_clone = False

    def create(self, path: str, data: bytes) -> None:
        super().create(path, data)
        if path == self._root:
            self._is_complete_clone = True
            raise AmbiguousWriteError("no answer", path=path)

    def read(self, path: str, **part: Any) -> bytes:
        if path == self._root and self._is_complete_clone:
            raise TransientError("no answer", path=path)
        return super().read(path, **part)


def faulty(lake: Lakehouse, *faults: Any) -> Warehouses:
    return Warehouses({ONLY: Lakehouse(FaultyStorage(lake.storage, list(faults)), lake.storage_options)})


def test_500_says_that_nobody_knows(lakes: Lakes) -> None:
    """Only where the root's answer was lost and its name cannot be read. What certainly failed is 503."""
    lake = lakes.local()
    with serving(settings_for(lake)) as served:
        served.catalog().create_namespace("ns")
        assert served.ask("POST", TABLES, created()).status == 200
    key, body = {"Idempotency-Key": new_key()}, commit_of(properties(a="1"))
    version = lake.latest_version()
    root = lake.files.roots.path(version + 1)
    silent = SilentRoot(lake.storage, root)
    with serving(settings_for(lake), Warehouses({ONLY: Lakehouse(silent, lake.storage_options)})) as served:
        assert served.ask("POST", TABLE, body, key).error == UNKNOWN
    with serving(settings_for(lake)) as served:
        assert served.ask("POST", TABLE, body, key).status == 200
    assert lake.latest_version() == version + 1
    full = fail(1, StorageFullError, kind="create", times=50)
    with serving(settings_for(lake), faulty(lake, full)) as served:
        refused = served.ask("POST", TABLE, commit_of(properties(a="2")))
        assert refused.error == (503, "ServiceUnavailableException")
    assert lake.latest_version() == version + 1
    lost = lose_response(1, kind="create", path_part=lake.files.roots.path(version + 2))
    with serving(settings_for(lake), faulty(lake, lost)) as served:
        assert served.ask("POST", TABLE, commit_of(properties(a="3"))).status == 200
    assert lake.latest_version() == version + 2


def counting_metadata(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return a counter of how often metadata of tables is parsed and encoded from now on."""
    counted: Counter[str] = Counter()
    parse, encode = TableMetadataUtil.parse_obj, TableMetadataV2.model_dump_json

    def parsing(content: dict[str, Any]) -> Any:
        counted["parsed"] += 1
        return parse(content)

    def encoding(metadata: TableMetadataV2, **options: Any) -> str:
        counted["encoded"] += 1
        return encode(metadata, **options)

    monkeypatch.setattr(TableMetadataUtil, "parse_obj", staticmethod(parsing))
    monkeypatch.setattr(TableMetadataV2, "model_dump_json", encoding)
    return counted


def test_metadata_is_encoded_and_parsed_once(served: Served, lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit parses the bytes that it writes, answers with them, and the next request finds what was parsed."""
    catalog_at(lake).create_namespace("ns")
    assert served.ask("POST", TABLES, created()).status == 200
    counted = counting_metadata(monkeypatch)
    loaded = served.ask("GET", TABLE).document
    counted.clear()
    for number in range(3):
        before = loaded
        committed = served.ask("POST", TABLE, commit_of(properties(a=str(number)))).document
        assert counted == {"parsed": 1, "encoded": 1}, number
        for _ in range(3):
            loaded = served.ask("GET", TABLE).document
        assert counted == {"parsed": 1, "encoded": 2}, number
        assert committed["metadata"] == loaded["metadata"] != before["metadata"]
        assert committed["metadata-location"] == loaded["metadata-location"] != before["metadata-location"]
        counted.clear()


def test_large_metadata_is_encoded_and_parsed_once(
    served: Served, lake: Lakehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has more than an eighth of the capacity of the cache, and is kept among other large metadata."""
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    catalog.create_table("ns.t", ROWS.schema, properties={"large": "x" * (3 << 20)})
    counted = counting_metadata(monkeypatch)
    for _ in range(3):
        assert served.ask("GET", TABLE).status == 200
        assert served.ask("POST", f"{TABLE}/plan", {}).status == 200
    assert counted == {"parsed": 1, "encoded": 1}


def test_compressed_metadata_is_answered_as_json(served: Served, lake: Lakehouse) -> None:
    catalog_at(lake).create_namespace("ns")
    compressed = {"write.metadata.compression-codec": "gzip"}
    assert served.ask("POST", TABLES, created(properties=compressed)).status == 200
    committed = served.ask("POST", TABLE, commit_of(properties(a="1")))
    assert committed.document["metadata"]["properties"]["a"] == "1"
    assert committed.document["metadata-location"].endswith(".metadata.json")
    assert served.ask("GET", TABLE).document["metadata"] == committed.document["metadata"]
