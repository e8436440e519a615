"""``trioleg bench stalled``."""

from __future__ import annotations

from typing import Any

import click

from ...errors import TriolegError
from ..options import console
from .group import bench, bench_json, bench_model, run_bench, tell


@bench.command(short_help="Clients that read nothing.")
@click.option(
    "--stalled",
    type=click.IntRange(min=1),
    default=200,
    show_default=True,
    help="Clients that ask for a stream and read nothing of it.",
)
@click.option(
    "--readers",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Clients beside them that read, and check every token.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=100_000,
    show_default=True,
    help="Tokens of each stream, at most.",
)
@click.option(
    "--step-interval",
    type=click.FloatRange(min=0),
    default=0.02,
    show_default=True,
    metavar="SECONDS",
    help="Between two tokens; 0 is as fast as the front end takes them.",
)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="Stop to look by then, whatever has been sent.",
)
@bench_model
@bench_json
def stalled(model: str, as_json: bool, **settings: Any) -> None:
    """Let clients ask for streams that they never read, and see what that takes, and that nobody else notices.

    First with a write bound that is out of reach, then with a short one. Exit code 1 if a reader missed a token, if
    SIGTERM took longer than it may, or if a connection did not end in order.

    \b
    Example:
      trioleg bench stalled --stalled 50 --time-limit 10
    """
    import msgspec

    from ...bench.stalled import run_stalled
    from ...bench.stalled_report import Stalled, show_stalled

    asked = Stalled(**settings)
    let_be, bound = run_bench(model, run_stalled, asked, tell)
    if as_json:
        click.echo(msgspec.json.encode({"let_be": let_be, "bound": bound}))
    else:
        show_stalled(asked, let_be, bound, console())
    if faults := [*let_be.faults(asked), *bound.faults()]:
        raise TriolegError("; ".join(faults))
