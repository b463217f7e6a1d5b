"""Tests of the files of the project: generated code, pins, make targets, settings and forbidden content."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from dagster import DagsterInstance
from dagster._core.run_coordinator import DefaultRunCoordinator
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.environments import SEPARATE_EXTRAS, dependency_groups

PROJECT = Path(__file__).resolve().parent.parent
PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9.!+_-]*)")


def tracked_files() -> list[Path]:
    """Return the files under version control, and new files that are not ignored."""
    listing = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=PROJECT,
        check=True,
        capture_output=True,
    ).stdout
    return [path for name in listing.decode().split("\0") if name and (path := PROJECT / name).is_file()]


def pins(file: str = "constraints.txt") -> dict[str, str]:
    matches = [PIN.fullmatch(line) for line in (PROJECT / file).read_text().splitlines()]
    assert all(matches), "constraints.txt contains only names and versions"
    return {canonicalize_name(match[1]): match[2] for match in matches if match}


def environment_requirements(separate_extra: str = "") -> list[Requirement]:
    """Return the requirements of the development environment, or of the separate environment of an extra."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    texts = [*project["project"]["dependencies"]]
    texts += [] if separate_extra else [*project["build-system"]["requires"], "pip", "wheel"]
    for extra, extra_texts in project["project"]["optional-dependencies"].items():
        if extra == separate_extra or not (separate_extra or extra in SEPARATE_EXTRAS):
            texts += extra_texts
    requirements = [
        requirement for requirement in map(Requirement, texts) if requirement.name != project["project"]["name"]
    ]
    if separate_extra:
        return requirements
    return requirements + [requirement for group in dependency_groups().values() for requirement in group]


def test_generated_protobuf_code_is_current(tmp_path: Path) -> None:
    subprocess.run([sys.executable, PROJECT / "scripts/generate_protobuf.py", tmp_path], check=True, timeout=60)
    folder = "trinitylake_ops/format"
    generated = {path.name: path.read_text() for path in (tmp_path / folder).iterdir()}
    committed = {path.name: path.read_text() for path in (PROJECT / folder).glob("*_pb2.*")}
    assert sorted(generated) == ["definitions_pb2.py", "definitions_pb2.pyi"]
    assert committed == generated, "run make proto"


def test_pre_commit_hooks_run_installed_programs_and_existing_tests() -> None:
    (repository,) = yaml.safe_load((PROJECT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    assert {hook["id"] for hook in repository["hooks"]} == {"ruff", "ruff-format", "codespell", "check-yaml", "links"}
    for hook in repository["hooks"]:
        program, *arguments = hook["entry"].split()
        assert Path(program).parent == Path(".venv/bin")
        assert Path(sys.executable).with_name(Path(program).name).exists(), hook["id"]
        assert all((PROJECT / path).exists() for path in arguments if path.startswith("tests/"))


def test_code_owners_name_existing_paths() -> None:
    lines = (PROJECT / ".github/CODEOWNERS").read_text().splitlines()
    owned = [line.split() for line in lines if line and not line.startswith("#")]
    assert owned[0][0] == "*"
    for path, *owners in owned:
        assert owners
        assert path == "*" or (PROJECT / path.removeprefix("/")).exists(), path


@pytest.mark.debian_packages
def test_no_machine_path_or_package_host_in_any_file() -> None:
    roots = "work|root|home|Users"
    hosts = "|".join(["pypi[.]" + "org", "python" + "hosted", "index" + "-url", "find" + "-links"])
    forbidden = re.compile(rf"(?<![\w.~}}-])/(?:{roots})/|{hosts}".encode())
    assert forbidden.search(b"see file:///" + b"home/user/"), "the pattern matches paths of a machine"
    assert not forbidden.search(b"s3://bucket/" + b"root/"), "the pattern ignores paths within a URI"
    files = tracked_files()
    assert Path(__file__).resolve() in files
    matches = [
        f"{path.relative_to(PROJECT)}: {match[0].decode()}"
        for path in files
        for match in forbidden.finditer(path.read_bytes())
    ]
    assert matches == []


def test_package_data_includes_every_file() -> None:
    settings = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["setuptools"]
    package = PROJECT / "trinitylake_ops"
    shipped = {path for pattern in settings["package-data"]["trinitylake_ops"] for path in package.glob(pattern)}
    data_files = {path for path in tracked_files() if package in path.parents and path.suffix != ".py"}
    assert {path.suffix for path in data_files} >= {".jinja", ".css", ".md"}
    assert data_files <= shipped


@pytest.mark.parametrize("file", ["constraints.txt", *SEPARATE_EXTRAS.values()])
def test_constraints_are_sorted_pins_without_duplicates(file: str) -> None:
    lines = (PROJECT / file).read_text().splitlines()
    assert len(pins(file)) == len(lines)
    assert lines == sorted(lines, key=str.lower)


@pytest.mark.parametrize("separate_extra", ["", *SEPARATE_EXTRAS])
def test_constraints_satisfy_every_declared_dependency(separate_extra: str) -> None:
    pinned = pins(SEPARATE_EXTRAS.get(separate_extra, "constraints.txt"))
    unsatisfied = [
        str(requirement)
        for requirement in environment_requirements(separate_extra)
        if pinned.get(canonicalize_name(requirement.name), "") not in requirement.specifier
    ]
    assert unsatisfied == []


def test_installed_versions_equal_constraints() -> None:
    """The tests must run on the pinned versions."""
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "freeze", "--all", "--exclude-editable"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    installed = [PIN.fullmatch(line) for line in listing.splitlines()]
    pinned = pins()
    assert {m[1]: m[2] for m in installed if m and pinned.get(canonicalize_name(m[1]), m[2]) != m[2]} == {}


def test_targets_named_in_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (PROJECT / "Makefile").read_text(), flags=re.MULTILINE))
    # Commands are at the start of a line or of inline code; `apt-get install make git` is not a target.
    mentioned = set(re.findall(r"(?:^[ $]*|`)make ([a-z-]+)", (PROJECT / "README.md").read_text(), flags=re.MULTILINE))
    assert {"demo", "test"} <= mentioned
    assert mentioned - targets == set()


def test_targets_named_in_release_checklist_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (PROJECT / "Makefile").read_text(), flags=re.MULTILINE))
    page = (PROJECT / "docs/release.md").read_text()
    mentioned = set(re.findall(r"(?:^|`)make ([a-z-]+)", page, flags=re.MULTILINE))
    assert {"dist", "test", "soak"} <= mentioned <= targets


def test_version_is_defined_once() -> None:
    """Only the chart repeats the version, because Helm requires it there; tests/test_charts.py compares them."""
    version = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"]
    code = [
        path for path in tracked_files() if path.suffix == ".py" and path.parts[len(PROJECT.parts)] == "trinitylake_ops"
    ]
    assert len(code) > 100
    assert [path.name for path in code if version in path.read_text()] == []


def test_unit_tests_need_no_server_jvm_or_dagster() -> None:
    makefile = (PROJECT / "Makefile").read_text().replace("\\\n", " ")
    unit_tests = re.search(r"^UNIT_TESTS := (.*)$", makefile, flags=re.MULTILINE)
    assert unit_tests is not None
    paths = [PROJECT / name for name in unit_tests[1].split()]
    files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])]
    assert len(files) > 25
    heavy = re.compile(r"^ *(?:from|import) (?:dagster|pyspark|tests\.(?:flights|servers))\b", flags=re.MULTILINE)
    assert [file.name for file in files if heavy.search(file.read_text())] == []


def test_make_help_lists_every_target() -> None:
    makefile = (PROJECT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, flags=re.MULTILINE)
    assert phony is not None
    help_text = subprocess.run(["make"], cwd=PROJECT, check=True, capture_output=True, text=True).stdout
    assert set(phony[1].split()) == set(re.findall(r"^  make ([a-z-]+)", help_text, flags=re.MULTILINE))


def soak_in(folder: Path, failing_argument: str) -> subprocess.CompletedProcess[str]:
    """Run the commands of ``make soak`` with a fake Python that fails if its arguments contain a text."""
    for path, text in {
        ".venv/bin/python": f'#!/bin/sh\necho "ran $*"\ncase "$*" in *{failing_argument}*) exit 1;; esac\n',
        "scripts/debian_packages.sh": "#!/bin/sh\n",
        "scripts/run_soak.sh": (PROJECT / "scripts/run_soak.sh").read_text(),
    }.items():
        script = folder / path
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(text)
        script.chmod(0o755)
    dry_run = subprocess.run(
        ["make", "-n", "-o", "setup", "soak"], cwd=PROJECT, check=True, capture_output=True, text=True
    )
    return subprocess.run(["bash", "-c", dry_run.stdout], cwd=folder, capture_output=True, text=True, check=False)


def test_soak_continues_after_failed_part(tmp_path: Path) -> None:
    """The exit status is 1 if any part fails, not only the last one."""
    kinds = ("moto", "radosgw", "azurite", "fake_gcs", "dynalite", "redis_server", "valkey_server", "hdfs")
    soak = soak_in(tmp_path, "lakes=dynalite")
    assert [kind for kind in kinds if f"--lakes={kind} " in soak.stdout] == list(kinds)
    assert soak.returncode == 1
    last = soak.stdout.splitlines()[-1]
    assert last.startswith("make soak: failed, see soak/")
    assert last.endswith(": lakehouses on dynalite; ")
    (log,) = (tmp_path / "soak").iterdir()
    assert log.read_text() == soak.stdout
    assert soak_in(tmp_path, "nothing").returncode == 0


def test_dagster_instance_of_demo_starts_runs_without_daemon(tmp_path: Path) -> None:
    settings = (PROJECT / "deploy/demo/dagster.yaml").read_text()
    (tmp_path / "dagster.yaml").write_text(settings)
    with DagsterInstance.from_config(str(tmp_path)) as instance:
        assert isinstance(instance.run_coordinator, DefaultRunCoordinator)
        assert not instance.telemetry_enabled
        assert not instance.nux_enabled
    assert set(yaml.safe_load(settings)) == {"run_coordinator", "telemetry", "nux"}
