"""Local disk through system calls, and the client libraries of DynamoDB, Redis and HDFS, as our storages use them."""

from __future__ import annotations

import os
import time
import uuid
from typing import Any

import botocore.session
import hdfs_native
import redis
from botocore.config import Config
from redis.backoff import NoBackoff
from redis.retry import Retry

from benchmarks.replay import BareClient, Request, key_prefix
from tests.servers.dynalite import DynamoDBServer
from tests.servers.hdfs import HdfsServer
from tests.servers.redis import RedisServer
from trinitylake_ops.storage.http.settings import MAX_CONNECTIONS
from trinitylake_ops.storage.redis.server import CREATE, READ, WRITE

_MAX_BYTES = 256 << 20


class BareFiles(BareClient):
    """System calls on a local disk. New files are synced, and then linked to their name."""

    def __init__(self, root: str):
        self._folder = root.removeprefix("file://")
        self._temporary = f"{self._folder}_ops/tmp/"

    def send(self, request: Request) -> bytes | None:
        name = self._folder + request.path
        try:
            if request.kind == "read":
                return self._read(name, request)
            if request.kind == "stat":
                os.stat(name)
                return None
        except FileNotFoundError:
            return None
        self._publish(name, request)
        return None

    def _read(self, name: str, request: Request) -> bytes:
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            length = os.fstat(descriptor).st_size if request.length is None else request.length
            return os.pread(descriptor, length, request.offset)
        finally:
            os.close(descriptor)

    def _publish(self, name: str, request: Request) -> None:
        temporary = f"{self._temporary}{uuid.uuid4().hex}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
        try:
            os.write(descriptor, request.data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if request.kind == "create":
            os.link(temporary, name)
            os.unlink(temporary)
        else:
            os.replace(temporary, name)
        folder = os.open(os.path.dirname(name), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class BareDynamoDB(BareClient):
    """botocore. Only for files that are stored as one item."""

    def __init__(self, server: DynamoDBServer, root: str):
        self._table, self._partition = server.table, f"/{key_prefix(root)}"
        self._client = botocore.session.get_session().create_client(
            "dynamodb",
            region_name=server.region,
            endpoint_url=server.endpoint,
            aws_access_key_id=server.access_key_id,
            aws_secret_access_key=server.secret_access_key,
            config=Config(max_pool_connections=MAX_CONNECTIONS, retries={"total_max_attempts": 1, "mode": "standard"}),
        )

    def send(self, request: Request) -> bytes | None:
        key = {"root": {"S": self._partition}, "path": {"S": request.path}}
        if request.kind == "read":
            response = self._client.get_item(TableName=self._table, Key=key, ConsistentRead=True)
            body: bytes | None = response["Item"]["body"]["B"] if "Item" in response else None
            end = None if request.length is None else request.offset + request.length
            return None if body is None else body[request.offset : end]
        if request.kind == "stat":
            names = {"#path": "path", "#size": "size_bytes", "#modified": "modified_ms"}
            self._client.get_item(
                TableName=self._table, Key=key, ConsistentRead=True, ProjectionExpression=", ".join(names),
                ExpressionAttributeNames=names,
            )  # fmt: skip
            return None
        numbers = {"size_bytes": len(request.data), "modified_ms": time.time_ns() // 1_000_000}
        item = {**key, **{name: {"N": str(number)} for name, number in numbers.items()}, "body": {"B": request.data}}
        condition = {
            "ConditionExpression": "attribute_not_exists(#path)", "ExpressionAttributeNames": {"#path": "path"}
        }  # fmt: skip
        parameters = condition if request.kind == "create" else {"ReturnValues": "ALL_OLD"}
        self._client.put_item(TableName=self._table, Item=item, **parameters)
        return None


class BareRedis(BareClient):
    """redis-py, with the Lua scripts of our storage."""

    def __init__(self, server: RedisServer, root: str):
        name, _, self._folder = root.split("/", 4)[4].partition("/")
        self._index = f"{{{name}}}"
        self._client = redis.Redis("127.0.0.1", server.port, retry=Retry(NoBackoff(), 0), protocol=3)

    def send(self, request: Request) -> bytes | None:
        member = self._folder + request.path
        content = f"{self._index}/{member}"
        if request.kind == "read":
            length = -1 if request.length is None else request.length
            data: Any = self._client.eval(READ, 1, content, request.offset, length, _MAX_BYTES)
            return None if data is None else bytes(data)
        if request.kind == "stat":
            self._client.zrangebylex(self._index, f"[{member}\0", f"({member}\1", start=0, num=1)
            return None
        script = CREATE if request.kind == "create" else WRITE
        self._client.eval(script, 2, self._index, content, member, request.data)
        return None


class BareHdfs(BareClient):
    """hdfs-native. New files are synced under a temporary name, and then renamed."""

    def __init__(self, server: HdfsServer, root: str):
        self._folder = f"/{key_prefix(root)}"
        self._client = hdfs_native.Client(f"hdfs://{server.address}")

    def send(self, request: Request) -> bytes | None:
        name = self._folder + request.path
        if request.kind in ("create", "write"):
            self._publish(name, request)
            return None
        try:
            if request.kind == "read":
                reader = self._client.read(name)
                length = len(reader) if request.length is None else request.length
                return bytes(reader.read_range(request.offset, min(length, len(reader) - request.offset)))
            self._client.get_file_info(name)
        except FileNotFoundError:
            pass
        return None

    def _publish(self, name: str, request: Request) -> None:
        temporary = f"{self._folder}_ops/tmp/{uuid.uuid4().hex}"
        writer = self._client.create(temporary, hdfs_native.WriteOptions(overwrite=False, create_parent=True))
        writer.write(request.data)
        writer.hsync()
        writer.close()
        self._client.rename(temporary, name, request.kind == "write")
