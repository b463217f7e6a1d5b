"""Azurite, Microsoft's emulator of Azure Blob Storage, installed from npm with a lock file.

Blobs live in memory, so tests delete what they wrote. It has no hierarchical accounts, roles, quotas or throttling, so
tests inject such responses on the wire. It keeps everything it receives in memory, even rejected and deleted content,
and rejects all requests with 409 when this exceeds half of the machine's memory.
"""

from __future__ import annotations

import base64
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.servers.daemons import Daemons, free_port, listens
from tests.servers.npm import NODE_WITHOUT_TIMEOUTS, installed
from trinitylake_ops._lazy import cached_attribute

ACCOUNT_NAME = "teststorage"
ACCOUNT_KEY = base64.b64encode(b"the key of an account for tests, of 64 bytes as those of Azure..").decode()
CONTAINER = "tests"

_PACKAGE = Path(__file__).resolve().parent / "azurite_package"
_WITHOUT_GC = Path(__file__).resolve().parent / "azurite_without_gc.cjs"
_MAIN = "node_modules/azurite/dist/src/blob/main.js"


def start_azurite(folder: Path, daemons: Daemons) -> str:
    """Start Azurite and return the endpoint of its account. Raises ServerStartError."""
    program, port = installed(_PACKAGE, daemons.log) / _MAIN, free_port()
    daemons.start(
        [
            *NODE_WITHOUT_TIMEOUTS, "--require", str(_WITHOUT_GC), str(program), "--blobHost", "127.0.0.1",
            "--blobPort", str(port), "--silent", "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry",
        ],
        {"AZURITE_ACCOUNTS": f"{ACCOUNT_NAME}:{ACCOUNT_KEY}"},
    )  # fmt: skip
    daemons.wait_until(lambda: listens(port), "Azurite")
    endpoint = f"http://127.0.0.1:{port}/{ACCOUNT_NAME}"
    AzureServer("azurite", endpoint, folder).make_shared_bucket()
    return endpoint


@dataclass(frozen=True)
class AzureServer:
    """An account on a server. Tests share one container, and each uses a fresh prefix."""

    kind: str
    endpoint: str
    folder: Path
    container: str = CONTAINER
    account_name: str = ACCOUNT_NAME
    account_key: str = ACCOUNT_KEY

    @property
    def storage_options(self) -> dict[str, str]:
        """Storage options for roots on this server."""
        return {"endpoint": self.endpoint, "account_name": self.account_name, "account_key": self.account_key}

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which roots on this server can be opened without options."""
        parts = {"AccountName": self.account_name, "AccountKey": self.account_key, "BlobEndpoint": self.endpoint}
        return {"AZURE_STORAGE_CONNECTION_STRING": ";".join(f"{name}={value}" for name, value in parts.items())}

    def fresh_root(self, name: str = "lake", *, scheme: str = "az") -> str:
        """Return the root URI of an unused prefix."""
        account = f"@{self.account_name}.dfs.core.windows.net" if scheme == "abfss" else ""
        return f"{scheme}://{self.container}{account}/{uuid.uuid4().hex}/{name}/"

    def make_shared_bucket(self) -> None:
        """Create the container that tests share."""
        self.client.create_container(self.container)

    @cached_attribute
    def client(self) -> Any:
        """Return an independent synchronous client with the rights of the account's owner."""
        from azure.storage.blob import BlobServiceClient

        credential = {"account_name": self.account_name, "account_key": self.account_key}
        return BlobServiceClient(self.endpoint, credential=credential)

    def put(self, root: str, path: str, data: bytes, **settings: Any) -> None:
        """Write a blob."""
        container, prefix = split(root)
        self.client.get_blob_client(container, prefix + path).upload_blob(data, overwrite=True, **settings)

    def names(self, root: str) -> list[str]:
        """Return the names of all blobs below a root, without the root's prefix."""
        container, prefix = split(root)
        blob_names = self.client.get_container_client(container).list_blob_names(name_starts_with=prefix)
        return [name.removeprefix(prefix) for name in blob_names]

    def delete_all(self, root: str) -> None:
        """Delete every blob below a root."""
        container, prefix = split(root)
        client = self.client.get_container_client(container)
        names = list(client.list_blob_names(name_starts_with=prefix))
        for start in range(0, len(names), 256):
            client.delete_blobs(*names[start : start + 256])


def split(root: str) -> tuple[str, str]:
    """Return the container and the prefix of a root."""
    container, _, prefix = root.partition("://")[2].partition("/")
    return container.partition("@")[0], prefix
