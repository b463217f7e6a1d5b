"""A proxy for the Google Cloud Storage emulator that checks the rights of each request.

The required permissions are those in Google's documentation
(https://docs.cloud.google.com/storage/docs/access-control/iam-json). Unknown requests are rejected.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.servers.gcs import GcsServer


@dataclass(frozen=True)
class Right:
    """A permission on an object, or on the bucket if there is no name. ``list_prefix`` is the prefix of a listing."""

    permission: str
    bucket: str
    name: str = ""
    list_prefix: str = ""

    @property
    def resource(self) -> str:
        """The resource name as conditions see it."""
        return f"projects/_/buckets/{self.bucket}" + (f"/objects/{self.name}" if self.name else "")


#: Returns whether the sender of a request with these headers has a right.
HasRight = Callable[[Mapping[str, str], Right], bool]


def required_rights(server: GcsServer, method: str, target: str, body: bytes) -> list[Right] | None:
    """Return the rights that a request requires, or None for an unknown kind of request."""
    path, query = urlsplit(target).path, parse_qs(urlsplit(target).query)
    if path.startswith("/batch/"):
        calls = re.findall(rb"^DELETE \S+/b/([^/]+)/o/(\S+)", body, re.MULTILINE)
        objects = [(bucket.decode(), unquote(name.decode().partition("?")[0])) for bucket, name in calls]
        return [Right("storage.objects.delete", bucket, name) for bucket, name in objects]
    match = re.fullmatch(r"(?:/(upload|download))?/storage/v1/b/([^/]+)(?:/o(?:/([^/]+)(/.*)?)?)?", path)
    if match is None:
        xml_match = re.fullmatch(r"/([a-z0-9._-]+)/(.+)", path)  # Arrow reads objects with the XML API
        if xml_match is None or method not in ("GET", "HEAD") or xml_match[1] != server.bucket:
            return None
        return [Right("storage.objects.get", xml_match[1], unquote(xml_match[2]))]
    kind, bucket, name, suffix = match[1], match[2], unquote(match[3] or ""), match[4]
    if kind == "upload":
        return _rights_of_upload(server, bucket, query, body) if method == "POST" and not name else None
    if suffix:
        source = [Right("storage.objects.get", bucket, name)]
        copy_target = re.fullmatch(r"/(?:rewriteTo|copyTo)/b/([^/]+)/o/([^/]+)", suffix)
        return (
            None
            if copy_target is None
            else [*source, Right("storage.objects.create", copy_target[1], unquote(copy_target[2]))]
        )
    if name:
        verbs = {"GET": "get", "DELETE": "delete", "PATCH": "update", "PUT": "update"}
        return [Right(f"storage.objects.{verbs[method]}", bucket, name)] if method in verbs else None
    if method != "GET":
        return None
    if path.endswith("/o"):
        return [Right("storage.objects.list", bucket, list_prefix=query.get("prefix", [""])[0])]
    return [Right("storage.buckets.get", bucket)]


def _rights_of_upload(
    server: GcsServer, bucket: str, query: Mapping[str, list[str]], body: bytes
) -> list[Right] | None:
    metadata_names = re.findall(rb'"name":\s*"([^"]+)"', body[:4_096])  # the first part is the metadata of the object
    names = query.get("name") or [metadata_names[0].decode() if metadata_names else ""]
    if len(names) != 1 or not names[0]:
        return None
    replaces = query.get("ifGenerationMatch") != ["0"] and "" in server.names(f"gs://{bucket}/{names[0]}")
    verbs = ("create", "delete") if replaces else ("create",)
    return [Right(f"storage.objects.{verb}", bucket, names[0]) for verb in verbs]


class RightsProxy:
    """Forwards allowed requests to the emulator, and replaces its address in responses."""

    def __init__(self, server: GcsServer, has_right: HasRight):
        self.server = server
        self._has_right = has_right
        self._uploads: set[str] = set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def respond(self) -> None:
                status, headers, data = outer.respond(self.command, self.path, self.headers, self._body())
                self.send_response_only(status)
                for name, value in headers.items():
                    if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                        self.send_header(name, value)
                self.send_header("Content-Length", headers.get("Content-Length", "0") if not data else str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            def _body(self) -> bytes:
                if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                    return self.rfile.read(int(self.headers.get("Content-Length", 0)))
                parts: list[bytes] = []
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    parts.append(self.rfile.read(size + 2)[:-2])
                self.rfile.readline()
                return b"".join(parts)

            do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = respond  # noqa: N815 - names of the base class

            def log_message(self, format: str, *args: Any) -> None:
                """Do not log requests."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._http.server_address[1]}"

    @contextmanager
    def running(self) -> Iterator[str]:
        """Serve requests while the block runs, and yield the endpoint."""
        thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self.endpoint
        finally:
            self._http.shutdown()
            self._http.server_close()
            thread.join()

    def respond(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Return the emulator's response, or a rejection if the sender lacks a right."""
        # The URL of an upload session authorizes its parts, because rights were checked when the session was created.
        upload = parse_qs(urlsplit(target).query).get("upload_id", [""])[0]
        if not (method == "PUT" and upload in self._uploads):
            rights = required_rights(self.server, method, target, body)
            if rights is None:
                return rejection(403, "unknown kind of request")
            for right in rights:
                if not self._has_right(headers, right):
                    return rejection(403, f"{right.permission} on {right.resource}")
        address = urlsplit(self.server.endpoint)
        connection = HTTPConnection(address.hostname or "", address.port, timeout=60)
        forwarded_headers = {name: value for name, value in headers.items() if name.lower() != "transfer-encoding"}
        connection.request(method, target, body, {**forwarded_headers, "Content-Length": str(len(body))})
        response = connection.getresponse()
        data, response_headers = response.read(), dict(response.getheaders())
        connection.close()
        if "json" in response_headers.get("Content-Type", ""):  # object URLs must also refer to this proxy
            data = data.replace(self.server.endpoint.encode(), self.endpoint.encode())
        if upload_url := response_headers.get("Location"):
            self._uploads |= set(parse_qs(urlsplit(upload_url).query).get("upload_id", []))
            response_headers["Location"] = upload_url.replace(self.server.endpoint, self.endpoint)
        return response.status, response_headers, data


def rejection(status: int, message: str) -> tuple[int, Mapping[str, str], bytes]:
    """Return a rejection in the format of the service."""
    document = {"error": {"code": status, "message": message, "errors": [{"reason": "forbidden"}]}}
    return status, {"Content-Type": "application/json"}, json.dumps(document).encode()
