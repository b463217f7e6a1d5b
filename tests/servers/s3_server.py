"""Access to a running S3 server."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from tests.servers.aws import AwsServer
from trinitylake_ops._lazy import cached_attribute

ACCESS_KEY_ID = "tests-access-key"
BUCKET = "tests"


@dataclass(frozen=True)
class S3Server(AwsServer):
    """An S3 server.

    Tests share one bucket, and each uses a new prefix. Tests that count or forbid requests create a separate bucket.
    """

    access_key_id: str = ACCESS_KEY_ID
    bucket: str = BUCKET

    def fresh_root(self, name: str = "lake") -> str:
        """Return the root URI of an unused prefix."""
        return f"s3://{self.bucket}/{uuid.uuid4().hex}/{name}/"

    def make_shared_bucket(self) -> None:
        """Create the bucket that tests share."""
        self.client.create_bucket(Bucket=self.bucket)

    @cached_attribute
    def client(self) -> Any:
        """Return an independent boto3 client with the rights of the bucket's owner."""
        import boto3
        from botocore.config import Config

        session = boto3.session.Session(self.access_key_id, self.secret_access_key, region_name=self.region)
        settings = Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 2})
        return session.client("s3", endpoint_url=self.endpoint, config=settings)

    def make_bucket(self) -> str:
        """Create a bucket for one test. ``drop_bucket`` deletes it with its content."""
        name = f"test-{uuid.uuid4().hex}"
        self.client.create_bucket(Bucket=name)
        return name

    def drop_bucket(self, name: str) -> None:
        self.delete_all(f"s3://{name}/")
        self.client.delete_bucket(Bucket=name)

    def delete_all(self, root: str) -> None:
        """Delete every object below a root, because test servers keep objects in memory."""
        bucket, _, prefix = root.removeprefix("s3://").partition("/")
        for page in self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
            if keys := [{"Key": entry["Key"]} for entry in page.get("Contents", ())]:
                response = self.client.delete_objects(Bucket=bucket, Delete={"Objects": keys, "Quiet": True})
                assert not response.get("Errors"), response["Errors"]

    def requests(self) -> list[str]:
        """Return the lines of moto's request log (``tests/servers/moto.py``) so far."""
        from tests.servers.moto import REQUEST_LOG

        return (self.folder / REQUEST_LOG).read_text().splitlines()
