"""S3 through obstore: requests, typed errors for its exceptions, and the fallback to s3fs."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Sequence

import pytest
from obstore.exceptions import GenericError, UnauthenticatedError

from tests.processes import fork
from tests.storage.scripted_server import (
    DropConnection,
    NoResponse,
    RecordedRequest,
    ScriptedResponse,
    ScriptedServer,
    s3_error,
)
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import (
    AmbiguousWriteError,
    CorruptFileError,
    FileExistsAlreadyError,
    FileMissingError,
    StorageError,
    StoragePermissionError,
    TransientError,
    TrinityLakeError,
    UnreachableError,
)
from trinitylake_ops.storage.http.requests import Request, StorageRequest
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.storage.s3.obstore_errors import status_and_code
from trinitylake_ops.storage.s3.obstore_storage import ObstoreS3Storage, is_folder_ahead, typed_error
from trinitylake_ops.storage.s3.s3fs_storage import S3Storage

ACCESS_KEY_ID, SECRET = "AKIDEXAMPLE12345", "wJalrXUtnFEMI/K7MDENG"
Script = Callable[[int, RecordedRequest], ScriptedResponse | DropConnection | NoResponse]
OBJECT_HEADERS = {"Last-Modified": "Sat, 21 Nov 2026 07:00:05 GMT", "ETag": '"tag"'}

CONFLICT_DUMP = """Object at location k already exists: Error performing PUT {url} in 2ms - \
Server returned non-2xx status code: 409 Conflict: \
<Error><Code>ConditionalRequestConflict</Code><AWSAccessKeyId>AKIDEXAMPLE12345</AWSAccessKeyId></Error>

Debug source:
AlreadyExists {{
    path: "k",
    source: RetryError(
        RetryErrorImpl {{
            method: PUT,
            inner: Status {{
                status: 409,
                body: Some(
                    "<Code>ConditionalRequestConflict</Code><Message>quoted \\"word\\"\\nby AKIDEXAMPLE12345</Message>",
                ),
            }},
        }},
    ),
}}"""
FORGED_DUMP = 'x\n    inner: Status {\n        status: 412,\n        body: Some(\n            "",\n        ),\n'


def always(response: ScriptedResponse | DropConnection | NoResponse) -> Script:
    return lambda number, request: response


def storage_at(server: ScriptedServer, storage_class: type[S3Storage] = ObstoreS3Storage, **options: str) -> S3Storage:
    default_options = {
        "endpoint": server.endpoint,
        "region": "us-east-1",
        "access_key_id": ACCESS_KEY_ID,
        "secret_access_key": SECRET,
        "connect_timeout_seconds": "30",  # a slow machine must not cause timeouts
        "read_timeout_seconds": "30",
    }
    return storage_class("s3://bucket/lake/", {**default_options, **options})


def failure(call: Callable[[], object]) -> TrinityLakeError:
    with pytest.raises(TrinityLakeError) as caught:
        call()
    message = str(caught.value)
    for hidden_text in ("\n", "<", "Debug source", SECRET, ACCESS_KEY_ID):
        assert hidden_text not in message
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return caught.value


def storage_request(operation: Request = Request.CREATE) -> StorageRequest:
    options = StorageOptions({"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET})
    return StorageRequest(operation, "k", "s3://bucket/lake/", options)


def error_dump(*lines: str) -> str:
    return "\n".join(["Generic S3 error: HTTP error: error sending request", "", "Debug source:", *lines])


# --- exceptions ----------------------------------------------------------------------------------


def test_read_rejects_a_file_above_the_limit_by_its_length() -> None:
    """The rest of the response never arrives: a client that waits for it would see a truncated response."""
    response = ScriptedResponse(200, b"abc", OBJECT_HEADERS, content_length=2 << 30)
    with ScriptedServer(always(response)).running() as server:
        storage = storage_at(server)
        for limit_bytes in (None, 3):
            error = failure(lambda limit_bytes=limit_bytes: storage.read("a", limit_bytes=limit_bytes))
            assert type(error) is CorruptFileError
            assert str(2 << 30) in error.message
        assert len(server.requests) == 2


def test_status_and_code_are_read_from_the_dump() -> None:
    error = GenericError(CONFLICT_DUMP.format(url="http://host/bucket/k"))
    assert status_and_code(error) == (409, "ConditionalRequestConflict")
    mapped_error = typed_error(storage_request(), error, "http://host")
    assert type(mapped_error) is TransientError
    assert 'quoted "word" by ***' in str(mapped_error)
    assert ACCESS_KEY_ID not in str(mapped_error)


def test_names_and_responses_cannot_imitate_the_debug_dump() -> None:
    error = GenericError(CONFLICT_DUMP.format(url=FORGED_DUMP))
    assert status_and_code(error) == (409, "ConditionalRequestConflict")


@pytest.mark.parametrize(
    ("lines", "operation", "error_type", "message"),
    [
        (
            (
                "    inner: Http(",
                "        kind: Connect,",
                "        source: hyper_util::client::legacy::Error(",
                "            Connect,",
                '            message: "Connection refused",',
            ),
            Request.CREATE,
            UnreachableError,
            "Connection refused",
        ),
        (
            (
                "    inner: Http(",
                "        kind: Timeout,",
                "        source: hyper_util::client::legacy::Error(",
                "            Connect,",
            ),
            Request.CREATE,
            UnreachableError,
            "timeout while connecting",
        ),
        (("    inner: Http(", "        kind: Timeout,"), Request.CREATE, AmbiguousWriteError, "timeout"),
        (("    inner: Http(", "        kind: Request,"), Request.WRITE, AmbiguousWriteError, "connection was lost"),
        (
            ("    source: HttpError {", "        kind: Interrupted,"),
            Request.READ,
            TransientError,
            "connection was lost",
        ),
        (
            (
                "    inner: Http(",
                "        source: hyper_util::client::legacy::Error(",
                "            Connect,",
                "            error: InvalidCertificate(",
            ),
            Request.CREATE,
            StorageError,
            "certificate",
        ),
        (("    inner: BareRedirect,",), Request.READ, StorageError, "'region'"),
        (("    source: NotPartial,",), Request.READ, StorageError, "s3fs"),
        (("    source: Metadata {",), Request.CREATE, AmbiguousWriteError, "is invalid"),
    ],
)
def test_missing_response_maps_to_its_error(
    lines: tuple[str, ...], operation: Request, error_type: type[StorageError], message: str
) -> None:
    mapped_error = typed_error(storage_request(operation), GenericError(error_dump(*lines)), "http://host")
    assert type(mapped_error) is error_type
    assert message in str(mapped_error)
    assert "Debug" not in str(mapped_error)


def test_missing_credentials_are_reported() -> None:
    error = UnauthenticatedError(f"for path External AWS credential provider: RuntimeError: {SECRET}")
    mapped_error = typed_error(storage_request(), error, "http://host")
    assert type(mapped_error) is StoragePermissionError
    assert SECRET not in str(mapped_error)


# --- on the wire ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size_bytes", [0, 5, 12 * 1024 * 1024])
def test_create_is_one_put_with_the_condition(size_bytes: int) -> None:
    data = b"x" * size_bytes
    with ScriptedServer(always(ScriptedResponse(headers={"ETag": '"tag"'}))).running() as server:
        storage_at(server).create("a/b", data)
    (request,) = server.requests
    assert (request.method, request.path, request.body == data) == ("PUT", "/bucket/lake/a/b", True)
    assert {name.lower(): value for name, value in request.headers.items()}["if-none-match"] == "*"


@pytest.mark.parametrize(
    ("response", "error_type"),
    [
        (DropConnection(), AmbiguousWriteError),
        (NoResponse(), AmbiguousWriteError),
        (s3_error(500, "InternalError"), AmbiguousWriteError),
        (s3_error(409, "ConditionalRequestConflict"), TransientError),
        (s3_error(412, "PreconditionFailed"), FileExistsAlreadyError),
        (s3_error(403, "InvalidAccessKeyId", f"no {ACCESS_KEY_ID}"), StoragePermissionError),
        (s3_error(400, "Odd", f"no {ACCESS_KEY_ID} {SECRET}"), StorageError),
        (s3_error(404, "NoSuchBucket"), StorageError),
    ],
)
def test_create_is_sent_once(
    response: ScriptedResponse | DropConnection | NoResponse, error_type: type[StorageError]
) -> None:
    def script(number: int, request: RecordedRequest) -> ScriptedResponse | DropConnection | NoResponse:
        return response if request.method == "PUT" else ScriptedResponse(headers=OBJECT_HEADERS)

    with ScriptedServer(script).running() as server:
        timeout_seconds = "1.5" if isinstance(response, NoResponse) else "30"
        storage = storage_at(server, read_timeout_seconds=timeout_seconds)
        storage.stat("warm")  # the connection is reused, and breaks when it is reused
        assert type(failure(lambda: storage.create("a", b"x"))) is error_type
    assert [request.method for request in server.requests] == ["HEAD", "PUT"]


def test_missing_file_is_not_a_permission_error() -> None:
    with ScriptedServer(always(s3_error(404, "NoSuchKey"))).running() as server:
        assert type(failure(lambda: storage_at(server).read("a"))) is FileMissingError
        assert type(failure(lambda: storage_at(server).stat("a"))) is FileMissingError
    with ScriptedServer(always(s3_error(403, "AccessDenied"))).running() as server:
        assert type(failure(lambda: storage_at(server).read("a"))) is StoragePermissionError


def test_slow_read_times_out() -> None:
    response = ScriptedResponse(body=b"x" * 100, headers=OBJECT_HEADERS, byte_delay_s=0.2)
    with ScriptedServer(always(response)).running() as server:
        storage = storage_at(server, read_timeout_seconds="0.5", connect_timeout_seconds="0.5")
        started = time.monotonic()
        assert type(failure(lambda: storage.read("a"))) is TransientError
        assert time.monotonic() - started < 10


def test_environment_does_not_override_options(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "AWS_CONDITIONAL_PUT": "disabled",
        "AWS_SKIP_SIGNATURE": "true",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true",
        "AWS_S3_EXPRESS": "true",
        "AWS_BUCKET": "other",
    }.items():
        monkeypatch.setenv(name, value)
    with ScriptedServer(always(ScriptedResponse(headers={"ETag": '"tag"'}))).running() as server:
        storage_at(server).create("a", b"x")
    (request,) = server.requests
    assert request.path == "/bucket/lake/a"
    headers = {name.lower(): value for name, value in request.headers.items()}
    assert ACCESS_KEY_ID in headers["authorization"]
    assert headers["if-none-match"] == "*"


def test_credentials_region_and_endpoint_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedServer(always(ScriptedResponse(headers={"ETag": '"tag"'}))).running() as server:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "FROMTHEENVIRONMENT")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_SESSION_TOKEN", "token")
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.endpoint)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
        ObstoreS3Storage("s3://bucket/", {}).write("a", b"")
    headers = {name.lower(): value for name, value in server.requests[0].headers.items()}
    assert "FROMTHEENVIRONMENT/" in headers["authorization"]
    assert "/eu-central-1/" in headers["authorization"]
    assert headers["x-amz-security-token"] == "token"


# --- lists ---------------------------------------------------------------------------------------


def listing(*keys: str) -> ScriptedResponse:
    return sized_listing([(key, 0 if key.endswith("/") else 3) for key in keys])


def sized_listing(sizes_bytes: Sequence[tuple[str, int]], next_token: str = "") -> ScriptedResponse:
    contents = "".join(
        f"<Contents><Key>{key}</Key><Size>{size_bytes}</Size><ETag>x</ETag>"
        "<LastModified>2026-11-21T07:00:05.999Z</LastModified></Contents>"
        for key, size_bytes in sizes_bytes
    )
    token_element = f"<NextContinuationToken>{next_token}</NextContinuationToken>" if next_token else ""
    truncated_element = f"<IsTruncated>{'true' if next_token else 'false'}</IsTruncated>"
    return ScriptedResponse(
        body=f"<ListBucketResult>{truncated_element}{token_element}{contents}</ListBucketResult>".encode()
    )


def test_listing_omits_folder_objects() -> None:
    def script(number: int, request: RecordedRequest) -> ScriptedResponse:
        return ScriptedResponse(404) if request.method == "HEAD" else listing("lake/", "lake/a/", "lake/a/b", "lake/c")

    with ScriptedServer(script).running() as server:
        files = list(storage_at(server).list())
    assert [file.path for file in files] == ["a/b", "c"]
    assert {file.last_modified_ms % 1000 for file in files} == {0}


@pytest.mark.parametrize("size_bytes", [5, 0])
@pytest.mark.parametrize("is_paged", [False, True])
def test_folder_object_does_not_duplicate_a_file(size_bytes: int, is_paged: bool) -> None:
    """Other keys may sort between "a" and "a/", so that a page ends between them."""
    keys = [("lake/a", size_bytes), ("lake/a-b", 3), ("lake/a/", 0), ("lake/a/b", 3)]

    def script(number: int, request: RecordedRequest) -> ScriptedResponse:
        if request.method == "HEAD":
            return ScriptedResponse(body=b"x" * size_bytes, headers=OBJECT_HEADERS)
        if not is_paged:
            return sized_listing(keys)
        if "continuation-token=" in request.path:
            return sized_listing(keys[2:])
        return sized_listing(keys[:2], next_token="more")

    with ScriptedServer(script).running() as server:
        paths = sorted((file.path, file.size_bytes) for file in storage_at(server).list())
    assert paths == [("a", size_bytes), ("a-b", 3), ("a/b", 3)]


def test_empty_files_are_tracked_only_until_their_folder_is_listed() -> None:
    keys = sorted(["a", "a!", "a-b", "a/", "a/b", "a0", "b", *(f"flat/{number:03}" for number in range(100))])
    for position, last_key in enumerate(keys):
        tracked_keys = [key for key in keys[: position + 1] if is_folder_ahead(key, last_key)]
        assert all(key in tracked_keys for key in keys[: position + 1] if f"{key}/" in keys[position + 1 :])
        assert len(tracked_keys) <= 3, "memory does not grow with the number of empty files"


def test_listing_continues_with_s3fs_after_a_key_that_obstore_rejects() -> None:
    keys = ["lake/a", "lake/b//c", "lake/d"]
    with ScriptedServer(always(listing(*keys))).running() as server:
        assert [file.path for file in storage_at(server).list()] == ["a", "d"]


@pytest.mark.parametrize("prefix", ["_", "a0", "a/!", "a/ b", "\x80", "\ue000", "a-", "ä"])
def test_listing_by_a_name_prefix_starts_at_the_prefix(prefix: str) -> None:
    names = ["lake/+", f"lake/{prefix}", f"lake/{prefix}x", "lake/\U0010fffe"]
    with ScriptedServer(always(listing(*names))).running() as server:
        paths = [file.path for file in storage_at(server).list(prefix)]
    assert paths == [prefix, f"{prefix}x"]
    assert "start-after=" in server.requests[0].path or prefix == "a/ b"


@pytest.mark.parametrize("is_paged", [False, True])
def test_unsorted_listing_is_rejected_by_obstore_and_read_by_s3fs(is_paged: bool) -> None:
    """Directory buckets list objects unsorted, so a partial listing would seem complete."""
    keys = [("lake/c", 3), ("lake/a", 3), ("lake/b", 3)]

    def script(number: int, request: RecordedRequest) -> ScriptedResponse:
        if not is_paged:
            return sized_listing(keys)
        if "continuation-token=" in request.path:
            return sized_listing(keys[1:])
        return sized_listing(keys[:1], next_token="more")

    with ScriptedServer(script).running() as server:
        with pytest.raises(StorageError, match="'client'"):
            list(storage_at(server).list())
        paths = [file.path for file in storage_at(server, S3Storage).list()]
    assert paths == ["c", "a", "b"]


# --- fallback to s3fs -----------------------------------------------------------------------------


def test_control_characters_are_stored_literally() -> None:
    with ScriptedServer(always(ScriptedResponse(headers={"ETag": '"tag"'}))).running() as server:
        storage_at(server).create("a\tb", b"x")
    (request,) = server.requests
    assert request.path == "/bucket/lake/a%09b"
    assert {name.lower(): value for name, value in request.headers.items()}["if-none-match"] == "*"


def test_forked_child_uses_s3fs() -> None:
    with ScriptedServer(always(ScriptedResponse(body=b"body", headers=OBJECT_HEADERS))).running() as server:
        storage = storage_at(server)
        assert storage.read("a") == b"body"  # starts the threads of obstore
        child = fork(lambda report: report(pickle.loads(pickle.dumps(storage)).read("a").decode()))
        assert child.finish() == (0, ["body"])
        assert storage.read("a") == b"body"
    uses_obstore = ["object_store" in str(request.headers).lower() for request in server.requests]
    assert uses_obstore == [True, False, True]


def test_delete_batch_reports_failures_by_file() -> None:
    body = b"<DeleteResult><Error><Key>lake/b</Key><Code>AccessDenied</Code></Error></DeleteResult>"
    with ScriptedServer(always(ScriptedResponse(body=body))).running() as server:
        failures = storage_at(server).delete_batch(["a", "b", "c"])
    assert {path: type(error) for path, error in failures.items()} == {"b": StoragePermissionError}


def test_text_hides_credentials_and_pickle_keeps_them() -> None:
    storage = ObstoreS3Storage("s3://bucket/lake/", {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET})
    assert ACCESS_KEY_ID not in repr(storage)
    assert SECRET not in repr(storage)
    copy = pickle.loads(pickle.dumps(storage))
    assert type(copy) is ObstoreS3Storage
    assert (copy.root, copy.options) == (storage.root, storage.options)


def test_server_time_is_requested_in_parallel_with_the_first_read() -> None:
    """Obstore does not return the date of a response, so the time is requested in parallel with the first read."""
    time_requested, is_parallel = threading.Event(), []

    def script(_: int, request: RecordedRequest) -> ScriptedResponse:
        if request.method == "HEAD":
            time_requested.set()
            return ScriptedResponse(200, b"")
        if not is_parallel:
            is_parallel.append(time_requested.wait(60))
        return s3_error(404, "NoSuchKey")

    with ScriptedServer(script).running() as server:
        with pytest.raises(FileMissingError):
            Lakehouse(storage_at(server)).snapshot()
        assert is_parallel == [True]
        assert [request.method for request in server.requests].count("HEAD") == 1
