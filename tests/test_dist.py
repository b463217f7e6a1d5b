"""What `make dist` makes: the same bytes each time, and a wheel that works where there is no checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import pytest

from scripts.build_dist import build
from scripts.smoke_wheel import Environment
from tests.environments import CONSTRAINTS, NAME, PROJECT
from tests.test_project import pins, tracked_files

pytestmark = [pytest.mark.soak, pytest.mark.debian_packages, pytest.mark.timeout(1_800)]

EPOCH_S = 1_790_000_000
UV = str(Path(sys.executable).with_name("uv"))
PACKAGE = "trinitylake_ops"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An sdist and a wheel."""
    return build(tmp_path_factory.mktemp("dist"), EPOCH_S)


@pytest.fixture(scope="module")
def made(dist: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel and all that demo, server and Dagster need."""
    environment = Environment(tmp_path_factory.mktemp("made") / "environment", UV, CONSTRAINTS)
    environment.install(f"{dist[1]}[demo,server]")
    return environment


def test_the_same_files_make_the_same_bytes(dist: tuple[Path, Path], tmp_path: Path) -> None:
    """Another folder, time, umask and language: none of them is in what is built."""
    others = {"SOURCE_DATE_EPOCH": str(EPOCH_S), "TZ": "Asia/Tokyo", "LC_ALL": "C", "PYTHONHASHSEED": "7"}
    again = tmp_path / "elsewhere" / "again"
    script = PROJECT / "scripts" / "build_dist.py"
    subprocess.run([sys.executable, script, again], env={**os.environ, **others}, cwd="/", umask=0o077, check=True)
    assert [(again / path.name).read_bytes() == path.read_bytes() for path in dist] == [True, True]


def test_they_hold_the_package_and_nothing_else(dist: tuple[Path, Path]) -> None:
    sdist, wheel = dist
    tracked = {str(path.relative_to(PROJECT)) for path in tracked_files() if (PROJECT / PACKAGE) in path.parents}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        times = {entry.date_time for entry in archive.infolist()}
        (text,) = (archive.read(name).decode() for name in names if name.endswith("METADATA"))
        (programs,) = (archive.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    assert {name for name in names if not name.startswith(f"{PACKAGE}-")} == tracked
    assert len(times) == 1
    said = Parser().parsestr(text)
    assert said["Requires-Python"] == ">=3.11"
    assert all(
        f"Programming Language :: Python :: 3.{minor}" in said.get_all("Classifier", []) for minor in range(11, 15)
    )
    assert all(f"{program} = trinitylake_ops.cli:main" in programs for program in ("trinitylake", NAME))
    with tarfile.open(sdist) as archive:
        folder = sdist.name.removesuffix(".tar.gz")
        inside = {member.name.removeprefix(f"{folder}/") for member in archive.getmembers() if member.isfile()}
    assert inside >= {*tracked, "pyproject.toml", "constraints.txt", "CHANGELOG.md", "LICENSE", "README.md"}
    assert not [name for name in inside if name.startswith(("tests/", "docs/", "."))]


@pytest.mark.parametrize("tool", ["uvx", "pipx"])
def test_the_packages_name_is_a_program(tool: str, dist: tuple[Path, Path], tmp_path: Path) -> None:
    """As from an index: the tool finds the wheel by the package's name, and runs the program of that name."""
    _, wheel = dist
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if tool == "uvx":
        call = [str(Path(UV).with_name("uvx")), "--system-certs", "--no-config", NAME]
        variables |= {"UV_FIND_LINKS": str(wheel.parent), "UV_TOOL_DIR": str(tmp_path / "tools")}
    else:
        pipx = Environment(tmp_path / "pipx", UV, CONSTRAINTS)
        pipx.install("pipx")
        call = [str(pipx.folder / "bin" / "pipx"), "run", "--spec", str(wheel), NAME]
        variables |= {"PIPX_HOME": str(tmp_path / "home"), "PIPX_DEFAULT_PYTHON": sys.executable}
    ran = subprocess.run([*call, "--help"], env=variables, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "Free space:" in ran.stdout


def test_the_demo_runs(made: Environment, tmp_path: Path) -> None:
    """The demo's definitions are no part of the package: they are taken along."""
    shutil.copy(PROJECT / "definitions.py", tmp_path)
    (tmp_path / "home").mkdir()
    shutil.copy(PROJECT / "deploy" / "demo" / "dagster.yaml", tmp_path / "home")
    root = tmp_path / "lake"
    shown = made.run(
        "python", "-m", "trinitylake_ops.demo", "--months", "2", cwd=tmp_path,
        variables={"TRINITYLAKE_ROOT": str(root), "DAGSTER_HOME": str(tmp_path / "home")},
    )  # fmt: skip
    assert "roll back to version" in shown
    log = json.loads(made.run("trinitylake", "--root", str(root), "log", "--json"))
    assert len(log) >= 4


def test_an_example_of_dagster_publishes(made: Environment, tmp_path: Path) -> None:
    project = tmp_path / "project"
    shutil.copytree(PROJECT / "examples" / "existing_project", project)
    root = tmp_path / "lake"
    made.run("trinitylake", "--root", str(root), "init")
    (tmp_path / "home").mkdir()
    made.run(
        "dagster", "asset", "materialize", "--select", "*", "-f", "definitions.py", cwd=project,
        variables={"LAKE_ROOT": str(root), "DAGSTER_HOME": str(tmp_path / "home")},
    )  # fmt: skip
    assert "sales" in made.run("trinitylake", "--root", str(root), "ls")
    assert made.run("trinitylake", "--root", str(root), "verify", "--deep")


@pytest.fixture
def served(made: Environment, tmp_path: Path) -> Iterator[str]:
    """The address of a server of a lakehouse that everybody here may write."""
    root = tmp_path / "lake"
    made.run("trinitylake", "--root", str(root), "init")
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        [made.folder / "bin" / "trinitylake", "serve", root, "--anonymous-writes", "--port", "0"],
        env=variables, cwd=tmp_path, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        yield json.loads(process.stderr.readline())["address"]
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def test_its_server_takes_a_table(made: Environment, served: str, tmp_path: Path) -> None:
    program = (
        "import sys, pyarrow as pa\nfrom pyiceberg.catalog.rest import RestCatalog\n"
        "catalog = RestCatalog('lake', uri=sys.argv[1], warehouse='main')\ncatalog.create_namespace('sales')\n"
        "rows = pa.table({'id': [1, 2]})\ncatalog.create_table('sales.orders', rows.schema).append(rows)\n"
        "print(catalog.load_table('sales.orders').scan().to_arrow().num_rows)"
    )
    assert made.run("python", "-c", program, served, cwd=tmp_path) == "2\n"


def test_nothing_that_a_release_needs_is_unpinned() -> None:
    assert {"cyclonedx-bom", "setuptools", "wheel", "uv"} <= set(pins())
