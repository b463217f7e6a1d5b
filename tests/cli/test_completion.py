"""Shell completion: the scripts for shells, and the completions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trinitylake_ops.cli.app import trinitylake
from trinitylake_ops.cli.completion import SHELLS

PROGRAM = [sys.executable, "-m", "trinitylake_ops.cli"]


def ask(*arguments: str, **variables: str) -> str:
    ran = subprocess.run([*PROGRAM, *arguments], env={**os.environ, **variables}, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_script_calls_the_program(shell: str) -> None:
    script = ask("completion", shell)
    assert f"_TRINITYLAKE_COMPLETE={shell}_complete" in script
    words = {"COMP_WORDS": "trinitylake roll", "COMP_CWORD": "roll" if shell == "fish" else "1"}
    answer = ask(_TRINITYLAKE_COMPLETE=f"{shell}_complete", **words)
    expected = {"bash": "plain,rollback\n", "zsh": "plain\nrollback\n", "fish": "plain,rollback\tReturn"}
    assert answer.startswith(expected[shell])


def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    """Complete words as bash does, with the function that the script defines."""
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
    ran = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["expire export exports", "--limit", "bash zsh fish"]


def test_command_names_complete_without_importing_commands() -> None:
    code = (
        "import sys\nfrom trinitylake_ops.cli.app import trinitylake\n"
        "found = trinitylake.shell_complete(trinitylake.make_context('x', [], resilient_parsing=True), '')\n"
        "print(len(found), [name for name in sys.modules if name in ('pyarrow', 'rich')])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown == f"{len(trinitylake.commands)} []\n"
