"""The command line: ``trioleg serve``, ``engine``, ``keys``, ``chat``, ``batch``, ``trace``, ``pull``, ``models``,
``bench``, ``compare``. And ``trioleg-frontend``, which vLLM starts (``frontend.py``).

A module for each command. Rules of this folder: at the top only what is light. A command imports what it runs on
when it runs, so that ``--help`` answers at once and no command loads another's weight. stdout is for what a command
was asked for, stderr for all else; an error of ours is one line there and exit code 1.
"""

from __future__ import annotations

import sys

import click

from ..errors import TriolegError
from . import (  # noqa: F401 - each adds its commands
    batch,
    bench,
    chat,
    compare,
    engine,
    keys,
    models,
    serve,
    trace,
)
from .group import commands

__all__ = ["commands", "main"]


def main() -> None:
    """The console script's entry; leaves by ``SystemExit``."""
    try:
        commands(prog_name="trioleg")
    except TriolegError as error:
        click.echo(f"trioleg: {' '.join(str(error).split())}", err=True)
        sys.exit(1)
