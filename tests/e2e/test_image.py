"""Build the image of ``deploy/`` from its Dockerfile with buildah, without Docker and without an image registry.

The base image is built by debootstrap, with Python 3.11 at the path of the official image. Everything else is built as
by a user: with the Dockerfile, its ignore file, and the packages in ``constraints.txt``.
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
#: Settings of this machine: pip's package index and trusted certificates.
PIP_FILES = ("/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt", str(Path.home() / ".config" / "pip"))
PIP_VARIABLES = ("PIP_CERT", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS")


class Builder:
    """Runs buildah with a separate store."""

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


def create_debian_root(folder: Path) -> Path:
    """Create the root of a Debian system with Python and pip installed like in the official Python image."""
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
    signature_policy = ("--signature-policy", buildah.policy)
    container = buildah("from", "scratch")
    buildah("copy", "-q", container, create_debian_root(folder), "/")
    path = "/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin"
    buildah("config", "--env", f"PATH={path}", container)
    buildah("commit", "-q", *signature_policy, container, BASE)
    yield buildah
    buildah("rm", "--all")
    buildah("rmi", "--all", "--force")


def build(buildah: Builder, image: str, *target: str) -> str:
    """Build an image, by default of the last stage of the Dockerfile, and return a container of the image."""
    signature_policy = ("--signature-policy", buildah.policy)
    volumes = [option for file in PIP_FILES if Path(file).exists() for option in ("-v", f"{file}:{file}:ro")]
    variables = [
        option for name in PIP_VARIABLES if name in os.environ for option in ("--env", f"{name}={os.environ[name]}")
    ]
    ignore_file = ("--ignorefile", DEPLOY / "Dockerfile.dockerignore")
    dockerfile = (*target, "-f", DEPLOY / "Dockerfile", "-t", image, ".")
    flags = ("--isolation", "chroot", "--network", "host", *signature_policy, "--pull-never")
    buildah("bud", *flags, *volumes, *variables, *ignore_file, *dockerfile)
    return buildah("from", *signature_policy, "--pull-never", image)


def run_inside(buildah: Builder, container: str, command: str) -> str:
    """Run a shell command in a container as the image's user."""
    return buildah("run", "--isolation", "chroot", container, "--", "sh", "-c", command)


def size_row(buildah: Builder, container: str, name: str) -> str:
    """Return a table row with the size of an image."""
    size = run_inside(buildah, container, "du -sxm / 2>/dev/null | cut -f 1")
    return f"| {name} | {size} MB |"


#: Program that starts the REST server, sends requests until it responds, and stops it like Kubernetes does.
_SERVE_PROGRAM = """
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
    """Return the configuration that a REST server in a container sends, and assert that the server exits cleanly."""
    program = f"python -c {shlex.quote(_SERVE_PROGRAM)} {free_port()}"
    response: dict[str, object] = json.loads(run_inside(buildah, container, program).splitlines()[-1])
    return response


@pytest.fixture(scope="module")
def built_image(builder: Builder) -> tuple[Builder, str]:
    """The complete image and a container of it."""
    return builder, build(builder, IMAGE)


def test_image_runs_its_services(built_image: tuple[Builder, str], record_property: pytest.RecordProperty) -> None:
    buildah, container = built_image
    run_in_container = functools.partial(run_inside, buildah, container)
    record_property(SUMMARY_PROPERTY, size_row(buildah, container, "all"))
    assert run_in_container("id -un") == "trinitylake"
    assert run_in_container("trinitylake --root /lakehouse/lake init").startswith(
        "Created a lakehouse at file:///lakehouse/lake/"
    )
    assert run_in_container("ls /dagster") == "dagster.yaml\nstorage"
    assert {"definitions.py", "workspace.yaml", "trinitylake_ops"} <= {*run_in_container("ls /app").split()}
    assert not {"tests", "docs", ".git", "benchmarks"} & {*run_in_container("ls -a /app").split()}
    run_in_container("touch /dagster/storage/test /lakehouse/test")
    # A separate home is used, because the image's home is configured for a database.
    without_database = "DAGSTER_HOME=/lakehouse/home TRINITYLAKE_ROOT=/lakehouse/lake"
    validate = "dagster definitions validate --python-file /app/definitions.py"
    run_in_container(f"mkdir /lakehouse/home && cd /lakehouse/home && {without_database} {validate}")
    assert "dagster-webserver" in run_in_container("dagster-webserver --version")
    assert served_config(buildah, container)["overrides"] == {"prefix": "main"}


@pytest.mark.parametrize(("target", "missing_modules"), [("server", ("dagster", "pyspark")), ("dagster", ("pyspark",))])
def test_smaller_images_run_their_services(
    target: str, missing_modules: tuple[str, ...], builder: Builder, record_property: pytest.RecordProperty
) -> None:
    container = build(builder, f"{IMAGE}-{target}", "--target", target)
    run_in_container = functools.partial(run_inside, builder, container)
    record_property(SUMMARY_PROPERTY, size_row(builder, container, target))
    assert run_in_container("id -u") == "1000"
    assert run_in_container("trinitylake --root /lakehouse/lake init").startswith("Created a lakehouse")
    assert run_in_container("trinitylake --root /lakehouse/lake verify")
    assert served_config(builder, container)["overrides"] == {"prefix": "main"}
    modules = json.loads(
        run_in_container(
            "python -c 'import json, pkgutil; print(json.dumps([m.name for m in pkgutil.iter_modules()]))'"
        )
    )
    assert not {*missing_modules} & {*modules}
    assert {"s3fs", "gcsfs", "obstore", "uvicorn"} <= {*modules}
    run_in_container("python -c 'import azure.storage.blob'")
    if target == "dagster":
        assert {"dagster_k8s", "dagster_postgres", "dagster_webserver"} <= {*modules}
        assert run_in_container("ls /dagster") == "dagster.yaml\nstorage"
