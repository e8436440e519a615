"""``trioleg bench load``."""

from __future__ import annotations

from typing import Any

import click

from ...config import ServerConfig
from .group import bench, bench_json, bench_model, run_bench, show_measured, tell


@bench.command(short_help="Many streams beside prompts of megabytes.")
@click.option("--streams", type=click.IntRange(1, 10_000), default=1000, show_default=True)
@click.option(
    "--step",
    type=click.FloatRange(min=0.001),
    default=0.1,
    show_default=True,
    metavar="SECONDS",
    help="Between two tokens of a stream.",
)
@click.option(
    "--prompts",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Big prompts, one after the other.",
)
@click.option(
    "--megabytes",
    type=click.FloatRange(0.01, ServerConfig().max_body_bytes / 1e6 - 0.1),
    default=5.0,
    show_default=True,
    help="Of text in each big prompt.",
)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="Stop by then, whatever has been measured.",
)
@bench_model
@bench_json
def load(model: str, as_json: bool, **settings: Any) -> None:
    """Measure /health, the streams' evenness and the wait of small prompts, without and with a big prompt.

    Each big prompt is followed by as long a time without one, on the same server; the streams' clients are a process
    of their own.

    \b
    Example:
      trioleg bench load --streams 100 --prompts 2
    """
    from ...bench.load import Load, run_load

    show_measured(run_bench(model, run_load, Load(**settings), tell), as_json=as_json)
