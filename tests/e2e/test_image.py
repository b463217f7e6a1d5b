"""The image of ``deploy/``, built from its Dockerfile by buildah, without Docker and without a registry of images.

The base image is made here: a Debian by debootstrap, with its Python 3.11 where the official image has one. All else is
as anybody builds it: the Dockerfile, the ignored files, the packages of ``constraints.txt``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.e2e.topology import DEPLOY, REPOSITORY

pytestmark = [pytest.mark.soak, pytest.mark.debian_packages, pytest.mark.timeout(1800)]

DEBIAN = "bookworm"
BASE, IMAGE = "docker.io/library/python:3.11-slim", "localhost/trinitylake"
PACKAGES = ("ca-certificates", "python3", "python3-pip", "python3-venv")
#: Of this machine: where pip finds packages, and whom it trusts.
PIP_FILES = ("/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt", str(Path.home() / ".config" / "pip"))
PIP_VARIABLES = ("PIP_CERT", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS")


class Builder:
    """buildah with a store of its own, in the namespaces that this user has."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.policy = folder / "policy.json"
        self.policy.write_text(json.dumps({"default": [{"type": "insecureAcceptAnything"}]}))

    def __call__(self, *arguments: str | Path) -> str:
        places = ("--root", self._folder / "store", "--runroot", self._folder / "run", "--storage-driver", "vfs")
        return run(["buildah", *map(str, places), *map(str, arguments)])


def run(command: Sequence[str]) -> str:
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-2000:]} {done.stderr[-2000:]}"
    return done.stdout.strip()


def debian(folder: Path) -> Path:
    """Return the root of a Debian as the official image of Python has it: python and pip for the whole system."""
    root = folder / "debian"
    site = run(["apt-get", "indextargets", "--format", "$(SITE)", f"Codename: {DEBIAN}", "Created-By: Packages"])
    command = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", DEBIAN, str(root)]
    run([*command, *site.splitlines()[:1]])
    (root / "usr" / "local" / "bin" / "python").symlink_to("/usr/bin/python3")
    (root / "usr" / "lib" / "python3.11" / "EXTERNALLY-MANAGED").unlink()
    shutil.rmtree(root / "var" / "cache" / "apt")
    return root


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Builder, str]]:
    """Build the image, and yield a container of it."""
    folder = tmp_path_factory.mktemp("image")
    buildah = Builder(folder)
    signed = ("--signature-policy", buildah.policy)
    container = buildah("from", "scratch")
    buildah("copy", "-q", container, debian(folder), "/")
    path = "/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin"
    buildah("config", "--env", f"PATH={path}", container)
    buildah("commit", "-q", *signed, container, BASE)
    places = [part for file in PIP_FILES if Path(file).exists() for part in ("-v", f"{file}:{file}:ro")]
    given = [part for name in PIP_VARIABLES if name in os.environ for part in ("--env", f"{name}={os.environ[name]}")]
    ignored = ("--ignorefile", DEPLOY / "Dockerfile.dockerignore")
    dockerfile = ("-f", DEPLOY / "Dockerfile", "-t", IMAGE, ".")
    how = ("--isolation", "chroot", "--network", "host", *signed, "--pull-never")
    buildah("bud", *how, *places, *given, *ignored, *dockerfile)
    container = buildah("from", *signed, "--pull-never", IMAGE)
    yield buildah, container
    buildah("rm", "--all")
    buildah("rmi", "--all", "--force")


def test_it_has_what_its_services_start(built: tuple[Builder, str]) -> None:
    buildah, container = built

    def inside(command: str) -> str:
        return buildah("run", "--isolation", "chroot", container, "--", "sh", "-c", command)

    assert inside("id -un") == "trinitylake"
    assert inside("trinitylake --root /lakehouse/lake init").startswith(
        "Created a lakehouse at file:///lakehouse/lake/"
    )
    assert inside("ls /dagster") == "dagster.yaml\nstorage"
    assert {"definitions.py", "workspace.yaml", "trinitylake_ops"} <= {*inside("ls /app").split()}
    assert not {"tests", "docs", ".git", "benchmarks"} & {*inside("ls -a /app").split()}
    inside("touch /dagster/storage/written /lakehouse/written")
    # A home of its own, as the image's has the settings of a database, and a folder that its user may write.
    without_database = "DAGSTER_HOME=/lakehouse/home TRINITYLAKE_ROOT=/lakehouse/lake"
    validated = "dagster definitions validate --python-file /app/definitions.py"
    inside(f"mkdir /lakehouse/home && cd /lakehouse/home && {without_database} {validated}")
    assert "dagster-webserver" in inside("dagster-webserver --version")
