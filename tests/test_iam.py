"""The permissions in ``deploy/iam`` are sufficient and minimal, as tested on radosgw, Azurite and fake-gcs-server."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lakes import check_lake
from tests.operations.changes import ROWS, append_rows
from tests.servers.azurite import AzureServer
from tests.servers.gcs import GcsServer
from tests.servers.google_rights import Right, RightsProxy
from tests.servers.s3_server import S3Server
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import StoragePermissionError, TrinityLakeError
from trinitylake_ops.format.file_names import HINT_PATH, new_slot_request_path
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.storage import background, open_storage

IAM = Path(__file__).resolve().parent.parent / "deploy" / "iam"
ROLES = ("reader", "writer", "maintainer")
PREFIX = "BUCKET/lake"
BLOBS = "Microsoft.Storage/storageAccounts/blobServices/containers/blobs/"
#: The permissions of a shared access signature for each data action.
LETTERS = {"read": "rl", "add/action": "a", "write": "cw", "delete": "d"}
Options = Mapping[str, str]


def policy(role: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((IAM / f"s3-{role}.json").read_text())
    return content


def permissions(name: str) -> list[str]:
    content: list[str] = yaml.safe_load((IAM / f"gcs-{name}.yaml").read_text())["includedPermissions"]
    return content


def data_actions(role: str) -> list[str]:
    content: list[str] = json.loads((IAM / f"azure-{role}.json").read_text())["DataActions"]
    return content


def test_roles_have_only_named_permissions() -> None:
    """No role can access bucket settings or other services, and no permission contains a wildcard."""
    actions: dict[str, list[set[str]]] = {"s3": [], "gcs": [], "azure": []}
    for role in ROLES:
        statements = policy(role)["Statement"]
        assert {statement["Effect"] for statement in statements} == {"Allow"}
        actions["s3"].append({action for statement in statements for action in statement["Action"]})
        actions["gcs"].append({*permissions(role)})
        actions["azure"].append({*data_actions(role)})
        for statement in statements:
            assert all(
                resource.startswith(f"arn:aws:s3:::{PREFIX}/") for resource in statement["Resource"]
            ) or statement["Action"] == ["s3:ListBucket"]
    for reader, writer, maintainer in actions.values():
        assert reader < writer <= maintainer
        assert not [action for action in maintainer if "*" in action]
    assert actions["s3"][2] == {"s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:DeleteObject"}


def check_role(role: str, root: str, as_owner: Options, as_role: Options, *, deletes_notes: bool = True) -> None:
    """Run the operations that a role permits, check that other operations are rejected, and verify the lakehouse.

    Args:
        role: The role.
        root: The root of a new lakehouse.
        as_owner: Storage options of the owner.
        as_role: Storage options with the permissions of the role.
        deletes_notes: Whether the role can delete notes.
    """
    owner = Lakehouse.create(root, as_owner)
    append_rows(owner)
    before = _files(root, as_owner) - {HINT_PATH}  # a lost hint only costs additional requests
    lake = Lakehouse.open(root, as_role)
    assert catalog_at(lake).load_table("ns.t").scan().to_arrow().num_rows == 3
    assert [version.version for version in lake.history()] == [3, 2, 1, 0]
    assert catalog_at(lake, 2).list_tables("ns") == [("ns", "t")]
    operations.verify(lake, deep=True)
    storage = open_storage(root, as_role)
    if role == "reader":
        with pytest.raises(StoragePermissionError), lake.transaction() as transaction:
            transaction.create_namespace("refused")
        _check_rejected(storage.write, HINT_PATH, b"0")
    else:
        _write(lake)
        slot_request = new_slot_request_path(10)
        storage.write(slot_request, b"")
        storage.write(slot_request, b"")
        if deletes_notes:
            storage.delete(slot_request)
    if role == "maintainer":
        _maintain(lake)
    else:
        for path in before:
            _check_rejected(storage.delete, path)
    background.drain()
    if role != "maintainer":
        assert before <= _files(root, as_owner)
    check_lake(owner)


def _write(lake: Lakehouse) -> None:
    table = catalog_at(lake).load_table("ns.t")
    table.append(ROWS)
    table.delete("id = 1")
    table.overwrite(ROWS)
    with suppress(TrinityLakeError), lake.transaction() as loser:
        loser.create_namespace("both")
        with lake.transaction() as winner:
            winner.create_namespace("both")
    with lake.transaction() as transaction:
        transaction.create_namespace("kept")
    operations.plan_rollback(lake, lake.latest_version() - 1).execute()


def _maintain(lake: Lakehouse) -> None:
    operations.plan_export(lake, "kept").execute()
    operations.plan_trim_tables(lake).execute()
    operations.plan_expiration(lake).execute()
    operations.plan_purge(lake).execute()
    operations.plan_orphan_removal(lake).execute()
    unused = "_ops/tmp/of-a-test"
    lake.storage.write(unused, b"x")
    lake.storage.delete(unused)
    assert not lake.storage.exists(unused)


def _check_rejected(call: Callable[..., None], *arguments: Any) -> None:
    with pytest.raises(StoragePermissionError):
        call(*arguments)


def _files(root: str, options: Options) -> set[str]:
    background.drain()
    return {file.path for file in open_storage(root, options).list()}


# S3: a session of a radosgw role that has the policy of the file.


def role_on_radosgw(radosgw: S3Server, role: str, prefix: str) -> dict[str, str]:
    """Create a role with a policy for one prefix, and return the storage options of a session of the role.

    Args:
        radosgw: The server.
        role: The role of ``deploy/iam``.
        prefix: The bucket and the prefix of the lakehouse.
    """
    import boto3  # slow import

    name = f"{role}-{prefix.split('/')[1]}"
    trust = {"Effect": "Allow", "Principal": {"AWS": ["arn:aws:iam:::user/tests"]}, "Action": ["sts:AssumeRole"]}
    text = (
        json.dumps(policy(role))
        .replace(PREFIX, prefix)
        .replace("arn:aws:s3:::BUCKET", f"arn:aws:s3:::{radosgw.bucket}")
    )
    trusted = json.dumps({"Version": "2012-10-17", "Statement": [trust]})
    _admin(radosgw, "role", "create", "--role-name", name, "--assume-role-policy-doc", trusted)
    _admin(radosgw, "role-policy", "put", "--role-name", name, "--policy-name", role, "--policy-doc", text)
    session = boto3.session.Session(radosgw.access_key_id, radosgw.secret_access_key, region_name=radosgw.region)
    sts = session.client("sts", endpoint_url=radosgw.endpoint)
    keys = sts.assume_role(RoleArn=f"arn:aws:iam:::role/{name}", RoleSessionName="tests")["Credentials"]
    return {
        "endpoint": radosgw.endpoint,
        "region": radosgw.region,
        "addressing_style": "path",
        "access_key_id": keys["AccessKeyId"],
        "secret_access_key": keys["SecretAccessKey"],
        "session_token": keys["SessionToken"],
    }


def _admin(radosgw: S3Server, *arguments: str) -> None:
    environment = {"CEPH_CONF": str(radosgw.folder / "ceph.conf"), "PATH": "/usr/bin:/bin"}
    subprocess.run(["radosgw-admin", *arguments], env=environment, check=True, capture_output=True, timeout=120)


@pytest.mark.soak
@pytest.mark.parametrize("role", ROLES)
def test_s3_policy_is_sufficient_and_necessary(role: str, radosgw: S3Server) -> None:
    root = radosgw.fresh_root()
    prefix = root.removeprefix("s3://").rstrip("/")
    check_role(role, root, radosgw.storage_options, role_on_radosgw(radosgw, role, prefix))
    radosgw.delete_all(root)


# Azure: a shared access signature with the permissions of the role.


@pytest.mark.soak
@pytest.mark.parametrize("role", ROLES)
def test_azure_role_is_sufficient_and_necessary(role: str, azurite: AzureServer) -> None:
    from azure.storage.blob import ContainerSasPermissions, generate_container_sas

    letters = "".join(LETTERS[action.removeprefix(BLOBS)] for action in data_actions(role))
    signature = generate_container_sas(
        azurite.account_name,
        azurite.container,
        account_key=azurite.account_key,
        permission=ContainerSasPermissions.from_string(letters),
        expiry=datetime.now(UTC) + timedelta(hours=1),
    )
    options = {"endpoint": azurite.endpoint, "account_name": azurite.account_name, "sas_token": signature}
    check_role(role, azurite.fresh_root(), azurite.storage_options, options, deletes_notes=role == "maintainer")


# Google: the emulator does not check permissions, so a proxy enforces the documented permissions of each request.


def proxy_with_rights(server: GcsServer, role: str, prefix: str) -> RightsProxy:
    """Return a proxy for the emulator that rejects requests for which a role has no permission.

    Args:
        server: The emulator.
        role: The role of ``deploy/iam``.
        prefix: The prefix of the lakehouse in the bucket.
    """
    role_permissions = {*permissions(role)}
    text = yaml.safe_load((IAM / "gcs-writer-notes-condition.yaml").read_text())["expression"]
    note_prefixes = [prefix + name for name in re.findall(r'objects/lake/([^"]+)"', text)]
    assert len(note_prefixes) == 3

    def is_permitted(_headers: Mapping[str, str], right: Right) -> bool:
        is_note = right.permission in permissions("writer-notes") and right.name.startswith(tuple(note_prefixes))
        return right.permission in role_permissions or (role == "writer" and is_note)

    return RightsProxy(server, is_permitted)


@pytest.mark.soak
@pytest.mark.parametrize("role", ROLES)
def test_gcs_role_is_sufficient_and_necessary(role: str, fake_gcs: GcsServer) -> None:
    root = fake_gcs.fresh_root()
    prefix = root.removeprefix(f"gs://{fake_gcs.bucket}/")
    with proxy_with_rights(fake_gcs, role, prefix).running() as endpoint:
        as_role = {**fake_gcs.storage_options, "endpoint": endpoint}
        check_role(role, root, fake_gcs.storage_options, as_role)
        if role == "writer":  # replacing an object requires the delete permission
            path = next(path for path in _files(root, as_role) if path != HINT_PATH)
            _check_rejected(open_storage(root, as_role).write, path, b"")
    fake_gcs.delete_all(root)
