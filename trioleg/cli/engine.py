"""``trioleg engine``."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..config import EngineConfig
from ..errors import TriolegError
from ..heap import settle_heap
from .group import commands
from .models import make_ready
from .options import engine_options, log_to_stderr

if TYPE_CHECKING:
    from ..engine.interface import Core

__all__ = ["engine"]


@commands.command(short_help="Run an engine alone, for a front end in another process.")
@click.argument("model", required=False)
@click.option(
    "--handshake",
    metavar="ADDRESS",
    required=True,
    help="Where the front end waits for engines, such as tcp://127.0.0.1:29550.",
)
@click.option(
    "--curve-keys",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Join with the keys that `trioleg keys` made for this engine; over an encrypted wire.",
)
@click.option(
    "--script",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Play this JSON file in place of a model: tokens, pace and faults as it says.",
)
@engine_options
def engine(
    model: str | None,
    handshake: str,
    curve_keys: Path | None,
    script: Path | None,
    **settings: Any,
) -> None:
    """Run the engine of MODEL alone, for a front end on the same engine-core wire (ours or vLLM's).

    \b
    Example:
      trioleg engine smollm2-135m --handshake tcp://127.0.0.1:29550
    """
    if (model is None) == (script is None):
        raise click.UsageError("give either MODEL or --script")
    make_core = _scripted(script) if script else _torch(model or "", EngineConfig(**settings))
    # Sentences alone: a front end that started us puts the time before them.
    log_to_stderr("info", form="%(message)s")

    import trio

    from ..engine.process import run_engine
    from ..ipc.curve import read_engine_keys

    keys = None if curve_keys is None else read_engine_keys(curve_keys)
    code = trio.run(functools.partial(run_engine, make_core, handshake, keys=keys))
    # A model that was still loading goes on in its thread, and C++ aborts loudly if the interpreter is
    # taken down under it. All that had to be delivered has been.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _scripted(script: Path) -> Callable[[], Core]:
    from ..engine.scripted import load_script, start_scripted_core

    return functools.partial(start_scripted_core, load_script(script))


def _torch(model: str, config: EngineConfig) -> Callable[[], Core]:
    """Only the files are seen to now: torch and the weights load once the front end knows of us."""
    directory = make_ready(model)

    def load() -> Core:
        try:
            from ..engine.core import EngineCore
        except ModuleNotFoundError as error:
            raise TriolegError(
                f"our engine needs {error.name}: pip install 'trioleg[engine]'"
            ) from error
        core = EngineCore.load(directory, config)
        # A step reads every weight once, and in pages of 4 KiB spends much of its time on finding them.
        settle_heap()
        return core

    return load
