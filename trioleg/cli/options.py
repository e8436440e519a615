"""What several commands share: the engine's options, the log, tables, exit codes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..config import DTYPES, SCHEDULING_POLICIES, EngineConfig

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["INTERRUPTED", "TERMINATED", "console", "engine_options", "log_to_stderr"]

# As a shell has it: 128 + SIGINT. For a talk that never began; one that is left has done its work, with 0.
# And for a batch that has not ended.
INTERRUPTED = 130
TERMINATED = 143

# Of a table that goes into a file or a pipe: wide enough for every column.
_PLAIN_WIDTH = 150

_ENGINE = EngineConfig()

_Command = TypeVar("_Command", bound=Callable[..., Any])


def engine_options(command: _Command) -> _Command:
    """How the torch engine is set up; names and meanings are vLLM's."""
    options = (
        click.option(
            "--dtype",
            type=click.Choice(DTYPES),
            default=_ENGINE.dtype,
            show_default=True,
            help="Number format of the weights; auto is the checkpoint's own.",
        ),
        click.option(
            "--device",
            default=_ENGINE.device,
            show_default=True,
            help="A torch device, such as cpu or cuda:0; auto takes a GPU if there is one.",
        ),
        click.option(
            "--max-model-len",
            type=int,
            help="Longest prompt and answer together, in tokens; by default the model's own.",
        ),
        click.option(
            "--max-num-seqs",
            type=int,
            default=_ENGINE.max_num_seqs,
            show_default=True,
            help="Requests that run at once; more wait.",
        ),
        click.option(
            "--max-num-batched-tokens",
            type=int,
            default=_ENGINE.max_num_batched_tokens,
            show_default=True,
            help="Tokens of one step, chunks of prompts included.",
        ),
        click.option(
            "--max-logprobs",
            type=int,
            default=_ENGINE.max_logprobs,
            show_default=True,
            help="Most probable tokens that a request may ask for at each position; -1: no bound.",
        ),
        click.option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            default=_ENGINE.enable_prefix_caching,
            show_default=True,
            help="Keep what finished requests computed, for prompts that begin alike.",
        ),
        click.option(
            "--scheduling-policy",
            type=click.Choice(SCHEDULING_POLICIES),
            default=_ENGINE.scheduling_policy,
            show_default=True,
            help="Who is served first; with priority, requests may name one, and the smallest wins.",
        ),
        click.option(
            "--num-gpu-blocks-override",
            type=int,
            metavar="BLOCKS",
            help="Size of the key/value cache, on any device; by default what memory allows.",
        ),
        click.option(
            "--torch-profiler-dir",
            type=click.Path(path_type=Path, file_okay=False),
            help="Lets torch's profiler be turned on by name, and its traces go there.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def log_to_stderr(
    level: str, *, form: str = "%(asctime)s %(levelname)s %(name)s: %(message)s"
) -> None:
    """Our own lines from ``level`` on (each request's ending is one); of libraries only warnings."""
    logging.basicConfig(format=form)
    logging.getLogger("trioleg").setLevel(level.upper())


def console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
