"""Features of Azure storages: folders, batches, signatures, connection strings and forks."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from azure.storage.blob import ContainerSasPermissions, generate_container_sas

from tests import proxy as wire
from tests.processes import fork
from tests.proxy import FaultyProxy
from tests.servers.azurite import ACCOUNT_KEY, ACCOUNT_NAME, CONTAINER, AzureServer
from tests.servers.plugin import REPOSITORY
from trinitylake_ops.errors import FileExistsAlreadyError, FileMissingError, StorageError, StoragePermissionError
from trinitylake_ops.storage import Storage, open_storage
from trinitylake_ops.storage.azure import blob_storage
from trinitylake_ops.storage.azure.blob_storage import AzureStorage

pytestmark = pytest.mark.debian_packages


@pytest.fixture
def root(azurite: AzureServer) -> Iterator[str]:
    new_root = azurite.fresh_root()
    yield new_root
    azurite.delete_all(new_root)


@pytest.fixture
def storage(azurite: AzureServer, root: str) -> Storage:
    return open_storage(root, azurite.storage_options)


def test_folders_are_not_files(azurite: AzureServer, root: str, storage: Storage) -> None:
    azurite.put(root, "folder", b"", metadata={"hdi_isfolder": "true"})
    azurite.put(root, "folder/", b"", metadata={"Hdi_isfolder": "True"})
    azurite.put(root, "folder//x", b"x")
    storage.create("folder/file", b"x")
    storage.create("empty", b"")
    assert sorted(info.path for info in storage.list()) == ["empty", "folder/file"]
    assert not storage.exists("folder")
    for call in (
        lambda: storage.stat("folder"),
        lambda: storage.read("folder"),
        lambda: storage.read("folder", length=0),
    ):
        with pytest.raises(FileMissingError):
            call()
    with pytest.raises(FileExistsAlreadyError):  # the name of a folder is in use
        storage.create("folder", b"x")
    assert (storage.read("empty"), storage.stat("empty").size_bytes) == (b"", 0)


def _signature(permissions: str) -> str:
    """Return a signature for the container, because Azurite fails batches with an account signature."""
    return str(
        generate_container_sas(
            ACCOUNT_NAME,
            CONTAINER,
            ACCOUNT_KEY,
            permission=ContainerSasPermissions.from_string(permissions),
            expiry=datetime.now(UTC) + timedelta(hours=1),
        )
    )


@pytest.mark.parametrize("source", ["option", "connection string", "environment"])
def test_shared_access_signature_is_used(
    azurite: AzureServer, root: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    signature = _signature("rwdlc")
    options = {"endpoint": azurite.endpoint, "account_name": ACCOUNT_NAME}
    if source == "option":
        options["sas_token"] = signature
    elif source == "environment":
        monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", f"?{signature}")
    else:
        connection_string = f"BlobEndpoint={azurite.endpoint};SharedAccessSignature={signature}"
        options = {"account_name": ACCOUNT_NAME, "connection_string": connection_string}
    storage = open_storage(root, options)
    storage.create("a b%", b"x")
    storage.write("b", b"y")
    assert storage.read_many(["a b%", "b"]) == [b"x", b"y"]
    assert sorted(info.path for info in storage.list()) == ["a b%", "b"]
    assert storage.delete_many(["a b%", "b", "c"]) == {}
    assert abs(storage.now_ms() - datetime.now(UTC).timestamp() * 1000) < 5_000


def test_read_only_signature_rejects_writes(azurite: AzureServer, root: str) -> None:
    azurite.put(root, "f", b"x")
    signature = _signature("rl")
    all_options = {"endpoint": azurite.endpoint, "account_name": ACCOUNT_NAME, "sas_token": signature}
    storage = open_storage(root, all_options)
    assert storage.read("f") == b"x"
    assert storage.now_ms() > 0
    calls = {
        "create": lambda: storage.create("g", b"x"),
        "write": lambda: storage.write("f", b"y"),
        "delete": lambda: storage.delete("f"),
    }
    for name, call in calls.items():
        with pytest.raises(StoragePermissionError) as caught:
            call()
        assert "sig=" not in str(caught.value), name
    failures = storage.delete_many(["f", "g"])
    assert isinstance(failures["f"], StoragePermissionError)
    assert azurite.names(root) == ["f"]


def test_delete_batch_reports_a_failed_delete(azurite: AzureServer, root: str) -> None:
    """The response does not reliably show which delete failed, so each file is then deleted separately."""
    for name in ("a", "leased", "z"):
        azurite.put(root, name, b"x")
    container, prefix = azurite.container, root.split("/", 3)[3]
    lease = azurite.client.get_blob_client(container, f"{prefix}leased").acquire_lease()
    with FaultyProxy(azurite.endpoint) as proxy:
        endpoint = f"{proxy.url}/{ACCOUNT_NAME}"
        storage = open_storage(root, {**azurite.storage_options, "endpoint": endpoint})
        failures = storage.delete_many(["a", "leased", "missing", "z"])
        assert [exchange.method for exchange in proxy.log] == ["POST", "DELETE", "DELETE", "DELETE", "DELETE"]
    assert list(failures) == ["leased"]
    assert isinstance(failures["leased"], StorageError)
    assert "lease" in str(failures["leased"])
    assert azurite.names(root) == ["leased"]
    lease.release()


def test_account_without_batches_deletes_single_files(azurite: AzureServer, root: str) -> None:
    """The storage tries one batch, and then deletes files separately."""
    for name in ("a", "b"):
        azurite.put(root, name, b"x")
    with FaultyProxy(azurite.endpoint) as proxy:
        endpoint = f"{proxy.url}/{ACCOUNT_NAME}"
        storage = open_storage(root, {**azurite.storage_options, "endpoint": endpoint})
        code = "FeatureNotYetSupportedForHierarchicalNamespaceAccounts"
        proxy.begin(wire.respond(status=409, code=code, method="POST", times=None))
        assert storage.delete_many(["a", "b"]) == {}
        assert [exchange.method for exchange in proxy.log] == ["POST", "DELETE", "DELETE"]
        assert storage.delete_batch(["a", "b"]) == {}
        assert [exchange.method for exchange in proxy.log].count("POST") == 1
    assert azurite.names(root) == []


def test_create_rejects_a_body_larger_than_one_request(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_storage, "MAX_BODY_BYTES", 10)
    storage.create("ten", b"0123456789")
    with pytest.raises(StorageError):
        storage.create("eleven", b"0123456789x")
    assert not storage.exists("eleven")


def test_threads_and_forked_processes_use_one_storage(storage: Storage) -> None:
    storage.create("before", b"x")
    threads = [threading.Thread(target=storage.create, args=(f"thread-{number}", b"x")) for number in range(8)]
    for thread in threads:
        thread.start()

    def work(report) -> None:  # type: ignore[no-untyped-def]
        assert storage.read("before") == b"x"
        storage.create("child", b"x")
        assert pickle.loads(pickle.dumps(storage)).read("child") == b"x"
        report(",".join(sorted(info.path for info in storage.list("child"))))

    status, lines = fork(work).finish()
    for thread in threads:
        thread.join()
    assert (status, lines) == (0, ["child"])
    assert len(list(storage.list("thread-"))) == 8
    assert storage.read("child") == b"x"


_FORKING_PROGRAM = """
import json, os, sys
from trinitylake_ops.storage import open_storage
root, options = json.loads(sys.argv[1])
storage = open_storage(root, options)
storage.write("parent", b"x")
if (child := os.fork()) == 0:
    if options["child_writes"] == "yes": storage.write("child", b"x")
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
for number in range(5):
    assert storage.read("parent") == b"x"
"""


@pytest.mark.parametrize("child_writes", ["yes", "no"])
def test_forked_process_exits_without_affecting_its_parent(azurite: AzureServer, root: str, child_writes: str) -> None:
    options = azurite.storage_options
    program = _FORKING_PROGRAM.replace('options["child_writes"]', repr(child_writes))
    completed = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, json.dumps([root, options])],
        capture_output=True, text=True, timeout=60, cwd=REPOSITORY,
    )  # fmt: skip
    assert (completed.returncode, completed.stdout, completed.stderr) == (0, "", "")


def test_garbage_collected_storage_closes_its_connections(azurite: AzureServer, root: str) -> None:
    storage = AzureStorage(root, azurite.storage_options)
    storage.write("f", b"x")
    client = storage._client._opened[0]
    transport = client.service._pipeline._transport
    assert transport.session is not None
    del storage
    assert transport.session is None


def test_missing_credentials_are_reported(tmp_path: Path, azurite: AzureServer, root: str) -> None:
    """The search for credentials takes a bounded time."""
    program = (
        "import json, sys\nfrom trinitylake_ops.storage import open_storage\n"
        "root, options = json.loads(sys.argv[1])\n"
        "try: open_storage(root, options).read('f')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    options = {
        "account_name": ACCOUNT_NAME, "endpoint": "https://127.0.0.1:9/account",
        "connect_timeout_seconds": "1", "read_timeout_seconds": "1",
    }  # fmt: skip
    completed = subprocess.run(
        [sys.executable, "-c", program, json.dumps([root, options])],
        capture_output=True, text=True, timeout=100, cwd=REPOSITORY,
        env={"PATH": str(tmp_path), "HOME": str(tmp_path), "AZURE_TOKEN_CREDENTIALS": "EnvironmentCredential"},
    )  # fmt: skip
    assert completed.stdout.startswith("StoragePermissionError cannot read 'f'"), completed.stdout + completed.stderr
    assert "set one of the options 'account_key'" in completed.stdout
