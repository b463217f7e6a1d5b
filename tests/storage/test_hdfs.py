"""HDFS: roots, options, and the typed error for each failure of a real server."""

from __future__ import annotations

import gc
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.processes import fork
from tests.servers.daemons import free_port
from tests.servers.hdfs import JAVA_FOLDER, SUPERUSER, HdfsServer
from tests.storage.hdfs_relay import Relay, RelayFault
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import (
    AmbiguousWriteError,
    FileExistsAlreadyError,
    FileMissingError,
    InvalidInputError,
    InvalidLocationError,
    StorageError,
    StorageFullError,
    StoragePermissionError,
    TransientError,
    UnreachableError,
)
from trinitylake_ops.storage import RetryStorage, Storage, open_storage
from trinitylake_ops.storage.hdfs.client import NameNodeClock
from trinitylake_ops.storage.hdfs.errors import Request, Step, typed_error
from trinitylake_ops.storage.hdfs.storage import HdfsStorage
from trinitylake_ops.storage.registry import environment_of

REPOSITORY = Path(__file__).parents[2]
MAX_DURATION_S = 20.0
BODY = b"x" * 5000


@pytest.fixture(autouse=True)
def _user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HADOOP_USER_NAME", SUPERUSER)
    monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)


@pytest.fixture
def root(hdfs: HdfsServer) -> Iterator[str]:
    new_root = hdfs.fresh_root()
    yield new_root
    hdfs.delete_all(new_root)


@pytest.fixture
def relay(hdfs: HdfsServer) -> Iterator[Relay]:
    with Relay(hdfs.namenode_port) as running_relay:
        yield running_relay


def bare_storage(root: str, **options: str) -> Storage:
    """Return the storage without its retries."""
    storage = open_storage(root, options)
    assert isinstance(storage, RetryStorage)
    return storage.inner


def relayed_storage(relay: Relay, root: str, **options: str) -> Storage:
    return bare_storage(f"hdfs://{relay.address}/{root.split('/', 3)[3]}", **options)


def message_of_error(error_type: type[StorageError], call: Callable[[], object]) -> str:
    """Assert that a call raises exactly this type of error, and return its message of one line."""
    with pytest.raises(error_type) as raised:
        call()
    assert type(raised.value) is error_type
    message = str(raised.value)
    assert "\n" not in message and "\tat" not in message and ".java" not in message
    return message


# --- roots and options ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "root",
    [
        "hdfs:///path/", "hdfs://user:pass@host:8020/path/", "hdfs://host:0/p/", "hdfs://host:port/p/",
        "hdfs://host:65536/p/", "hdfs://ho st/p/", "hdfs://h:1/a:b/", "hdfs://h:1/.reserved/raw/",
        "hdfs://h:1/a/.snapshot/s/",
    ],
)  # fmt: skip
def test_invalid_roots_are_rejected(root: str) -> None:
    with pytest.raises(InvalidLocationError) as raised:
        open_storage(root)
    assert "pass" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fsync": "yes"}, "'fsync' must be 'true' or 'false'"),
        ({"namenodes": "a:1 b:1"}, "this root has a port"),
        ({"replication": "0"}, "'replication' must be a whole number from 1 to 512"),
        ({"replication": "1.5"}, "'replication' must be a whole number"),
        ({"read_timeout_seconds": "0"}, "'read_timeout_seconds'"),
        ({"region": "eu"}, r"unknown storage option 'region': hdfs:// supports .*namenodes"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        open_storage("hdfs://host:8020/lake/", options)


@pytest.mark.parametrize("namenodes", ["", "a", "a:x", "a:1,b:1", "a:1 " * 17])
def test_invalid_namenodes_are_rejected(namenodes: str) -> None:
    with pytest.raises(InvalidInputError, match="'namenodes'"):
        open_storage("hdfs://lakes/lake/", {"namenodes": namenodes})


def test_unreachable_storage_opens_and_pickles() -> None:
    storage = open_storage("hdfs://no-such-host.invalid:8020/lake/", {"replication": "2"})
    copy = pickle.loads(pickle.dumps(storage))
    assert copy.root == "hdfs://no-such-host.invalid:8020/lake/"
    assert repr(copy.inner) == repr(storage.inner)  # type: ignore[attr-defined]
    assert "HADOOP_USER_NAME" in environment_of(storage.root)


@pytest.mark.parametrize("name", ["a:b", ".snapshot", "a/.snapshot/b"])
def test_names_that_hdfs_does_not_support_are_rejected(name: str) -> None:
    storage = bare_storage("hdfs://127.0.0.1:1/lake/")
    for call in (storage.read, storage.stat, storage.delete, storage.list, lambda path: storage.create(path, b"")):
        with pytest.raises(InvalidLocationError):
            call(name)


# --- no server ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("authority", ["a free port", "no-such-host.invalid:8020"])
def test_closed_port_and_unknown_host_are_unreachable(authority: str) -> None:
    storage = bare_storage(f"hdfs://{authority.replace('a free port', f'127.0.0.1:{free_port()}')}/lake/")
    start_s = time.monotonic()
    for call in (
        lambda: storage.read("f"), lambda: storage.create("f", BODY), lambda: storage.write("f", BODY),
        lambda: list(storage.list()), storage.now_ms,
    ):  # fmt: skip
        assert "check the address of the NameNode" in message_of_error(UnreachableError, call)
    assert time.monotonic() - start_s < MAX_DURATION_S


def test_silent_server_times_out_after_the_configured_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        storage = bare_storage(f"hdfs://127.0.0.1:{silent.getsockname()[1]}/lake/", read_timeout_seconds="0.3")
        start_s = time.monotonic()
        for call in (lambda: storage.read("f"), lambda: storage.create("f", BODY), lambda: list(storage.list())):
            assert "no response within 0.3" in message_of_error(TransientError, call)
        message_of_error(AmbiguousWriteError, lambda: storage.delete("f"))
        assert time.monotonic() - start_s < MAX_DURATION_S


def test_unknown_name_service_is_reported() -> None:
    assert "'namenodes'" in message_of_error(StorageError, lambda: bare_storage("hdfs://lakes/lake/").read("f"))


# --- rights, quota, names -----------------------------------------------------------------------------


def test_user_without_rights_is_denied(hdfs: HdfsServer, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bare_storage(root).create("folder/f", BODY)
    hdfs.call("PUT", "/" + root.split("/", 3)[3].rstrip("/"), op="SETPERMISSION", permission="700")
    monkeypatch.setenv("HADOOP_USER_NAME", "stranger")
    storage = bare_storage(root)
    for call in (
        lambda: storage.read("folder/f"), lambda: storage.stat("folder/f"), lambda: storage.create("new", BODY),
        lambda: storage.write("folder/f", b""), lambda: storage.delete("folder/f"), lambda: list(storage.list()),
        lambda: storage.write_best_effort("folder/f", b""), storage.now_ms,
    ):  # fmt: skip
        assert "user=stranger" in message_of_error(StoragePermissionError, call)


def test_exceeded_quotas_are_reported(hdfs: HdfsServer, root: str) -> None:
    storage, folder = bare_storage(root), "/" + root.split("/", 3)[3].rstrip("/")
    storage.create("f", b"")
    hdfs.administer("-setQuota", "5", folder)  # the folder, _ops, _ops/tmp, f and one more file
    storage.create("g", b"")
    assert "quota" in message_of_error(StorageFullError, lambda: storage.create("h", b""))
    storage.delete("g")
    storage.write("h", b"")
    hdfs.administer("-clrQuota", folder)
    hdfs.administer("-setSpaceQuota", "1000", folder)
    assert "quota" in message_of_error(StorageFullError, lambda: storage.create("i", BODY))
    assert sorted(file.path for file in storage.list()) == ["f", "h"]
    assert list(storage.list("_ops/tmp/")) == []


def test_too_long_and_conflicting_names_are_reported(root: str) -> None:
    storage = bare_storage(root)
    for name in ("x" * 256, "a/" * 4500 + "b"):
        with pytest.raises(InvalidLocationError):
            storage.create(name, BODY)
    storage.create("file", BODY)
    storage.create("folder/f", BODY)
    assert "a part of the path is a file" in message_of_error(
        StorageError, lambda: storage.create("file/below/it", BODY)
    )
    assert "a part of the path is a file" in message_of_error(StorageError, lambda: storage.write("file/below", BODY))
    assert "it is a folder" in message_of_error(StorageError, lambda: storage.write("folder", BODY))
    message_of_error(FileExistsAlreadyError, lambda: storage.create("folder", BODY))
    storage.write_best_effort("missing/note", b"x")
    message_of_error(FileMissingError, lambda: storage.read("missing/note"))
    assert list(storage.list("_ops/tmp/")) == []


def test_replication_option_sets_the_number_of_replicas(hdfs: HdfsServer, root: str) -> None:
    bare_storage(root, replication="1", fsync="false").create("f", BODY)
    status = hdfs.call("GET", "/" + root.split("/", 3)[3] + "f", op="GETFILESTATUS")
    assert status["FileStatus"]["replication"] == 1  # type: ignore[index]


def test_name_service_fails_over_to_the_second_namenode(hdfs: HdfsServer, root: str) -> None:
    service = f"hdfs://lakes/{root.split('/', 3)[3]}"
    storage = bare_storage(service, namenodes=f"127.0.0.1:{free_port()} {hdfs.address}")
    storage.create("a/f", BODY)
    message_of_error(FileExistsAlreadyError, lambda: storage.create("a/f", BODY))
    assert storage.read("a/f") == bare_storage(root).read("a/f") == BODY
    unreachable_storage = bare_storage(service, namenodes=f"127.0.0.1:{free_port()} 127.0.0.1:{free_port()}")
    message_of_error(UnreachableError, lambda: unreachable_storage.read("a/f"))


def test_name_service_of_hadoop_configuration_works(
    hdfs: HdfsServer, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = {"a": f"127.0.0.1:{free_port()}", "b": f"127.0.0.1:{free_port()}", "c": hdfs.address}
    settings = {"dfs.ha.namenodes.lakes": "a,b,c"} | {
        f"dfs.namenode.rpc-address.lakes.{name}": address for name, address in addresses.items()
    }
    properties = "".join(
        f"<property><name>{key}</name><value>{value}</value></property>" for key, value in settings.items()
    )
    (tmp_path / "hdfs-site.xml").write_text(f"<configuration>{properties}</configuration>")
    (tmp_path / "core-site.xml").write_text("<configuration></configuration>")
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    storage = bare_storage(f"hdfs://lakes/{root.split('/', 3)[3]}")
    storage.create("f", BODY)
    assert bare_storage(root).read("f") == BODY


# --- lost responses -------------------------------------------------------------------------------------


def test_rename_with_a_lost_response_is_ambiguous(relay: Relay, root: str) -> None:
    storage = relayed_storage(relay, root)
    for number, operation in enumerate((storage.create, storage.write)):
        name = f"f{number}"
        operation(f"before-{number}", BODY)
        relay.begin(RelayFault(b"rename2", "drop_response"))
        assert "may have taken effect" in message_of_error(AmbiguousWriteError, lambda: operation(name, BODY))  # noqa: B023
        assert relay.n_hits == 1
        assert storage.read(name) == BODY


def test_lost_rename_request_is_ambiguous(relay: Relay, root: str) -> None:
    storage = relayed_storage(relay, root)
    storage.create("f", BODY)
    relay.begin(RelayFault(b"rename2", "drop_request"))
    message_of_error(AmbiguousWriteError, lambda: storage.create("g", BODY))
    assert relay.n_hits == 1, "only RetryStorage resends requests"
    assert not storage.exists("g")
    storage.create("g", BODY)
    assert list(storage.list("_ops/tmp/")) == []


def test_temporary_file_is_deleted_after_two_lost_connections(relay: Relay, root: str) -> None:
    storage = relayed_storage(relay, root)
    storage.create("f", BODY)
    relay.begin(RelayFault(b"rename2", "drop_request"), RelayFault(b"delete", "drop_request"))
    message_of_error(AmbiguousWriteError, lambda: storage.create("g", BODY))
    assert relay.n_hits == 2
    assert list(bare_storage(root).list("_ops/tmp/")) == []


def test_lost_connection_is_reported_once(relay: Relay, root: str) -> None:
    storage = relayed_storage(relay, root)
    storage.create("f", BODY)
    for _ in range(10):
        relay.begin(RelayFault(b"rename2", "drop_request"))
        message_of_error(AmbiguousWriteError, lambda: storage.create("g", BODY))
        assert not storage.exists("g")


def test_name_service_does_not_repeat_a_rename(relay: Relay, root: str) -> None:
    service = f"hdfs://lakes/{root.split('/', 3)[3]}"
    storage = bare_storage(service, namenodes=f"{relay.address} {relay.address}")
    storage.create("f", BODY)
    for number, action in enumerate(("drop_response", "drop_request")):
        relay.begin(RelayFault(b"rename2", action))  # type: ignore[arg-type]
        message_of_error(AmbiguousWriteError, lambda: storage.create(f"g{number}", BODY))  # noqa: B023
        assert relay.n_hits == 1
        assert storage.exists(f"g{number}") == (action == "drop_response")


def test_rename_of_a_missing_temporary_file_is_ambiguous() -> None:
    request = Request(Step.CREATE, "f", "hdfs://host:1/lake/")
    error = typed_error(request, FileNotFoundError("rename source /lake/_ops/tmp/1 is not found.\n\tat X"), 1)
    assert type(error) is AmbiguousWriteError


@pytest.mark.parametrize("action", ["drop_response", "drop_request"])
def test_rename_to_a_stopped_server_is_ambiguous(relay: Relay, root: str, action: str) -> None:
    storage = relayed_storage(relay, root)
    storage.create("f", BODY)
    relay.begin(RelayFault(b"rename2", action))  # type: ignore[arg-type]
    relay.reject_connections()
    message_of_error(AmbiguousWriteError, lambda: storage.create("g", BODY))
    assert bare_storage(root).exists("g") == (action == "drop_response")


def test_rename_without_a_response_times_out(relay: Relay, root: str) -> None:
    storage = relayed_storage(relay, root, read_timeout_seconds="1.5")
    storage.create("f", BODY)
    relay.begin(RelayFault(b"rename2", "silence"))
    start_s = time.monotonic()
    assert "no response within 1.5 s" in message_of_error(AmbiguousWriteError, lambda: storage.create("g", BODY))
    assert time.monotonic() - start_s < MAX_DURATION_S
    assert storage.read("g") == BODY, "the next request uses another connection"


@pytest.mark.parametrize("method", [b"addBlock", b"complete"])
def test_failed_temporary_file_creates_nothing(relay: Relay, root: str, method: bytes) -> None:
    storage = relayed_storage(relay, root, read_timeout_seconds="1.5")
    storage.create("f", BODY)
    relay.begin(RelayFault(method, "silence"))
    message_of_error(TransientError, lambda: storage.create("g", BODY))
    assert relay.n_hits == 1
    message_of_error(FileMissingError, lambda: storage.read("g"))
    storage.create("g", BODY)
    assert storage.read("g") == BODY


def test_reads_and_deletes_with_lost_responses_are_transient(relay: Relay, root: str) -> None:
    bare_storage(root).create("f", BODY)
    storage = relayed_storage(relay, root, read_timeout_seconds="0.5")
    for method, error_type, call in (
        (b"getBlockLocations", TransientError, lambda: storage.read("f")),
        (b"getFileInfo", TransientError, lambda: storage.stat("f")),
        (b"getListing", TransientError, lambda: list(storage.list())),
        (b"delete", AmbiguousWriteError, lambda: storage.delete("f")),
    ):
        relay.begin(RelayFault(method, "silence"))
        message_of_error(error_type, call)
        assert relay.n_hits == 1


def test_commit_with_a_lost_response_is_committed_once(relay: Relay, root: str) -> None:
    lake = Lakehouse.create(f"hdfs://{relay.address}/{root.split('/', 3)[3]}", {"cache_bytes": "0"})
    for number in range(4):
        relay.begin(RelayFault(b"rename2", "drop_response", times=1 + number))
        with lake.transaction() as txn:
            txn.create_namespace(f"ns{number}")
        assert relay.n_hits > 0
    assert lake.latest_version() == 4
    assert sorted(Lakehouse.open(root).snapshot().namespaces()) == [f"ns{number}" for number in range(4)]


# --- processes and clocks -----------------------------------------------------------------------------


def test_forked_child_is_rejected_and_its_parent_continues(root: str) -> None:
    storage = open_storage(root)
    storage.create("f", BODY)
    child = fork(lambda report: report(message_of_error(StorageError, lambda: storage.read("f"))))
    assert "forked" in child.next_report()
    assert child.finish()[0] == 0
    assert storage.read("f") == BODY


def test_forked_child_does_not_wait_when_it_drops_a_client(root: str) -> None:
    """A client waits for its threads when it is destroyed, and these do not exist in the child."""
    storages = [open_storage(root)]
    storages[0].create("f", BODY)

    def drop(report: Callable[[str], None]) -> None:
        storages.clear()
        gc.collect()
        report("dropped")

    child = fork(drop, time_limit_seconds=20)
    assert child.finish() == (0, ["dropped"])
    assert storages[0].read("f") == BODY


def test_forked_child_does_not_wait_for_an_abandoned_client(root: str) -> None:
    """Garbage collection destroys a client in a reference cycle, but it must not do so in a forked child."""
    storage = bare_storage(root)
    assert isinstance(storage, HdfsStorage)
    storage.create("f", BODY)
    gc.collect()
    gc.disable()
    try:
        cycle: list[object] = [storage._client._current()]
        cycle.append(cycle)
        storage._client._drop(cycle[0])  # type: ignore[arg-type]
        del cycle

        def collect(report: Callable[[str], None]) -> None:
            gc.collect()
            report("collected")

        child = fork(collect, time_limit_seconds=10)
    finally:
        gc.enable()
    assert child.finish() == (0, ["collected"])
    assert storage.read("f") == BODY


def test_child_forked_before_first_use_works(root: str) -> None:
    open_storage(root).create("f", BODY)
    program = (
        "import os, sys\nfrom trinitylake_ops.storage import open_storage\nstorage = open_storage(sys.argv[1])\n"
        "child = os.fork()\nos.write(1, b'%d\\n' % len(storage.read('f')))\n"
        "if child:\n    assert os.waitpid(child, 0)[1] == 0\n"
    )
    completed = subprocess.run([sys.executable, "-c", program, root], cwd=REPOSITORY, capture_output=True, text=True)
    assert (completed.stdout, completed.returncode) == ("5000\n5000\n", 0), completed.stderr


def test_now_ms_is_the_servers_time(root: str) -> None:
    storage = bare_storage(root)
    times_ms = [storage.now_ms() for _ in range(5)]
    storage.create("f", b"")
    assert times_ms == sorted(times_ms)
    assert times_ms[-1] - 1 <= storage.stat("f").last_modified_ms <= storage.now_ms() + 1000
    assert list(storage.list("_ops/tmp/")) == []


def test_clock_is_never_ahead_and_refreshes_every_two_minutes() -> None:
    local_ms, n_requests = [0.0], [0]

    def request_time() -> int:
        local_ms[0] += 5
        n_requests[0] += 1
        server_ms = 1_000_000 + int(local_ms[0]) - 3
        local_ms[0] += 5
        return server_ms

    clock = NameNodeClock(local_ms=lambda: local_ms[0])
    last_ms = 0
    for _ in range(100):
        local_ms[0] += 10_000
        now_ms = clock.now_ms(request_time)
        assert last_ms < now_ms <= 1_000_000 + local_ms[0]
        assert now_ms >= 1_000_000 + local_ms[0] - 10 - 25
        last_ms = now_ms
    assert n_requests[0] == 8
    local_ms[0] += 200_000
    assert clock.now_ms(lambda: 500_000) == 500_000, "the clock follows a server clock that was set back"


def test_web_servers_unpack_their_pages_into_the_server_folder(hdfs: HdfsServer) -> None:
    """A killed server does not delete these files, but its folder is deleted when the tests end."""
    assert list(hdfs.log.parent.glob(f"data-*/{JAVA_FOLDER}/Jetty_*"))
    assert not list(Path(tempfile.gettempdir()).glob(f"Jetty_*_{hdfs.http_port}_*"))
