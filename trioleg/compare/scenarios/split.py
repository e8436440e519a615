"""What it costs to read a socket in one task and to process in another: see ``trioleg/compare/split/``.

Each leg stands for its event loop here, and no server is started. The figures have the batch in their names, since that
is what the answer depends on; a ratio above 1 says that two tasks cost, or take, more than one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from ...bench.processes import Program, running
from ...errors import TriolegError
from ..legs import ASYNCIO, TRIOLEG
from ..outcome import Outcome
from ..scenario import Scene, scenario
from ..split.measure import BATCHES, ONE, TWO

__all__ = ["play"]

_LOOPS = {TRIOLEG: "trio", ASYNCIO: "asyncio"}
_TOKENS = 30_000
# Of a ratio: what two runs of the same differ by on a machine that is used otherwise, too.
_ALIKE = 0.05
_LINES_KEPT = 100


@scenario(
    "split-of-socket-and-handler",
    "cost",
    asks="What does it buy to read the socket in a task of its own, and at which batch size?",
    legs=(TRIOLEG, ASYNCIO),
    seconds=35.0,
)
async def play(scene: Scene) -> None:
    """Both shapes on the leg's event loop, at every batch size."""
    case = scene.case()
    arguments = ["-m", "trioleg.compare.split.measure", str(case.directory)]
    arguments += [",".join(map(str, case.token_ids)), "--loop", _LOOPS[scene.leg]]
    arguments += ["--tokens", str(_TOKENS), "--seed", str(scene.random.random())]
    async with running(*arguments, lines_kept=_LINES_KEPT) as program:
        code = await program.wait_code()
        if code != 0:
            raise TriolegError(f"the measurement ended with {code}; it said: {program.last_words}")
        note(scene.outcome, _lines(program))


def _lines(program: Program) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in program.lines if line.startswith("{")]


def note(outcome: Outcome, lines: Iterable[dict[str, Any]]) -> None:
    """Figures and remarks of what ``split.measure`` has printed."""
    found = {(one["batch"], one["paced"], one["shape"]): one for one in lines}
    batches = [batch for batch in BATCHES if (batch, True, ONE) in found]
    for batch in batches:
        for shape in (ONE, TWO):
            place = f"{_outputs(batch)}, {shape}"
            outcome.figures |= _costs(found[batch, True, shape], found[batch, False, shape], place)
        outcome.figures |= _overlaps(found[batch, False, TWO], f"{_outputs(batch)}, {TWO}")
    for what, name, is_paced in _COMPARED:
        ratios = {
            batch: found[batch, is_paced, TWO][name] / found[batch, is_paced, ONE][name]
            for batch in batches
        }
        for batch, ratio in ratios.items():
            outcome.figures[f"two tasks / one, {what}, {_outputs(batch)}"] = ratio
        outcome.remarks.append(f"{what}, two tasks / one: {verdict(ratios)}")


# What is better if it is less: its field, and whether it is that of the paced measurement.
_COMPARED = (
    ("processor time, paced", "cpu_us", True),
    ("processor time, saturated", "cpu_us", False),
    ("median time to put, paced", "p50_ms", True),
)


def _costs(paced: dict[str, Any], full: dict[str, Any], place: str) -> dict[str, float]:
    return {
        f"µs/token, {place}": paced["cpu_us"],
        f"p50 ms to put, {place}": paced["p50_ms"],
        f"p99 ms to put, {place}": paced["p99_ms"],
        f"µs/token saturated, {place}": full["cpu_us"],
        f"messages/s saturated, {place}": full["messages_s"],
    }


def _overlaps(full: dict[str, Any], place: str) -> dict[str, float]:
    return {
        f"share with a receive posted while processing, {place}": full["posted"],
        f"share with a message taken while processing, {place}": full["overlapped"],
        f"messages queued at most, {place}": full["longest_queue"],
    }


def _outputs(batch: int) -> str:
    return "1 output" if batch == 1 else f"{batch} outputs"


def verdict(ratios: dict[int, float]) -> str:
    """For which batches which is better, in one clause. ``ratios``: two tasks to one, of what is better if less."""
    kinds: dict[str, list[str]] = {}
    for batch, ratio in ratios.items():
        kind = f"within {_ALIKE:.0%} at"
        if abs(ratio - 1) > _ALIKE:
            kind = "one task less at" if ratio > 1 else "two tasks less at"
        kinds.setdefault(kind, []).append(f"{batch} ({ratio:.2f})")
    return "; ".join(f"{kind} {', '.join(places)}" for kind, places in kinds.items() if places)
