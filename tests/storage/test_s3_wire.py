"""S3 through s3fs on the wire: requests, and results for each response."""

from __future__ import annotations

import gc
import os
import pickle
import re
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import unquote

import pytest

from tests.processes import fork
from tests.storage.scripted_server import (
    DropConnection,
    NoResponse,
    RecordedRequest,
    ScriptedResponse,
    ScriptedServer,
    http_date,
    s3_error,
)
from trinitylake_ops.errors import (
    AmbiguousWriteError,
    CorruptFileError,
    FileExistsAlreadyError,
    FileMissingError,
    StorageError,
    StoragePermissionError,
    ThrottledError,
    TransientError,
    TrinityLakeError,
    UnreachableError,
)
from trinitylake_ops.storage.s3.s3fs_storage import S3Storage

ACCESS_KEY_ID, SECRET = "AKIDEXAMPLE12345", "wJalrXUtnFEMI/K7MDENG"
Script = Callable[[int, RecordedRequest], ScriptedResponse | DropConnection | NoResponse]
MODIFIED = {"Last-Modified": "Sat, 21 Nov 2026 07:00:05 GMT"}


def always(response: ScriptedResponse | DropConnection | NoResponse) -> Script:
    return lambda number, request: response


def storage_at(server: ScriptedServer, **options: str) -> S3Storage:
    return S3Storage(
        "s3://bucket/lake/",
        {
            "endpoint": server.endpoint,
            "region": "us-east-1",
            "access_key_id": ACCESS_KEY_ID,
            "secret_access_key": SECRET,
            "addressing_style": "path",
            "connect_timeout_seconds": "30",  # a slow machine must not cause timeouts
            "read_timeout_seconds": "30",
            **options,
        },
    )


def listing(keys: list[str], token: str | None = None) -> ScriptedResponse:
    contents = "".join(
        f"<Contents><Key>{key}</Key><Size>3</Size><LastModified>2026-11-21T07:00:05.999Z</LastModified></Contents>"
        for key in keys
    )
    next_page = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{token}</NextContinuationToken>"
    position = next_page if token else "<IsTruncated>false</IsTruncated>"
    return ScriptedResponse(body=f"<ListBucketResult>{position}{contents}</ListBucketResult>".encode())


def failure(call: Callable[[], object]) -> TrinityLakeError:
    with pytest.raises(TrinityLakeError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert "<" not in message
    assert SECRET not in message
    assert ACCESS_KEY_ID not in message
    assert caught.value.__cause__ is None
    return caught.value


@pytest.mark.parametrize("size_bytes", [0, 5, 2 * 1024 * 1024, 20 * 1024 * 1024])
def test_create_is_one_put_with_the_condition(size_bytes: int) -> None:
    data = b"x" * size_bytes
    with ScriptedServer(always(ScriptedResponse())).running() as server:
        storage_at(server).create("a/b", data)
    (request,) = server.requests
    assert (request.method, request.path, request.headers["If-None-Match"]) == ("PUT", "/bucket/lake/a/b", "*")
    assert request.body == data
    assert "Expect" not in request.headers, "not every server or proxy supports this header"


def test_write_is_one_put_without_a_condition() -> None:
    with ScriptedServer(always(ScriptedResponse())).running() as server:
        storage_at(server).write("a", b"x")
    (request,) = server.requests
    assert (request.method, request.headers.get("If-None-Match")) == ("PUT", None)


def test_each_operation_is_one_request() -> None:
    def script(number: int, request: RecordedRequest) -> ScriptedResponse:
        return ScriptedResponse(204) if request.method == "DELETE" else ScriptedResponse(body=b"abc", headers=MODIFIED)

    with ScriptedServer(script).running() as server:
        storage = storage_at(server)
        assert storage.read("a") == b"abc"
        assert storage.stat("a").last_modified_ms == 1_795_244_405_000
        storage.delete("a")
        storage.now_ms()
    assert [request.method for request in server.requests] == ["GET", "HEAD", "DELETE"], (
        "the time is known from the other responses"
    )


@pytest.mark.parametrize(
    "lost_response",
    [DropConnection(), ScriptedResponse(content_length=50, body=b"<Err", status=500)],
    ids=["dropped", "truncated"],
)
@pytest.mark.parametrize("is_connection_reused", [False, True])
def test_request_with_a_lost_response_is_not_resent(
    lost_response: ScriptedResponse | DropConnection, is_connection_reused: bool
) -> None:
    """By default the HTTP library resends PUT and DELETE, and s3fs and botocore resend after transient errors."""
    earlier_responses = [ScriptedResponse(body=b"abc")] if is_connection_reused else []
    operations: list[tuple[Callable[[S3Storage], object], type[StorageError]]] = [
        (lambda storage: storage.create("a", b"x"), AmbiguousWriteError),
        (lambda storage: storage.write("a", b"x"), AmbiguousWriteError),
        (lambda storage: storage.delete("a"), AmbiguousWriteError),
        (lambda storage: storage.delete_batch(["a", "b"]), AmbiguousWriteError),
        (lambda storage: storage.read("a"), TransientError),
        (lambda storage: storage.stat("a"), TransientError),
        (lambda storage: list(storage.list()), TransientError),
    ]
    for operation, error_type in operations:
        responses = [*earlier_responses, lost_response]
        with ScriptedServer(lambda number, request, responses=responses: responses[number]).running() as server:  # type: ignore[misc]
            storage = storage_at(server)
            for _ in earlier_responses:
                storage.read("before")
            assert type(failure(lambda: operation(storage))) is error_type  # noqa: B023 - called immediately
        assert len(server.requests) == len(responses)


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_server_errors_of_a_create_are_ambiguous(status: int) -> None:
    with ScriptedServer(always(ScriptedResponse(status))).running() as server:
        assert type(failure(lambda: storage_at(server).create("a", b"x"))) is AmbiguousWriteError
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("response", "error_type", "message"),
    [
        (s3_error(412, "PreconditionFailed"), FileExistsAlreadyError, "already exists"),
        (s3_error(409, "ConditionalRequestConflict"), TransientError, "retry"),
        (s3_error(503, "SlowDown"), ThrottledError, "slower pace"),
        (s3_error(404, "NoSuchBucket"), StorageError, "bucket 'bucket' does not exist"),
        (s3_error(400, "ExpiredToken", f"token of {ACCESS_KEY_ID}"), StoragePermissionError, "expired"),
        (s3_error(403, "AccessDenied", SECRET), StoragePermissionError, "policy"),
        (s3_error(501, "NotImplemented", f"for {SECRET}"), StorageError, "If-None-Match"),
        (ScriptedResponse(200, content_length=10, body=b"x"), AmbiguousWriteError, "no complete response"),
    ],
)
def test_each_create_response_maps_to_its_error(
    response: ScriptedResponse, error_type: type[StorageError], message: str
) -> None:
    with ScriptedServer(always(response)).running() as server:
        error = failure(lambda: storage_at(server).create("a", b"x"))
        assert type(error) is error_type
        assert message in str(error)
        assert len(server.requests) == 1


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_redirects_are_not_followed_with_the_body(status: int) -> None:
    with ScriptedServer(always(ScriptedResponse())).running() as other_server:
        redirect = ScriptedResponse(status, headers={"Location": f"{other_server.endpoint}/bucket/lake/a"})
        with ScriptedServer(always(redirect)).running() as server:
            error = failure(lambda: storage_at(server).create("a", b"x"))
    assert type(error) is StorageError
    assert "'region' or 'endpoint'" in str(error)
    assert other_server.requests == []
    assert [request.method for request in server.requests] == ["PUT"]


@pytest.mark.parametrize("behavior", ["silent", "trickling"])
def test_slow_responses_time_out(behavior: str) -> None:
    trickle = ScriptedResponse(body=b"x" * 1000, headers=MODIFIED, byte_delay_s=0.05)
    with ScriptedServer(always(NoResponse() if behavior == "silent" else trickle)).running() as server:
        storage = storage_at(server, connect_timeout_seconds="0.5", read_timeout_seconds="0.5")
        started = time.monotonic()
        error = failure(lambda: storage.read("a"))
        assert type(error) is TransientError
        assert "timeout" in str(error)
        assert time.monotonic() - started < 10


def test_closed_port_of_the_server_is_unreachable() -> None:
    with ScriptedServer(always(ScriptedResponse())).running() as server:
        pass
    error = failure(lambda: storage_at(server).create("a", b"x"))
    assert type(error) is UnreachableError, "nothing was sent, so the create had no effect"
    assert server.endpoint in str(error)


def test_server_without_tls_is_reported() -> None:
    with ScriptedServer(always(ScriptedResponse())).running() as server:
        error = failure(lambda: storage_at(server, endpoint=server.endpoint.replace("http:", "https:")).stat("a"))
    assert type(error) is StorageError
    assert "TLS" in str(error)


@pytest.mark.parametrize(
    ("content_range", "body", "expected"),
    [
        ("bytes 2-4/10", b"234", b"234"),
        ("bytes 2-3/4", b"23", b"23"),
        ("bytes 2-4/10", b"23", None),
        ("bytes 1-3/10", b"123", None),
        ("bytes 2-3/10", b"23", None),
        (None, b"0123456789", b"234"),
    ],
)
def test_wrong_range_is_rejected(content_range: str | None, body: bytes, expected: bytes | None) -> None:
    response = (
        ScriptedResponse(206, body, {"Content-Range": content_range}) if content_range else ScriptedResponse(200, body)
    )
    with ScriptedServer(always(response)).running() as server:
        storage = storage_at(server)
        if expected is None:
            assert type(failure(lambda: storage.read("a", offset=2, length=3))) is TransientError
        else:
            assert storage.read("a", offset=2, length=3) == expected
    assert server.requests[0].headers["Range"] == "bytes=2-4"


def test_read_rejects_a_file_above_the_limit_by_its_length() -> None:
    """The rest of the response never arrives: a client that waits for it would see a truncated response."""
    response = ScriptedResponse(200, b"abc", MODIFIED, content_length=2 << 30)
    with ScriptedServer(always(response)).running() as server:
        storage = storage_at(server)
        for limit_bytes in (None, 3):
            error = failure(lambda limit_bytes=limit_bytes: storage.read("a", limit_bytes=limit_bytes))
            assert type(error) is CorruptFileError
            assert str(2 << 30) in error.message
        assert len(server.requests) == 2


def test_response_without_a_length_is_read_up_to_the_limit() -> None:
    chunked = b"".join(b"100000\r\n" + b"x" * (1 << 20) + b"\r\n" for _ in range(3)) + b"0\r\n\r\n"
    headers = {"Transfer-Encoding": "chunked"}
    with ScriptedServer(always(ScriptedResponse(200, chunked, headers))).running() as server:
        storage = storage_at(server)
        assert storage.read("a") == b"x" * (3 << 20)
        assert type(failure(lambda: storage.read("a", limit_bytes=2 << 20))) is CorruptFileError


def test_empty_ranges_require_an_existing_file() -> None:
    with ScriptedServer(always(s3_error(416, "InvalidRange"))).running() as server:
        assert storage_at(server).read("a", offset=99) == b""
    with ScriptedServer(always(ScriptedResponse(404))).running() as server:
        assert type(failure(lambda: storage_at(server).read("a", offset=1, length=0))) is FileMissingError


def test_other_server_is_reported() -> None:
    with ScriptedServer(always(ScriptedResponse(body=b"<html>hello"))).running() as server:
        storage = storage_at(server)
        assert "endpoint" in str(failure(lambda: storage.stat("a")))
        failure(lambda: list(storage.list()))


def test_second_page_of_a_listing_is_retried() -> None:
    script: list[ScriptedResponse | DropConnection] = [
        listing(["lake/a"], "t1"),
        s3_error(503, "SlowDown"),
        DropConnection(),
        listing(["lake/b"], "t2"),
        listing(["lake/c"]),
    ]
    with ScriptedServer(lambda number, request: script[number]).running() as server:
        files = list(storage_at(server).list())
    assert [file.path for file in files] == ["a", "b", "c"]
    assert {file.last_modified_ms for file in files} == {1_795_244_405_000}, "truncated to whole seconds, as in stat"
    tokens = [re.search(r"continuation-token=(\w+)", request.path) for request in server.requests]
    assert [match and match[1] for match in tokens] == [None, "t1", "t1", "t1", "t2"]


def test_missing_page_ends_the_listing_with_an_error() -> None:
    script = [listing(["lake/a"], "t1"), s3_error(403, "AccessDenied")]
    with ScriptedServer(lambda number, request: script[number]).running() as server:
        files = storage_at(server).list()
        assert next(files).path == "a"
        assert type(failure(lambda: next(files))) is StoragePermissionError
    without_token = ScriptedResponse(body=b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>")
    with ScriptedServer(always(without_token)).running() as server:
        assert "incomplete listing" in str(failure(lambda: list(storage_at(server).list())))


def test_invalid_page_of_a_listing_is_rejected() -> None:
    repeated_page = ScriptedResponse(
        body=b"<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>"
        b"</ListBucketResult>"
    )
    with ScriptedServer(always(repeated_page)).running() as server:
        assert "repeated a page" in str(failure(lambda: list(storage_at(server).list())))
    for entry in (b"<Key>k</Key>", b"<Size>1</Size>"):
        body = b"<ListBucketResult><Contents>" + entry + b"</Contents></ListBucketResult>"
        with ScriptedServer(always(ScriptedResponse(body=body))).running() as server:
            assert "has no key, size or time" in str(failure(lambda: list(storage_at(server).list())))


def test_pages_are_requested_lazily() -> None:
    with ScriptedServer(always(listing(["lake/a", "lake/b"], "more"))).running() as server:
        files = storage_at(server).list()
        assert server.requests == []
        next(files)
        next(files)
        assert len(server.requests) == 1
        next(files)
        assert len(server.requests) == 2


def test_listing_omits_objects_without_valid_paths() -> None:
    keys = ["lake/", "lake/folder/", "lake/a//b", "lake/../c", "lake/_ops/tmp/x", "lake/valid"]
    with ScriptedServer(always(listing(keys))).running() as server:
        assert [file.path for file in storage_at(server).list()] == ["valid"]


def test_delete_batch_sends_one_request_and_reports_failures() -> None:
    errors = [("lake/b", "AccessDenied"), ("lake/c", "InternalError"), ("lake/d", "SlowDown"), ("lake/e", "NoSuchKey")]
    body = "".join(f"<Error><Key>{key}</Key><Code>{code}</Code></Error>" for key, code in errors)
    with ScriptedServer(
        always(ScriptedResponse(body=f"<DeleteResult>{body}</DeleteResult>".encode()))
    ).running() as server:
        failures = storage_at(server).delete_batch(["a", "b", "c", "d", "e"])
    assert {path: type(error) for path, error in failures.items()} == {
        "b": StoragePermissionError,
        "c": AmbiguousWriteError,
        "d": ThrottledError,
    }
    (request,) = server.requests
    assert request.body.count(b"<Key>lake/") == 5


def test_batch_failure_for_an_unknown_name_is_an_error() -> None:
    body = b"<DeleteResult><Error><Key>lake/zzz</Key><Code>InternalError</Code></Error></DeleteResult>"
    with ScriptedServer(always(ScriptedResponse(body=body))).running() as server:
        assert "delete them again" in str(failure(lambda: storage_at(server).delete_batch(["a", "b"])))


def test_names_that_xml_cannot_represent_are_deleted_separately() -> None:
    with ScriptedServer(always(ScriptedResponse(body=b"<DeleteResult/>"))).running() as server:
        assert storage_at(server).delete_batch(["a\x01", "b\r", "c\n"]) == {}
    requests = [(request.method, unquote(request.path)) for request in server.requests]
    assert requests == [("DELETE", "/bucket/lake/a\x01"), ("DELETE", "/bucket/lake/b\r"), ("POST", "/bucket?delete")]


def test_ten_thousand_deletes_are_ten_requests() -> None:
    with ScriptedServer(always(ScriptedResponse(body=b"<DeleteResult/>"))).running() as server:
        assert storage_at(server).delete_many([f"{number}" for number in range(10_000)]) == {}
    assert len(server.requests) == 10


def test_now_ms_uses_the_date_of_responses() -> None:
    server_seconds = int(time.time()) - 1_000
    response = ScriptedResponse(headers={"Date": http_date(server_seconds), **MODIFIED})
    with ScriptedServer(always(response)).running() as server:
        storage = storage_at(server)
        now_ms = storage.now_ms()
        assert 0 <= now_ms - server_seconds * 1000 < 5_000
        assert storage.now_ms() >= now_ms
    assert [request.method for request in server.requests] == ["HEAD"]
    with ScriptedServer(always(s3_error(403, "AccessDenied"))).running() as server:
        assert type(failure(storage_at(server).now_ms)) is StoragePermissionError


def test_credentials_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedServer(always(ScriptedResponse())).running() as server:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "FROMTHEENVIRONMENT")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.endpoint)
        monkeypatch.setenv("AWS_REGION", "eu-central-1")
        S3Storage("s3://bucket/", {"addressing_style": "path"}).write("a", b"")
    (request,) = server.requests
    assert "FROMTHEENVIRONMENT" in request.headers["Authorization"]


def test_missing_credentials_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    with ScriptedServer(always(ScriptedResponse())).running() as server:
        storage = S3Storage("s3://bucket/lake/", {"endpoint": server.endpoint})
        error = failure(lambda: storage.create("a", b""))
    assert type(error) is StoragePermissionError
    assert "access_key_id" in str(error)
    assert server.requests == []


def test_repr_hides_credentials_and_pickle_keeps_them() -> None:
    storage = S3Storage("s3://bucket/lake/", {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET})
    assert SECRET not in repr(storage)
    assert ACCESS_KEY_ID not in repr(storage)
    copy = pickle.loads(pickle.dumps(storage))
    assert (copy.root, copy.options) == (storage.root, storage.options)


def test_threads_share_one_storage() -> None:
    with ScriptedServer(always(ScriptedResponse(body=b"abc"))).running() as server:
        storage = storage_at(server)
        with ThreadPoolExecutor(64) as pool:
            bodies = list(pool.map(storage.read, [f"{number}" for number in range(300)]))
    assert bodies == [b"abc"] * 300
    assert len(server.requests) == 300


def read_twice(storage: S3Storage) -> Callable[[Callable[[str], None]], None]:
    return lambda report: report((storage.read("child") + storage.read("child")).decode())


IGNORES_FORK_WARNINGS = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # from 3.12 on


@IGNORES_FORK_WARNINGS
@pytest.mark.parametrize("process_id_is_reused", [False, True])
def test_forked_child_creates_a_new_client(monkeypatch: pytest.MonkeyPatch, process_id_is_reused: bool) -> None:
    """This includes a child that has the process id of an ancestor that exited."""
    if process_id_is_reused:
        process_id = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: process_id)
    with ScriptedServer(always(ScriptedResponse(body=b"abc"))).running() as server:
        storage = storage_at(server)
        storage.read("parent")
        child = fork(read_twice(storage), time_limit_seconds=20)
        assert child.finish() == (0, ["abcabc"])
        assert storage.read("parent") == b"abc"


@IGNORES_FORK_WARNINGS
def test_forked_child_starts_with_free_locks() -> None:
    with ScriptedServer(always(ScriptedResponse(body=b"abc"))).running() as server:
        storage = storage_at(server)
        storage.read("parent")
        with storage._client._lock, storage._clock._lock:
            child = fork(read_twice(storage), time_limit_seconds=20)
            assert child.finish() == (0, ["abcabc"])


def test_garbage_collected_storage_closes_its_connections() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ScriptedServer(always(ScriptedResponse(body=b"abc"))).running() as server:
            n_threads = threading.active_count()
            for _ in range(3):
                storage_at(server).read("a")
            gc.collect()
            deadline = time.monotonic() + 10
            while threading.active_count() > n_threads and time.monotonic() < deadline:
                time.sleep(0.01)  # the server has a thread for each open connection
            assert threading.active_count() <= n_threads + 1, "the event loop of the client may have started"
    assert [str(warning.message) for warning in caught if "nclosed" in str(warning.message)] == []
