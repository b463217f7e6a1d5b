"""Tests of `make dist`: reproducible builds, and a wheel that works without a checkout.

Tests with the fixture `environment` or `airflow_environment` use only the packages that are installed there, and
nothing from this checkout.
"""

from __future__ import annotations

import json
import os
import re
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
from tests.docs.pages import DOCS, snippets
from tests.environments import CONSTRAINTS, NAME, PROJECT, SEPARATE_EXTRAS, dependency_groups
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
def environment(dist: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel and the dependencies of the demo, the server and the Dagster plugin."""
    environment = Environment(tmp_path_factory.mktemp("wheel") / "environment", UV, CONSTRAINTS)
    environment.install(f"{dist[1]}[demo,server]")
    return environment


@pytest.fixture(scope="module")
def airflow_environment(dist: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel and Airflow, at compatible versions."""
    folder = tmp_path_factory.mktemp("wheel") / "environment"
    environment = Environment(folder, UV, PROJECT / SEPARATE_EXTRAS["airflow"])
    environment.install(f"{dist[1]}[airflow]")
    return environment


def variables_of(environment: Environment, **variables: object) -> dict[str, str]:
    """Return the variables of a shell in which an environment is active, without references to this checkout."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    activation = {"PATH": f"{environment.folder / 'bin'}:{os.environ['PATH']}", "VIRTUAL_ENV": str(environment.folder)}
    return {**inherited, **activation, **{name: str(value) for name, value in variables.items()}}


def in_shell(shell: str, script: str, environment: Environment, folder: Path, **variables: object) -> str:
    """Run a script in a shell in which an environment is active, and return its output."""
    program = shutil.which(shell)
    assert program is not None, f"{shell} is not installed"
    shell_variables = variables_of(environment, **variables)
    process = subprocess.run([program, "-c", script], env=shell_variables, cwd=folder, capture_output=True, text=True)
    assert process.returncode == 0, f"{script}\n{process.stdout}{process.stderr}"
    return process.stdout


def test_build_is_reproducible(dist: tuple[Path, Path], tmp_path: Path) -> None:
    """The result does not depend on the folder, time zone, umask, locale or hash seed."""
    variables = {"SOURCE_DATE_EPOCH": str(EPOCH_S), "TZ": "Asia/Tokyo", "LC_ALL": "C", "PYTHONHASHSEED": "7"}
    rebuilt = tmp_path / "other" / "again"
    script = PROJECT / "scripts" / "build_dist.py"
    subprocess.run([sys.executable, script, rebuilt], env={**os.environ, **variables}, cwd="/", umask=0o077, check=True)
    assert [(rebuilt / path.name).read_bytes() == path.read_bytes() for path in dist] == [True, True]


def test_distributions_contain_only_the_package(dist: tuple[Path, Path]) -> None:
    sdist, wheel = dist
    tracked = {str(path.relative_to(PROJECT)) for path in tracked_files() if (PROJECT / PACKAGE) in path.parents}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        times = {entry.date_time for entry in archive.infolist()}
        (text,) = (archive.read(name).decode() for name in names if name.endswith("METADATA"))
        (entry_points,) = (archive.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    assert {name for name in names if not name.startswith(f"{PACKAGE}-")} == tracked
    assert len(times) == 1
    metadata = Parser().parsestr(text)
    assert metadata["Requires-Python"] == ">=3.11"
    assert all(
        f"Programming Language :: Python :: 3.{minor}" in metadata.get_all("Classifier", []) for minor in range(11, 15)
    )
    assert all(f"{program} = trinitylake_ops.cli:main" in entry_points for program in ("trinitylake", NAME))
    with tarfile.open(sdist) as archive:
        folder = sdist.name.removesuffix(".tar.gz")
        files = {member.name.removeprefix(f"{folder}/") for member in archive.getmembers() if member.isfile()}
    assert files >= {*tracked, "pyproject.toml", "constraints.txt", "CHANGELOG.md", "LICENSE", "README.md"}
    assert not [name for name in files if name.startswith(("tests/", "docs/", "."))]


@pytest.mark.parametrize("tool", ["uvx", "pipx"])
def test_package_name_is_a_command(tool: str, dist: tuple[Path, Path], tmp_path: Path) -> None:
    """The tool finds the wheel by the package name, as it would in an index, and runs the command with that name."""
    _, wheel = dist
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if tool == "uvx":
        command = [str(Path(UV).with_name("uvx")), "--system-certs", "--no-config", NAME]
        variables |= {"UV_FIND_LINKS": str(wheel.parent), "UV_TOOL_DIR": str(tmp_path / "tools")}
    else:
        pipx = Environment(tmp_path / "pipx", UV, CONSTRAINTS)
        pipx.install("pipx")
        command = [str(pipx.folder / "bin" / "pipx"), "run", "--spec", str(wheel), NAME]
        variables |= {"PIPX_HOME": str(tmp_path / "home"), "PIPX_DEFAULT_PYTHON": sys.executable}
    process = subprocess.run(
        [*command, "--help"], env=variables, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert "Reclaim space:" in process.stdout


@pytest.mark.parametrize("minor", range(11, 15))
def test_development_dependencies_have_wheels_for_each_python(minor: int) -> None:
    """A package without a wheel would be built from source, which may need a compiler. The test installs nothing."""
    groups = [f"--group={group}" for group in dependency_groups()]
    versions = [f"--python-version=3.{minor}", f"--constraint={CONSTRAINTS}", "--only-binary=:all:", "--system-certs"]
    command = [UV, "--no-config", "pip", "compile", "--quiet", *versions, "--extra=deploy", *groups, "pyproject.toml"]
    process = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


def test_wheel_runs_on_python_of_a_debian_root(dist: tuple[Path, Path], tmp_path: Path) -> None:
    """The root is built as in `make dist`. It contains only bind mounts of this system, and leaves no mount behind."""
    debian = subprocess.run(
        ["scripts/debian_python.sh", "3.14", tmp_path], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    assert debian.returncode == 0, debian.stderr
    shutil.copy(dist[1], tmp_path / "debian-3.14" / "tmp")
    wheel, uv = Path("/tmp") / dist[1].name, PROJECT / ".venv" / "bin" / "uv"
    smoke = ["scripts/smoke_wheel.py", wheel, "--uv", uv, "--constraints", CONSTRAINTS, "--extra=", "--extra=server"]
    process = subprocess.run([debian.stdout.strip(), *smoke], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    assert re.findall(r"^Python 3\.14\.\S+ +(\w+)", process.stdout, flags=re.MULTILINE) == ["core", "server"]
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()
    shutil.rmtree(tmp_path / "debian-3.14")  # 300 MB


def test_environments_import_installed_wheel(
    environment: Environment, airflow_environment: Environment, tmp_path: Path
) -> None:
    for installed in (environment, airflow_environment):
        location = installed.run("python", "-c", "import trinitylake_ops as t; print(t.__file__)", cwd=tmp_path)
        assert Path(location.strip()).is_relative_to(installed.folder)
        assert len(list(installed.folder.glob("lib/python*/site-packages/__editable__*"))) == 0


def test_commands_of_wheel_run(environment: Environment, tmp_path: Path) -> None:
    lake = ("trinitylake", "--root", str(tmp_path / "lake"))
    assert "Created a lakehouse at file://" in environment.run(*lake, "init", cwd=tmp_path)
    environment.run(*lake, "create-namespace", "sales", cwd=tmp_path)
    assert environment.run(*lake, "status", cwd=tmp_path).startswith("Version 1, ")
    assert json.loads(environment.run(*lake, "status", "--json", cwd=tmp_path))["version"] == 1
    environment.run(*lake, "status", "--html", "status.html", cwd=tmp_path)
    assert "</html>" in (tmp_path / "status.html").read_text()
    log = json.loads(environment.run(*lake, "log", "--json", cwd=tmp_path))
    assert [version["operation"] for version in log] == ["create-namespace", "init"]
    assert json.loads(environment.run(*lake, "verify", "--deep", "--json", cwd=tmp_path))["findings"] == []


#: Scripts that complete "roll" in each shell. The one for zsh replaces the display functions by functions that print.
COMPLETIONS = {
    "bash": """eval "$(trinitylake completion bash)"
complete -p trinitylake >/dev/null
COMP_WORDS=(trinitylake roll); COMP_CWORD=1; _trinitylake_completion trinitylake; echo "${COMPREPLY[@]}" """,
    "zsh": """compdef() { [[ $* == "_trinitylake_completion trinitylake" ]] || exit 1; }
_describe() { print -l -- ${(P)3}; }
compadd() { print -l -- ${(P)@[-1]}; }
eval "$(trinitylake completion zsh)"
words=(trinitylake roll); CURRENT=2; _trinitylake_completion""",
    "fish": """trinitylake completion fish | source
complete --do-complete 'trinitylake roll'""",
}


@pytest.mark.parametrize("shell", COMPLETIONS)
def test_shell_completes_commands(shell: str, environment: Environment, tmp_path: Path) -> None:
    completions = in_shell(shell, COMPLETIONS[shell], environment, tmp_path, HOME=tmp_path).split()
    assert completions[0].partition(":")[0] == "rollback"


def test_demo_of_wheel_runs(environment: Environment, tmp_path: Path) -> None:
    """The definitions of the demo are not part of the package, so they are copied."""
    shutil.copy(PROJECT / "definitions.py", tmp_path)
    (tmp_path / "home").mkdir()
    shutil.copy(PROJECT / "deploy" / "demo" / "dagster.yaml", tmp_path / "home")
    root = tmp_path / "lake"
    output = environment.run(
        "python", "-m", "trinitylake_ops.demo", "--months", "2", cwd=tmp_path,
        variables={"TRINITYLAKE_ROOT": str(root), "DAGSTER_HOME": str(tmp_path / "home")},
    )  # fmt: skip
    assert "roll back to version" in output
    log = json.loads(environment.run("trinitylake", "--root", str(root), "log", "--json"))
    assert len(log) >= 4


def test_dagster_example_publishes(environment: Environment, tmp_path: Path) -> None:
    project = tmp_path / "project"
    shutil.copytree(PROJECT / "examples" / "existing_project", project)
    root = tmp_path / "lake"
    environment.run("trinitylake", "--root", str(root), "init")
    (tmp_path / "home").mkdir()
    environment.run(
        "dagster", "asset", "materialize", "--select", "*", "-f", "definitions.py", cwd=project,
        variables={"LAKE_ROOT": str(root), "DAGSTER_HOME": str(tmp_path / "home")},
    )  # fmt: skip
    assert "sales" in environment.run("trinitylake", "--root", str(root), "ls")
    assert environment.run("trinitylake", "--root", str(root), "verify", "--deep")


def test_quickstart_commands_work(environment: Environment, tmp_path: Path) -> None:
    """Run the commands of the page in a shell, except for the installation, for which the wheel is used."""
    page_snippets = list(snippets(DOCS / "quickstart.md"))
    for snippet in page_snippets:
        if snippet.title:
            (tmp_path / snippet.title).write_text(snippet.text)
    install, create, publish, roll_back = (snippet.text for snippet in page_snippets if snippet.language == "sh")
    assert "pip install" in install
    log = in_shell("bash", f"set -e\n{create}{publish}python read.py", environment, tmp_path)
    assert "{'customer': 'Ann', 'euros_sum': 25.5}" in log
    assert "Created a lakehouse at file://" in log and "euros_sum" in log
    (execute,) = re.findall(r"^dagster job execute .*$", publish, flags=re.MULTILINE)
    root = {"LAKE_ROOT": tmp_path / "lake", "DAGSTER_HOME": tmp_path / "home"}
    definitions = (tmp_path / "definitions.py").read_text()
    for euros, negation in (("-12.0", "!"), ("1200.0", "")):
        (tmp_path / "definitions.py").write_text(definitions.replace("12.0", euros))
        in_shell("bash", f"{negation} {execute}", environment, tmp_path, **root)
    plan, apply = roll_back.splitlines()
    (digest,) = re.findall(
        r"--apply (\S+)$", in_shell("bash", f"{plan} 2>&1", environment, tmp_path, **root), flags=re.MULTILINE
    )
    in_shell("bash", apply.replace("DIGEST", digest), environment, tmp_path, **root)
    log = json.loads(environment.run("trinitylake", "--root", str(tmp_path / "lake"), "log", "--json"))
    assert [(version["version"], version["operation"]) for version in log[:3]] == [
        (3, "rollback"),
        (2, "publish"),
        (1, "publish"),
    ]
    assert "{'customer': 'Bob', 'euros_sum': 12.0}" in in_shell("bash", "python read.py", environment, tmp_path, **root)


@pytest.fixture
def server_address(environment: Environment, tmp_path: Path) -> Iterator[str]:
    """The address of a server that allows anonymous writes."""
    root = tmp_path / "lake"
    environment.run("trinitylake", "--root", str(root), "init")
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        [environment.folder / "bin" / "trinitylake", "serve", root, "--anonymous-writes", "--port", "0"],
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


def test_server_of_wheel_creates_table(environment: Environment, server_address: str, tmp_path: Path) -> None:
    program = (
        "import sys, pyarrow as pa\nfrom pyiceberg.catalog.rest import RestCatalog\n"
        "catalog = RestCatalog('lake', uri=sys.argv[1], warehouse='main')\ncatalog.create_namespace('sales')\n"
        "rows = pa.table({'id': [1, 2]})\ncatalog.create_table('sales.orders', rows.schema).append(rows)\n"
        "print(catalog.load_table('sales.orders').scan().to_arrow().num_rows)"
    )
    assert environment.run("python", "-c", program, server_address, cwd=tmp_path) == "2\n"


#: A program that imports the example and prints its DAGs and whether Airflow registered the provider.
_AIRFLOW = """
import json
from importlib.metadata import version
from airflow.dag_processing.dagbag import DagBag
from airflow.providers_manager import ProvidersManager
from trinitylake_ops.airflow_plugin.example_dags import example_trinitylake
bag, manager = DagBag(example_trinitylake.__file__, collect_dags=False), ProvidersManager()
bag.collect_dags(example_trinitylake.__file__)
has_version = manager.providers["trinitylake-ops"].version == version("trinitylake-ops")
print(json.dumps([bag.import_errors, sorted(bag.dags), has_version and "trinitylake" in manager.hooks]))
"""


def test_airflow_example_is_imported_and_publishes(airflow_environment: Environment, tmp_path: Path) -> None:
    root = str(tmp_path / "lake")
    (packages,) = airflow_environment.folder.glob("lib/python*/site-packages")
    settings = {
        "AIRFLOW_HOME": str(tmp_path / "airflow"),
        "AIRFLOW_CONN_TRINITYLAKE_DEFAULT": json.dumps({"conn_type": "trinitylake", "host": root}),
        "AIRFLOW__CORE__DAGS_FOLDER": str(packages / PACKAGE / "airflow_plugin" / "example_dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
    }

    def run(program: str, *arguments: str) -> str:
        return airflow_environment.run(program, *arguments, cwd=tmp_path, variables=settings)

    run("trinitylake", "--root", root, "init")
    run("airflow", "db", "migrate")
    dags = [f"trinitylake_{name}" for name in ("follow", "maintenance", "publish", "rollback")]
    assert json.loads(run("python", "-c", _AIRFLOW).splitlines()[-1]) == [{}, dags, True]
    run("airflow", "dags", "test", "trinitylake_publish")
    log = json.loads(run("trinitylake", "--root", root, "log", "--json"))
    assert (log[0]["operation"], log[0]["message"]) == ("publish", "orders of a day")


def test_release_tools_are_pinned() -> None:
    assert {"cyclonedx-bom", "setuptools", "wheel", "uv"} <= set(pins())
