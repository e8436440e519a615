"""``trioleg bench engine``: our engine and vLLM's on the same model, asked the same by the same head.

Both run for as long as the bench does, and answer in turns of a few seconds, while the other one sleeps; who is
first alternates from run to run. Before the first run every question is asked once, so that nothing is measured that
happens only once. Prompts are random token ids. Those that are read are new in every run. Those of the streams are
the same, and their keys and values still in both caches: to read 32 long prompts takes ten times as long as what is
measured of their answers.
"""

from __future__ import annotations

import json
import operator
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

from ..model_store import resolve
from .engine_head import EngineHead
from .engine_subjects import VLLM, EngineBench, Subject, machine_cpu_seconds, open_subjects
from .machine import Machine, read_machine
from .measurement import about_minutes
from .report import OURS, Chart, Report, Series
from .vllm_python import read_vllm_version

__all__ = ["run_engine_bench"]

# No slower than vLLM's, and no larger.
_GOAL = 1.0
# Prompts that are read one after the other, of whose times the median is taken.
_TRIES = 3
# The run before the first: with prompts of its own, and few steps.
_WARM_UP = -1
_WARM_STEPS = 4

# The figure, and the first token of each request.
Outcome: TypeAlias = tuple[float, list[int]]


@dataclass(slots=True)
class _Case:
    """``ask`` a head: in which run, for how many steps. By subject: ``first``, the first tokens of all that was asked;
    ``busy``, how many processors the engine used, turn by turn. ``others``: what else there is on the machine."""

    series: Series
    ask: Callable[[EngineHead, int, int], Awaitable[Outcome]]
    first: dict[str, list[int]] = field(default_factory=dict)
    busy: dict[str, list[float]] = field(default_factory=dict)
    others: list[float] = field(default_factory=list)

    async def measure(self, subject: Subject, run: int, steps: int) -> None:
        started, whole, own = time.monotonic(), machine_cpu_seconds(), subject.cpu_seconds()
        figure, first = await subject.measure(lambda head: self.ask(head, run, steps))
        own = subject.cpu_seconds() - own
        whole = machine_cpu_seconds() - whole
        seconds = time.monotonic() - started
        self.series.note(subject.name, figure)
        self.first.setdefault(subject.name, []).extend(first)
        self.busy.setdefault(subject.name, []).append(own / seconds)
        self.others.append(max(0.0, whole - own) / seconds)


async def run_engine_bench(model: str, asked: EngineBench, tell: Callable[[str], None]) -> Report:
    """Start the engines, measure, and end them; ``tell`` gets a line now and then.

    Raises ``TriolegError`` for an engine that does not start, or does not do what it is asked for.
    """
    if asked.vllm_python is not None:
        await read_vllm_version(asked.vllm_python)
    directory = resolve(model)
    words = _vocab_size(directory)
    tell("starting the engines; one that compiles takes minutes for a new model")
    async with open_subjects(directory, asked) as subjects:
        tell("warming up: every prompt of the streams is read once")
        await _run(subjects, _cases(asked, words), _WARM_UP, min(asked.steps, _WARM_STEPS))
        cases = _cases(asked, words)
        for run in range(asked.runs):
            tell(f"run {run + 1} of {asked.runs}")
            started = time.monotonic()
            await _run(subjects, cases, run, asked.steps)
            # Nobody can tell before: that is what is measured.
            if (left := asked.runs - run - 1) and run == 0:
                tell(f"for the rest, {about_minutes(left * (time.monotonic() - started))}")
        memory = _series(asked, "peak memory of its processes", "MB", less_is_better=True)
        for subject in subjects:
            memory.note(subject.name, subject.peak_mb())
        machine = _machine(subjects)
    series = [*(case.series for case in cases), memory]
    settings = asdict(asked) | {"model": Path(model).name, "vllm_python": None}
    return Report("trioleg bench engine", settings, machine, series, list(_notes(asked, cases)))


async def _run(subjects: Sequence[Subject], cases: list[_Case], run: int, steps: int) -> None:
    turns = subjects if run % 2 == 0 else subjects[::-1]
    for case in cases:
        for subject in turns:
            for one in subjects:
                await one.quiet_down()
            await case.measure(subject, run, steps)


def _cases(asked: EngineBench, words: int) -> list[_Case]:
    tokens = asked.prompt_tokens
    first = _series(asked, f"time to first token, {tokens} tokens", "ms", less_is_better=True)
    read = _series(asked, f"prefill, {asked.prompts} prompts of {tokens} tokens", "tokens/s")
    cases = [
        _Case(first, partial(_first_token, asked, words)),
        _Case(read, partial(_prefill, asked, words)),
    ]
    for context in asked.contexts:
        chart = Chart(
            f"decode-{context}", f"Decoding behind prompts of {context} tokens", "streams"
        )
        for streams in asked.streams:
            what = f"decode, {streams} × {context}"
            series = _series(asked, what, "tokens/s", chart=chart, at=streams)
            prompts = _prompts("streams", words, streams, context)
            cases.append(_Case(series, partial(_decode, prompts)))
    return cases


def _series(
    asked: EngineBench,
    what: str,
    unit: str,
    *,
    less_is_better: bool = False,
    chart: Chart | None = None,
    at: float | None = None,
) -> Series:
    against = VLLM if asked.vllm_python is not None else None
    goal = None if against is None else _GOAL
    return Series(what, unit, goal, against, less_is_better, chart=chart, at=at)


async def _first_token(
    asked: EngineBench, words: int, head: EngineHead, run: int, _steps: int
) -> Outcome:
    prompts = _prompts(f"first, run {run}", words, _TRIES, asked.prompt_tokens)
    answers = [await head.prefill([prompt]) for prompt in prompts]
    seconds = statistics.median(one.seconds for one in answers)
    return 1000 * seconds, [token for one in answers for token in one.first]


async def _prefill(
    asked: EngineBench, words: int, head: EngineHead, run: int, _steps: int
) -> Outcome:
    answer = await head.prefill(
        _prompts(f"prefill, run {run}", words, asked.prompts, asked.prompt_tokens)
    )
    return answer.rate, answer.first


async def _decode(prompts: list[list[int]], head: EngineHead, _run: int, steps: int) -> Outcome:
    answer = await head.decode(prompts, steps)
    return answer.rate, answer.first


def _prompts(seed: str, words: int, number: int, tokens: int) -> list[list[int]]:
    """The same ones for the same ``seed``; a shorter one is the beginning of a longer one."""
    sources = [random.Random(f"{seed}, {index}") for index in range(number)]
    return [source.choices(range(words), k=tokens) for source in sources]


def _vocab_size(directory: Path) -> int:
    size: int = json.loads((directory / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    return size


def _machine(subjects: Sequence[Subject]) -> Machine:
    theirs = {one.name: one.engine.ready.vllm_version for one in subjects if one.name == VLLM}
    return read_machine(("trio", "pyzmq", "msgspec", "torch"), theirs)


def _notes(asked: EngineBench, cases: Sequence[_Case]) -> Iterator[str]:
    for name in cases[0].first:
        busy = statistics.median(figure for case in cases for figure in case.busy[name])
        yield f"{name} kept {busy:.2f} processors busy; its model may use {asked.threads}."
    others = [share for case in cases for share in case.others]
    yield (
        f"All else on this machine kept {statistics.median(others):.2f} processors busy meanwhile, "
        f"at most {max(others):.2f}."
    )
    if asked.vllm_python is not None:
        ours, theirs = (
            [token for case in cases for token in case.first[name]] for name in (OURS, VLLM)
        )
        same = sum(map(operator.eq, ours, theirs))
        yield f"Both answer {same} of {len(ours)} requests with the same first token."
