"""Access to a folder of a bucket for others: credentials of a session that ends soon, and signatures of requests.

Credentials come from AWS's STS, or from a server that speaks its protocol. They are the session of a role, with a
policy of its own (decision 37). The keys of this process are given to nobody.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

import botocore.session
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import BotoCoreError, ClientError

from trinitylake_ops._lazy import cached_attribute
from trinitylake_ops.errors import InvalidInputError, StoragePermissionError, TransientError
from trinitylake_ops.storage.delegation import CachedCredentials, DelegationSettings
from trinitylake_ops.storage.http.aws import is_without_credentials
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.storage.s3.s3fs_client import BucketAddress, bucket_address, new_session
from trinitylake_ops.storage.s3.settings import S3Location, S3Settings
from trinitylake_ops.storage.s3.signing import SignedRequest, UnsignedRequest, check_request, signed

_LONGEST_POLICY_CHARS = 2_048
#: Keys of conditions by which AWS enforces conditional writes.
_IF_NONE_MATCH, _CREATES_OBJECT = "s3:if-none-match", "s3:ObjectCreationOperation"
#: These stand for other characters in the resources of a policy.
_WILD = re.compile(r"[*?$]")
_NO_NAME = re.compile(r"[^A-Za-z0-9+=,.@-]")
_LONGEST_NAME_CHARS = 64


@dataclass(frozen=True, slots=True)
class SessionCredentials:
    """Credentials that end. Their text form hides them. ``expires_at_ms`` is by the clock of the service."""

    access_key_id: str = field(repr=False)
    secret_access_key: str = field(repr=False)
    session_token: str = field(repr=False)
    expires_at_ms: int

    @property
    def properties(self) -> Mapping[str, str]:
        """What they are, by the names that clients of Iceberg know."""
        return {
            "s3.access-key-id": self.access_key_id,
            "s3.secret-access-key": self.secret_access_key,
            "s3.session-token": self.session_token,
            "s3.session-token-expires-at-ms": str(self.expires_at_ms),
        }


class S3Delegate:
    """Gives others access to folders of one storage. Raises InvalidInputError for options that make no sense."""

    scheme = "s3"

    def __init__(self, options: StorageOptions, settings: DelegationSettings):
        self.settings = settings
        self._of_storage = S3Settings.of(options)
        self._session = new_session(options)
        self._kept: CachedCredentials[SessionCredentials] = CachedCredentials()
        self._addresses: dict[str, BucketAddress] = {}

    def credentials(self, folder: str, *, writes: bool, name: str) -> SessionCredentials:
        """Return credentials for a folder, a URI that ends with ``/``, and for nothing beside it.

        The same are returned until half of their time is over. ``name`` says for whom, in the logs of the service.
        Raises InvalidInputError for a folder that no policy can name, StoragePermissionError, TransientError.
        """
        partition = self.settings.role.split(":")[1]

        def assumed() -> SessionCredentials:
            location, create_only = S3Location.of(folder), self.settings.create_only
            return self._assumed(folder_policy(location, partition, writes=writes, create_only=create_only), name)

        return self._kept.get((folder, writes, name), assumed)

    def sign(
        self,
        request: UnsignedRequest,
        folder: str,
        *,
        may_write: bool,
        name: str,
        reached: Container[str] | None = None,
    ) -> SignedRequest:
        """Return a signed request for a file below a folder.

        It is signed with credentials for that folder alone. Without a role only requests that read are signed, with
        the keys of this process: servers are known that obey headers which nobody signed.

        Args:
            request: The request to sign.
            folder: The folder of the table, a URI that ends with ``/``.
            may_write: Whether the client may write files there.
            name: The name of the client, for the logs of the service of sessions.
            reached: The URIs of the only files that the client may read, None for all files of the folder.

        Raises:
            LocationNotAllowedError: If the request is beyond the folder, or is not signed for the client.
            InvalidInputError: If it is no request to this storage.
            StoragePermissionError: If there are no credentials to sign with.
            TransientError: If the service of sessions does not respond.
        """
        location = S3Location.of(folder)
        place = self._bucket_address(location.bucket)
        writes = check_request(
            request, location, place, may_write=may_write and bool(self.settings.role), reached=reached
        )
        if self.settings.role:
            session = self.credentials(folder, writes=writes, name=name)
            keys = Credentials(session.access_key_id, session.secret_access_key, session.session_token)
        else:
            keys = self._own_keys()
        return signed(request, place.region, keys)

    def _bucket_address(self, bucket: str) -> BucketAddress:
        if bucket not in self._addresses:
            self._addresses[bucket] = bucket_address(self._session, self._of_storage, bucket)
        return self._addresses[bucket]

    def _own_keys(self) -> Credentials:
        found = self._session.get_credentials()
        if found is None:
            raise StoragePermissionError("there are no credentials to sign with; set up AWS credentials")
        frozen = found.get_frozen_credentials()
        return Credentials(frozen.access_key, frozen.secret_key, frozen.token)

    @cached_attribute
    def _sts(self) -> botocore.client.BaseClient:
        return self._session.create_client(
            "sts",
            region_name=self._of_storage.region or "us-east-1",
            endpoint_url=self.settings.sts_endpoint or self._of_storage.endpoint,
            config=Config(
                connect_timeout=self._of_storage.connect_timeout_seconds,
                read_timeout=self._of_storage.read_timeout_seconds,
                retries={"max_attempts": 2},
            ),
        )

    def _assumed(self, policy: str, name: str) -> SessionCredentials:
        session_name = _NO_NAME.sub("-", f"trinitylake-{name}")[:_LONGEST_NAME_CHARS]
        try:
            given = self._sts.assume_role(
                RoleArn=self.settings.role,
                RoleSessionName=session_name,
                Policy=policy,
                DurationSeconds=self.settings.seconds,
            )["Credentials"]
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))[:60]
            raise StoragePermissionError(
                f"no session of the role {self.settings.role} is given for this table ({code}); the operator of the"
                " server looks at the role, whom it trusts, and how long its sessions may last"
            ) from error
        except BotoCoreError as error:
            if is_without_credentials(error):
                raise StoragePermissionError(
                    "there are no credentials that may ask for a session of the role"
                ) from error
            raise TransientError(f"the service that gives sessions does not answer: {type(error).__name__}") from error
        return SessionCredentials(
            given["AccessKeyId"],
            given["SecretAccessKey"],
            given["SessionToken"],
            int(given["Expiration"].timestamp() * 1_000),
        )


def folder_policy(location: S3Location, partition: str, *, writes: bool, create_only: bool = False) -> str:
    """Return the policy of a session for a folder, as compact JSON, since some servers refuse spaces in it.

    Nothing is ever deleted by it: older versions read the files. Metadata files and the owner file are the server's.

    Args:
        location: The folder of a table.
        partition: The partition of AWS, such as ``aws``.
        writes: Whether the session writes files below ``data/`` and ``metadata/``.
        create_only: Whether it must not overwrite an object. Then a write needs the header ``If-None-Match``. A storage
            that does not know this condition denies all writes.

    Raises:
        InvalidInputError: For a folder whose name a policy would take for a pattern, or that is too long.
    """
    key = location.key_prefix.rstrip("/")
    if not key or _WILD.search(key) or not key.isprintable() or '"' in key:
        raise InvalidInputError(
            "no policy can name the table's place, as its path has a character with a meaning there"
        )
    bucket, files = f"arn:{partition}:s3:::{location.bucket}", f"arn:{partition}:s3:::{location.bucket}/{key}"
    statements: list[dict[str, object]] = [
        {"Effect": "Allow", "Action": ["s3:GetObject"], "Resource": [f"{files}/*"]},
        {
            "Effect": "Allow",
            "Action": ["s3:ListBucket"],
            "Resource": [bucket],
            "Condition": {"StringLike": {"s3:prefix": [f"{key}/*"]}},
        },
    ]
    if writes:
        parts = ["s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"]
        allowed = [f"{files}/data/*", f"{files}/metadata/*"]
        denied = [f"{files}/metadata/*.metadata.json", f"{files}/metadata/*.metadata.json.gz"]
        if create_only:
            # AWS documents the first operator. Ceph ignores it for an unknown key, but then the second one fails.
            conditional = {"Null": {_IF_NONE_MATCH: "false"}, "StringLike": {_IF_NONE_MATCH: "*"}}
            # Requests that begin a multipart upload or send a part have no such header, and create no object.
            statements += [
                {"Effect": "Allow", "Action": ["s3:PutObject"], "Resource": allowed, "Condition": condition}
                for condition in (conditional, {"Bool": {_CREATES_OBJECT: "false"}})
            ]
        statements.append(
            {"Effect": "Allow", "Action": parts if create_only else ["s3:PutObject", *parts], "Resource": allowed}
        )
        statements.append({"Effect": "Deny", "Action": ["s3:PutObject"], "Resource": denied})
    text = json.dumps({"Version": "2012-10-17", "Statement": statements}, separators=(",", ":"))
    if len(text) > _LONGEST_POLICY_CHARS:
        raise InvalidInputError("the path of the lakehouse's root is too long for a policy; credentials are not given")
    return text
