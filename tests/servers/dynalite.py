"""DynamoDB servers on loopback: dynalite, which npm installs, and moto.

dynalite validates requests, sizes and conditions as DynamoDB does, and keeps items in memory. It checks neither
credentials nor capacity and has no separate clock; docs/storages/README.md lists what neither server covers.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import botocore.session
from botocore.config import Config

from tests.servers.aws import AwsServer
from tests.servers.daemons import Daemons, free_port, listens
from tests.servers.npm import NODE_WITHOUT_TIMEOUTS, installed
from trinitylake_ops._lazy import cached_attribute

ACCESS_KEY_ID = "testsAccessKey"
TABLE = "tests"

_PACKAGE = Path(__file__).resolve().parent / "dynalite_package"


def start_dynalite(folder: Path, daemons: Daemons) -> str:
    """Start dynalite and return its endpoint. Raises ServerStartError."""
    program = installed(_PACKAGE, daemons.log) / "node_modules" / "dynalite" / "cli.js"
    port = free_port()
    daemons.start(
        [*NODE_WITHOUT_TIMEOUTS, str(program), "--host", "127.0.0.1", "--port", str(port), "--createTableMs", "0"]
    )
    daemons.wait_until(lambda: listens(port), "dynalite")
    endpoint = f"http://127.0.0.1:{port}"
    DynamoDBServer("dynalite", endpoint, folder).make_table()
    return endpoint


def error_response_body(code: str, message: str = "injected") -> bytes:
    """Return the body of a response with which DynamoDB rejects a request."""
    return json.dumps({"__type": f"com.amazonaws.dynamodb.v20120810#{code}", "message": message}).encode()


@dataclass(frozen=True)
class DynamoDBServer(AwsServer):
    """A DynamoDB server. Tests share a table, and each uses a new root."""

    access_key_id: str = ACCESS_KEY_ID
    table: str = TABLE

    def fresh_root(self, name: str = "lake") -> str:
        """Return the root URI of an unused prefix."""
        return f"dynamodb://{self.table}/{uuid.uuid4().hex}/{name}/"

    @cached_attribute
    def client(self) -> Any:
        """Return a separate client with botocore's default settings."""
        return botocore.session.get_session().create_client(
            "dynamodb", region_name=self.region, endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key_id, aws_secret_access_key=self.secret_access_key,
            config=Config(max_pool_connections=40),
        )  # fmt: skip

    def make_table(self, table: str = TABLE, keys: tuple[str, str] = ("root", "path"), **settings: Any) -> None:
        """Create a table unless it exists, and wait until it is active."""
        settings = settings or {"BillingMode": "PAY_PER_REQUEST"}
        attributes = [{"AttributeName": key, "AttributeType": "S"} for key in keys]
        schema = [{"AttributeName": key, "KeyType": kind} for key, kind in zip(keys, ("HASH", "RANGE"), strict=True)]
        with contextlib.suppress(self.client.exceptions.ResourceInUseException):
            self.client.create_table(TableName=table, AttributeDefinitions=attributes, KeySchema=schema, **settings)
        self.client.get_waiter("table_exists").wait(TableName=table, WaiterConfig={"Delay": 1, "MaxAttempts": 60})

    def _table_keys(self, table: str = TABLE) -> list[tuple[str, str]]:
        """Return the keys of all items of a table."""
        pages = self.client.get_paginator("scan").paginate(
            TableName=table, ProjectionExpression="#r, #p", ExpressionAttributeNames={"#r": "root", "#p": "path"}
        )
        return [(item["root"]["S"], item["path"]["S"]) for page in pages for item in page["Items"]]

    def item_keys(self, root: str) -> list[tuple[str, str]]:
        """Return the keys of all items of a root, including parts and uploads."""
        table, _, prefix = root.removeprefix("dynamodb://").partition("/")
        return sorted(key for key in self._table_keys(table) if key[0].startswith(f"/{prefix}"))

    def delete_all(self, root: str) -> None:
        """Delete every item of a root, because test servers keep all items in memory."""
        table = root.removeprefix("dynamodb://").partition("/")[0]
        for partition, path in self.item_keys(root):
            self.client.delete_item(TableName=table, Key={"root": {"S": partition}, "path": {"S": path}})
