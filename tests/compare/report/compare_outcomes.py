"""A made-up study, for what reads and shows one."""

from __future__ import annotations

from trioleg.bench.machine import Machine
from trioleg.compare.outcome import LEAK, Outcome
from trioleg.compare.source_counts import Counts, SourceCount
from trioleg.compare.study import FailedRun, Question, Recording, Settings, Study

MACHINE = Machine("A processor", 2, 7.8, "Linux 6.1", "3.11.2", {"trio": "0.35.0"})


def outcomes(leg: str, *told: float | None, scenario: str = "leaves", **more) -> list[Outcome]:
    """A run for each time that the engine was told after; None: it never was."""
    return [
        Outcome(
            scenario,
            leg,
            run,
            client="nothing",
            told_engine_s=seconds,
            has_told_engine=seconds is not None,
            **more,
        )
        for run, seconds in enumerate(told, 1)
    ]


def made_study() -> Study:
    """Three legs and two scenarios: trioleg is slower in one, and one leg leaks in two of three runs."""
    study = Study(
        Settings("smollm2-135m", ["trioleg", "asyncio", "vllm"], 3, 7),
        MACHINE,
        [
            Question("leaves", "Endings", "Who hears of a client that leaves?"),
            Question("dies", "Engines", "What does a dead engine do?"),
        ],
    )
    study.outcomes += outcomes("trioleg", 0.004, 0.006, 0.005)
    leaking = outcomes("asyncio", 0.002, None, 0.001, remarks=["One remark."])
    for one in leaking[:2]:
        one.find(LEAK, "A task is left.")
        one.leaked["tasks"] = one.run
    study.outcomes += leaking
    study.outcomes.append(
        Outcome("leaves", "vllm", 1, is_absent=True, remarks=["It has no | such thing."])
    )
    for run, error in ((1, "ValueError: a"), (2, "")):
        dies = Outcome("dies", "trioleg", run, client="503", error=error, exit_code=1, exit_s=1.5)
        dies.figures["tokens a second"] = 10.0
        study.outcomes.append(dies)
    asyncio = Outcome("dies", "asyncio", 1, client="500", noticed_s={"health": 0.75})
    asyncio.figures["tokens a second"] = 20.0
    study.outcomes.append(asyncio)
    study.failed.append(FailedRun("dies", "trioleg", 3, "TriolegError: it was not ready"))
    study.recordings.append(Recording("leaves", "trioleg", 100.0))
    study.sources.append(SourceCount("trioleg", "a.py", "all", [], Counts(10, 1, 0, 0, 2)))
    study.sources.append(SourceCount("vllm", "b.py", "part", ["B"], Counts(1200, 3, 2, 1, 4, 5, 6)))
    return study
