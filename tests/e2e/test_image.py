"""The image of ``deploy/``, built from its Dockerfile by buildah, without Docker and without a registry of images.

The base image is made here: a Debian by debootstrap, with its Python 3.11 where the official image has one. All else is
as anybody builds it: the Dockerfile, the ignored files, the packages of ``constraints.txt``.
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

from tests.conftest import SHOWN
from tests.e2e.topology import DEPLOY, REPOSITORY
from tests.servers.daemons import free_port

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
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    """Buildah with the base of all images."""
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
    """Build an image of the Dockerfile, by default the last one. Returns a container of it."""
    signed = ("--signature-policy", buildah.policy)
    places = [part for file in PIP_FILES if Path(file).exists() for part in ("-v", f"{file}:{file}:ro")]
    given = [part for name in PIP_VARIABLES if name in os.environ for part in ("--env", f"{name}={os.environ[name]}")]
    ignored = ("--ignorefile", DEPLOY / "Dockerfile.dockerignore")
    dockerfile = (*target, "-f", DEPLOY / "Dockerfile", "-t", image, ".")
    how = ("--isolation", "chroot", "--network", "host", *signed, "--pull-never")
    buildah("bud", *how, *places, *given, *ignored, *dockerfile)
    return buildah("from", *signed, "--pull-never", image)


def run_inside(buildah: Builder, container: str, command: str) -> str:
    """Run a shell command in a container, as the image's user."""
    return buildah("run", "--isolation", "chroot", container, "--", "sh", "-c", command)


def shown(buildah: Builder, container: str, name: str) -> str:
    """Return a row that tells how large the files of an image are."""
    size = run_inside(buildah, container, "du -sxm / 2>/dev/null | cut -f 1")
    return f"| {name} | {size} MB |"


#: Starts the server for engines, asks it until it answers, and ends it as Kubernetes does.
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
    """Return what a server in a container answers first; it ends well."""
    program = f"python -c {shlex.quote(_SERVED)} {free_port()}"
    answer: dict[str, object] = json.loads(run_inside(buildah, container, program).splitlines()[-1])
    return answer


@pytest.fixture(scope="module")
def built(builder: Builder) -> tuple[Builder, str]:
    """The image with everything, and a container of it."""
    return builder, build(builder, IMAGE)


def test_it_has_what_its_services_start(built: tuple[Builder, str], record_property: pytest.RecordProperty) -> None:
    buildah, container = built
    inside = functools.partial(run_inside, buildah, container)
    record_property(SHOWN, shown(buildah, container, "all"))
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
    assert served_config(buildah, container)["overrides"] == {"prefix": "main"}


@pytest.mark.parametrize(("target", "lacking"), [("server", ("dagster", "pyspark")), ("dagster", ("pyspark",))])
def test_smaller_images_have_what_they_start(
    target: str, lacking: tuple[str, ...], builder: Builder, record_property: pytest.RecordProperty
) -> None:
    container = build(builder, f"{IMAGE}-{target}", "--target", target)
    inside = functools.partial(run_inside, builder, container)
    record_property(SHOWN, shown(builder, container, target))
    assert inside("id -u") == "1000"
    assert inside("trinitylake --root /lakehouse/lake init").startswith("Created a lakehouse")
    assert inside("trinitylake --root /lakehouse/lake verify")
    assert served_config(builder, container)["overrides"] == {"prefix": "main"}
    modules = json.loads(
        inside("python -c 'import json, pkgutil; print(json.dumps([m.name for m in pkgutil.iter_modules()]))'")
    )
    assert not {*lacking} & {*modules}
    assert {"s3fs", "gcsfs", "obstore", "uvicorn"} <= {*modules}
    inside("python -c 'import azure.storage.blob'")
    if target == "dagster":
        assert {"dagster_k8s", "dagster_postgres", "dagster_webserver"} <= {*modules}
        assert inside("ls /dagster") == "dagster.yaml\nstorage"
