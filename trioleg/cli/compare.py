"""``trioleg compare``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ..errors import InvalidRequestError, TriolegError
from .bench.group import bench_json, bench_model, check_out, run_bench, tell
from .group import commands
from .options import console

if TYPE_CHECKING:
    from ..compare.study import Study

__all__ = ["compare"]

# As compare/legs.py has them, which is loaded when something runs.
_LEGS = ("trioleg", "asyncio", "taskgroup", "vllm")
_VLLM = "vllm"
# What a study that was played before has settled.
_NOT_WITH_FROM = ("runs", "seed", "model", "vllm_python")


@commands.command(short_help="Two concurrency shapes, measured side by side.")
@click.option(
    "--only", multiple=True, metavar="SCENARIO", help="Only this; may be given again: see --list."
)
@click.option(
    "--legs",
    multiple=True,
    metavar="LEG[,LEG]",
    help=f"Who is compared, of {', '.join(_LEGS)}; may be given again. By default all, vllm only with --vllm-python.",
)
@click.option(
    "--runs",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Of each scenario against each leg.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the order, and of chance.")
@click.option("--vllm-python", metavar="PATH", help="An interpreter that has vLLM.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    callback=lambda context, option, out: check_out(context, option, out, extra="compare"),
    help="Also write study.json, results.md and timelines (SVG) there; needs trioleg[compare].",
)
@click.option(
    "--from",
    "sources_of",
    multiple=True,
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Show an earlier study.json; nothing is played. May be given again: of the same runs in two, the last count.",
)
@click.option("--details", is_flag=True, help="Print all that was seen, scenario by scenario.")
@click.option("--list", "is_list", is_flag=True, help="Name the scenarios; nothing is played.")
@click.option("--sources", is_flag=True, help="Only count what the legs' sources hold.")
@bench_model
@bench_json
def compare(
    sources_of: tuple[Path, ...],
    out: Path | None,
    details: bool,
    as_json: bool,
    is_list: bool,
    sources: bool,
    **settings: Any,
) -> None:
    """Play the same scenarios against trioleg, against the same return leg in two shapes of asyncio, and against
    vLLM's API server, and see what each does when something goes wrong.

    Exit code 1 if a run failed, which is a fault of the study, whatever the legs did.

    \b
    Example:
      trioleg compare --only client-leaves-in-mid-stream --legs trioleg,asyncio --details
    """
    _refuse_two(earlier=sources_of, list=is_list, sources=sources)
    if is_list:
        _list()
        return
    if sources_of:
        study = _load(sources_of, settings)
    elif sources:
        _count(settings, as_json=as_json)
        return
    else:
        study = _run(settings, out)
    # What took an hour is kept before it is shown: who reads the table may leave.
    if out is not None:
        _write(study, [one.parent for one in sources_of] or [out], out)
    _show(study, as_json=as_json, details=details)
    if study.failed:
        from ..compare.runner import failed_runs

        raise TriolegError(f"runs that failed: {'; '.join(failed_runs(study))}")


def _refuse_two(**instead: object) -> None:
    """Each of these is in place of a study that is played."""
    given = [
        f"--{name if name != 'earlier' else 'from'}" for name, value in instead.items() if value
    ]
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(given)} exclude each other")


def _list() -> None:
    for name, one in _scenarios().items():
        click.echo(f"{name}  ({one.group})\n    {one.asks}")


def _scenarios() -> dict[str, Any]:
    from ..compare import scenarios  # noqa: F401 - to import it is to know them
    from ..compare.scenario import SCENARIOS

    return SCENARIOS


def _load(sources_of: Sequence[Path], settings: dict[str, Any]) -> Study:
    context = click.get_current_context()
    for name in _NOT_WITH_FROM:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = name.replace("_", "-")
            raise click.UsageError(f"--{option} is for a study that is played; --from plays none")
    from ..compare.study import load, merge

    study = merge([load(one) for one in sources_of])
    only, legs = settings["only"], _split(settings["legs"])
    _check("only", only, [one.name for one in study.questions])
    _check("legs", legs, study.settings.legs)
    study.narrow(only, legs)
    return study


def _count(settings: dict[str, Any], *, as_json: bool) -> None:
    import msgspec
    import trio

    from ..compare.runner import count_legs
    from ..compare.table import show_sources

    counted = trio.run(count_legs, _legs(settings), settings["vllm_python"])
    if as_json:
        click.echo(msgspec.json.encode(counted))
    else:
        show_sources(counted, console())


def _run(settings: dict[str, Any], out: Path | None) -> Study:
    legs = _legs(settings)
    _check("only", settings["only"], list(_scenarios()))
    from ..compare.runner import AskedStudy, run_study

    asked = AskedStudy(
        legs=legs,
        only=settings["only"],
        runs=settings["runs"],
        seed=settings["seed"],
        vllm_python=settings["vllm_python"],
        folder=out,
    )
    study: Study = run_bench(settings["model"], run_study, asked, tell)
    return study


def _legs(settings: dict[str, Any]) -> tuple[str, ...]:
    """Those that are asked for. Raises ``InvalidRequestError`` for one that cannot be."""
    python = settings["vllm_python"]
    legs = _split(settings["legs"]) or tuple(leg for leg in _LEGS if leg != _VLLM or python)
    _check("legs", legs, _LEGS)
    if _VLLM in legs and python is None:
        raise InvalidRequestError(
            "--legs is vllm, but --vllm-python is not given; allowed: an interpreter that has vLLM",
            parameter="vllm_python",
        )
    if python is not None and _VLLM not in legs:
        raise click.UsageError("--vllm-python is for --legs vllm, which is not given")
    return legs


def _split(given: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for one in given for name in one.split(",")))


def _check(option: str, given: Sequence[str], allowed: Sequence[str]) -> None:
    for name in given:
        if name not in allowed:
            raise InvalidRequestError(
                f"--{option} is {name!r}; allowed: {', '.join(allowed)}", parameter=option
            )


def _show(study: Study, *, as_json: bool, details: bool) -> None:
    import msgspec

    from ..compare.table import show_study

    if as_json:
        click.echo(msgspec.json.encode(study))
    else:
        show_study(study, console(), details=details)


def _write(study: Study, beside: Sequence[Path], out: Path) -> None:
    from ..compare.markdown import to_markdown
    from ..compare.study import STUDY_FILE, write_json
    from ..compare.timeline_plot import write_timelines

    write_json(study, out / STUDY_FILE)
    for fault in write_timelines(study, beside, out):
        tell(fault)
    (out / "results.md").write_text(to_markdown(study), encoding="utf-8")
