"""``trioleg trace``."""

from __future__ import annotations

import functools
import sys

import click

from .. import model_store
from ..config import DETOKENIZERS, LLMConfig
from .group import commands
from .models import make_ready
from .options import console

__all__ = ["trace"]


@commands.command(short_help="Show one request hop by hop, token by token.")
@click.argument("prompt", required=False)
@click.option(
    "--model",
    default=model_store.DEFAULT_MODEL,
    show_default=True,
    help="As for serve: a name, a directory, a GGUF file, or OWNER/NAME on the hub.",
)
@click.option(
    "--ids",
    metavar="1,2,3",
    help="No model: a scripted engine says these tokens, one a step; MODEL needs only its tokenizer.",
)
@click.option("--max-tokens", type=int, help="Longest answer; by default 16, or all of --ids.")
@click.option("--stop", multiple=True, metavar="TEXT", help="A stop string; may be given again.")
@click.option("--stream-interval", type=int, help="A frame only every that many tokens.")
@click.option(
    "--detokenizer",
    type=click.Choice(DETOKENIZERS),
    default=DETOKENIZERS[0],
    show_default=True,
    help="Which of the two implementations decodes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of the tables.")
def trace(
    prompt: str | None,
    model: str,
    ids: str | None,
    max_tokens: int | None,
    stop: tuple[str, ...],
    stream_interval: int | None,
    detokenizer: str,
    as_json: bool,
) -> None:
    """Serve one greedy request for PROMPT and show the way of every token: when it passed each hop, the
    frame that carried it, and what was held back and why. Exit code 1 if it ended in an error.

    \b
    Example:
      trioleg trace "What is the capital of France?"
      trioleg trace --ids 391,10813,230,131 --stop "!"
    """
    if (prompt is None) == (ids is None):
        raise click.UsageError("give either PROMPT or --ids")
    from ..sampling_params import SamplingParams

    token_ids = None if ids is None else _parse_ids(ids)
    params = SamplingParams(
        temperature=0,
        max_tokens=max_tokens or (16 if token_ids is None else len(token_ids)),
        stop=stop,
        stream_interval=stream_interval,
    )
    make_ready(model, weights=ids is None)

    import trio

    from ..trace import trace_request
    from ..trace_table import show_trace

    config = LLMConfig(detokenizer=detokenizer)
    made = trio.run(
        functools.partial(trace_request, token_ids=token_ids), model, prompt, params, config
    )
    if as_json:
        click.echo(made.to_json())
    else:
        show_trace(made, console())
    if any(frame.kind == "error" for frame in made.frames):
        sys.exit(1)


def _parse_ids(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    # No vocabulary has more ids than int32; what this one does not have is the trace's to show.
    if not all(part.isdecimal() and len(part) < 10 for part in parts):
        raise click.UsageError(f"--ids is {text!r}; allowed: token ids with commas, such as 1,2,3")
    return [int(part) for part in parts]
