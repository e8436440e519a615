"""What the legs cost where nothing goes wrong: processor, time, wake-ups, memory, start.

Each is measured as ``trioleg bench leg`` does it, by the same functions. A figure's name begins with its unit, and of
each less is better; "Hz" are steps of the engine a second. They are compared within a study alone: another machine, or
the same one on another day, has others.

Tokens that came in one frame since the leg was busy are one token here, which flatters it: "% merged" says how many.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import trio

from ...bench.client import CHAT, ask, chat_body
from ...bench.leg_control import Remote, open_remote
from ...bench.leg_figures import of_streams
from ...bench.leg_streams import Run
from ...bench.processes import allow_open_files
from ..legs import ASYNCIO, TASKGROUP, TRIOLEG, VLLM
from ..measured import UVLOOP, Measured, measuring
from ..outcome import Outcome
from ..scenario import Scene, scenario

__all__ = ["measure_first_tokens", "measure_memory", "measure_processor", "measure_wakeups"]

_GROUP = "cost"

_STREAMS = (1, 16, 64, 256)
# Steps of the engine a second: a big model's, and a small one's.
_RATES = (20.0, 50.0)
# Many times what a garbage collection takes, and the server's once-a-second work is in it.
_SECONDS = 1.5
_FEW_STREAMS = (64, 256)

_LOADED_STREAMS, _LOADED_RATE = 64, 50.0
_FIRST_TOKENS = 30
_SINGLE_STEPS = 8
# So far apart that no step meets another.
_SINGLE_RATE = 100.0

_COUNTED_STREAMS = (1, 64, 256)
_COUNTED_STEPS, _COUNTED_RATE = 40, 50.0
# Tasks whose clients have left end within milliseconds; none that ends for so long, and those that are left stay.
_SETTLED_S = 0.3

_IDLE_STREAMS = 1000

# What trioleg's program takes: every frame goes by its stream's own task.
_BY_TASK = {"direct": "off"}


@scenario(
    "cost-processor",
    _GROUP,
    asks="How much of the processor does a token take, and how evenly do tokens come?",
    seconds=32,
)
async def _processor(scene: Scene) -> None:
    await measure_processor(scene, _STREAMS, _RATES, _SECONDS)
    if scene.leg == VLLM:
        scene.outcome.remarks.append("as it is served: on uvloop")


@scenario(
    "cost-processor-best-loop",
    _GROUP,
    asks="What does a token take with the fastest loop that the leg can have?",
    seconds=16,
)
async def _best_loop(scene: Scene) -> None:
    options = UVLOOP if scene.leg in (ASYNCIO, TASKGROUP) else {}
    await measure_processor(scene, _FEW_STREAMS, _RATES, _SECONDS, **options)
    scene.outcome.remarks.append(
        "Trio's own loop; there is no other" if scene.leg == TRIOLEG else "uvloop"
    )


@scenario(
    "cost-processor-by-task",
    _GROUP,
    asks="What does a token take where every frame goes by its stream's own task, as the twins' do?",
    seconds=16,
)
async def _by_task(scene: Scene) -> None:
    options = _BY_TASK if scene.leg == TRIOLEG else {}
    await measure_processor(scene, _FEW_STREAMS, _RATES, _SECONDS, **options)
    if scene.leg == TRIOLEG:
        scene.outcome.remarks.append("without its direct way, which is none of Trio's doing")


async def measure_processor(
    scene: Scene,
    streams: Sequence[int],
    rates: Sequence[float],
    seconds: float,
    **options: str,
) -> None:
    """Of the server's process, user and system, for each of ``streams`` with each of ``rates``, for ``seconds``."""
    figures = scene.outcome.figures
    async with measuring(scene.leg, scene.case(options=options)) as measured:
        for count in streams:
            run = measured.run()
            await run.open(count)
            for rate in rates:
                window = await run.window(rate, seconds)
                at = f"{of_streams(count)} at {rate:g} Hz"
                figures[f"µs/token, {at}"] = window.cost_us
                figures[f"ms gap p50 beyond the step, {at}"] = window.gap_p50 * 1e3
                figures[f"ms gap p99 beyond the step, {at}"] = window.gap_p99 * 1e3
            ended = await run.finish()
            figures[f"% merged, {of_streams(count)}"] = 100 * (1 - ended.frames_of_tokens)


@scenario(
    "cost-latency",
    _GROUP,
    asks="How long until a new request's first token beside others, and from a step to its last frame?",
    seconds=25,
)
async def _latency(scene: Scene) -> None:
    async with measuring(scene.leg, scene.case()) as measured:
        run = measured.run()
        await run.open(_LOADED_STREAMS)
        # What is loaded for a first request was; what a first step loads is not yet.
        await run.burst(_SINGLE_RATE, 1)
        steps = [(await run.burst(_SINGLE_RATE, 1)).seconds for _ in range(_SINGLE_STEPS)]
        scene.outcome.figures[f"ms step to last frame p50, {of_streams(_LOADED_STREAMS)}"] = (
            statistics.median(steps) * 1e3
        )
        subject = measured.subject
        await subject.engine.tell("pace", rate=_LOADED_RATE)
        await measure_first_tokens(scene.outcome, subject.port, _LOADED_STREAMS, _FIRST_TOKENS)


async def measure_first_tokens(outcome: Outcome, port: int, streams: int, count: int) -> None:
    """So many requests one after the other, beside ``streams`` that run: from the connect to the first token. Each
    leaves when it has that."""
    waits = [await _first_token(port) for _ in range(count)]
    beside = f"beside {of_streams(streams)}"
    outcome.figures[f"ms first token p50, {beside}"] = statistics.median(waits) * 1e3
    outcome.figures[f"ms first token worst of {count}, {beside}"] = max(waits) * 1e3


async def _first_token(port: int) -> float:
    started = time.monotonic()
    async with ask(port, CHAT, chat_body(stream=True, max_tokens=_FIRST_TOKENS)) as exchange:
        # The first frame tells the role.
        while exchange.body.count(b"data: ") < 2 and await exchange.receive():
            pass
        return time.monotonic() - started


@scenario(
    "cost-wakeups",
    _GROUP,
    asks="How often is a task resumed for a token, and how many tasks does a stream keep?",
    seconds=12,
)
async def _wakeups(scene: Scene) -> None:
    await measure_wakeups(scene, _COUNTED_STREAMS, _COUNTED_STEPS)
    if scene.leg == TRIOLEG:
        await measure_wakeups(scene, _COUNTED_STREAMS, _COUNTED_STEPS, ", by task", **_BY_TASK)
        scene.outcome.remarks.append(
            "as it is served its link writes most frames itself; by task: without that direct way"
        )


async def measure_wakeups(
    scene: Scene, streams: Sequence[int], steps: int, how: str = "", **options: str
) -> None:
    """In ``steps`` steps of the engine, for each of ``streams``. Counting has its price, so nothing else is measured."""
    figures = scene.outcome.figures
    # Where the loop is uvloop, steps are counted with lanes alone; nobody is to look at these.
    lanes = Path(os.devnull) if scene.leg == VLLM else None
    case = scene.case(options=options, lanes=lanes)
    async with measuring(scene.leg, case) as measured, open_remote(measured.probe_at) as probe:
        await probe.tell("steps")
        await _warm_up(measured)
        for count in streams:
            run = measured.run()
            before = await _settled_tasks(probe)
            await run.open(count)
            tasks = await _tasks(probe) - before
            figures[f"tasks/stream, {of_streams(count)}{how}"] = tasks / count
            resumed = await _wakeups_of(run, probe, steps)
            figures[f"wake-ups/token, {of_streams(count)}{how}"] = resumed / count
            await run.finish()


async def _warm_up(measured: Measured) -> None:
    """A first request starts what the others share: tasks, threads."""
    run = measured.run()
    await run.open(1)
    await run.finish()


async def _wakeups_of(run: Run, probe: Remote, steps: int) -> float:
    """For each step, of all streams together."""
    before = (await probe.tell("steps"))["steps"]
    await run.burst(_COUNTED_RATE, steps)
    resumed: int = (await probe.tell("steps"))["steps"] - before
    return resumed / steps


async def _settled_tasks(probe: Remote) -> int:
    """Once those of the streams before have gone."""
    before = -1
    while (now := await _tasks(probe)) != before:
        before = now
        await trio.sleep(_SETTLED_S)
    return now


async def _tasks(probe: Remote) -> int:
    tasks: int = (await probe.tell("census"))["tasks"]
    return tasks


@scenario(
    "cost-memory-and-start",
    _GROUP,
    asks="What does the server take until it is ready, and for a stream that is open and says nothing?",
    seconds=6,
)
async def _memory(scene: Scene) -> None:
    allow_open_files(_IDLE_STREAMS, f"{scene.outcome.scenario} opens {_IDLE_STREAMS}")
    await measure_memory(scene, _IDLE_STREAMS)


async def measure_memory(scene: Scene, streams: int) -> None:
    """Resident, of the server's process alone; the start is the engine's too."""
    figures = scene.outcome.figures
    async with measuring(scene.leg, scene.case()) as measured:
        run = measured.run()
        figures["s start to ready, with its engine"] = measured.subject.start_s
        figures["MB ready"] = run.memory_mb()
        # What a first request loads is no stream's.
        await run.open(1)
        before = run.memory_mb()
        await run.open(streams - 1)
        each = (run.memory_mb() - before) / (streams - 1)
        figures[f"KB/stream, {streams} idle"] = each * 1024
        await run.finish()
