"""``trioleg bench churn``."""

from __future__ import annotations

from typing import Any

import click

from ...config import LLMConfig
from ...errors import TriolegError
from ..options import console
from .group import bench, bench_json, bench_model, run_bench, tell


@bench.command(short_help="Many clients that leave, engines that die.")
@click.option("--requests", type=click.IntRange(min=1), default=20_000, show_default=True)
@click.option(
    "--clients", type=click.IntRange(min=1), default=64, show_default=True, help="At a time."
)
@click.option(
    "--kills",
    type=click.IntRange(min=0, max=LLMConfig().max_engine_restarts),
    default=3,
    show_default=True,
    help="Engines that are killed in between.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of who leaves when.")
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Stop by then, whatever has been done.",
)
@bench_model
@bench_json
def churn(model: str, as_json: bool, **settings: Any) -> None:
    """Let clients come and leave at random points, kill engines meanwhile, and see that nothing is left.

    Prints how the requests ended and what memory, descriptors and states the server has then. Exit code 1
    if a request ended in a way that it must not, or if something is left.

    \b
    Example:
      trioleg bench churn --requests 2000 --kills 1
    """
    import msgspec

    from ...bench.churn import Churn, run_churn, show_churn

    asked = Churn(**settings)
    report = run_bench(model, run_churn, asked, tell)
    if as_json:
        click.echo(msgspec.json.encode(report.summary()))
    else:
        show_churn(report, console())
    if faults := report.faults(asked):
        raise TriolegError("; ".join(faults))
