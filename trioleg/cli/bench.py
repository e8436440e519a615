"""``trioleg bench``."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from .. import model_store
from ..config import LLMConfig, ServerConfig
from ..errors import TriolegError
from .group import commands
from .models import make_ready
from .options import INTERRUPTED, console

if TYPE_CHECKING:
    from ..bench.measurement import Measurement

__all__ = ["bench", "churn", "endings", "load", "stalled"]


@commands.group(short_help="Measure what endings cost.")
def bench() -> None:
    """Measure the way between engine and client from outside, with real processes and the scripted engine.

    \b
    Example:
      trioleg bench endings --only disconnect
    """


_bench_model = click.option(
    "--model",
    default=model_store.DEFAULT_MODEL,
    show_default=True,
    help="As for serve; only its tokenizer is needed.",
)
_bench_json = click.option("--json", "as_json", is_flag=True, help="Print JSON in place of tables.")
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
@_bench_model
@_bench_json
def endings(tries: int, only: tuple[str, ...], model: str, as_json: bool) -> None:
    """Measure how long it takes from what ends requests to those who must hear of it.

    A client that leaves until the engine has the ABORT; an engine that is killed until its last client has
    been told, or stopped until /health says so; a front end that is killed until its engine is gone.

    \b
    Example:
      trioleg bench endings --tries 5 --only kill-engine --only stop-engine
    """
    from ..bench.endings import measure_endings

    _show(_run_bench(model, measure_endings, tries, only, _tell), as_json=as_json)


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
@_bench_model
@_bench_json
def churn(model: str, as_json: bool, **settings: Any) -> None:
    """Let clients come and leave at random points, kill engines meanwhile, and see that nothing is left.

    Prints how the requests ended and what memory, descriptors and states the server has then. Exit code 1
    if a request ended in a way that it must not, or if something is left.

    \b
    Example:
      trioleg bench churn --requests 2000 --kills 1
    """
    import msgspec

    from ..bench.churn import Churn, run_churn, show_churn

    asked = Churn(**settings)
    report = _run_bench(model, run_churn, asked, _tell)
    if as_json:
        click.echo(msgspec.json.encode(report.summary()))
    else:
        show_churn(report, console())
    if faults := report.faults(asked):
        raise TriolegError("; ".join(faults))


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
@_bench_model
@_bench_json
def load(model: str, as_json: bool, **settings: Any) -> None:
    """Measure /health, the streams' evenness and the wait of small prompts, without and with a big prompt.

    Each big prompt is followed by as long a time without one, on the same server; the streams' clients are a process
    of their own.

    \b
    Example:
      trioleg bench load --streams 100 --prompts 2
    """
    from ..bench.load import Load, run_load

    _show(_run_bench(model, run_load, Load(**settings), _tell), as_json=as_json)


def _show(measured: list[Measurement], *, as_json: bool) -> None:
    import msgspec

    from ..bench.measurement import show_measurements

    if as_json:
        click.echo(msgspec.json.encode([one.summary() for one in measured]))
    else:
        show_measurements(measured, console())


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
@_bench_model
@_bench_json
def stalled(model: str, as_json: bool, **settings: Any) -> None:
    """Let clients ask for streams that they never read, and see what that takes, and that nobody else notices.

    First with a write bound that is out of reach, then with a short one. Exit code 1 if a reader missed a token, if
    SIGTERM took longer than it may, or if a connection did not end in order.

    \b
    Example:
      trioleg bench stalled --stalled 50 --time-limit 10
    """
    import msgspec

    from ..bench.stalled import run_stalled
    from ..bench.stalled_report import Stalled, show_stalled

    asked = Stalled(**settings)
    let_be, bound = _run_bench(model, run_stalled, asked, _tell)
    if as_json:
        click.echo(msgspec.json.encode({"let_be": let_be, "bound": bound}))
    else:
        show_stalled(asked, let_be, bound, console())
    if faults := [*let_be.faults(asked), *bound.faults()]:
        raise TriolegError("; ".join(faults))


def _run_bench(model: str, measure: Callable[..., Any], *arguments: Any) -> Any:
    """What ``measure`` returns. SIGTERM is as good as Ctrl-C: every program ends, then this one does."""
    import trio

    make_ready(model, weights=False)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        return trio.run(measure, model, *arguments)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _tell(line: str) -> None:
    click.echo(line, err=True)
