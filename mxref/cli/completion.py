"""`mxref completion`: the script by which a shell completes commands, options and their values."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

VARIABLE = "_MXREF_COMPLETE"
"""The environment variable by which the script asks for completions."""
SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the script by which a SHELL completes what you type.

    Commands, options, dialects, recipes, presets, ladders, backends, clauses and the folders of runs are completed.
    Bash must be 4.4 or newer.

    \b
    Examples:
      eval "$(mxref completion bash)"       in ~/.bashrc
      eval "$(mxref completion zsh)"        in ~/.zshrc, after compinit
      mxref completion fish | source        in ~/.config/fish/config.fish
    """  # noqa: D301 - the character \\b tells click to keep the lines that follow
    root = click.get_current_context().find_root()
    found = get_completion_class(shell)
    assert found is not None, shell
    click.echo(found(root.command, {}, "mxref", VARIABLE).source(), nl=False)
