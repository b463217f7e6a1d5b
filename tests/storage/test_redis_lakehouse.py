"""End-to-end tests of lakehouses on Redis, the requests of a commit, and TLS."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.lakes import check_lake
from tests.operations.aging import Aging
from tests.operations.changes import append_rows, create, drop
from tests.redis_proxy import RedisProxy, is_create, is_read, is_write
from tests.servers.daemons import free_port
from tests.servers.redis import DURABLE, RedisServer, running
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import InvalidInputError, LakehouseExistsError, StorageError, VersionExpiredError
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.storage import open_storage
from trinitylake_ops.storage.redis.storage import RedisStorage

pytestmark = pytest.mark.usefixtures("fixed_requests")

DAY_MS = 24 * 3_600_000


def rows_of(lake: Lakehouse) -> list[int]:
    with catalog_at(lake) as catalog:
        ids: list[int] = catalog.load_table("ns.t").scan().to_arrow()["id"].to_pylist()
    return sorted(ids)


def test_lakehouse_end_to_end(redis_server: RedisServer) -> None:
    aging = Aging.on(open_storage(redis_server.fresh_root()))
    lake = aging.lake
    append_rows(lake)
    create(lake, "a", "t", "u")
    kept_version = lake.latest_version()
    drop(lake, "a")
    append_rows(lake)
    assert rows_of(lake) == [1, 1, 2, 2, 3, 3]
    assert [info.version for info in lake.history()] == list(range(lake.latest_version(), -1, -1))

    operations.rollback(lake, kept_version)
    assert lake.snapshot().tables("a") == ["t", "u"]
    assert rows_of(lake) == [1, 2, 3]

    target = redis_server.fresh_root("export")
    operations.plan_export(lake, "copy", "full", target=target).execute()
    exported = Lakehouse.open(target)
    assert exported.snapshot().namespaces() == ["a", "ns"]
    assert rows_of(exported) == [1, 2, 3]
    assert operations.verify_export(lake, "copy", deep=True).is_clean

    n_files_before = len(list(lake.storage.list()))
    aging.clean_up()
    assert len(list(lake.storage.list())) < n_files_before
    with pytest.raises(VersionExpiredError):
        lake.snapshot(0)
    assert rows_of(lake) == [1, 2, 3]
    assert operations.verify(lake, deep=True).findings == ()
    check_lake(exported)
    assert rows_of(exported) == [1, 2, 3]


def test_create_fails_on_an_existing_lakehouse(redis_server: RedisServer) -> None:
    root = redis_server.fresh_root()
    Lakehouse.create(root)
    with pytest.raises(LakehouseExistsError):
        Lakehouse.create(root)


def test_table_in_another_folder_is_registered(redis_server: RedisServer) -> None:
    source = Lakehouse.create(redis_server.fresh_root("warehouse"))
    append_rows(source)
    with catalog_at(source) as catalog:
        metadata = catalog.load_table("ns.t").metadata_location
    assert metadata.startswith(source.root)
    lake = Lakehouse.create(redis_server.fresh_root(), {"allowed_roots": source.root})
    create(lake, "ns")
    operations.register_table(lake, "ns", "t", metadata)
    assert rows_of(lake) == [1, 2, 3]


def test_commit_sends_its_documented_requests(redis_server: RedisServer) -> None:
    """The requests are documented in docs/storages/README.md."""
    with RedisProxy(redis_server.port) as proxy:
        root = redis_server.fresh_root().replace(str(redis_server.port), str(proxy.port))
        lake = Lakehouse.create(root)
        create(lake, "a", "t")
        proxy.begin()
        with lake.transaction() as txn:
            txn.create_namespace("b")
        names = [name for name in proxy.names() if name not in ("HELLO", "INFO", "CONFIG")]
        assert names == ["EVAL"] * 6
        counts = [sum(map(is_request, proxy.log)) for is_request in (is_read, is_create, is_write)]
        assert counts == [3, 2, 1], "reads the hint and two roots; creates a definition and the root; writes the hint"


# TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority, ``ca.pem``, and its certificates ``server.pem`` and ``client.pem``, all with keys."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=tests")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    for name in ("server", "client"):
        openssl("req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                "-out", f"{name}.crt", "-days", "2", "-extfile", "names")  # fmt: skip
        (folder / f"{name}.pem").write_text((folder / f"{name}.crt").read_text() + (folder / f"{name}.key").read_text())
    return folder


def test_tls_verifies_server_and_client_certificates(redis_folder: Path, certificates: Path) -> None:
    port = free_port()
    settings = (
        *DURABLE, "--tls-port", str(port), "--tls-cert-file", f"{certificates}/server.crt",
        "--tls-key-file", f"{certificates}/server.key", "--tls-ca-cert-file", f"{certificates}/ca.pem",
    )  # fmt: skip
    with running(RedisServer("redis", redis_folder, settings)):
        root = f"rediss://127.0.0.1:{port}/0/lake/"
        authority = {"tls_ca_file": f"{certificates}/ca.pem"}
        client_options = {**authority, "tls_client_pem_file": f"{certificates}/client.pem"}
        lake = Lakehouse.create(root, client_options)
        create(lake, "a", "t")
        assert Lakehouse.open(root, client_options).snapshot().tables("a") == ["t"]
        for options, reason in (
            ({"tls_client_pem_file": f"{certificates}/client.pem"}, "TLS handshake failed .*verify failed"),
            (authority, "TLS handshake failed|no connection"),
            ({**client_options, "tls_ca_file": f"{certificates}/missing.pem"}, "No such file"),
        ):
            with pytest.raises(StorageError, match=reason) as caught:
                RedisStorage(root, options).read("name")
            assert "key" not in str(caught.value).lower()


def test_tls_options_require_a_tls_root() -> None:
    with pytest.raises(InvalidInputError, match="rediss://"):
        RedisStorage("redis://127.0.0.1/0/lake/", {"tls_client_pem_file": "/x.pem"})
