"""``trioleg bench leg``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from .group import (
    FiniteRange,
    bench,
    bench_json,
    bench_model,
    bench_out,
    run_bench,
    show_reported,
    tell,
)

_PARTS = ("cost", "saturation", "start", "idle", "length")
_PEERS = ("vllm", "floor")
# Options that not every part takes.
_TAKEN_BY = {
    "streams": ("cost",),
    "rate": ("cost", "saturation"),
    "token_rate": ("cost",),
    "seconds": ("cost", "length"),
}
# The bench's own programs wait for each other somewhat longer.
_MOST_SECONDS = 100
_MOST_RATE = 10_000


@bench.command(short_help="What a token costs on its way, beside others.")
@click.option(
    "--streams",
    multiple=True,
    type=click.IntRange(1, 10_000),
    default=(1, 16, 64, 256, 1024, 4096),
    show_default=True,
    help="At a time; may be given again.",
)
@click.option(
    "--rate",
    type=FiniteRange(0.1, _MOST_RATE),
    default=50.0,
    show_default=True,
    help="Steps of the engine a second: each is a token for every stream.",
)
@click.option(
    "--token-rate",
    type=FiniteRange(1, 1e9),
    default=12_800.0,
    show_default=True,
    help="Tokens a second in all, at most: many streams get fewer steps, so that no server is at its limit.",
)
@click.option(
    "--runs",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="How often everybody has a turn; a figure is the median.",
)
@click.option(
    "--seconds",
    type=FiniteRange(0.1, _MOST_SECONDS),
    default=5.0,
    show_default=True,
    help="That a run measures for, with all its streams running; of the part length 2 at most.",
)
@click.option(
    "--only",
    "parts",
    multiple=True,
    type=click.Choice(_PARTS),
    default=_PARTS,
    help="Only this part; may be given again. By default all.",
)
@click.option(
    "--peer",
    "peers",
    multiple=True,
    type=click.Choice(_PEERS),
    default=("floor",),
    show_default=True,
    help="Who gets the same in turns with us; may be given again.",
)
@click.option(
    "--vllm-python", metavar="PATH", help="An interpreter that has vLLM; with --peer vllm."
)
@click.option(
    "--pin", "is_pinned", is_flag=True, help="The server on one core, all else on another."
)
@bench_model
@bench_json
@bench_out
def leg(model: str, as_json: bool, out: Path | None, **settings: Any) -> None:
    """Measure what a token costs between engine and client, and how evenly it comes.

    The engine is a script at a set rate, the client is as cheap as can be, and both are processes of their own. Peers
    get the same frames: vLLM's API server, and the floor, which decodes, frames and sends, and does nothing else.

    \b
    Parts, and which options they take besides --runs and --peer:
      cost        processor, gaps, first frames, memory   --streams --rate --token-rate --seconds
      saturation  most tokens a second, of 256 streams    --rate, at which the search begins
      start       until a server is ready                 none
      idle        memory of up to 4,096 silent streams    none
      length      processor behind 20,000 tokens          --seconds

    \b
    Example:
      trioleg bench leg --streams 64 --only cost --runs 3
    """
    from ...bench.leg import AskedLeg, run_leg

    for name in ("streams", "parts", "peers"):
        settings[name] = tuple(dict.fromkeys(settings[name]))
    _refuse_ignored(settings)
    report = run_bench(model, run_leg, AskedLeg(**settings), tell)
    show_reported(report, as_json=as_json, out=out)


def _refuse_ignored(settings: Mapping[str, Any]) -> None:
    """Whoever gives an option means something by it."""
    context = click.get_current_context()
    for name, takers in _TAKEN_BY.items():
        is_given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if is_given and set(takers).isdisjoint(settings["parts"]):
            option, parts = name.replace("_", "-"), " or ".join(takers)
            raise click.UsageError(
                f"--{option} is for --only {parts}; what --only names takes none"
            )
    if settings["vllm_python"] is not None and "vllm" not in settings["peers"]:
        raise click.UsageError("--vllm-python is for --peer vllm, which is not given")
