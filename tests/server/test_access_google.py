"""Clients without keys on Google Cloud Storage: downscoped tokens, and what they do not let anybody do.

Boundaries are held by a proxy of the tests (``tests/servers/google.py``), not by Google's service.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import pyarrow as pa
import pytest
import yaml
from google.auth import downscoped

from tests.clients.test_clients import run
from tests.server.requests import TABLE, commit_of, properties
from tests.server.served import Served, logged, serving, settings_for
from tests.server.test_safety import ENTRIES, READER, UNAUTHORIZED, WRITER
from tests.servers.gcs import GcsServer
from tests.servers.google import Google
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import (
    InvalidInputError,
    StorageError,
    StoragePermissionError,
    TransientError,
    TrinityLakeError,
)
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.server.settings import ONLY, LakehouseSettings, read_lakehouses
from trinitylake_ops.server.warehouses import Warehouses
from trinitylake_ops.storage import delegation
from trinitylake_ops.storage.delegation import DelegationSettings
from trinitylake_ops.storage.gcs.delegation import GcsDelegate, folder_boundary
from trinitylake_ops.storage.gcs.settings import GcsLocation
from trinitylake_ops.storage.options import StorageOptions

ROWS = pa.table({"id": pa.array([1, 2, 3], pa.int64())})
VENDED = {"X-Iceberg-Access-Delegation": "vended-credentials"}
AS_WRITER, AS_READER = ({"Authorization": f"Bearer {token}"} for token in (WRITER, READER))
TOKEN, ENDS, REFRESH = "gcs.oauth2.token", "gcs.oauth2.token-expires-at", "gcs.oauth2.refresh-credentials-endpoint"
#: By which pyiceberg reads and writes files.
ARROW, GCSFS = "pyiceberg.io.pyarrow.PyArrowFileIO", "pyiceberg.io.fsspec.FsspecFileIO"
#: Otherwise gcsfs asks Google, at its own addresses, when a token ends, and of which kind a bucket is.
OF_GCSFS = {"FETCH_RAW_TOKEN_EXPIRY": "false", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}


@pytest.fixture
def google(fake_gcs: GcsServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Google]:
    """Google's services, as tests have them. Nobody finds credentials in the environment."""
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "STORAGE_EMULATOR_HOST", "CLOUDSDK_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    made = Google(fake_gcs)
    with made.proxy.running():
        yield made


@pytest.fixture
def on_google(google: Google) -> Iterator[Lakehouse]:
    """A lakehouse with ``ns.t`` and ``own.secret``, each of three rows."""
    lake = Lakehouse.create(google.server.fresh_root(), google.server.storage_options)  # by nobody's token
    catalog = catalog_at(lake)
    for name in ("ns.t", "own.secret"):
        catalog.create_namespace(name.partition(".")[0])
        catalog.create_table(name, ROWS.schema).append(ROWS)
    yield Lakehouse.open(lake.root, google.storage_options)
    google.server.delete_all(lake.root)


@pytest.fixture
def giving(google: Google, on_google: Lakehouse, tmp_path: Path) -> Iterator[Served]:
    """A server that gives downscoped tokens."""
    with serving_files(on_google, tmp_path, settings_of(google)) as served:
        yield served


def settings_of(google: Google) -> DelegationSettings:
    return DelegationSettings(downscope=True, sts_endpoint=google.sts_endpoint)


def serving_files(lake: Lakehouse, folder: Path, files: DelegationSettings) -> Any:
    path = folder / "tokens.yaml"
    path.write_text(yaml.safe_dump({"tokens": ENTRIES}))
    lakehouses = {ONLY: LakehouseSettings(lake.root, lake.storage_options, files)}
    return serving(settings_for(lake, lakehouses=lakehouses, tokens=path))


def delegate_of(google: Google, files: DelegationSettings | None = None) -> GcsDelegate:
    return GcsDelegate(StorageOptions(google.storage_options), files or settings_of(google))


def place_of(lake: Lakehouse, name: str) -> GcsLocation:
    return GcsLocation.of(f"{catalog_at(lake).load_table(name).metadata.location}/")


class Bucket:
    """Requests to the storage by a token."""

    def __init__(self, google: Google, token: str):
        self.google = google
        self._token = token
        self._objects = f"/storage/v1/b/{google.server.bucket}/o"

    def ask(self, method: str, target: str, body: bytes = b"") -> int:
        address = urlsplit(self.google.endpoint)
        connection = HTTPConnection(address.hostname or "", address.port, timeout=60)
        connection.request(method, target, body, {"Authorization": f"Bearer {self._token}"})
        answer = connection.getresponse()
        answer.read()
        connection.close()
        return answer.status

    def get(self, name: str) -> int:
        return self.ask("GET", f"{self._objects}/{quote(name, safe='')}?alt=media")

    def put(self, name: str, **query: str) -> int:
        asked = urlencode({"uploadType": "media", "name": name, **query})
        return self.ask("POST", f"/upload{self._objects}?{asked}", b"x")

    def delete(self, name: str) -> int:
        return self.ask("DELETE", f"{self._objects}/{quote(name, safe='')}")

    def update(self, name: str) -> int:
        return self.ask("PATCH", f"{self._objects}/{quote(name, safe='')}", b"{}")

    def list(self, prefix: str | None) -> int:
        return self.ask("GET", self._objects + ("" if prefix is None else f"?prefix={quote(prefix, safe='')}"))

    def copy(self, source: str, target: str) -> int:
        names = [quote(name, safe="") for name in (source, target)]
        return self.ask("POST", f"{self._objects}/{names[0]}/rewriteTo/b/{self.google.server.bucket}/o/{names[1]}")


def test_a_token_reaches_its_table_alone(giving: Served, google: Google, on_google: Lakehouse) -> None:
    loaded = giving.ask("GET", TABLE, headers={**AS_WRITER, **VENDED})
    (given,) = loaded.document["storage-credentials"]
    own, other = (place_of(on_google, name) for name in ("ns.t", "own.secret"))
    assert given["prefix"] == own.root
    assert loaded.headers["cache-control"] == "no-store"
    assert "etag" not in loaded.headers
    assert time.time() < int(given["config"][ENDS]) / 1_000 <= time.time() + 3_600
    assert given["config"]["gcs.service.host"] == google.endpoint
    bucket, prefix = Bucket(google, given["config"][TOKEN]), own.key_prefix
    foreign, *_ = names(google, other)
    metadata = next(name for name in names(google, own) if name.endswith(".metadata.json"))
    data = next(name for name in names(google, own) if name.endswith(".parquet"))
    new = f"{prefix}data/new.parquet"
    assert {bucket.get(metadata), bucket.get(data), bucket.list(prefix), bucket.put(new), bucket.get(new)} == {200}
    refused = [
        bucket.get(foreign),
        bucket.put(f"{other.key_prefix}data/new.parquet"),
        bucket.put(f"{prefix.rstrip('/')}x/data/a"),
        bucket.put(f"{on_google.root.partition(google.server.bucket + '/')[2]}_ops/a"),
        bucket.put(f"{prefix}_owner.json"),
        bucket.put(f"{prefix}new.json"),
        bucket.put(f"{prefix}new/a"),
        bucket.put(f"{prefix}metadata/new.metadata.json"),
        bucket.put(f"{prefix}metadata/new.metadata.json.gz"),
        bucket.put(metadata),
        bucket.put(new),  # to replace is to delete
        *(bucket.delete(name) for name in (metadata, data, new, foreign)),
        bucket.update(new),
        bucket.copy(foreign, f"{prefix}data/stolen"),
        bucket.copy(data, f"{other.key_prefix}data/planted"),
        bucket.list(None),
        bucket.list(prefix[:-1]),
        bucket.list(other.key_prefix),
        bucket.ask("GET", f"/storage/v1/b/{google.server.bucket}"),
        bucket.ask("POST", "/storage/v1/b?project=any", b'{"name": "of-a-token"}'),
        bucket.ask("GET", f"/storage/v1/b/{google.server.bucket}/iam"),
    ]
    assert refused == [403] * len(refused)
    assert Bucket(google, "made-up").get(data) == 401


def names(google: Google, place: GcsLocation) -> list[str]:
    return [place.key_prefix + name for name in google.server.names(place.root)]


def test_a_reader_gets_a_token_that_reads(giving: Served, google: Google, on_google: Lakehouse) -> None:
    own = place_of(on_google, "ns.t")
    for headers, table in ((AS_READER, TABLE), (AS_WRITER, TABLE.replace("main", "v5"))):
        bucket = Bucket(google, _given(giving, headers, table)[TOKEN])
        assert bucket.list(own.key_prefix) == bucket.get(names(google, own)[0]) == 200
        assert bucket.put(f"{own.key_prefix}data/x") == 403
    assert Bucket(google, _given(giving, AS_WRITER, TABLE)[TOKEN]).put(f"{own.key_prefix}data/x") == 200


def test_an_old_version_of_a_dropped_table_gives_no_token(giving: Served, google: Google, on_google: Lakehouse) -> None:
    old = TABLE.replace("main", "v5")
    catalog_at(on_google).rename_table("ns.t", "ns.u")
    assert TOKEN in _given(giving, AS_WRITER, old)
    catalog_at(on_google).drop_table("ns.u")
    assert TOKEN not in _given(giving, AS_WRITER, old)
    assert giving.ask("GET", f"{old}/credentials", headers=AS_WRITER).error == (406, "UnsupportedOperationException")


def _given(served: Served, headers: Mapping[str, str], table: str) -> dict[str, str]:
    config: dict[str, str] = served.ask("GET", table, headers={**headers, **VENDED}).document["config"]
    return config


def test_what_is_answered_without_keys(giving: Served, google: Google, on_google: Lakehouse) -> None:
    """No token or key of the server is in an answer. A token is given again, and to its own person alone."""
    plain = giving.ask("GET", TABLE, headers=AS_WRITER)
    assert plain.document["config"] == {"gcs.service.host": google.endpoint}
    vended = giving.ask("GET", TABLE, headers={**AS_WRITER, **VENDED})
    again = giving.ask("GET", f"/{vended.document['config'][REFRESH]}", headers=AS_WRITER)
    assert again.document["storage-credentials"] == vended.document["storage-credentials"]
    assert len(google.boundaries) == 1
    assert _given(giving, AS_READER, TABLE)[TOKEN] != vended.document["config"][TOKEN]
    own = [name for name, token in google.tokens.items() if token.rules is None]
    key = json.loads(on_google.storage_options["credentials"])["private_key"].splitlines()[1]
    for reply in (plain, vended, again):
        for secret in (key, *own):
            assert secret.encode() not in reply.body


def test_a_token_is_given_until_half_of_its_time_is_over(google: Google, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, delegate = "gs://tests/lake/tables/id/", delegate_of(google)
    asked = {"writes": False, "name": "reader"}
    first = delegate.credentials(folder, **asked)
    assert delegate.credentials(folder, **asked) is first
    assert delegate.credentials(folder, writes=True, name="reader") is not first
    assert first.token not in repr(first)
    for seconds, is_kept in ((1_790, True), (1_810, False)):
        later = SimpleNamespace(time=lambda: time.time() + seconds)  # noqa: B023 - called within the turn
        monkeypatch.setattr(delegation, "time", later)
        assert (delegate.credentials(folder, **asked) is first) == is_kept


def test_who_gets_nothing(giving: Served, google: Google, on_google: Lakehouse, tmp_path: Path) -> None:
    path = f"{TABLE}/credentials"
    assert giving.ask("GET", path).error == UNAUTHORIZED
    assert giving.ask("POST", f"{TABLE}/sign", {}, headers=AS_WRITER).error == (406, "UnsupportedOperationException")
    with serving_files(on_google, tmp_path, DelegationSettings()) as plain:
        assert plain.ask("GET", path, headers=AS_WRITER).error == (406, "UnsupportedOperationException")
        assert _given(plain, AS_WRITER, TABLE) == {"gcs.service.host": google.endpoint}
    google.has_uniform_access = False
    denied = giving.ask("GET", TABLE, headers={**AS_READER, **VENDED})
    assert denied.error == (503, "ServiceUnavailableException")
    assert giving.ask("GET", TABLE, headers=AS_READER).status == 200


@pytest.mark.soak
@pytest.mark.parametrize("file_io", [ARROW, GCSFS])
def test_pyiceberg_without_keys(giving: Served, google: Google, on_google: Lakehouse, file_io: str) -> None:
    """Arrow waits for the storage without letting other threads go on, so the client is in another process."""
    google.asked.clear()
    program = Path(__file__).parents[1] / "clients" / "programs" / "with_pyiceberg.py"
    found = run(sys.executable, str(program), giving.url, WRITER, READER, file_io, **OF_GCSFS)
    assert "storage.objects.create" in found.pop("error") if file_io == ARROW else "Forbidden" in found.pop("error")
    assert found == {"now": 6, "then": 3}
    check_rights(google)
    assert operations.verify(on_google, deep=True).findings == ()


def check_rights(google: Google) -> None:
    """Check that clients read and created by downscoped tokens, and were refused nothing else than to write."""
    of_clients = [one for one in google.asked if one.is_downscoped]
    assert {one.right.permission for one in of_clients if one.is_allowed} >= {
        "storage.objects.get", "storage.objects.create",
    }  # fmt: skip
    assert {one.right.permission for one in of_clients if not one.is_allowed} <= {"storage.objects.create"}


@pytest.mark.parametrize("place", ["a'b", 'a"b', "a\\b", "a b", "a%b", "ä", "a#b", "a?b", "a(b", "a[b", "a{b", "a*b"])
def test_places_that_no_boundary_names(place: str) -> None:
    """Such names could end the text of a condition, or be written in another way in the name of a resource."""
    with pytest.raises(InvalidInputError):
        folder_boundary(GcsLocation("gs://bucket/", "bucket", f"{place}/tables/id/"), writes=False)


def test_boundaries_name_one_folder() -> None:
    reads, writes = (folder_boundary(GcsLocation.of("gs://bucket/lake/t/id/"), writes=flag) for flag in (False, True))
    assert [roles_of(rule) for rule in reads.rules] == [["inRole:roles/storage.objectViewer"]]
    viewer, creator = writes.rules
    assert viewer.to_json() == reads.rules[0].to_json()
    assert roles_of(creator) == ["inRole:roles/storage.objectCreator"]
    assert {rule.available_resource for rule in writes.rules} == {"//storage.googleapis.com/projects/_/buckets/bucket"}
    assert viewer.availability_condition.expression == (
        "resource.name.startsWith('projects/_/buckets/bucket/objects/lake/t/id/')"
        " || api.getAttribute('storage.googleapis.com/objectListPrefix', '').startsWith('lake/t/id/')"
    )
    for prefix in ("", "/"):
        with pytest.raises(InvalidInputError):
            folder_boundary(GcsLocation("gs://bucket/", "bucket", prefix), writes=False)
    with pytest.raises(InvalidInputError):
        folder_boundary(GcsLocation.of(f"gs://bucket/{'a' * 950}/tables/id/"), writes=True)


def roles_of(rule: downscoped.AccessBoundaryRule) -> list[str]:
    return list(rule.available_permissions)


@pytest.mark.parametrize(
    ("status", "answer", "kind", "told"),
    [
        (400, b'{"error": "invalid_grant", "error_description": "not SECRET"}', StoragePermissionError, "invalid_gra"),
        (400, b"SECRET", StoragePermissionError, "no downscoped token"),
        (403, b"{}", StoragePermissionError, "no downscoped token"),
        (302, b"", StoragePermissionError, "no downscoped token"),
        (503, b"SECRET", TransientError, "busy"),
        (429, b"SECRET", TransientError, "busy"),
        (200, b"SECRET", StorageError, "not one of Google's"),
        (200, b"", StorageError, "not one of Google's"),
        (200, b"{}", StorageError, "not one of Google's"),
        (200, b"[]", StorageError, "not one of Google's"),
        (200, b'{"access_token": 7}', StorageError, "not one of Google's"),
        (200, b'{"access_token": "a b"}', StorageError, "not one of Google's"),
        (200, b'{"access_token": "OWN"}', StorageError, "not one of Google's"),
        (200, b'{"access_token": "SECRET", "expires_in": "soon"}', StorageError, "not one of Google's"),
        (200, b'{"access_token": "SECRET", "expires_in": 1e300}', StorageError, "not one of Google's"),
    ],
)
def test_strange_answers_of_the_service_of_tokens(
    google: Google, status: int, answer: bytes, kind: type[TrinityLakeError], told: str
) -> None:
    """The server's own token is given to nobody, whatever the service answers."""
    delegate = delegate_of(google)
    delegate.credentials("gs://tests/lake/tables/id/", writes=False, name="a")
    own = next(name for name, token in google.tokens.items() if token.rules is None)
    if b"OWN" in answer:
        google._given = lambda token, **more: _same(own)  # type: ignore[method-assign]
        answer = answer.replace(b"OWN", own.encode())
    google.instead.append((status, answer))
    with pytest.raises(kind, match=told) as caught:
        delegate.credentials("gs://tests/lake/tables/id/", writes=True, name="a")
    for secret in ("SECRET", own):
        assert secret not in str(caught.value)


def _same(token: str) -> tuple[int, Mapping[str, str], bytes]:
    return 200, {}, json.dumps({"access_token": token, "token_type": "Bearer", "expires_in": 3_600}).encode()


def test_services_that_do_not_answer(google: Google, tmp_path: Path) -> None:
    asked = {"folder": "gs://tests/lake/tables/id/", "writes": False, "name": "a"}
    nobody = replace(settings_of(google), sts_endpoint="http://127.0.0.1:9/v1/token")
    with pytest.raises(TransientError):
        delegate_of(google, nobody).credentials(**asked)
    file = tmp_path / "key.json"
    file.write_text('{"type": "service_account", "private_key": "hush-hush"}')
    for credentials in (str(file), str(tmp_path / "none.json"), None):
        options = {"endpoint": google.endpoint, **({"credentials": credentials} if credentials else {})}
        with pytest.raises(StoragePermissionError) as caught:
            GcsDelegate(StorageOptions(options), settings_of(google)).credentials(**asked)
        assert "hush" not in str(caught.value)
    with pytest.raises(StoragePermissionError, match=r"storage\.buckets\.get"):
        delegate_of(google).credentials("gs://no-such-bucket/lake/tables/id/", writes=False, name="a")


def test_settings_that_make_no_sense(google: Google, tmp_path: Path) -> None:
    for wrong in ({"role": "arn:aws:iam:::role/lake"}, {"sign": True}, {"seconds": 900}):
        with pytest.raises(InvalidInputError):
            DelegationSettings(downscope=True, **wrong)
    for address in (
        "http://sts.example/v1/token",
        "https://",
        "https://a@b/",
        "https://b/?a",
        "ftp://b",
        "b",
        "https://b/ ",
    ):
        with pytest.raises(InvalidInputError):
            delegate_of(google, DelegationSettings(downscope=True, sts_endpoint=address))
    delegate_of(google, DelegationSettings(downscope=True, sts_endpoint="https://sts.private.example/v1/token"))
    anonymous = LakehouseSettings(
        "gs://tests/lake", StorageOptions({"credentials": "anonymous"}), DelegationSettings(downscope=True)
    )
    with pytest.raises(InvalidInputError):
        Warehouses.opened({ONLY: anonymous})
    for root, files in (
        ("s3://bucket/lake", DelegationSettings(downscope=True)),
        ("gs://bucket/lake", DelegationSettings(sign=True)),
        (f"{tmp_path}/lake", DelegationSettings(downscope=True)),
        ("az://container/lake", DelegationSettings(downscope=True)),
    ):
        with pytest.raises(InvalidInputError):
            Warehouses.opened({ONLY: LakehouseSettings(root, StorageOptions(), files)})
    path = tmp_path / "lakehouses.yaml"
    path.write_text("lakehouses: {a: {root: 'gs://bucket/a', files: {downscope: true}}}")
    assert read_lakehouses(path)["a"].files == DelegationSettings(downscope=True)


def test_tokens_are_in_no_log_and_no_metric(giving: Served, google: Google) -> None:
    with logged(logging.INFO) as text:
        _given(giving, AS_WRITER, TABLE)
        assert giving.ask("POST", TABLE, commit_of(properties(a="1")), headers=AS_WRITER).status == 200
        metrics = giving.ask("GET", "/metrics", headers=AS_WRITER).body.decode()
    assert '"status": 200' in text.getvalue()
    for secret in google.tokens:
        assert secret not in metrics + text.getvalue()
