"""A Ceph S3 server on one node: a monitor, an OSD with objects in memory, and radosgw."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path

from tests.servers.aws import SECRET_ACCESS_KEY
from tests.servers.daemons import Daemons, free_port, listens, run
from tests.servers.s3_server import ACCESS_KEY_ID, S3Server

#: Objects are in memory, so tests delete the objects that they wrote. A full store would reject writes.
STORE_BYTES = 6 << 30
#: The store counts its bytes without a lock. Permanent objects prevent lost updates from making the count negative,
#: which would be treated as a full store.
BALLAST_OBJECTS, BALLAST_OBJECT_BYTES = 4, 100 << 20
#: A role with all rights on objects, which session policies restrict.
ROLE_NAME = "lake"
ROLE_ARN = f"arn:aws:iam:::role/{ROLE_NAME}"

# A collector reclaims the space of deleted objects that are larger than one stripe, by default after two hours.
_CONFIGURATION = """[global]
fsid = {fsid}
mon host = [v1:127.0.0.1:{monitor_port}]
mon initial members = a
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind msgr2 = false
ms bind ipv6 = false
auth cluster required = none
auth service required = none
auth client required = none
osd crush chooseleaf type = 0
osd pool default size = 1
osd pool default min size = 1
mon allow pool size one = true
mon warn on pool no redundancy = false
osd pool default pg num = 4
osd pool default pgp num = 4
osd objectstore = memstore
osd crush update on start = false
osd class update on start = false
memstore device bytes = {store_bytes}
osd data = {folder}/osd
mon data = {folder}/mon
run dir = {folder}/run
admin socket =
log to file = false
log to stderr = true
err to stderr = true
mon cluster log to file = false
mon data avail crit = 1
mon data avail warn = 2
mon osd full ratio = .99
osd failsafe full ratio = 1.0
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw enable apis = s3, sts
rgw sts key = of-tests-16bytes
rgw s3 auth use sts = true
rgw thread pool size = 64
rgw gc obj min wait = 2
rgw gc processor period = 2
rgw gc processor max time = 60
"""


def start_radosgw(folder: Path, daemons: Daemons) -> str:
    """Start radosgw with a user for the tests, and return its endpoint. Raises ServerStartError."""
    for name in ("mon", "osd", "run"):
        (folder / name).mkdir(parents=True)
    monitor_port, port, fsid = free_port(), free_port(), str(uuid.uuid4())
    configuration, monitor_map = folder / "ceph.conf", folder / "monmap"
    configuration.write_text(
        _CONFIGURATION.format(fsid=fsid, monitor_port=monitor_port, port=port, folder=folder, store_bytes=STORE_BYTES)
    )
    # Without the variable, Ceph's tools also read the machine's configuration.
    environment = {"CEPH_CONF": str(configuration)}

    def call(*command: str) -> str:
        return run(list(command), daemons.log, environment)

    address = f"[v1:127.0.0.1:{monitor_port}]"
    call("monmaptool", "--create", "--fsid", fsid, "--addv", "a", address, str(monitor_map))
    call("ceph-mon", "--id", "a", "--mkfs", "--monmap", str(monitor_map), "--keyring", os.devnull)
    keyring = folder / "mon" / "keyring"
    keyring.touch()
    daemons.start(["ceph-mon", "-f", "--id", "a", "--keyring", str(keyring)], environment)
    daemons.wait_until(lambda: listens(monitor_port), "the Ceph monitor")
    osd_uuid = str(uuid.uuid4())
    osd = call("ceph", "osd", "create", osd_uuid)
    (folder / "osd" / "keyring").touch()
    call("ceph", "osd", "crush", "add", f"osd.{osd}", "1", "root=default", "host=localhost")
    call("ceph-osd", "--id", osd, "--mkfs", "--osd-uuid", osd_uuid)
    daemons.start(["ceph-osd", "-f", "--id", osd], environment)
    daemons.start(["radosgw", "-f", "-n", "client.rgw"], environment)
    daemons.wait_until(lambda: listens(port), "radosgw")
    call(
        "radosgw-admin", "user", "create", "--uid", "tests", "--display-name", "tests",
        "--access-key", ACCESS_KEY_ID, "--secret", SECRET_ACCESS_KEY,
    )  # fmt: skip
    call("ceph", "osd", "pool", "create", "ballast", "1")
    for number in range(BALLAST_OBJECTS):
        call("rados", "--pool", "ballast", "create", f"ballast-{number}")
        call("rados", "--pool", "ballast", "truncate", f"ballast-{number}", str(BALLAST_OBJECT_BYTES))
    trust_policy, files_policy = (
        json.dumps({"Version": "2012-10-17", "Statement": [{"Effect": "Allow", **statement}]}, separators=(",", ":"))
        for statement in (
            {"Principal": {"AWS": ["arn:aws:iam:::user/tests"]}, "Action": ["sts:AssumeRole"]},
            {"Action": ["s3:*"], "Resource": "arn:aws:s3:::*"},
        )
    )
    call("radosgw-admin", "role", "create", "--role-name", ROLE_NAME, "--assume-role-policy-doc", trust_policy)
    call(
        "radosgw-admin", "role-policy", "put", "--role-name", ROLE_NAME, "--policy-name", "files",
        "--policy-doc", files_policy,
    )  # fmt: skip
    endpoint = f"http://127.0.0.1:{port}"
    S3Server("radosgw", endpoint, folder).make_shared_bucket()
    return endpoint
