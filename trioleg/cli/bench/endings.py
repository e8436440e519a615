"""``trioleg bench endings``."""

from __future__ import annotations

import click

from .group import bench, bench_json, bench_model, run_bench, show_measured, tell

_ENDINGS = ("disconnect", "kill-engine", "stop-engine", "kill-front-end")


@bench.command(short_help="How fast they hear of it who must.")
@click.option(
    "--tries",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Kills and stops of each kind; disconnects, which are quick, ten times as many.",
)
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(_ENDINGS),
    help="Only this; may be given again. By default all, which takes minutes.",
)
@bench_model
@bench_json
def endings(tries: int, only: tuple[str, ...], model: str, as_json: bool) -> None:
    """Measure how long it takes from what ends requests to those who must hear of it.

    A client that leaves until the engine has the ABORT; an engine that is killed until its last client has
    been told, or stopped until /health says so; a front end that is killed until its engine is gone.

    \b
    Example:
      trioleg bench endings --tries 5 --only kill-engine --only stop-engine
    """
    from ...bench.endings import measure_endings

    show_measured(run_bench(model, measure_endings, tries, only, tell), as_json=as_json)
