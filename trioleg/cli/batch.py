"""``trioleg batch``."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import click

from .. import model_store
from ..config import EngineConfig, LLMConfig
from .group import commands
from .models import make_ready
from .options import INTERRUPTED, TERMINATED, engine_options

__all__ = ["batch"]


@commands.command(short_help="Answer a file of requests.")
@click.argument("in", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--model",
    default=model_store.DEFAULT_MODEL,
    show_default=True,
    help="As for serve: a name, a directory, a GGUF file, or OWNER/NAME on the hub.",
)
@click.option("--served-model-name", metavar="NAME", help="The model's name in the requests.")
@engine_options
def batch(model: str, out: Path, served_model_name: str | None, **settings: Any) -> None:
    """Answer the requests in IN, in this process, and write the answers to OUT, both in OpenAI's batch
    format: a JSON object a line, told apart by custom_id.

    An answer is written as soon as it is finished. If OUT has answers, the others are added: an
    interrupted run goes on where it stopped. To ask again what ended in an error, delete its line.

    Exit code 0: every request has its answer, be it an error of its own. 1: IN, OUT or the model cannot
    be used; the message names file and line. 130, 143: SIGINT, SIGTERM.

    \b
    Example:
      trioleg batch questions.jsonl answers.jsonl --model smollm2-135m
    with lines such as
      {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
       "body": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}}
    """
    # Not the default, which would leave a terminal without its cursor.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    questions = settings.pop("in")
    config = LLMConfig(engine=EngineConfig(**settings))
    try:
        from ..batch import run

        # Before OUT is made: a wrong name leaves nothing behind.
        make_ready(model)
        run(model, questions, out, config, served_model_name)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
