"""Virtual environments for tests, and processes that can import only some installed packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).parent.parent
NAME = "trinitylake-ops"
CONSTRAINTS = PROJECT / "constraints.txt"
#: Extras that conflict with other extras and therefore have a separate environment, and the files with its pins.
SEPARATE_EXTRAS = {"airflow": "tests/airflow/constraints.txt"}
_INSTALL_SECONDS = 1_200

#: Code to prepend to a program, so that it cannot import some modules.
_HIDE = """
import sys
class _HidingFinder:
    def __init__(self, finder):
        self._finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name in {names!r} else self._finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self._finder, name)
sys.meta_path[:] = [_HidingFinder(finder) for finder in sys.meta_path]
"""


@cache
def declared_requirements() -> dict[str, list[Requirement]]:
    """Return the requirements in pyproject.toml by extra. The name of the core is empty."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    extras = {"": project["dependencies"], **project["optional-dependencies"]}
    return {extra: [Requirement(text) for text in texts] for extra, texts in extras.items()}


@cache
def dependency_groups() -> dict[str, list[Requirement]]:
    """Return the requirements of each dependency group in pyproject.toml."""
    groups = tomllib.loads((PROJECT / "pyproject.toml").read_text())["dependency-groups"]
    return {group: [Requirement(text) for text in texts] for group, texts in groups.items()}


@cache
def packages_distributions() -> Mapping[str, list[str]]:
    """Return the distributions of each installed top-level module, which requires reading all their file lists."""
    return metadata.packages_distributions()


def distributions_of(extra: str) -> set[str]:
    """Return the distributions that an extra requires, including those of the extras that it refers to."""
    names: set[str] = set()
    for requirement in declared_requirements()[extra]:
        if requirement.name == NAME:
            names |= {name for other in requirement.extras for name in distributions_of(other)}
        else:
            names.add(canonicalize_name(requirement.name))
    return names


def installed_with(extras: Iterable[str]) -> set[str]:
    """Return the distributions that the core and some extras require, including transitive dependencies."""
    visited: set[tuple[str, str]] = set()
    remaining = [requirement for extra in ("", *extras) for requirement in declared_requirements()[extra]]
    while remaining:
        requirement = remaining.pop()
        if requirement.name == NAME:
            remaining += [other for extra in requirement.extras for other in declared_requirements()[extra]]
            continue
        for extra in ("", *requirement.extras):
            if (canonicalize_name(requirement.name), extra) not in visited:
                visited.add((canonicalize_name(requirement.name), extra))
                remaining += _required(requirement.name, extra)
    return {name for name, _ in visited}


@cache
def _required(name: str, extra: str) -> list[Requirement]:
    try:
        texts = requires(name) or []
    except PackageNotFoundError:  # required only on another platform
        return []
    requirements = [Requirement(text) for text in texts]
    return [
        requirement
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra})
    ]


def extra_modules_of(extras: Iterable[str]) -> set[str]:
    """Return the installed top-level modules that neither the core nor these extras provide."""
    provided = {*installed_with(extras), canonicalize_name(NAME)}
    return {
        module
        for module, distributions in packages_distributions().items()
        if not provided & {canonicalize_name(name) for name in distributions}
    }


def run_without(hidden: Iterable[str], program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program in a separate process in which some modules appear not to be installed."""
    code = _HIDE.format(names=set(hidden)) + program
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, env=environment
    )


@dataclass(frozen=True)
class Environment:
    """A virtual environment with this project installed, and the time and size of the installation."""

    folder: Path
    install_s: float
    n_packages: int
    n_bytes: int
    bytecode_bytes: int

    def run(self, program: str, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, isolated from other packages. The exit code is not checked."""
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        command = [self.folder / "bin" / program, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=cwd)


def make_environment(folder: Path, extras: Sequence[str] = (), versions: Sequence[str] = ()) -> Environment:
    """Create an environment with the core and some extras, at their pinned versions unless ``versions`` replaces them.

    Args:
        folder: The new folder of the environment.
        extras: The extras to install.
        versions: Requirements such as ``pyspark==4.0.0`` that replace the pins of the same packages.
    """
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, capture_output=True)
    before = _sizes(folder)
    replaced = {canonicalize_name(Requirement(version).name) for version in versions}
    pins = [
        line for line in CONSTRAINTS.read_text().splitlines() if canonicalize_name(line.split("==")[0]) not in replaced
    ]
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join([*pins, *versions, ""]))
    source = _copy_sources(folder / "source")
    target = f"{source}[{','.join(extras)}]" if extras else str(source)
    pip = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--no-input", "-qq", "install"]
    started_s = time.monotonic()
    completed = subprocess.run(
        [*pip, "--constraint", constraints, target],
        capture_output=True,
        text=True,
        timeout=_INSTALL_SECONDS,
        check=False,
    )
    install_s = time.monotonic() - started_s
    assert completed.returncode == 0, completed.stderr[-4_000:]
    shutil.rmtree(source)
    constraints.unlink()
    after = _sizes(folder)
    return Environment(
        folder,
        install_s,
        len(list(folder.glob("lib/python*/site-packages/*.dist-info"))) - before[2],
        after[0] - before[0],
        after[1] - before[1],
    )


def _copy_sources(folder: Path) -> Path:
    """Copy the sources of the package, because a build leaves folders in the source tree."""
    folder.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PROJECT / name, folder)
    shutil.copytree(PROJECT / NAME.replace("-", "_"), folder / NAME.replace("-", "_"), ignore=_ignore_bytecode)
    return folder


_ignore_bytecode = shutil.ignore_patterns("__pycache__")


def _sizes(folder: Path) -> tuple[int, int, int]:
    """Return the size of all files and of the bytecode files in bytes, and the number of distributions."""
    sizes = [(path.suffix, path.lstat().st_size) for path in folder.rglob("*") if path.is_file()]
    bytecode = sum(size for suffix, size in sizes if suffix == ".pyc")
    return sum(size for _, size in sizes), bytecode, len(list(folder.glob("lib/python*/site-packages/*.dist-info")))
