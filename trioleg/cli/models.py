"""``trioleg pull`` and ``trioleg models``, and how a command makes its model ready."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from .. import model_store
from .group import commands
from .options import INTERRUPTED, TERMINATED

__all__ = ["make_ready", "models", "pull"]


@commands.command(short_help="Fetch or convert a model.")
@click.argument("name")
def pull(name: str) -> None:
    """Fetch the model NAME, unless it is there: one that `trioleg models` lists, or OWNER/NAME (or
    OWNER/NAME@REVISION) on the Hugging Face hub. Or convert NAME, a GGUF file of your own.

    \b
    Example:
      trioleg pull smollm2-135m
      trioleg pull Qwen/Qwen3-0.6B
      trioleg pull ./model.Q8_0.gguf
    """
    try:
        directory = _pull(name)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    click.echo(f"{name} is in {directory}", err=True)


def make_ready(model: str, *, weights: bool = True, ours: bool = True) -> Path:
    """The model's directory, pulled if it is missing. With ``weights`` that our own engine is to compute, it
    is one that it can: that takes no torch to see, and loading torch takes seconds."""
    if model_store.is_missing(model, weights=weights):
        _pull(model)
    directory = model_store.resolve(model, weights=weights)
    if weights and ours:
        from ..engine.model_config import read_model_config

        read_model_config(directory)
    return directory


def _pull(name: str) -> Path:
    from ..pull_bar import PullBar

    with _in_order_at_sigterm(), PullBar(name) as bar:
        return model_store.pull(name, progress=bar)


@contextmanager
def _in_order_at_sigterm() -> Iterator[None]:
    """Within, SIGTERM leaves by an exception, so that a download's process and half-made folders go too.

    A handler that is there already (``serve``'s, ``batch``'s) does as much, and stays.
    """

    def leave(number: int, _frame: object) -> None:
        # Only once: a second signal must not end the cleaning up.
        signal.signal(number, signal.SIG_IGN)
        sys.exit(TERMINATED)

    before = signal.getsignal(signal.SIGTERM)
    if before is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@commands.command(short_help="List the models with names.")
@click.option("--path", "name", metavar="NAME", help="Print only the directory of this model.")
def models(name: str | None) -> None:
    """List the models that can be named, and whether they are here.

    \b
    Example:
      trioleg models --path smollm2-135m
    """
    if name is not None:
        click.echo(model_store.resolve(name))
        return
    rows = [(one.name, _state(one), str(one.path)) for one in model_store.known_models()]
    if sys.stdout.isatty():
        _show_table(rows)
    else:
        click.echo("\n".join("\t".join(row) for row in rows))


def _state(model: model_store.StoredModel) -> str:
    if model.present:
        return f"here, {model.size / 1e6:.0f} MB"
    return f"not here, {model.download_size / 1e6:.0f} MB to fetch"


def _show_table(rows: list[tuple[str, str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("model", "state", "directory")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
