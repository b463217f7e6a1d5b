"""Completion of commands and options in shells, by click."""

from __future__ import annotations

import os

import click
from click.shell_completion import get_completion_class, shell_complete

PROGRAM = "trinitylake"
#: The variable by which a shell asks for completions, as click names it.
VARIABLE = "_TRINITYLAKE_COMPLETE"
SHELLS = ("bash", "zsh", "fish")


@click.command(short_help="Print a shell completion script.")
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print what lets a shell complete commands and options.

    The line eval "$(trinitylake completion bash)" in ~/.bashrc lets bash read it, and the same with zsh in ~/.zshrc.
    For fish it belongs into ~/.config/fish/completions/trinitylake.fish.

    Example: trinitylake completion bash
    """
    made = get_completion_class(shell)
    assert made is not None
    click.echo(made(click.get_current_context().find_root().command, {}, PROGRAM, VARIABLE).source())


def completed(commands: click.Command) -> int | None:
    """Answer a shell that asks for completions. Returns the exit code, None if no shell asks."""
    asked = os.environ.get(VARIABLE)
    return shell_complete(commands, {}, PROGRAM, VARIABLE, asked) if asked else None
