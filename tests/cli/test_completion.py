"""Shell completion: the scripts for the shells, and the completions of commands and options."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trinitylake_ops.cli.app import trinitylake
from trinitylake_ops.cli.completion import SHELLS

PROGRAM = [sys.executable, "-m", "trinitylake_ops.cli"]


def run_program(*arguments: str, **variables: str) -> str:
    process = subprocess.run([*PROGRAM, *arguments], env={**os.environ, **variables}, capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")
    return process.stdout


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_script_calls_program(shell: str) -> None:
    script = run_program("completion", shell)
    assert f"_TRINITYLAKE_COMPLETE={shell}_complete" in script
    variables = {"COMP_WORDS": "trinitylake roll", "COMP_CWORD": "roll" if shell == "fish" else "1"}
    output = run_program(_TRINITYLAKE_COMPLETE=f"{shell}_complete", **variables)
    expected = {"bash": "plain,rollback\n", "zsh": "plain\nrollback\n", "fish": "plain,rollback\tReturn"}
    assert output.startswith(expected[shell])


def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    """The test completes words as bash does, with the function that the script defines."""
    program = tmp_path / "trinitylake"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m trinitylake_ops.cli "$@"\n')
    program.chmod(0o755)
    script = """
eval "$(trinitylake completion bash)"
complete_at() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _trinitylake_completion trinitylake; }
complete_at trinitylake exp; echo "${COMPREPLY[@]}"
complete_at trinitylake log --l; echo "${COMPREPLY[@]}"
complete_at trinitylake completion ""; echo "${COMPREPLY[@]}"
"""
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    process = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert process.stdout.splitlines() == ["expire export exports", "--limit", "bash zsh fish"]


def test_command_names_complete_without_importing_commands() -> None:
    code = (
        "import sys\nfrom trinitylake_ops.cli.app import trinitylake\n"
        "completions = trinitylake.shell_complete(trinitylake.make_context('x', [], resilient_parsing=True), '')\n"
        "print(len(completions), [name for name in sys.modules if name in ('pyarrow', 'rich')])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output == f"{len(trinitylake.commands)} []\n"
