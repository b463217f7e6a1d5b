"""Clients without keys on Google Cloud Storage: downscoped tokens and their limits.

A test proxy (``tests/servers/google.py``) enforces the boundaries, not Google's service.
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
from tests.server.live_server import LiveServer, captured_log, serving, settings_for
from tests.server.request_bodies import TABLE, commit_of, properties
from tests.server.test_access_control import ENTRIES, READER, UNAUTHORIZED, WRITER
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
TOKEN, EXPIRES_AT, REFRESH = (
    "gcs.oauth2.token",
    "gcs.oauth2.token-expires-at",
    "gcs.oauth2.refresh-credentials-endpoint",
)
#: The two file IO implementations with which pyiceberg accesses the storage.
ARROW, GCSFS = "pyiceberg.io.pyarrow.PyArrowFileIO", "pyiceberg.io.fsspec.FsspecFileIO"
#: Without these variables, gcsfs would query Google's servers for the token's expiry and the bucket's type.
GCSFS_ENVIRONMENT = {"FETCH_RAW_TOKEN_EXPIRY": "false", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}


@pytest.fixture
def google(fake_gcs: GcsServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Google]:
    """An emulator of Google's services. The environment contains no credentials."""
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "STORAGE_EMULATOR_HOST", "CLOUDSDK_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    simulated = Google(fake_gcs)
    with simulated.proxy.running():
        yield simulated


@pytest.fixture
def gcs_lake(google: Google) -> Iterator[Lakehouse]:
    """A lakehouse with the tables ``ns.t`` and ``own.secret``, each with three rows."""
    lake = Lakehouse.create(google.server.fresh_root(), google.server.storage_options)  # without a client's token
    catalog = catalog_at(lake)
    for name in ("ns.t", "own.secret"):
        catalog.create_namespace(name.partition(".")[0])
        catalog.create_table(name, ROWS.schema).append(ROWS)
    yield Lakehouse.open(lake.root, google.storage_options)
    google.server.delete_all(lake.root)


@pytest.fixture
def vending_server(google: Google, gcs_lake: Lakehouse, tmp_path: Path) -> Iterator[LiveServer]:
    """A server that vends downscoped tokens."""
    with serving_files(gcs_lake, tmp_path, settings_of(google)) as server:
        yield server


def settings_of(google: Google) -> DelegationSettings:
    return DelegationSettings(downscope=True, sts_endpoint=google.sts_endpoint)


def serving_files(lake: Lakehouse, folder: Path, files: DelegationSettings) -> Any:
    path = folder / "tokens.yaml"
    path.write_text(yaml.safe_dump({"tokens": ENTRIES}))
    lakehouses = {ONLY: LakehouseSettings(lake.root, lake.storage_options, files)}
    return serving(settings_for(lake, lakehouses=lakehouses, tokens=path))


def delegate_of(google: Google, files: DelegationSettings | None = None) -> GcsDelegate:
    return GcsDelegate(StorageOptions(google.storage_options), files or settings_of(google))


def location_of(lake: Lakehouse, name: str) -> GcsLocation:
    return GcsLocation.of(f"{catalog_at(lake).load_table(name).metadata.location}/")


class Bucket:
    """Send requests to the storage with a token."""

    def __init__(self, google: Google, token: str):
        self.google = google
        self._token = token
        self._objects = f"/storage/v1/b/{google.server.bucket}/o"

    def request(self, method: str, target: str, body: bytes = b"") -> int:
        address = urlsplit(self.google.endpoint)
        connection = HTTPConnection(address.hostname or "", address.port, timeout=60)
        connection.request(method, target, body, {"Authorization": f"Bearer {self._token}"})
        response = connection.getresponse()
        response.read()
        connection.close()
        return response.status

    def get(self, name: str) -> int:
        return self.request("GET", f"{self._objects}/{quote(name, safe='')}?alt=media")

    def put(self, name: str, **query: str) -> int:
        upload_query = urlencode({"uploadType": "media", "name": name, **query})
        return self.request("POST", f"/upload{self._objects}?{upload_query}", b"x")

    def delete(self, name: str) -> int:
        return self.request("DELETE", f"{self._objects}/{quote(name, safe='')}")

    def update(self, name: str) -> int:
        return self.request("PATCH", f"{self._objects}/{quote(name, safe='')}", b"{}")

    def list(self, prefix: str | None) -> int:
        return self.request("GET", self._objects + ("" if prefix is None else f"?prefix={quote(prefix, safe='')}"))

    def copy(self, source: str, target: str) -> int:
        names = [quote(name, safe="") for name in (source, target)]
        return self.request("POST", f"{self._objects}/{names[0]}/rewriteTo/b/{self.google.server.bucket}/o/{names[1]}")


def test_token_is_limited_to_its_table(vending_server: LiveServer, google: Google, gcs_lake: Lakehouse) -> None:
    loaded = vending_server.request("GET", TABLE, headers={**AS_WRITER, **VENDED})
    (credentials,) = loaded.document["storage-credentials"]
    location, other_location = (location_of(gcs_lake, name) for name in ("ns.t", "own.secret"))
    assert credentials["prefix"] == location.root
    assert loaded.headers["cache-control"] == "no-store"
    assert "etag" not in loaded.headers
    assert time.time() < int(credentials["config"][EXPIRES_AT]) / 1_000 <= time.time() + 3_600
    assert credentials["config"]["gcs.service.host"] == google.endpoint
    bucket, prefix = Bucket(google, credentials["config"][TOKEN]), location.key_prefix
    foreign, *_ = names(google, other_location)
    metadata = next(name for name in names(google, location) if name.endswith(".metadata.json"))
    data = next(name for name in names(google, location) if name.endswith(".parquet"))
    new = f"{prefix}data/new.parquet"
    assert {bucket.get(metadata), bucket.get(data), bucket.list(prefix), bucket.put(new), bucket.get(new)} == {200}
    statuses = [
        bucket.get(foreign),
        bucket.put(f"{other_location.key_prefix}data/new.parquet"),
        bucket.put(f"{prefix.rstrip('/')}x/data/a"),
        bucket.put(f"{gcs_lake.root.partition(google.server.bucket + '/')[2]}_ops/a"),
        bucket.put(f"{prefix}_owner.json"),
        bucket.put(f"{prefix}new.json"),
        bucket.put(f"{prefix}new/a"),
        bucket.put(f"{prefix}metadata/new.metadata.json"),
        bucket.put(f"{prefix}metadata/new.metadata.json.gz"),
        bucket.put(metadata),
        bucket.put(new),  # replacing requires the permission to delete
        *(bucket.delete(name) for name in (metadata, data, new, foreign)),
        bucket.update(new),
        bucket.copy(foreign, f"{prefix}data/stolen"),
        bucket.copy(data, f"{other_location.key_prefix}data/planted"),
        bucket.list(None),
        bucket.list(prefix[:-1]),
        bucket.list(other_location.key_prefix),
        bucket.request("GET", f"/storage/v1/b/{google.server.bucket}"),
        bucket.request("POST", "/storage/v1/b?project=any", b'{"name": "of-a-token"}'),
        bucket.request("GET", f"/storage/v1/b/{google.server.bucket}/iam"),
    ]
    assert statuses == [403] * len(statuses)
    assert Bucket(google, "invalid").get(data) == 401


def names(google: Google, location: GcsLocation) -> list[str]:
    return [location.key_prefix + name for name in google.server.names(location.root)]


def test_reader_gets_read_only_token(vending_server: LiveServer, google: Google, gcs_lake: Lakehouse) -> None:
    location = location_of(gcs_lake, "ns.t")
    for headers, table in ((AS_READER, TABLE), (AS_WRITER, TABLE.replace("main", "v5"))):
        bucket = Bucket(google, _vended_config(vending_server, headers, table)[TOKEN])
        assert bucket.list(location.key_prefix) == bucket.get(names(google, location)[0]) == 200
        assert bucket.put(f"{location.key_prefix}data/x") == 403
    assert (
        Bucket(google, _vended_config(vending_server, AS_WRITER, TABLE)[TOKEN]).put(f"{location.key_prefix}data/x")
        == 200
    )


def test_token_is_not_vended_for_old_version_of_dropped_table(
    vending_server: LiveServer, google: Google, gcs_lake: Lakehouse
) -> None:
    old = TABLE.replace("main", "v5")
    catalog_at(gcs_lake).rename_table("ns.t", "ns.u")
    assert TOKEN in _vended_config(vending_server, AS_WRITER, old)
    catalog_at(gcs_lake).drop_table("ns.u")
    assert TOKEN not in _vended_config(vending_server, AS_WRITER, old)
    assert vending_server.request("GET", f"{old}/credentials", headers=AS_WRITER).error == (
        406,
        "UnsupportedOperationException",
    )


def _vended_config(server: LiveServer, headers: Mapping[str, str], table: str) -> dict[str, str]:
    config: dict[str, str] = server.request("GET", table, headers={**headers, **VENDED}).document["config"]
    return config


def test_responses_contain_no_token_of_server(vending_server: LiveServer, google: Google, gcs_lake: Lakehouse) -> None:
    """No response contains a token or key of the server. A token is reused, but only for the same principal."""
    without_token = vending_server.request("GET", TABLE, headers=AS_WRITER)
    assert without_token.document["config"] == {"gcs.service.host": google.endpoint}
    vended = vending_server.request("GET", TABLE, headers={**AS_WRITER, **VENDED})
    repeated = vending_server.request("GET", f"/{vended.document['config'][REFRESH]}", headers=AS_WRITER)
    assert repeated.document["storage-credentials"] == vended.document["storage-credentials"]
    assert len(google.boundaries) == 1
    assert _vended_config(vending_server, AS_READER, TABLE)[TOKEN] != vended.document["config"][TOKEN]
    server_tokens = [name for name, token in google.tokens.items() if token.rules is None]
    key = json.loads(gcs_lake.storage_options["credentials"])["private_key"].splitlines()[1]
    for response in (without_token, vended, repeated):
        for secret in (key, *server_tokens):
            assert secret.encode() not in response.body


def test_token_is_reused_for_half_of_its_lifetime(google: Google, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, delegate = "gs://tests/lake/tables/id/", delegate_of(google)
    arguments = {"writes": False, "name": "reader"}
    first = delegate.credentials(folder, **arguments)
    assert delegate.credentials(folder, **arguments) is first
    assert delegate.credentials(folder, writes=True, name="reader") is not first
    assert first.token not in repr(first)
    for seconds, is_reused in ((1_790, True), (1_810, False)):
        later_clock = SimpleNamespace(time=lambda: time.time() + seconds)  # noqa: B023 - called within the iteration
        monkeypatch.setattr(delegation, "time", later_clock)
        assert (delegate.credentials(folder, **arguments) is first) == is_reused


def test_token_is_not_vended_without_authentication_or_support(
    vending_server: LiveServer, google: Google, gcs_lake: Lakehouse, tmp_path: Path
) -> None:
    path = f"{TABLE}/credentials"
    assert vending_server.request("GET", path).error == UNAUTHORIZED
    assert vending_server.request("POST", f"{TABLE}/sign", {}, headers=AS_WRITER).error == (
        406,
        "UnsupportedOperationException",
    )
    with serving_files(gcs_lake, tmp_path, DelegationSettings()) as plain_server:
        assert plain_server.request("GET", path, headers=AS_WRITER).error == (406, "UnsupportedOperationException")
        assert _vended_config(plain_server, AS_WRITER, TABLE) == {"gcs.service.host": google.endpoint}
    google.has_uniform_access = False
    denied = vending_server.request("GET", TABLE, headers={**AS_READER, **VENDED})
    assert denied.error == (503, "ServiceUnavailableException")
    assert vending_server.request("GET", TABLE, headers=AS_READER).status == 200


@pytest.mark.soak
@pytest.mark.parametrize("file_io", [ARROW, GCSFS])
def test_pyiceberg_works_without_keys(
    vending_server: LiveServer, google: Google, gcs_lake: Lakehouse, file_io: str
) -> None:
    """Arrow blocks all Python threads while it waits for the storage, so the client is in another process."""
    google.rights_checks.clear()
    program = Path(__file__).parents[1] / "clients" / "programs" / "with_pyiceberg.py"
    output = run(sys.executable, str(program), vending_server.url, WRITER, READER, file_io, **GCSFS_ENVIRONMENT)
    assert "storage.objects.create" in output.pop("error") if file_io == ARROW else "Forbidden" in output.pop("error")
    assert output == {"latest": 6, "earlier": 3}
    check_rights(google)
    assert operations.verify(gcs_lake, deep=True).findings == ()


def check_rights(google: Google) -> None:
    """Check that clients read and created files with downscoped tokens, and were denied only writes."""
    client_requests = [request for request in google.rights_checks if request.is_downscoped]
    assert {request.right.permission for request in client_requests if request.is_allowed} >= {
        "storage.objects.get", "storage.objects.create",
    }  # fmt: skip
    assert {request.right.permission for request in client_requests if not request.is_allowed} <= {
        "storage.objects.create"
    }


@pytest.mark.parametrize(
    "location", ["a'b", 'a"b', "a\\b", "a b", "a%b", "ä", "a#b", "a?b", "a(b", "a[b", "a{b", "a*b"]
)
def test_unsafe_locations_get_no_boundary(location: str) -> None:
    """Such names could end the string in a condition, or be spelled differently in a resource name."""
    with pytest.raises(InvalidInputError):
        folder_boundary(GcsLocation("gs://bucket/", "bucket", f"{location}/tables/id/"), writes=False)


def test_boundary_names_one_folder() -> None:
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
    ("status", "response", "kind", "message"),
    [
        (400, b'{"error": "invalid_grant", "error_description": "not SECRET"}', StoragePermissionError, "invalid_gra"),
        (400, b"SECRET", StoragePermissionError, "cannot vend"),
        (403, b"{}", StoragePermissionError, "cannot vend"),
        (302, b"", StoragePermissionError, "cannot vend"),
        (503, b"SECRET", TransientError, "busy"),
        (429, b"SECRET", TransientError, "busy"),
        (200, b"SECRET", StorageError, "not from Google's token service"),
        (200, b"", StorageError, "not from Google's token service"),
        (200, b"{}", StorageError, "not from Google's token service"),
        (200, b"[]", StorageError, "not from Google's token service"),
        (200, b'{"access_token": 7}', StorageError, "not from Google's token service"),
        (200, b'{"access_token": "a b"}', StorageError, "not from Google's token service"),
        (200, b'{"access_token": "OWN"}', StorageError, "not from Google's token service"),
        (200, b'{"access_token": "SECRET", "expires_in": "soon"}', StorageError, "not from Google's token service"),
        (200, b'{"access_token": "SECRET", "expires_in": 1e300}', StorageError, "not from Google's token service"),
    ],
)
def test_invalid_token_service_responses_are_rejected(
    google: Google, status: int, response: bytes, kind: type[TrinityLakeError], message: str
) -> None:
    """The server's own token is never vended, whatever the token service responds."""
    delegate = delegate_of(google)
    delegate.credentials("gs://tests/lake/tables/id/", writes=False, name="a")
    server_token = next(name for name, token in google.tokens.items() if token.rules is None)
    if b"OWN" in response:
        google._issue_token = lambda token, **options: _token_response(server_token)  # type: ignore[method-assign]
        response = response.replace(b"OWN", server_token.encode())
    google.replaced_responses.append((status, response))
    with pytest.raises(kind, match=message) as caught:
        delegate.credentials("gs://tests/lake/tables/id/", writes=True, name="a")
    for secret in ("SECRET", server_token):
        assert secret not in str(caught.value)


def _token_response(token: str) -> tuple[int, Mapping[str, str], bytes]:
    return 200, {}, json.dumps({"access_token": token, "token_type": "Bearer", "expires_in": 3_600}).encode()


def test_unreachable_token_service_is_reported(google: Google, tmp_path: Path) -> None:
    arguments = {"folder": "gs://tests/lake/tables/id/", "writes": False, "name": "a"}
    anonymous = replace(settings_of(google), sts_endpoint="http://127.0.0.1:9/v1/token")
    with pytest.raises(TransientError):
        delegate_of(google, anonymous).credentials(**arguments)
    file = tmp_path / "key.json"
    file.write_text('{"type": "service_account", "private_key": "hush-hush"}')
    for credentials in (str(file), str(tmp_path / "none.json"), None):
        options = {"endpoint": google.endpoint, **({"credentials": credentials} if credentials else {})}
        with pytest.raises(StoragePermissionError) as caught:
            GcsDelegate(StorageOptions(options), settings_of(google)).credentials(**arguments)
        assert "hush" not in str(caught.value)
    with pytest.raises(StoragePermissionError, match=r"storage\.buckets\.get"):
        delegate_of(google).credentials("gs://no-such-bucket/lake/tables/id/", writes=False, name="a")


def test_invalid_settings_are_rejected(google: Google, tmp_path: Path) -> None:
    for invalid_fields in ({"role": "arn:aws:iam:::role/lake"}, {"sign": True}, {"seconds": 900}):
        with pytest.raises(InvalidInputError):
            DelegationSettings(downscope=True, **invalid_fields)
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


def test_tokens_are_not_logged(vending_server: LiveServer, google: Google) -> None:
    with captured_log(logging.INFO) as text:
        _vended_config(vending_server, AS_WRITER, TABLE)
        assert vending_server.request("POST", TABLE, commit_of(properties(a="1")), headers=AS_WRITER).status == 200
        metrics = vending_server.request("GET", "/metrics", headers=AS_WRITER).body.decode()
    assert '"status": 200' in text.getvalue()
    for secret in google.tokens:
        assert secret not in metrics + text.getvalue()
