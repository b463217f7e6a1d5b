"""The client libraries of S3, Azure and Google. Settings and conditions are those of our storages."""

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


class _OnLoop(BareClient):
    """A client with an event loop, which runs in a thread of its own."""

    def send(self, request: Request) -> bytes | None:
        return self._wait_for(self._send(request))

    async def _send(self, request: Request) -> bytes | None:
        raise NotImplementedError

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        found: T = fsspec.asyn.sync(fsspec.asyn.get_loop(), lambda: work)
        return found


class BareS3fs(_OnLoop):
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
        where = {"Bucket": self._bucket, "Key": self._prefix + request.path}
        try:
            if request.kind == "read":
                answer = await call("get_object", **where, **_byte_range(request))
                async with answer["Body"] as body:
                    return bytes(await body.read())
            if request.kind == "stat":
                await call("head_object", **where)
            elif request.kind == "create":
                await call("put_object", **where, Body=request.data, IfNoneMatch="*")
            else:
                await call("put_object", **where, Body=request.data)
        except FileNotFoundError:
            pass  # as for the engine: the next version is not there yet
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
            retry_config={"max_retries": 2},  # a radosgw in memory fails at times where a file is being overwritten
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


class BareAzure(_OnLoop):
    """azure-storage-blob, its asynchronous client."""

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
                part = {} if request.length is None else {"offset": request.offset, "length": request.length}
                found: bytes = await (await blob.download_blob(**part)).readall()
                return found
            if request.kind == "stat":
                await blob.get_blob_properties()
            else:
                await blob.upload_blob(request.data, overwrite=request.kind == "write")
        except ResourceNotFoundError:
            pass
        return None


class BareGcsfs(_OnLoop):
    """gcsfs."""

    def __init__(self, server: GcsServer, root: str):
        self._bucket, self._prefix = server.bucket, key_prefix(root)
        self._file_system = GCSFileSystem(
            token="anon", endpoint_url=server.endpoint, use_listings_cache=False, skip_instance_cache=True
        )

    async def _send(self, request: Request) -> bytes | None:
        key = self._prefix + request.path
        where = f"{self._bucket}/{key}"
        try:
            if request.kind == "read":
                end = None if request.length is None else request.offset + request.length
                found: bytes = await self._file_system._cat_file(where, start=request.offset or None, end=end)
                return found
            if request.kind == "stat":
                await self._file_system._call("GET", "b/{}/o/{}", self._bucket, key, json_out=True)
            else:
                mode = "create" if request.kind == "create" else "overwrite"
                await self._file_system._pipe_file(where, request.data, mode=mode)
        except FileNotFoundError:
            pass
        return None


def _byte_range(request: Request) -> dict[str, str]:
    if request.length is None:
        return {}
    return {"Range": f"bytes={request.offset}-{request.offset + request.length - 1}"}
