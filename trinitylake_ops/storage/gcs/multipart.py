"""Bodies with several parts: an upload that is one request, and a batch of deletes (pure)."""

from __future__ import annotations

import email.parser
import email.policy
import json
import re
import secrets
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import quote

_NUMBER = re.compile(r"\+([0-9]{1,9})>\s*$")
_STATUS = re.compile(rb"HTTP/[0-9.]+ (\d{3})")
#: Anybody may read an object that is public from caches for an hour, unless it says so. A storage shows the newest.
_CACHE_CONTROL = "no-store"


class Body(NamedTuple):
    """The body of a request and its content type."""

    data: bytes
    content_type: str


class PartAnswer(NamedTuple):
    """The answer to one call of a batch."""

    status: int
    body: bytes


def upload_body(name: str, data: bytes) -> Body:
    """Return the body that creates or replaces an object: its metadata, then its bytes as they are now.

    The boundary is random, so no content can end its own part.
    """
    boundary = secrets.token_hex(16)
    metadata = json.dumps({"name": name, "cacheControl": _CACHE_CONTROL})
    head = (
        f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{metadata}\r\n"
        f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
    )
    whole = b"".join((head.encode(), data, f"\r\n--{boundary}--\r\n".encode()))
    return Body(whole, f"multipart/related; boundary={boundary}")


def batch_of_deletes(targets: Sequence[str]) -> Body:
    """Return the body of a batch that deletes what the targets, paths of URLs, name."""
    boundary = secrets.token_hex(16)
    parts = [
        f"--{boundary}\r\nContent-Type: application/http\r\nContent-Transfer-Encoding: binary\r\n"
        f"Content-ID: <{boundary}+{number}>\r\n\r\nDELETE {target} HTTP/1.1\r\nContent-Length: 0\r\n\r\n\r\n"
        for number, target in enumerate(targets)
    ]
    return Body("".join([*parts, f"--{boundary}--\r\n"]).encode(), f"multipart/mixed; boundary={boundary}")


def answers_of_batch(content_type: str, body: bytes) -> dict[int, PartAnswer]:
    """Return the answers of a batch by the numbers of its calls. An answer that cannot be read is not among them."""
    parser = email.parser.BytesParser(policy=email.policy.HTTP)
    message = parser.parsebytes(b"Content-Type: %b\r\n\r\n%b" % (content_type.encode("latin-1", "replace"), body))
    found: dict[int, PartAnswer] = {}
    for part in message.iter_parts() if message.is_multipart() else ():
        number = _NUMBER.search(str(part.get("Content-ID", "")))
        payload = part.get_payload(decode=True)
        status = _STATUS.match(payload.lstrip()) if isinstance(payload, bytes) else None
        if number is None or status is None or not isinstance(payload, bytes):
            continue
        content = re.split(rb"\r?\n\r?\n", payload.lstrip(), maxsplit=1)
        found[int(number[1])] = PartAnswer(int(status[1]), content[1].strip() if len(content) > 1 else b"")
    return found


def object_target(bucket: str, name: str) -> str:
    """Return what stands after ``b/`` and ``o/`` in the URL of an object: nothing in it means something to a server."""
    return f"b/{quote(bucket, safe='')}/o/{quote(name, safe='')}"
