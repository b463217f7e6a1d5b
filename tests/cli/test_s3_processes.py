"""The command line on S3 as a process: each failure prints one line without secrets, and without a long delay."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import pytest

from tests import proxy as wire
from tests.cli.forked import Result, run
from tests.cli.test_processes import assert_one_line, rerun_one
from tests.lakes import check_lake
from tests.proxy import FaultyProxy, WireFault
from tests.servers.s3_server import S3Server
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.format.file_names import root_path
from trinitylake_ops.storage import background

pytestmark = pytest.mark.debian_packages

WRONG_SECRET = "wrong-secret-of-this-test"
WRONG_KEY = "wrong-key-of-this-test"
LONG_TIMEOUT_S, SHORT_TIMEOUT_S = "30", "0.5"  # the short timeout is for servers that do not respond
MAX_DURATION_S = 30


@pytest.fixture
def root(radosgw: S3Server) -> Iterator[str]:
    new_root = radosgw.fresh_root()
    Lakehouse.create(new_root, radosgw.storage_options)
    yield new_root
    radosgw.delete_all(new_root)


@pytest.fixture
def silent_endpoint() -> Iterator[str]:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        yield f"http://127.0.0.1:{silent.getsockname()[1]}"


@pytest.fixture
def closed_endpoint() -> Iterator[str]:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{unused.getsockname()[1]}"


def arguments(server: S3Server, root: str, client: str, *command: str, **options: str) -> tuple[object, ...]:
    storage_options = {**server.storage_options, "client": client, "read_timeout_seconds": LONG_TIMEOUT_S, **options}
    flags = [part for name, value in storage_options.items() for part in ("--storage-option", f"{name}={value}")]
    return ("--root", root, *flags, *command)


def assert_rejected(result: Result, server: S3Server, part: str) -> None:
    assert_one_line(result, 5, part)
    for secret in (WRONG_SECRET, WRONG_KEY, server.access_key_id, server.secret_access_key):
        assert secret not in result.err
    assert "AWS4-HMAC" not in result.err
    assert "<" not in result.err


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
def test_error_of_storage_is_one_line(
    radosgw: S3Server, root: str, client: str, silent_endpoint: str, closed_endpoint: str
) -> None:
    expected = {
        arguments(radosgw, root, client, "ls", "--json", endpoint=closed_endpoint): closed_endpoint,
        arguments(radosgw, root, client, "create-namespace", "x", access_key_id=WRONG_KEY): "credentials",
    }
    if client == "s3fs":  # both clients run the same code, and only the errors differ
        expected |= {
            arguments(
                radosgw, root, client, "ls", "--json", endpoint=silent_endpoint, read_timeout_seconds=SHORT_TIMEOUT_S
            ): silent_endpoint,
            arguments(radosgw, "s3://no-such-bucket-of-mine/lake", client, "ls"): "does not exist",
            arguments(radosgw, root, client, "ls", secret_access_key=WRONG_SECRET): "credentials",
            arguments(radosgw, "s3://no-such-bucket-of-mine/lake", client, "init"): "does not exist",
        }
    started = time.monotonic()
    results = rerun_one(list(expected))
    assert time.monotonic() - started < MAX_DURATION_S * len(expected) / 2
    for result, part in zip(results, expected.values(), strict=True):
        assert_rejected(result, radosgw, part)


def _expired_from(number: int) -> WireFault:
    return wire.respond(number, status=400, code="ExpiredToken", times=None)


def test_credentials_that_expire_during_commit_are_reported(radosgw: S3Server, root: str) -> None:
    """Nothing is committed, and the next attempt with new credentials succeeds.

    The rejected request for the root may have succeeded, so that a fence must exclude this.
    """
    client = "s3fs"
    lake = Lakehouse.open(root, radosgw.storage_options)
    background.drain()  # write the hint of the fixture's commits
    with FaultyProxy(radosgw.endpoint) as proxy:
        call = arguments(radosgw, root, client, "create-namespace", "ns", endpoint=proxy.url)
        undisturbed = run(*arguments(radosgw, root, client, "create-namespace", "other", endpoint=proxy.url))
        assert undisturbed.code == 0, undisturbed
        first_write = next(exchange.number for exchange in proxy.log if exchange.method == "PUT")
        proxy.begin(_expired_from(first_write))
        assert_rejected(run(*call), radosgw, "expired")
        proxy.begin(_expired_from(first_write + 1))
        unknown = run(*call)
        assert_one_line(unknown, 3, "expired")
        assert proxy.log[first_write].path.endswith(root_path(2)), "the create of the root"
        assert radosgw.secret_access_key not in unknown.err
        assert lake.snapshot().namespaces() == ["other"]
        proxy.begin()
        _, _, advice = unknown.err.partition("trinitylake resolve-commit ")
        resolve = arguments(radosgw, root, client, "resolve-commit", *advice.split()[:2], endpoint=proxy.url)
        resolutions = [json.loads(run(*resolve, *flags, "--json").out) for flags in ((), ("--fence",))]
        assert [resolution["resolution"] for resolution in resolutions] == ["undecided", "lost"]
        assert run(*call).code == 0
    assert lake.snapshot().namespaces() == ["ns", "other"]
    check_lake(lake)
    assert operations.verify(lake).is_clean
