"""``trioleg bench hops``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .group import bench, bench_json, bench_model, bench_out, run_bench, show_reported, tell

_BATCHES = (1, 16, 64, 256)
_PROFILED_BATCHES = (64,)
# More streams than a step of any engine here has.
_MOST_TOKENS_A_STEP = 1024


@bench.command(short_help="What each hop of a token's way costs.")
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="How often everything is measured; a figure is the median.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=3000,
    show_default=True,
    help="Of each round and batch, about.",
)
@click.option(
    "--batch",
    "batches",
    type=click.IntRange(1, _MOST_TOKENS_A_STEP),
    multiple=True,
    help="Tokens of a step, one a stream; may be given again. By default 1, 16, 64 and 256; with --profile 64.",
)
@click.option(
    "--profile",
    is_flag=True,
    help="In place of the hops: the front end's own time by function, sampled in the whole leg.",
)
@bench_model
@bench_json
@bench_out
def hops(
    model: str,
    batches: tuple[int, ...],
    profile: bool,
    as_json: bool,
    out: Path | None,
    **settings: Any,
) -> None:
    """Measure processor time a token of every hop, from the engine's encoder to the client's socket, and in all.

    \b
    Example:
      trioleg bench hops --rounds 3 --batch 64 --out report
    """
    from ...bench.hops import Hops, run_hops
    from ...bench.sampler import run_profile

    measure, default = (run_profile, _PROFILED_BATCHES) if profile else (run_hops, _BATCHES)
    asked = Hops(batches=tuple(dict.fromkeys(batches)) or default, **settings)
    show_reported(run_bench(model, measure, asked, tell), as_json=as_json, out=out)
