"""``trioleg bench engine``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from ... import model_store
from ...config import DTYPES
from .group import bench, bench_json, bench_out, run_bench, show_reported, tell

__all__ = ["engine"]

_CORES = len(os.sched_getaffinity(0))


@bench.command(short_help="Our engine beside vLLM's.")
@click.option(
    "--vllm-python",
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="An interpreter whose environment has vLLM; without it our engine alone is measured.",
)
@click.option(
    "--streams",
    multiple=True,
    type=click.IntRange(min=1),
    default=(1, 8, 32),
    show_default=True,
    help="Answers at once; may be given again.",
)
@click.option(
    "--contexts",
    multiple=True,
    type=click.IntRange(min=1),
    default=(128, 1500),
    show_default=True,
    metavar="TOKENS",
    help="Prompt of each answer; may be given again.",
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    metavar="TOKENS",
    help="Each prompt that is read for the sake of reading, alone and eight at once.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="Tokens of each answer that are measured.",
)
@click.option(
    "--runs",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="How often everything is measured, behind a first time that does not count.",
)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="float32",
    show_default=True,
    help="Number format of both engines.",
)
@click.option(
    "--threads",
    type=click.IntRange(1, _CORES),
    default=_CORES,
    show_default="all cores",
    help="Of each engine.",
)
@click.option("--enforce-eager", is_flag=True, help="Let vLLM not compile; with --vllm-python.")
@click.option(
    "--model",
    default=model_store.DEFAULT_MODEL,
    show_default=True,
    help="As for serve.",
)
@bench_json
@bench_out
def engine(model: str, as_json: bool, out: Path | None, **settings: Any) -> None:
    """Measure our engine on a CPU, and one of vLLM's beside it, on the same model, prompts and bounds.

    Prompts read, and tokens decoded, a second; time to the first token; memory. A head that does nothing else asks
    both the same over the same wire, in turns; figures are of the engines alone.

    \b
    Example:
      trioleg bench engine --vllm-python ~/vllm/bin/python --contexts 128
    """
    from ...bench.engine import run_engine_bench
    from ...bench.engine_subjects import EngineBench

    if settings["enforce_eager"] and settings["vllm_python"] is None:
        raise click.UsageError("--enforce-eager is for vLLM; without --vllm-python it does nothing")
    for name in ("streams", "contexts"):
        settings[name] = tuple(dict.fromkeys(settings[name]))
    asked = EngineBench(**settings)
    report = run_bench(model, run_engine_bench, asked, tell, weights=True)
    show_reported(report, as_json=as_json, out=out)
