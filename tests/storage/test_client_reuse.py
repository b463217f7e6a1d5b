"""S3 clients are shared for equal settings (decision 33)."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from trinitylake_ops.errors import TrinityLakeError
from trinitylake_ops.storage.http.clients import MAX_CLIENTS, ClientCache, run_on_loop
from trinitylake_ops.storage.s3.obstore_storage import ObstoreS3Storage
from trinitylake_ops.storage.s3.s3fs_client import response_time
from trinitylake_ops.storage.s3.s3fs_storage import S3Storage

OPTIONS = {
    "endpoint": "http://127.0.0.1:9",
    "region": "us-east-1",
    "access_key_id": "test-key-id",
    "secret_access_key": "secret",
    "connect_timeout_seconds": "1",
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate home folder, so that no client of another test is reused."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def client(root: str = "s3://bucket/a/", **options: str) -> object:
    return S3Storage(root, {**OPTIONS, **options})._client


def test_storages_of_equal_settings_share_a_client() -> None:
    assert client() is client("s3://other/b/")


def test_other_options_create_a_new_client() -> None:
    assert client() is not client(secret_access_key="another")
    assert client() is not client(read_timeout_seconds="7")
    assert client() is not client(addressing_style="path")


def test_changed_environment_creates_a_new_client(monkeypatch: pytest.MonkeyPatch) -> None:
    first = client()
    monkeypatch.setenv("AWS_PROFILE", "other")
    assert client() is not first
    monkeypatch.delenv("AWS_PROFILE")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:8")
    assert client() is not first
    monkeypatch.delenv("https_proxy")
    assert client() is first


def test_changed_configuration_file_creates_a_new_client(home: Path) -> None:
    first = client()
    (home / ".aws").mkdir()
    (home / ".aws/credentials").write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    second = client()
    assert second is not first
    (home / ".aws/credentials").write_text("[default]\naws_access_key_id = abc\naws_secret_access_key = b\n")
    assert client() is not second


def test_obstore_clients_are_shared_per_bucket() -> None:
    def stores(root: str) -> object:
        return ObstoreS3Storage(root, OPTIONS)._stores

    assert stores("s3://bucket/a/") is stores("s3://bucket/b/")
    assert stores("s3://bucket/a/") is not stores("s3://other/a/")


def test_client_without_a_response_is_not_shared() -> None:
    storage = S3Storage("s3://bucket/a/", OPTIONS)
    with pytest.raises(TrinityLakeError):
        storage.now_ms()
    assert client() is not storage._client


def test_recently_used_clients_are_cached() -> None:
    clients: ClientCache[object] = ClientCache()
    first = clients.get(0, object)
    for key in range(1, MAX_CLIENTS):
        clients.get(key, object)
    assert clients.get(0, object) is first, "this use makes it the most recently used client"
    second = clients.get(1, object)
    clients.get(MAX_CLIENTS, object)
    assert clients.get(0, object) is first
    assert clients.get(1, object) is second
    for key in range(100, 100 + MAX_CLIENTS):
        clients.get(key, object)
    assert clients.get(0, object) is not first


@pytest.mark.parametrize(
    "value",
    [
        "Wed, 25 Nov 2026 10:20:30 GMT",
        "2026-11-25T10:20:30Z",
        "2026-11-25T10:20:30.000Z",
        "20261125T102030Z",
        1795602030,
    ],
)
def test_response_times_are_parsed(value: str | float) -> None:
    assert response_time(value) == datetime(2026, 11, 25, 10, 20, 30, tzinfo=UTC)


def test_invalid_times_are_rejected() -> None:
    with pytest.raises(ValueError, match="Invalid timestamp"):
        response_time("soon")


def test_request_on_the_event_loop_thread_raises_an_error() -> None:
    """An object that is garbage-collected on this thread may send a request."""

    async def respond() -> int:
        return 1

    async def send_on_loop() -> int:
        return run_on_loop(respond())

    assert run_on_loop(respond()) == 1
    with pytest.raises(RuntimeError, match="thread of the event loop"):
        run_on_loop(send_on_loop())
