"""The client libraries of S3, Azure and Google, with the settings and conditions of our storages."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import fsspec.asyn
import obstore
import s3fs
from azure.core.exceptions import ResourceNotFoundError
from azure.storage.blob.aio import BlobServiceClient
from gcsfs.core import GCSFileSystem
from obstore.store import S3Store

from benchmarks.replay import BareClient, Request, key_prefix
from tests.servers.azurite import AzureServer
from tests.servers.gcs import GcsServer
from tests.servers.s3_server import S3Server

T = TypeVar("T")


class _AsyncClient(BareClient):
    """An asynchronous client. Its event loop runs in a separate thread."""

    def send(self, request: Request) -> bytes | None:
        return self._wait_for(self._send(request))

    async def _send(self, request: Request) -> bytes | None:
        raise NotImplementedError

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        result: T = fsspec.asyn.sync(fsspec.asyn.get_loop(), lambda: work)
        return result


class BareS3fs(_AsyncClient):
    """s3fs."""

    def __init__(self, server: S3Server, root: str):
        self._bucket, self._prefix = server.bucket, key_prefix(root)
        self._file_system = s3fs.S3FileSystem(
            key=server.access_key_id,
            secret=server.secret_access_key,
            endpoint_url=server.endpoint,
            client_kwargs={"region_name": server.region},
            config_kwargs={
                "retries": {"total_max_attempts": 1},
                "max_pool_connections": 64,
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
            },
            use_listings_cache=False,
            skip_instance_cache=True,
        )
        self._file_system.retries = 1
        self._file_system.connect()

    async def _send(self, request: Request) -> bytes | None:
        call: Callable[..., Any] = self._file_system._call_s3
        target = {"Bucket": self._bucket, "Key": self._prefix + request.path}
        try:
            if request.kind == "read":
                response = await call("get_object", **target, **_byte_range(request))
                async with response["Body"] as body:
                    return bytes(await body.read())
            if request.kind == "stat":
                await call("head_object", **target)
            elif request.kind == "create":
                await call("put_object", **target, Body=request.data, IfNoneMatch="*")
            else:
                await call("put_object", **target, Body=request.data)
        except FileNotFoundError:
            pass  # as in the engine: the next version does not exist yet
        return None


class BareObstore(BareClient):
    """obstore."""

    def __init__(self, server: S3Server, root: str):
        self._prefix = key_prefix(root)
        self._store = S3Store(
            server.bucket,
            endpoint=server.endpoint,
            access_key_id=server.access_key_id,
            secret_access_key=server.secret_access_key,
            region=server.region,
            client_options={"allow_http": True},
            retry_config={"max_retries": 2},  # a radosgw in memory sometimes fails while a file is being overwritten
        )

    def send(self, request: Request) -> bytes | None:
        key = self._prefix + request.path
        try:
            if request.kind == "read" and request.length is None:
                return bytes(obstore.get(self._store, key).bytes())
            if request.kind == "read":
                return bytes(obstore.get_range(self._store, key, start=request.offset, length=request.length))
            if request.kind == "stat":
                obstore.head(self._store, key)
            else:
                mode = "create" if request.kind == "create" else "overwrite"
                obstore.put(self._store, key, request.data, mode=mode, use_multipart=False)
        except FileNotFoundError:
            pass
        return None


class BareAzure(_AsyncClient):
    """The asynchronous client of azure-storage-blob."""

    def __init__(self, server: AzureServer, root: str):
        self._prefix = key_prefix(root)
        credential = {"account_name": server.account_name, "account_key": server.account_key}
        self._service = BlobServiceClient(server.endpoint, credential=credential, retry_total=0)
        self._container = self._service.get_container_client(server.container)

    def close(self) -> None:
        self._wait_for(self._service.close())

    async def _send(self, request: Request) -> bytes | None:
        blob = self._container.get_blob_client(self._prefix + request.path)
        try:
            if request.kind == "read":
                byte_range = {} if request.length is None else {"offset": request.offset, "length": request.length}
                data: bytes = await (await blob.download_blob(**byte_range)).readall()
                return data
            if request.kind == "stat":
                await blob.get_blob_properties()
            else:
                await blob.upload_blob(request.data, overwrite=request.kind == "write")
        except ResourceNotFoundError:
            pass
        return None


class BareGcsfs(_AsyncClient):
    """gcsfs."""

    def __init__(self, server: GcsServer, root: str):
        self._bucket, self._prefix = server.bucket, key_prefix(root)
        self._file_system = GCSFileSystem(
            token="anon", endpoint_url=server.endpoint, use_listings_cache=False, skip_instance_cache=True
        )

    async def _send(self, request: Request) -> bytes | None:
        key = self._prefix + request.path
        path = f"{self._bucket}/{key}"
        try:
            if request.kind == "read":
                end = None if request.length is None else request.offset + request.length
                data: bytes = await self._file_system._cat_file(path, start=request.offset or None, end=end)
                return data
            if request.kind == "stat":
                await self._file_system._call("GET", "b/{}/o/{}", self._bucket, key, json_out=True)
            else:
                mode = "create" if request.kind == "create" else "overwrite"
                await self._file_system._pipe_file(path, request.data, mode=mode)
        except FileNotFoundError:
            pass
        return None


def _byte_range(request: Request) -> dict[str, str]:
    if request.length is None:
        return {}
    return {"Range": f"bytes={request.offset}-{request.offset + request.length - 1}"}
