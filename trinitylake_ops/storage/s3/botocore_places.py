"""Where a bucket is, and who asks, as botocore finds it out: for clients of S3 that are not s3fs."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

import botocore
import botocore.session
from botocore.config import Config

from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.storage.s3.s3fs_client import service_models
from trinitylake_ops.storage.s3.settings import S3Settings

NO_REGION = "us-east-1"


@dataclass(frozen=True, slots=True)
class BucketPlace:
    """The address of a service, the region, and whether the bucket's name stands in the host's name."""

    endpoint: str
    region: str
    is_virtual: bool


def new_session(options: StorageOptions) -> botocore.session.Session:
    """Return a session with the credentials of the options, else those of AWS's environment."""
    session = botocore.session.Session()
    session.register_component("data_loader", service_models())
    if "access_key_id" in options:
        session.set_credentials(options["access_key_id"], options["secret_access_key"], options.get("session_token"))
    return session


def bucket_place(session: botocore.session.Session, settings: S3Settings, bucket: str) -> BucketPlace:
    """Return the place of a bucket. Nothing is sent."""
    # This client signs and sends nothing. It knows all places where AWS's endpoints and regions are set up.
    client = session.create_client(
        "s3",
        region_name=settings.region,
        endpoint_url=settings.endpoint,
        config=Config(signature_version=botocore.UNSIGNED, s3={"addressing_style": settings.addressing_style}),
    )
    region = client.meta.region_name
    example = client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "key"})
    is_virtual = (urlsplit(example).hostname or "").startswith(f"{bucket.lower()}.")
    is_known = region and region != "aws-global"
    return BucketPlace(client.meta.endpoint_url.rstrip("/"), region if is_known else NO_REGION, is_virtual)
