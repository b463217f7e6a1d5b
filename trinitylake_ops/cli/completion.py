"""Shell completion of commands and options."""

from __future__ import annotations

import os

import click
from click.shell_completion import get_completion_class, shell_complete

PROGRAM = "trinitylake"
#: The environment variable with which a shell requests completions, in the form that click expects.
VARIABLE = "_TRINITYLAKE_COMPLETE"
SHELLS = ("bash", "zsh", "fish")


@click.command(short_help="Print a shell completion script.")
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print a script that makes a shell complete commands and options.

    For bash, add eval "$(trinitylake completion bash)" to ~/.bashrc, and for zsh the same with zsh to ~/.zshrc. For
    fish, write the output to ~/.config/fish/completions/trinitylake.fish.

    Example: trinitylake completion bash
    """
    completion_class = get_completion_class(shell)
    assert completion_class is not None
    click.echo(completion_class(click.get_current_context().find_root().command, {}, PROGRAM, VARIABLE).source())


def complete_if_requested(commands: click.Command) -> int | None:
    """Print completions if a shell requests them, and return the exit code; return None otherwise."""
    instruction = os.environ.get(VARIABLE)
    return shell_complete(commands, {}, PROGRAM, VARIABLE, instruction) if instruction else None
