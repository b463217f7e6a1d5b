"""Clients without storage keys: sessions for the location of one table, signed requests, and their limits."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import botocore.session
import pyarrow as pa
import pytest
import yaml
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import ClientError
from pyiceberg.exceptions import SignError

from tests.server.live_server import LiveServer, Response, captured_log, command, serving, settings_for
from tests.server.request_bodies import TABLE, TABLES, commit_of, properties
from tests.server.test_access_control import ENTRIES, EXPIRED, FORBIDDEN, READER, UNAUTHORIZED, WRITER
from tests.servers.radosgw import ROLE_ARN
from tests.servers.s3_server import S3Server
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import InvalidInputError, LocationNotAllowedError
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.server.settings import ONLY, LakehouseSettings, read_lakehouses
from trinitylake_ops.server.warehouses import Warehouses
from trinitylake_ops.storage.delegation import DelegationSettings
from trinitylake_ops.storage.options import OPTIONS_VARIABLE
from trinitylake_ops.storage.s3.delegation import folder_policy
from trinitylake_ops.storage.s3.s3fs_client import BucketAddress
from trinitylake_ops.storage.s3.settings import S3Location
from trinitylake_ops.storage.s3.signing import UnsignedRequest, check_request, signed

ROWS = pa.table({"id": pa.array([1, 2, 3], pa.int64())})
VENDED = {"X-Iceberg-Access-Delegation": "vended-credentials"}
SIGNING = {"X-Iceberg-Access-Delegation": "remote-signing"}
ROLE, NO_ROLE = DelegationSettings(role=ROLE_ARN, seconds=900, sign=True), DelegationSettings(sign=True)
#: Configuration of the storage that every client receives.
STORAGE_CONFIG = {"s3.endpoint", "client.region", "s3.region", "s3.path-style-access"}
AS_WRITER, AS_READER = ({"Authorization": f"Bearer {token}"} for token in (WRITER, READER))


@pytest.fixture
def s3_lake(radosgw: S3Server) -> Lakehouse:
    """A lakehouse on radosgw with the tables ``ns.t`` and ``own.secret``, each with three rows."""
    lake = Lakehouse.create(radosgw.fresh_root(), {**radosgw.storage_options, "addressing_style": "path"})
    catalog = catalog_at(lake)
    for name in ("ns.t", "own.secret"):
        catalog.create_namespace(name.partition(".")[0])
        catalog.create_table(name, ROWS.schema).append(ROWS)
    return lake


@pytest.fixture
def vending_server(s3_lake: Lakehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    """A server that vends sessions of a role and signs requests. The environment of its clients contains no keys."""
    with serving_files(s3_lake, tmp_path, ROLE) as server:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        # By default Arrow sends checksums after the body, which this version of radosgw rejects.
        monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
        yield server


def serving_files(lake: Lakehouse, folder: Path, files: DelegationSettings) -> Any:
    path = folder / "tokens.yaml"
    path.write_text(yaml.safe_dump({"tokens": ENTRIES}))
    lakehouses = {ONLY: LakehouseSettings(lake.root, lake.storage_options, files)}
    return serving(settings_for(lake, lakehouses=lakehouses, tokens=path))


def location_of(lake: Lakehouse, name: str) -> str:
    return catalog_at(lake).load_table(name).metadata.location


def client_with(radosgw: S3Server, config: Mapping[str, str]) -> Any:
    """Return an S3 client with vended credentials."""
    return botocore.session.Session().create_client(
        "s3",
        endpoint_url=radosgw.endpoint,
        region_name=radosgw.region,
        aws_access_key_id=config["s3.access-key-id"],
        aws_secret_access_key=config["s3.secret-access-key"],
        aws_session_token=config["s3.session-token"],
        config=Config(s3={"addressing_style": "path"}, retries={"max_attempts": 0}),
    )


def is_rejected(call: Any, **arguments: Any) -> bool:
    """Whether S3 rejects a request."""
    try:
        call(**arguments)
    except ClientError as error:
        assert error.response["ResponseMetadata"]["HTTPStatusCode"] == 403, error
        return True
    return False


def test_session_is_limited_to_its_table(vending_server: LiveServer, s3_lake: Lakehouse, radosgw: S3Server) -> None:
    loaded = vending_server.request("GET", TABLE, headers={**AS_WRITER, **VENDED})
    (credentials,) = loaded.document["storage-credentials"]
    location, other_location = (S3Location.of(f"{location_of(s3_lake, name)}/") for name in ("ns.t", "own.secret"))
    assert credentials["prefix"] == location.root
    assert loaded.headers["cache-control"] == "no-store"
    assert "etag" not in loaded.headers
    s3, bucket = client_with(radosgw, credentials["config"]), location.bucket
    foreign = _keys(radosgw, bucket, other_location.key_prefix)[0]
    metadata = next(path for path in _keys(radosgw, bucket, location.key_prefix) if path.endswith(".metadata.json"))
    assert s3.get_object(Bucket=bucket, Key=metadata)["Body"].read()
    assert s3.list_objects_v2(Bucket=bucket, Prefix=location.key_prefix)["KeyCount"] >= 4
    new = f"{location.key_prefix}data/new.parquet"
    s3.put_object(Bucket=bucket, Key=new, Body=b"x")
    upload = s3.create_multipart_upload(Bucket=bucket, Key=new)["UploadId"]
    s3.abort_multipart_upload(Bucket=bucket, Key=new, UploadId=upload)
    for key in (
        foreign,
        f"{location.key_prefix.rstrip('/')}x/data/a",
        f"{s3_lake.root.partition(bucket + '/')[2]}_ops/a",
    ):
        assert is_rejected(s3.put_object, Bucket=bucket, Key=key, Body=b"x")
    assert is_rejected(s3.get_object, Bucket=bucket, Key=foreign)
    copied = {"Bucket": bucket, "Key": foreign}
    assert is_rejected(s3.copy_object, Bucket=bucket, Key=f"{location.key_prefix}data/stolen", CopySource=copied)
    assert is_rejected(s3.put_object, Bucket=bucket, Key=metadata, Body=b"{}")
    assert is_rejected(s3.put_object, Bucket=bucket, Key=f"{location.key_prefix}_owner.json", Body=b"{}")
    for key in (metadata, new, foreign):
        assert is_rejected(s3.delete_object, Bucket=bucket, Key=key)
    for prefix in ({}, {"Prefix": other_location.key_prefix}, {"Prefix": location.key_prefix[:-1]}):
        assert is_rejected(s3.list_objects_v2, Bucket=bucket, **prefix)
    assert is_rejected(s3.put_object_acl, Bucket=bucket, Key=new, ACL="public-read")
    assert is_rejected(s3.create_bucket, Bucket="of-a-session")


def _keys(radosgw: S3Server, bucket: str, prefix: str) -> list[str]:
    return [entry["Key"] for entry in radosgw.client.list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]]


def test_reader_gets_read_only_session(vending_server: LiveServer, s3_lake: Lakehouse, radosgw: S3Server) -> None:
    location = S3Location.of(f"{location_of(s3_lake, 'ns.t')}/")
    writes = client_with(radosgw, _vended_config(vending_server, AS_WRITER, TABLE))
    for headers, table in ((AS_READER, TABLE), (AS_WRITER, TABLE.replace("main", "v5"))):
        s3 = client_with(radosgw, _vended_config(vending_server, headers, table))
        assert s3.list_objects_v2(Bucket=location.bucket, Prefix=location.key_prefix)["KeyCount"] >= 4
        assert is_rejected(s3.put_object, Bucket=location.bucket, Key=f"{location.key_prefix}data/x", Body=b"x")
    writes.put_object(Bucket=location.bucket, Key=f"{location.key_prefix}data/x", Body=b"x")


def test_create_only_session_never_overwrites(s3_lake: Lakehouse, radosgw: S3Server, tmp_path: Path) -> None:
    """Ceph 16 does not support the condition, so it denies every write of such a session. Reads work."""
    location = S3Location.of(f"{location_of(s3_lake, 'ns.t')}/")
    file = next(path for path in _keys(radosgw, location.bucket, location.key_prefix) if path.endswith(".parquet"))
    with serving_files(s3_lake, tmp_path, replace(ROLE, create_only=True)) as server:
        s3 = client_with(radosgw, _vended_config(server, AS_WRITER, TABLE))
        assert s3.get_object(Bucket=location.bucket, Key=file)["Body"].read()
        assert is_rejected(s3.put_object, Bucket=location.bucket, Key=file, Body=b"x")
        assert is_rejected(s3.put_object, Bucket=location.bucket, Key=file, Body=b"x", IfNoneMatch="*")


def _vended_config(server: LiveServer, headers: Mapping[str, str], table: str) -> dict[str, str]:
    config: dict[str, str] = server.request("GET", table, headers={**headers, **VENDED}).document["config"]
    return config


def test_responses_contain_no_keys_of_server(vending_server: LiveServer, s3_lake: Lakehouse) -> None:
    """No response contains a key of the server. Clients that request no credentials get none, and can use an ETag."""
    without_credentials = vending_server.request("GET", TABLE, headers=AS_WRITER)
    assert set(without_credentials.document["config"]) == STORAGE_CONFIG
    assert "storage-credentials" not in without_credentials.document
    tag = {"If-None-Match": without_credentials.headers["etag"]}
    assert vending_server.request("GET", TABLE, headers={**AS_WRITER, **tag}).status == 304
    vended = vending_server.request("GET", TABLE, headers={**AS_WRITER, **VENDED, **tag})
    assert vended.status == 200
    repeated = vending_server.request("GET", f"{TABLE}/credentials", headers=AS_WRITER)
    assert repeated.document["storage-credentials"] == vended.document["storage-credentials"]
    refreshed = vended.document["config"]["client.refresh-credentials-endpoint"]
    assert vending_server.request("GET", f"/{refreshed}", headers=AS_WRITER).body == repeated.body
    signing = vending_server.request("GET", TABLE, headers={**AS_WRITER, **SIGNING}).document["config"]
    assert signing["s3.remote-signing-enabled"] == "true"
    assert not any("key" in name or "token" in name for name in signing)
    for response in (without_credentials, vended, repeated):
        for secret in ("access_key_id", "secret_access_key"):
            assert s3_lake.storage_options[secret].encode() not in response.body


def test_credentials_are_not_vended_without_authentication_or_support(
    vending_server: LiveServer, s3_lake: Lakehouse, tmp_path: Path
) -> None:
    before = s3_lake.latest_version()
    for path, method in ((f"{TABLE}/credentials", "GET"), (f"{TABLE}/sign", "POST")):
        assert vending_server.request(method, path, {}).error == UNAUTHORIZED
        assert (
            vending_server.request(method, path, {}, headers={"Authorization": f"Bearer {EXPIRED}"}).error
            == UNAUTHORIZED
        )
        missing = path.replace("/t/", "/none/")
        assert vending_server.request(method, missing, {}, headers=AS_WRITER).error == (404, "NoSuchTableException")
        foreign = path.replace("main", "other.main")
        assert vending_server.request(method, foreign, {}, headers=AS_WRITER).error == (404, "NoSuchWarehouseException")
    with serving_files(s3_lake, tmp_path, DelegationSettings()) as plain_server:
        for path, method in ((f"{TABLE}/credentials", "GET"), (f"{TABLE}/sign", "POST")):
            assert plain_server.request(method, path, {}, headers=AS_WRITER).error == (
                406,
                "UnsupportedOperationException",
            )
        config = plain_server.request("GET", TABLE, headers={**AS_WRITER, **VENDED}).document["config"]
        assert set(config) == STORAGE_CONFIG
    missing_role = replace(ROLE, role="arn:aws:iam:::role/missing")
    with serving_files(s3_lake, tmp_path, missing_role) as misconfigured_server:
        denied = misconfigured_server.request("GET", TABLE, headers={**AS_WRITER, **VENDED})
        assert denied.error == (503, "ServiceUnavailableException")
        assert misconfigured_server.request("GET", TABLE, headers=AS_WRITER).status == 200
    assert s3_lake.latest_version() == before


def sign(server: LiveServer, headers: Mapping[str, str], method: str, uri: str, **extra_headers: str) -> Response:
    body = {
        "method": method,
        "uri": uri,
        "region": "us-east-1",
        "headers": {name: [value] for name, value in extra_headers.items()},
    }
    return server.request("POST", f"{TABLE}/sign", body, headers=headers)


def send(method: str, signed: Response, body: bytes = b"", **unsigned: str) -> tuple[int, bytes]:
    """Send a signed request, optionally with unsigned headers."""
    document = signed.document
    split = urlsplit(document["uri"])
    connection = HTTPConnection(split.netloc, timeout=60)
    headers = {name: value for name, (value,) in document["headers"].items()}
    connection.request(method, document["uri"].partition(split.netloc)[2], body, {**headers, **unsigned})
    response = connection.getresponse()
    try:
        return response.status, response.read()
    finally:
        connection.close()


def test_signed_requests_are_limited_to_their_table(
    vending_server: LiveServer, s3_lake: Lakehouse, radosgw: S3Server, tmp_path: Path
) -> None:
    location, other_location = (S3Location.of(f"{location_of(s3_lake, name)}/") for name in ("ns.t", "own.secret"))
    bucket_url = f"{radosgw.endpoint}/{location.bucket}/"
    metadata = next(
        key for key in _keys(radosgw, location.bucket, location.key_prefix) if key.endswith(".metadata.json")
    )
    foreign = _keys(radosgw, location.bucket, other_location.key_prefix)[0]
    assert send("GET", sign(vending_server, AS_READER, "GET", bucket_url + metadata))[0] == 200
    assert sign(vending_server, AS_READER, "GET", bucket_url + foreign).error == FORBIDDEN
    new = f"{bucket_url}{location.key_prefix}data/new.parquet"
    assert sign(vending_server, AS_READER, "PUT", new).error == FORBIDDEN
    assert send("PUT", sign(vending_server, AS_WRITER, "PUT", new), b"content")[0] == 200
    assert send("GET", sign(vending_server, AS_READER, "GET", new)) == (200, b"content")
    # An existing file is not overwritten: the storage rejects the signed request, also without its signed condition.
    repeated = sign(vending_server, AS_WRITER, "PUT", new)
    assert send("PUT", repeated, b"other")[0] == 412
    assert send("PUT", repeated, b"other", **{"if-none-match": '"none"'})[0] == 403
    assert send("GET", sign(vending_server, AS_READER, "GET", new)) == (200, b"content")
    assert sign(vending_server, AS_READER, "GET", new, Host="other.example.com").status == 400
    # radosgw accepts unsigned headers. The session behind the signature still cannot access another table.
    stolen = sign(vending_server, AS_WRITER, "PUT", f"{bucket_url}{location.key_prefix}data/stolen")
    assert send("PUT", stolen, **{"x-amz-copy-source": f"/{location.bucket}/{foreign}"})[0] == 403
    unsigned = sign(vending_server, AS_WRITER, "PUT", f"{bucket_url}{location.key_prefix}data/opened")
    send("PUT", unsigned, b"x", **{"x-amz-acl": "public-read"})
    with serving_files(s3_lake, tmp_path, NO_ROLE) as read_only_server:
        assert send("GET", sign(read_only_server, AS_READER, "GET", bucket_url + metadata))[0] == 200
        assert sign(read_only_server, AS_WRITER, "PUT", new).error == FORBIDDEN
    assert sign(vending_server, AS_WRITER, "PUT", new.replace("main", "v1")).status == 200
    body = {"method": "PUT", "uri": new, "region": "us-east-1", "headers": {}}
    assert (
        vending_server.request("POST", f"{TABLE.replace('main', 'v5')}/sign", body, headers=AS_WRITER).error
        == FORBIDDEN
    )


FOLDER = S3Location.of("s3://bucket/lake/tables/id/")
ADDRESS = BucketAddress("https://s3.example.com", "eu-1", is_virtual=False)
FILE = "https://s3.example.com/bucket/lake/tables/id/data/a.parquet"


def unsigned_request(method: str, uri: str, region: str = "eu-1", **headers: str | list[str]) -> UnsignedRequest:
    header_lists = {name: [value] if isinstance(value, str) else value for name, value in headers.items()}
    return UnsignedRequest(
        method, uri, region, {name.replace("_", "-"): values for name, values in header_lists.items()}
    )


@pytest.mark.parametrize(
    ("method", "uri", "writes"),
    [
        ("GET", FILE, False),
        ("GET", f"{FILE}?x-id=GetObject", False),
        ("HEAD", "https://bucket.s3.example.com/lake/tables/id/metadata/a%20b.avro", False),
        ("GET", "https://s3.example.com/bucket?list-type=2&prefix=lake%2Ftables%2Fid%2Fdata", False),
        ("PUT", FILE, True),
        ("PUT", f"{FILE}?partNumber=1&uploadId=x", True),
        ("POST", f"{FILE}?uploads", True),
        ("POST", f"{FILE}?uploadId=x", True),
        ("DELETE", f"{FILE}?uploadId=x", True),
    ],
)
def test_allowed_requests_are_signed(method: str, uri: str, writes: bool) -> None:
    assert check_request(unsigned_request(method, uri), FOLDER, ADDRESS, may_write=True) is writes
    if writes:
        with pytest.raises(LocationNotAllowedError):
            check_request(unsigned_request(method, uri), FOLDER, ADDRESS, may_write=False)


@pytest.mark.parametrize(
    ("method", "uri", "headers"),
    [
        *(
            ("GET", uri, {})
            for uri in (
                "https://s3.example.com/bucket/lake/tables/other/data/a.parquet",
                "https://s3.example.com/bucket/lake/tables/idx/a",
                "https://[::1/bucket/lake/tables/id/data/a",
                "https://s3.example.com/bucket/lake/tables/id",
                "https://s3.example.com/bucket/lake/tables/id/",
                "https://s3.example.com/other/lake/tables/id/data/a",
                "https://s3.example.com/bucketlake/tables/id/data/a",
                "https://other.s3.example.com/lake/tables/id/data/a",
                "https://s3.example.com.evil.example/bucket/lake/tables/id/data/a",
                "https://user@s3.example.com/bucket/lake/tables/id/data/a",
                "http://s3.example.com/bucket/lake/tables/id/data/a",
                "https://s3.example.com:444/bucket/lake/tables/id/data/a",
                "https://s3.example.com/bucket/lake/tables/id/../other/a",
                "https://s3.example.com/bucket/lake/tables/id/%2e%2e/other/a",
                "https://s3.example.com/bucket/lake/tables/id/..%2Fother/a",
                "https://s3.example.com/bucket//lake/tables/id/a",
                "https://s3.example.com/bucket/lake/tables/id//a",
                "https://s3.example.com/bucket/lake/tables/id/a+b",
                "https://s3.example.com/bucket/lake/tables/id/data/a;b",
                "https://s3.example.com/bucket/lake/tables/id/data/..;/..;/other/a",
                "https://s3.example.com/bucket/lake/tables/id/data/a%3Bb",
                "https://s3.example.com/bucket;x/lake/tables/id/data/a",
                f"{FILE}?x-id=GetObject;acl",
                "https://s3.example.com/bucket/lake/tables/id/%ff",
                "https://s3.example.com/bucket/lake/tables/id/a\nb",
                "https://s3.example.com/bucket/lake/tables/id/a#b",
                "https://s3.example.com/bucket/lake/tables/id/%00",
                "",
                "/bucket/lake/tables/id/a",
                f"{FILE}?acl",
                f"{FILE}?policy",
                f"{FILE}?tagging",
                f"{FILE}?versionId=1",
                f"{FILE}?torrent",
                f"{FILE}?response-content-type=text%2Fhtml",
                f"{FILE}?x-id=a&x-id=b",
                f"{FILE}?a=" + "x" * 9_000,
                "https://s3.example.com/bucket?list-type=2",
                "https://s3.example.com/bucket?list-type=2&prefix=lake%2Ftables%2F",
                "https://s3.example.com/bucket?list-type=2&prefix=lake%2Ftables%2Fid",
                "https://s3.example.com/bucket?list-type=2&prefix=lake%2Ftables%2Fid%2F&acl",
                "https://s3.example.com/bucket?list-type=1&prefix=lake%2Ftables%2Fid%2F",
                "https://s3.example.com/bucket?versions&prefix=lake%2Ftables%2Fid%2F",
                "https://s3.example.com/bucket?acl",
                "https://s3.example.com/",
            )
        ),
        ("PUT", "https://s3.example.com/bucket/lake/tables/id/metadata/00001-a.metadata.json", {}),
        ("PUT", "https://s3.example.com/bucket/lake/tables/id/metadata/00001-a.gz.metadata.json", {}),
        ("PUT", "https://s3.example.com/bucket/lake/tables/id/_owner.json", {}),
        ("PUT", f"{FILE}?acl", {}),
        ("PUT", f"{FILE}?partNumber=1", {}),
        ("PUT", f"{FILE}?uploadId=1", {}),
        ("PUT", "https://s3.example.com/bucket", {}),
        ("POST", FILE, {}),
        ("POST", "https://s3.example.com/bucket?delete", {}),
        ("POST", f"{FILE}?restore", {}),
        ("POST", f"{FILE}?select&select-type=2", {}),
        ("DELETE", FILE, {}),
        ("PATCH", FILE, {}),
        ("PUT", FILE, {"x_amz_copy_source": "/bucket/lake/tables/other/a"}),
        ("PUT", f"{FILE}?partNumber=1&uploadId=x", {"x_amz_copy_source_range": "bytes=0-9"}),
        ("PUT", FILE, {"x_amz_acl": "public-read"}),
        ("PUT", FILE, {"x_amz_grant_read": "uri=all"}),
        ("PUT", FILE, {"x_amz_website_redirect_location": "/"}),
        ("PUT", FILE, {"content_type": "a\r\nx-amz-acl: public-read"}),
        ("GET", FILE, {"host": "other.example.com"}),
        ("GET", FILE, {"host": "bucket.s3.example.com"}),
        ("GET", FILE, {"host": "s3.example.com:80"}),
        ("GET", FILE, {"host": ["s3.example.com", "other.example.com"]}),
        ("GET", FILE, {"host": []}),
        ("GET", FILE, {"host ": "s3.example.com"}),
        *(
            ("GET", FILE, {name: "x"})
            for name in (
                "x_forwarded_host", "x_http_method_override", "x_original_url", "forwarded", "cookie", "cache_control",
                "content_disposition", "x_goog_acl", "x_amz_meta_a", "x_amz_copy_source", "x_amz_security_token_", "",
            )
        ),
    ],
)  # fmt: skip
def test_other_requests_are_not_signed(method: str, uri: str, headers: dict[str, str | list[str]]) -> None:
    with pytest.raises((LocationNotAllowedError, InvalidInputError)):
        check_request(unsigned_request(method, uri, **headers), FOLDER, ADDRESS, may_write=True)


KEYS = Credentials("AKIAEXAMPLE", "of-the-server")


def signed_headers(request: UnsignedRequest) -> tuple[dict[str, str], set[str]]:
    """Return the headers of a signed request, and the names of the signed headers."""
    check_request(request, FOLDER, ADDRESS, may_write=True)
    headers = {name.lower(): value for name, (value,) in signed(request, "eu-1", KEYS).headers.items()}
    return headers, set(headers["authorization"].partition("SignedHeaders=")[2].partition(",")[0].split(";"))


def test_only_host_of_uri_is_signed() -> None:
    """The host of the URI may be sent in upper or lower case, with the same signature as without a host header."""
    date = "20261127T120000Z"
    unsigned_headers, signed_names = signed_headers(unsigned_request("GET", FILE))
    assert "host" in signed_names
    assert "host" not in unsigned_headers
    for host in ("s3.example.com", "S3.EXAMPLE.COM"):
        assert signed_headers(unsigned_request("GET", FILE, host=host, x_amz_date=date))[0]["host"] == "s3.example.com"
    expected = unsigned_request(
        "GET", FILE, range="bytes=0-9", accept="*/*", user_agent="a", amz_sdk_invocation_id="b", if_match="c",
        x_amz_sdk_checksum_algorithm="CRC32", x_amzn_trace_id="d", authorization="e", connection="close",
    )  # fmt: skip
    assert "range" not in signed_headers(expected)[1]


@pytest.mark.parametrize(
    ("method", "uri", "creates"),
    [
        ("PUT", FILE, True),
        ("PUT", f"{FILE}?x-id=PutObject", True),
        ("POST", f"{FILE}?uploadId=x", True),
        ("PUT", f"{FILE}?partNumber=1&uploadId=x", False),
        ("POST", f"{FILE}?uploads", False),
        ("DELETE", f"{FILE}?uploadId=x", False),
        ("GET", FILE, False),
    ],
)
def test_writes_are_signed_to_create_only(method: str, uri: str, creates: bool) -> None:
    for condition in ({}, {"if_none_match": "anything"}):
        headers, signed_names = signed_headers(unsigned_request(method, uri, **condition))
        assert (headers.get("if-none-match") == "*") is creates
        assert ("if-none-match" in signed_names) is (creates or bool(condition))


def test_requests_for_another_region_are_not_signed() -> None:
    with pytest.raises(InvalidInputError):
        check_request(unsigned_request("GET", FILE, "us-1"), FOLDER, ADDRESS, may_write=True)


def test_policies_name_location_without_patterns() -> None:
    reads, writes = (json.loads(folder_policy(FOLDER, "aws", writes=flag))["Statement"] for flag in (False, True))
    assert {action for statement in reads for action in statement["Action"]} == {"s3:GetObject", "s3:ListBucket"}
    assert not any("Delete" in action for statement in writes for action in statement["Action"])
    for root in ("s3://bucket/a*b/", "s3://bucket/a?/", "s3://bucket/${aws:username}/", 's3://bucket/a"b/'):
        with pytest.raises(InvalidInputError):
            folder_policy(S3Location.of(f"{root}tables/id/"), "aws", writes=True)
    with pytest.raises(InvalidInputError):
        folder_policy(S3Location.of(f"s3://bucket/{'a' * 900}/tables/id/"), "aws", writes=True)
    assert all("Condition" not in statement for statement in writes if "s3:PutObject" in statement["Action"])
    creates = json.loads(folder_policy(FOLDER, "aws", writes=True, create_only=True))["Statement"]
    puts = [
        statement for statement in creates if "s3:PutObject" in statement["Action"] and statement["Effect"] == "Allow"
    ]
    assert [statement["Condition"] for statement in puts] == [
        {"Null": {"s3:if-none-match": "false"}, "StringLike": {"s3:if-none-match": "*"}},
        {"Bool": {"s3:ObjectCreationOperation": "false"}},
    ]
    assert all(statement["Action"] == ["s3:PutObject"] for statement in puts)
    assert "arn:aws-cn:s3:::bucket/lake" in folder_policy(FOLDER, "aws-cn", writes=False)


def test_invalid_delegation_settings_are_rejected(tmp_path: Path, lake: Lakehouse) -> None:
    for invalid_fields in (
        {"role": "lake"},
        {"create_only": True},
        {"downscope": True, "create_only": True},
        {"role": ROLE_ARN, "seconds": 10},
        {"role": ROLE_ARN, "seconds": 10**6},
    ):
        with pytest.raises(InvalidInputError):
            DelegationSettings(**invalid_fields)
    with pytest.raises(InvalidInputError):
        Warehouses.opened({ONLY: LakehouseSettings(lake.root, lake.storage_options, NO_ROLE)})
    path = tmp_path / "lakehouses.yaml"
    for files in ("[]", "{key: a}", "{sign: yes please}", "{seconds: '900'}", "{seconds: true}", "{role: lake}"):
        path.write_text(f"lakehouses: {{a: {{root: 's3://bucket/a', files: {files}}}}}")
        with pytest.raises(InvalidInputError):
            read_lakehouses(path)
    path.write_text(f"lakehouses: {{a: {{root: 's3://bucket/a', files: {{role: '{ROLE_ARN}', seconds: 900}}}}}}")
    assert read_lakehouses(path)["a"].files == DelegationSettings(ROLE_ARN, 900)


def test_pyiceberg_works_without_keys(vending_server: LiveServer, s3_lake: Lakehouse) -> None:
    """A client with only a token reads and writes files on S3, with a session and with signatures."""
    catalog = vending_server.catalog(token=WRITER)
    table = catalog.load_table("ns.t")
    table.append(ROWS)
    catalog.create_table("ns.new", ROWS.schema).append(ROWS)
    with catalog.create_table_transaction("ns.staged", ROWS.schema) as transaction:
        transaction.append(ROWS)
    assert catalog.load_table("ns.staged").scan().to_arrow().num_rows == 3
    assert vending_server.catalog("v5", token=READER).load_table("ns.t").scan().to_arrow().num_rows == 3
    reader = vending_server.catalog(token=READER).load_table("ns.t")
    assert reader.scan().to_arrow().num_rows == 6
    with pytest.raises(OSError, match=r"(?i)access.?denied"):
        reader.append(ROWS)
    assert catalog_at(s3_lake).load_table("ns.t").scan().to_arrow().num_rows == 6


@pytest.mark.soak
def test_pyiceberg_works_with_signatures(
    s3_lake: Lakehouse, radosgw: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop of s3fs waits for each signature, so the server must run in a separate process."""
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(yaml.safe_dump({"tokens": ENTRIES}))
    for name, value in {**radosgw.environment, OPTIONS_VARIABLE: "addressing_style=path"}.items():
        monkeypatch.setenv(name, value)
    arguments = ("--tokens", str(tokens), "--sign-requests", "--vend-role", ROLE_ARN)
    with command(s3_lake.root, *arguments) as (process, url, _first_record):
        assert process.stderr is not None
        threading.Thread(target=process.stderr.read, daemon=True).start()
        for name in radosgw.environment:
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        signing = {
            "header.X-Iceberg-Access-Delegation": "remote-signing",
            "py-io-impl": "pyiceberg.io.fsspec.FsspecFileIO",
        }
        table = LiveServer(url).catalog(token=WRITER, **signing).load_table("ns.t")
        assert not {"s3.access-key-id", "s3.session-token"} & set(table.io.properties)
        table.append(ROWS)
        reader = LiveServer(url).catalog(token=READER, **signing).load_table("ns.t")
        assert reader.scan().to_arrow().num_rows == 6
        with pytest.raises(SignError):
            reader.append(ROWS)


def test_sessions_are_not_logged(vending_server: LiveServer) -> None:
    with captured_log(logging.DEBUG) as text:
        session = _vended_config(vending_server, AS_WRITER, TABLE)
        signed = sign(vending_server, AS_WRITER, "GET", "http://other.example/bucket/a?secret=inquery45")
        assert signed.status == 400
        assert vending_server.request("POST", TABLE, commit_of(properties(a="1")), headers=AS_WRITER).status == 200
        metrics = vending_server.request("GET", "/metrics", headers=AS_WRITER).body.decode()
    assert '"status": 400' in text.getvalue()
    secrets = [session[f"s3.{name}"] for name in ("secret-access-key", "session-token", "access-key-id")]
    for secret in (*secrets, "inquery45"):
        assert secret not in metrics
        log_lines = [line for line in text.getvalue().splitlines() if '"logger": "trinitylake' in line]
        assert not any(secret in line for line in log_lines)
    assert TABLES in text.getvalue()
