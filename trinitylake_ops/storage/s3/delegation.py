"""Access delegation on S3: temporary credentials for one folder, and signatures for individual requests.

The credentials belong to a role session with a session policy for the folder, issued by AWS STS or a compatible server
(decision 37). The credentials of this process are never vended.
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

_MAX_POLICY_CHARS = 2_048
#: Condition keys with which AWS enforces conditional writes.
_IF_NONE_MATCH, _CREATES_OBJECT = "s3:if-none-match", "s3:ObjectCreationOperation"
#: Characters with a special meaning in the resources of a policy.
_WILDCARDS = re.compile(r"[*?$]")
_INVALID_IN_SESSION_NAME = re.compile(r"[^A-Za-z0-9+=,.@-]")
_MAX_SESSION_NAME_CHARS = 64


@dataclass(frozen=True, slots=True)
class SessionCredentials:
    """Temporary credentials. Their ``repr`` shows no secrets."""

    access_key_id: str = field(repr=False)
    secret_access_key: str = field(repr=False)
    session_token: str = field(repr=False)
    #: Expiration time on the clock of the service, in milliseconds since the epoch.
    expires_at_ms: int

    @property
    def properties(self) -> Mapping[str, str]:
        """The credentials as configuration properties of Iceberg clients."""
        return {
            "s3.access-key-id": self.access_key_id,
            "s3.secret-access-key": self.secret_access_key,
            "s3.session-token": self.session_token,
            "s3.session-token-expires-at-ms": str(self.expires_at_ms),
        }


class S3Delegate:
    """Vends credentials for folders of one storage, and signs requests.

    Args:
        options: Options of the storage.
        settings: The configuration of access delegation.

    Raises:
        InvalidInputError: An option is invalid.
    """

    scheme = "s3"

    def __init__(self, options: StorageOptions, settings: DelegationSettings):
        self.settings = settings
        self._storage_settings = S3Settings.of(options)
        self._session = new_session(options)
        self._cached: CachedCredentials[SessionCredentials] = CachedCredentials()
        self._addresses: dict[str, BucketAddress] = {}

    def credentials(self, folder: str, *, writes: bool, name: str) -> SessionCredentials:
        """Return credentials that are restricted to one folder. They are reused for half of their lifetime.

        Args:
            folder: URI of the folder, with a trailing ``/``.
            writes: Whether the credentials allow writes.
            name: Name of the principal, for the audit log of the service.

        Raises:
            InvalidInputError: A policy cannot describe the folder.
            StoragePermissionError: The service rejected the request.
            TransientError: The service did not respond.
        """
        partition = self.settings.role.split(":")[1]

        def assume_role() -> SessionCredentials:
            location, create_only = S3Location.of(folder), self.settings.create_only
            return self._assume_role(folder_policy(location, partition, writes=writes, create_only=create_only), name)

        return self._cached.get((folder, writes, name), assume_role)

    def sign(
        self,
        request: UnsignedRequest,
        folder: str,
        *,
        may_write: bool,
        name: str,
        reached: Container[str] | None = None,
    ) -> SignedRequest:
        """Sign a request for a file below a folder.

        The request is signed with credentials for that folder. Without a role, only reads are signed, with the
        credentials of this process, because some servers obey headers that are not covered by the signature.

        Args:
            request: The request to sign.
            folder: URI of the table's folder, with a trailing ``/``.
            may_write: Whether the client may write files in the folder.
            name: Name of the client, for the audit log of the session service.
            reached: URIs of the files that the client may read. None allows all files in the folder.

        Raises:
            LocationNotAllowedError: The request is not for the folder, or the client lacks the permission.
            InvalidInputError: The request is not a request to this storage.
            StoragePermissionError: There are no credentials to sign with.
            TransientError: The session service did not respond.
        """
        location = S3Location.of(folder)
        address = self._bucket_address(location.bucket)
        writes = check_request(
            request, location, address, may_write=may_write and bool(self.settings.role), reached=reached
        )
        if self.settings.role:
            session = self.credentials(folder, writes=writes, name=name)
            keys = Credentials(session.access_key_id, session.secret_access_key, session.session_token)
        else:
            keys = self._own_keys()
        return signed(request, address.region, keys)

    def _bucket_address(self, bucket: str) -> BucketAddress:
        if bucket not in self._addresses:
            self._addresses[bucket] = bucket_address(self._session, self._storage_settings, bucket)
        return self._addresses[bucket]

    def _own_keys(self) -> Credentials:
        credentials = self._session.get_credentials()
        if credentials is None:
            raise StoragePermissionError("cannot sign the request: there are no credentials; configure AWS credentials")
        frozen_credentials = credentials.get_frozen_credentials()
        return Credentials(frozen_credentials.access_key, frozen_credentials.secret_key, frozen_credentials.token)

    @cached_attribute
    def _sts(self) -> botocore.client.BaseClient:
        return self._session.create_client(
            "sts",
            region_name=self._storage_settings.region or "us-east-1",
            endpoint_url=self.settings.sts_endpoint or self._storage_settings.endpoint,
            config=Config(
                connect_timeout=self._storage_settings.connect_timeout_seconds,
                read_timeout=self._storage_settings.read_timeout_seconds,
                retries={"max_attempts": 2},
            ),
        )

    def _assume_role(self, policy: str, name: str) -> SessionCredentials:
        session_name = _INVALID_IN_SESSION_NAME.sub("-", f"trinitylake-{name}")[:_MAX_SESSION_NAME_CHARS]
        try:
            role_session = self._sts.assume_role(
                RoleArn=self.settings.role,
                RoleSessionName=session_name,
                Policy=policy,
                DurationSeconds=self.settings.seconds,
            )["Credentials"]
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))[:60]
            raise StoragePermissionError(
                f"cannot vend credentials for this table: the role {self.settings.role} could not be assumed ({code});"
                " ask the operator of the server to check the role, its trust policy and its maximum session duration"
            ) from error
        except BotoCoreError as error:
            if is_without_credentials(error):
                raise StoragePermissionError(
                    "cannot vend credentials: the server has no credentials to assume the role; ask its operator to"
                    " configure them"
                ) from error
            raise TransientError(
                f"cannot vend credentials: the session service did not respond ({type(error).__name__}); retry"
            ) from error
        return SessionCredentials(
            role_session["AccessKeyId"],
            role_session["SecretAccessKey"],
            role_session["SessionToken"],
            int(role_session["Expiration"].timestamp() * 1_000),
        )


def folder_policy(location: S3Location, partition: str, *, writes: bool, create_only: bool = False) -> str:
    """Return the session policy for a folder, as JSON without spaces, because some servers reject spaces.

    The policy never allows deletes, because older versions refer to the files. Only the server writes metadata files
    and the owner file.

    Args:
        location: Folder of a table.
        partition: AWS partition, for example ``aws``.
        writes: Whether the session may write files below ``data/`` and ``metadata/``.
        create_only: Whether the session may not overwrite objects. Writes then require the header ``If-None-Match``. A
            storage that does not support this condition denies all writes.

    Raises:
        InvalidInputError: The path of the folder is too long, or contains characters with a special meaning.
    """
    key = location.key_prefix.rstrip("/")
    if not key or _WILDCARDS.search(key) or not key.isprintable() or '"' in key:
        raise InvalidInputError(
            "cannot restrict credentials to the table: its path contains characters with a special meaning in a policy"
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
            # AWS documents the first operator. Ceph ignores it for an unknown key, but there the second operator fails.
            conditional = {"Null": {_IF_NONE_MATCH: "false"}, "StringLike": {_IF_NONE_MATCH: "*"}}
            # Requests that start a multipart upload or upload a part do not have the header, but they create no object.
            statements += [
                {"Effect": "Allow", "Action": ["s3:PutObject"], "Resource": allowed, "Condition": condition}
                for condition in (conditional, {"Bool": {_CREATES_OBJECT: "false"}})
            ]
        statements.append(
            {"Effect": "Allow", "Action": parts if create_only else ["s3:PutObject", *parts], "Resource": allowed}
        )
        statements.append({"Effect": "Deny", "Action": ["s3:PutObject"], "Resource": denied})
    text = json.dumps({"Version": "2012-10-17", "Statement": statements}, separators=(",", ":"))
    if len(text) > _MAX_POLICY_CHARS:
        raise InvalidInputError("cannot restrict credentials to the table: its path is too long for a policy")
    return text
