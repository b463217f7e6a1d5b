"""What servers answer, and what others leave where our files stand, decodes or is refused; nothing else is raised."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trinitylake_ops.storage.azure.blob_client import page_of
from trinitylake_ops.storage.dynamodb.items import StoredFile
from trinitylake_ops.storage.gcs.client import batch_responses
from trinitylake_ops.storage.gcs.errors import Refusal
from trinitylake_ops.storage.interface import FileInfo
from trinitylake_ops.storage.paths import check_path
from trinitylake_ops.storage.redis.server import file_info

MOST_DIGITS = b"1" * 5_000  # Python makes no number of them
NESTED = b"[" * 50_000
PAGE = (
    b'<?xml version="1.0"?><EnumerationResults><Blobs><Blob><Name>a/b</Name><Properties><Last-Modified>'
    b"Tue, 24 Nov 2026 13:00:00 GMT</Last-Modified><Content-Length>7</Content-Length></Properties></Blob></Blobs>"
    b"<NextMarker>m</NextMarker></EnumerationResults>"
)
REFUSAL = json.dumps({"error": {"code": 403, "message": "no", "errors": [{"reason": "forbidden"}]}}).encode()
PARTS = (
    b"--x\r\nContent-Type: application/http\r\nContent-ID: <response-x+1>\r\n\r\nHTTP/1.1 404 Not Found\r\n"
    b"Content-Length: 2\r\n\r\n{}\r\n--x--\r\n"
)


def changed(sample: bytes) -> st.SearchStrategy[bytes]:
    """Samples with some bytes put in another's place, and any bytes at all."""
    at = st.integers(0, len(sample))
    replaced = st.builds(lambda i, n, new: sample[:i] + new + sample[i + n :], at, st.integers(0, 9), st.binary())
    return st.one_of(replaced, st.binary())


@settings(max_examples=300, deadline=None)
@given(changed(b"folder/a/b\x0012 34"))
@example(b"a\x00" + MOST_DIGITS + b" 1")
@example(b"a\x001 " + MOST_DIGITS)
@example(b"\xff\x001 1")
@example(b"a//b\x001 1")
@example(b"../a\x001 1")
def test_entries_of_the_index_of_redis(member: bytes) -> None:
    found = file_info(member, "folder/")
    if found is not None:
        assert isinstance(found, FileInfo)
        check_path(found.path)


@settings(max_examples=300, deadline=None)
@given(changed(PAGE))
@example(PAGE.replace(b">7<", b">" + MOST_DIGITS + b"<"))
@example(PAGE.replace(b"Tue, 24 Nov 2026", b"Tue, 24 Nov 0000"))
@example(PAGE.replace(b"GMT", b"-0000"))
@example(b"<a>" * 20_000)
def test_pages_of_azure(document: bytes) -> None:
    try:
        blobs, _ = page_of(document)
    except ValueError:
        return
    assert all(blob.size_bytes >= 0 for blob in blobs)


@settings(max_examples=300, deadline=None)
@given(changed(REFUSAL))
@example(NESTED)
@example(b'{"error": [1]}')
@example(b'{"error": {"errors": {"reason": 1}, "message": null}}')
def test_refusals_of_google(body: bytes) -> None:
    refusal = Refusal.of(403, body)
    assert refusal.reason is None or isinstance(refusal.reason, str)


@settings(max_examples=300, deadline=None)
@given(changed(PARTS), changed(b"multipart/mixed; boundary=x"))
@example(PARTS.replace(b"x+1", b"x+" + MOST_DIGITS), b"multipart/mixed; boundary=x")
@example(PARTS.replace(b"404", MOST_DIGITS), b"multipart/mixed; boundary=x")
def test_answers_of_batches_of_google(body: bytes, content_type: bytes) -> None:
    for number, answer in batch_responses(content_type.decode("latin-1"), body).items():
        assert number >= 0
        assert 100 <= answer.status <= 999


def test_an_answer_of_a_batch_is_read() -> None:
    assert batch_responses("multipart/mixed; boundary=x", PARTS)[1].status == 404


_VALUES = st.fixed_dictionaries(
    {}, optional={"S": st.text(), "N": st.text(st.sampled_from("0123456789-.eEn")), "B": st.binary()}
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(["path", "size_bytes", "modified_ms", "body", "upload", "part_bytes"]), _VALUES))
def test_items_of_dynamodb(item: dict[str, dict[str, object]]) -> None:
    try:
        file = StoredFile.of_item(item)
    except (KeyError, ValueError):
        return
    assert file.size_bytes >= 0
    if file.parts is not None:
        assert file.part_bytes > 0


@pytest.mark.parametrize("size", ["-1", "1e9", "nan", MOST_DIGITS.decode()])
def test_an_item_of_no_size_is_no_file(size: str) -> None:
    item = {"path": {"S": "f"}, "size_bytes": {"N": size}, "modified_ms": {"N": "1"}}
    with pytest.raises(ValueError):
        StoredFile.of_item(item)
