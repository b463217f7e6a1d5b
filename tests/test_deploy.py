"""Tests of the files in ``deploy/``: settings, secrets and references. Running deployments are tested in tests/e2e."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.graphql import TIMEOUT_SECONDS
from tests.e2e.topology import DEPLOY, REPOSITORY, Image, Service, interpolate
from tests.server.live_server import LiveServer
from tests.server.test_access_control import READER, entry
from tests.servers.daemons import free_port, listens
from trinitylake_ops import Lakehouse

COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
#: Addresses inside the network, which are set only to run the services without containers.
ADDRESSES = {"LISTEN_HOST", "CODE_HOST"}
SECRETS = {"POSTGRES_PASSWORD", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"}


def test_example_contains_all_settings_with_defaults_and_no_secrets() -> None:
    text = (DEPLOY / "compose.yaml").read_text()
    defaults = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", text))
    example = dict(re.findall(r"^(\w+)=(.*)$", (DEPLOY / ".env.example").read_text(), flags=re.MULTILINE))
    assert example == {name: default for name, default in defaults.items() if name not in ADDRESSES}
    assert not SECRETS & set(example)
    assert set(defaults) >= ADDRESSES


def test_files_contain_no_values_of_secrets() -> None:
    for name, service in COMPOSE["services"].items():
        for variable in SECRETS & set(service.get("environment", {})):
            value = service["environment"][variable]
            assert value is None or re.fullmatch(r"\$\{\w+:\?[^}]*\}", value), f"{name}: {variable}"
    with pytest.raises(AssertionError, match="POSTGRES_PASSWORD: the password of Dagster's database"):
        interpolate(COMPOSE["services"]["postgres"], {})


def test_only_services_that_access_lakehouse_have_its_credentials() -> None:
    services = {
        name for name, service in COMPOSE["services"].items() if "AWS_SECRET_ACCESS_KEY" in service["environment"]
    }
    assert services == {"code", "server"}


def test_compose_server_responds_and_is_healthy(tmp_path: Path) -> None:
    lake = Lakehouse.create(str(tmp_path / "lake"))
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(yaml.safe_dump({"tokens": [entry(READER, "reader", scope="read")]}))
    port = free_port()
    variables = {
        "LISTEN_HOST": "127.0.0.1",
        "SERVER_PORT": str(port),
        "TOKENS_FILE": str(tokens),
        "TRINITYLAKE_ROOT": lake.root,
    }
    (tmp_path / "image").mkdir()
    definition = interpolate(COMPOSE["services"]["server"], variables)
    assert definition["profiles"] == ["server"]
    service = Service("server", definition, variables, Image(DEPLOY / "Dockerfile", tmp_path / "image"))
    service.start()
    try:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not listens(port):
            service.check()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert service.is_healthy()
        server = LiveServer(f"http://127.0.0.1:{port}")
        assert server.request("GET", "/v1/config").status == 401
        assert server.request("GET", "/v1/config", headers={"Authorization": f"Bearer {READER}"}).status == 200
        assert service.terminate() == 0
    finally:
        service.kill()


def test_services_refer_to_existing_files_and_volumes() -> None:
    services = COMPOSE["services"]
    for service in services.values():
        assert set(service.get("depends_on", {})) <= set(services)
        for volume in service.get("volumes", ()):
            assert volume.partition(":")[0] in COMPOSE["volumes"]
    assert services["code"]["build"] == {"context": "..", "dockerfile": "deploy/Dockerfile"}
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    copied = [
        source
        for line in (DEPLOY / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ")
        for source in line.split()[1:-1]
    ]
    assert {f"!{source}" for source in copied} == {line for line in ignored if line.startswith("!")}
    assert all((REPOSITORY / source).exists() for source in copied)


def test_image_user_can_be_created(tmp_path: Path) -> None:
    """The name must not be that of a predefined group of Debian, such as operator, because useradd rejects it."""
    (command,) = re.findall(r"\buseradd [^&\n]*", (DEPLOY / "Dockerfile").read_text())
    (tmp_path / "etc").mkdir()
    for name in ("passwd", "group"):
        shutil.copy(f"/usr/share/base-passwd/{name}.master", tmp_path / "etc" / name)
    shutil.copy("/etc/login.defs", tmp_path / "etc")
    (tmp_path / "home").mkdir()
    _, *arguments = command.split()
    process = subprocess.run(
        ["/usr/sbin/useradd", "--prefix", str(tmp_path), *arguments], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert f"USER {arguments[-1]}" in (DEPLOY / "Dockerfile").read_text().splitlines()
