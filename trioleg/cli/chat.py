"""``trioleg chat``."""

from __future__ import annotations

import sys
from typing import Any

import click

from .. import model_store
from .group import commands
from .options import INTERRUPTED

__all__ = ["chat"]


@commands.command(short_help="Talk with a model in the terminal.")
@click.argument("model", required=False)
@click.option(
    "--url",
    help="The server to talk to, with or without /v1; by default one on this machine, else a new one.",
)
@click.option("--model", "name", metavar="NAME", help="Which of the server's models to ask.")
@click.option("--system", metavar="TEXT", help="The system message.")
@click.option(
    "--temperature",
    type=float,
    # Not the API's 1, at which a small model, such as our default one, strays into nonsense.
    default=0.0,
    show_default=True,
    help="0 is greedy; 1 samples as the model predicts, which a small one does badly.",
)
@click.option(
    "--top-p",
    type=float,
    help="At a temperature above 0: sample among the tokens that make up this much.",
)
@click.option("--max-tokens", type=int, help="Longest answer, in tokens.")
@click.option("--seed", type=int, help="At a temperature above 0: the same seed, the same answer.")
def chat(
    model: str | None, url: str | None, name: str | None, system: str | None, **sampling: Any
) -> None:
    """Talk in the terminal: with the server at --url, else with one at http://127.0.0.1:8000 if it has
    MODEL, else with one that is started for this talk.

    Ctrl-C ends an answer (and aborts it in the engine), a second one leaves.

    \b
    Example:
      trioleg chat --temperature 0.7
      trioleg chat --url http://127.0.0.1:9000/v1 --system "Answer in one sentence."
    """
    from ..chat import run

    if url is not None and model is not None:
        raise click.UsageError("MODEL is for a server that is started here; with --url use --model")
    try:
        went_well = run(
            model,
            url,
            default_model=model_store.DEFAULT_MODEL,
            name=name,
            system=system,
            sampling={key: value for key, value in sampling.items() if value is not None},
        )
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    sys.exit(0 if went_well else 1)
