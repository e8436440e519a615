"""The group ``trioleg bench``, and what its commands share: options, the run, the output."""

from __future__ import annotations

import math
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ... import model_store
from ..group import commands
from ..models import make_ready
from ..options import INTERRUPTED, console

if TYPE_CHECKING:
    from ...bench.measurement import Measurement
    from ...bench.report import Report

__all__ = [
    "FiniteRange",
    "bench",
    "bench_json",
    "bench_model",
    "bench_out",
    "check_out",
    "run_bench",
    "show_measured",
    "show_reported",
    "tell",
]


@commands.group(short_help="Measure what endings and tokens cost.")
def bench() -> None:
    """Measure the way between engine and client, with real processes and sockets.

    \b
    Example:
      trioleg bench endings --only disconnect
    """


class FiniteRange(click.FloatRange):
    """A ``FloatRange`` that has an end, and in which nan is not."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return number


bench_model = click.option(
    "--model",
    default=model_store.DEFAULT_MODEL,
    show_default=True,
    help="As for serve; only its tokenizer is needed.",
)
bench_json = click.option("--json", "as_json", is_flag=True, help="Print JSON in place of tables.")


def check_out(
    _context: click.Context, _option: click.Parameter, out: Path | None, *, extra: str = "bench"
) -> Path | None:
    """Before minutes of measuring, rather than behind them. ``extra``: of trioleg, which brings matplotlib."""
    if out is None:
        return None
    from ...bench.plots import require_matplotlib

    require_matplotlib(extra)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            return out
    except OSError as error:
        raise click.BadParameter(
            f"{str(out)!r} cannot be written ({error.strerror}); allowed: a folder that can, or can be made"
        ) from error


bench_out = click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    callback=check_out,
    help="Also write report.json and plots (SVG) there, in place of those of an earlier report; needs trioleg[bench].",
)


def run_bench(
    model: str, measure: Callable[..., Any], *arguments: Any, weights: bool = False
) -> Any:
    """What ``measure`` returns. SIGTERM is as good as Ctrl-C: every program ends, then this one does. ``weights``:
    a real engine needs them."""
    import trio

    from ...runtime.unwrap import unwrapped

    make_ready(model, weights=weights)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        # The programs under test are owned by nurseries, in whose groups Ctrl-C leaves.
        with unwrapped():
            return trio.run(measure, model, *arguments)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def show_measured(measured: Sequence[Measurement], *, as_json: bool) -> None:
    import msgspec

    from ...bench.measurement import show_measurements

    if as_json:
        click.echo(msgspec.json.encode([one.summary() for one in measured]))
    else:
        show_measurements(measured, console())


def show_reported(report: Report, *, as_json: bool, out: Path | None) -> None:
    """Print it, and write it into ``out``, if there is one."""
    import msgspec

    from ...bench.report import show_report, write_report

    if as_json:
        click.echo(msgspec.json.encode(report.summary()))
    else:
        show_report(report, console())
    if out is not None:
        write_report(report, out)


def tell(line: str) -> None:
    click.echo(line, err=True)
