"""``trioleg keys``."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from .group import commands

__all__ = ["keys"]


@commands.command(short_help="Make keys, so that an engine can join over a network.")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--engine", metavar="NAME", default="engine", show_default=True, help="Whose keys to make."
)
def keys(directory: Path, engine: str) -> None:
    """Make a pair of CURVE keys for an engine, and, the first time, one for the front end.

    DIR/frontend is for `trioleg serve`, DIR/NAME for `trioleg engine`: move it to that engine's machine. What
    ends in .key_secret must stay secret. An engine comes in while its file is in DIR/frontend/engines when the
    front end starts.

    \b
    Example:
      trioleg keys ~/trioleg-keys --engine gpu1
    """
    from ..ipc.curve import make_keys

    try:
        front_end, of_engine = make_keys(directory, engine)
    except OSError as error:
        raise click.ClickException(f"cannot write keys: {error}") from error
    for command, option, folder in (
        ("serve", "--attach", front_end),
        ("engine", "--handshake", of_engine),
    ):
        quoted = shlex.quote(str(folder))
        click.echo(f"trioleg {command} MODEL {option} tcp://IP:PORT --curve-keys {quoted}")
