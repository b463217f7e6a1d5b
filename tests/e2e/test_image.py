"""Build the image of ``deploy/`` from its Dockerfile with buildah, without Docker and without an image registry.

The base image is built here: Debian by debootstrap, with Python 3.11 where the official image has it. The rest is built
like a user would: the Dockerfile, the ignored files, and the packages of ``constraints.txt``.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.conftest import SUMMARY_PROPERTY
from tests.e2e.topology import DEPLOY, REPOSITORY
from tests.servers.daemons import free_port

pytestmark = [pytest.mark.soak, pytest.mark.debian_packages, pytest.mark.timeout(1800)]

DEBIAN = "bookworm"
BASE, IMAGE = "docker.io/library/python:3.11-slim", "localhost/trinitylake"
PACKAGES = ("ca-certificates", "python3", "python3-pip", "python3-venv")
#: Settings of this machine: the package index for pip and trusted certificates.
PIP_FILES = ("/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt", str(Path.home() / ".config" / "pip"))
PIP_VARIABLES = ("PIP_CERT", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS")


class Builder:
    """buildah with a separate store, in the namespaces of this user."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.policy = folder / "policy.json"
        self.policy.write_text(json.dumps({"default": [{"type": "insecureAcceptAnything"}]}))

    def __call__(self, *arguments: str | Path) -> str:
        storage = ("--root", self._folder / "store", "--runroot", self._folder / "run", "--storage-driver", "vfs")
        return run(["buildah", *map(str, storage), *map(str, arguments)])


def run(command: Sequence[str]) -> str:
    process = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert process.returncode == 0, f"{' '.join(command)}: {process.stdout[-2000:]} {process.stderr[-2000:]}"
    return process.stdout.strip()


def debian(folder: Path) -> Path:
    """Create the root of a Debian system like the official Python image: with python and pip for the whole system."""
    root = folder / "debian"
    site = run(["apt-get", "indextargets", "--format", "$(SITE)", f"Codename: {DEBIAN}", "Created-By: Packages"])
    command = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", DEBIAN, str(root)]
    run([*command, *site.splitlines()[:1]])
    (root / "usr" / "local" / "bin" / "python").symlink_to("/usr/bin/python3")
    (root / "usr" / "lib" / "python3.11" / "EXTERNALLY-MANAGED").unlink()
    shutil.rmtree(root / "var" / "cache" / "apt")
    return root


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    """Buildah with the base image."""
    folder = tmp_path_factory.mktemp("image")
    buildah = Builder(folder)
    signed = ("--signature-policy", buildah.policy)
    container = buildah("from", "scratch")
    buildah("copy", "-q", container, debian(folder), "/")
    path = "/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin"
    buildah("config", "--env", f"PATH={path}", container)
    buildah("commit", "-q", *signed, container, BASE)
    yield buildah
    buildah("rm", "--all")
    buildah("rmi", "--all", "--force")


def build(buildah: Builder, image: str, *target: str) -> str:
    """Build an image, by default the last stage of the Dockerfile. Return a container of it."""
    signed = ("--signature-policy", buildah.policy)
    volumes = [part for file in PIP_FILES if Path(file).exists() for part in ("-v", f"{file}:{file}:ro")]
    variables = [
        part for name in PIP_VARIABLES if name in os.environ for part in ("--env", f"{name}={os.environ[name]}")
    ]
    ignored = ("--ignorefile", DEPLOY / "Dockerfile.dockerignore")
    dockerfile = (*target, "-f", DEPLOY / "Dockerfile", "-t", image, ".")
    flags = ("--isolation", "chroot", "--network", "host", *signed, "--pull-never")
    buildah("bud", *flags, *volumes, *variables, *ignored, *dockerfile)
    return buildah("from", *signed, "--pull-never", image)


def run_inside(buildah: Builder, container: str, command: str) -> str:
    """Run a shell command in a container as the image's user."""
    return buildah("run", "--isolation", "chroot", container, "--", "sh", "-c", command)


def size_row(buildah: Builder, container: str, name: str) -> str:
    """Return a table row with the size of an image."""
    size = run_inside(buildah, container, "du -sxm / 2>/dev/null | cut -f 1")
    return f"| {name} | {size} MB |"


#: Starts the REST server, sends requests until it responds, and stops it like Kubernetes.
_SERVED = """
import subprocess, sys, time, urllib.request

server = subprocess.Popen(["trinitylake", "serve", "/lakehouse/lake", "--port", sys.argv[1]])
for _ in range(600):
    try:
        print(urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/v1/config?warehouse=main").read().decode())
        break
    except OSError:
        time.sleep(0.1)
server.terminate()
sys.exit(server.wait(60))
"""


def served_config(buildah: Builder, container: str) -> dict[str, object]:
    """Return the server's first response in a container; the server exits cleanly."""
    program = f"python -c {shlex.quote(_SERVED)} {free_port()}"
    response: dict[str, object] = json.loads(run_inside(buildah, container, program).splitlines()[-1])
    return response


@pytest.fixture(scope="module")
def built_image(builder: Builder) -> tuple[Builder, str]:
    """The complete image and a container of it."""
    return builder, build(builder, IMAGE)


def test_image_runs_its_services(built_image: tuple[Builder, str], record_property: pytest.RecordProperty) -> None:
    buildah, container = built_image
    inside = functools.partial(run_inside, buildah, container)
    record_property(SUMMARY_PROPERTY, size_row(buildah, container, "all"))
    assert inside("id -un") == "trinitylake"
    assert inside("trinitylake --root /lakehouse/lake init").startswith(
        "Created a lakehouse at file:///lakehouse/lake/"
    )
    assert inside("ls /dagster") == "dagster.yaml\nstorage"
    assert {"definitions.py", "workspace.yaml", "trinitylake_ops"} <= {*inside("ls /app").split()}
    assert not {"tests", "docs", ".git", "benchmarks"} & {*inside("ls -a /app").split()}
    inside("touch /dagster/storage/written /lakehouse/written")
    # A separate, writable home, because the image's home is configured for a database.
    without_database = "DAGSTER_HOME=/lakehouse/home TRINITYLAKE_ROOT=/lakehouse/lake"
    validated = "dagster definitions validate --python-file /app/definitions.py"
    inside(f"mkdir /lakehouse/home && cd /lakehouse/home && {without_database} {validated}")
    assert "dagster-webserver" in inside("dagster-webserver --version")
    assert served_config(buildah, container)["overrides"] == {"prefix": "main"}


@pytest.mark.parametrize(("target", "missing_modules"), [("server", ("dagster", "pyspark")), ("dagster", ("pyspark",))])
def test_smaller_images_run_their_services(
    target: str, missing_modules: tuple[str, ...], builder: Builder, record_property: pytest.RecordProperty
) -> None:
    container = build(builder, f"{IMAGE}-{target}", "--target", target)
    inside = functools.partial(run_inside, builder, container)
    record_property(SUMMARY_PROPERTY, size_row(builder, container, target))
    assert inside("id -u") == "1000"
    assert inside("trinitylake --root /lakehouse/lake init").startswith("Created a lakehouse")
    assert inside("trinitylake --root /lakehouse/lake verify")
    assert served_config(builder, container)["overrides"] == {"prefix": "main"}
    modules = json.loads(
        inside("python -c 'import json, pkgutil; print(json.dumps([m.name for m in pkgutil.iter_modules()]))'")
    )
    assert not {*missing_modules} & {*modules}
    assert {"s3fs", "gcsfs", "obstore", "uvicorn"} <= {*modules}
    inside("python -c 'import azure.storage.blob'")
    if target == "dagster":
        assert {"dagster_k8s", "dagster_postgres", "dagster_webserver"} <= {*modules}
        assert inside("ls /dagster") == "dagster.yaml\nstorage"
