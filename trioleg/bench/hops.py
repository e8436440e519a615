"""``trioleg bench hops``: microseconds a token of each hop of the leg, their sum, and the same leg in one go.

What a hop is, and how it is taken alone, is in ``hop_parts.py``; the whole is in ``hop_leg.py``. Both are on real
objects, sockets, threads and processes, and both count processor time, which other programs on the machine disturb
least. Each round measures every batch, hops first, then the whole; so a round has the same weather, and the sum is
compared with the whole of its own round. The sum may come out above the whole, too: a hop that is alone has cold
or warm caches that it does not have in company.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from .. import model_store
from ..runtime.unwrap import unwrapped
from ..tokenizer import Tokenizer
from .hop_leg import Leg, Steps, open_leg
from .hop_parts import ASIDE, HOPS, Work, measure_hops
from .machine import read_machine
from .measurement import about_minutes
from .processes import allow_open_files
from .report import OURS, Chart, Report, Series

__all__ = ["TEXT", "Hops", "load_tokenizer", "run_hops", "steps_of", "work_of"]

# What the streams say: English, numbers, code, and a few characters that take several tokens.
TEXT = (
    "The return leg begins where a token has been sampled and ends where a client reads it. On the way it is "
    "packed, sent, unpacked, turned into text, merged with what is unread, framed and written; each of these is "
    "cheap, and there are 64 × 50 = 3,200 of them every second.\n\n"
    "```python\nasync with await open_connection(host, port=8000) as stream:\n    async for line in lines_of(stream):\n"
    "        print(line.removeprefix('data: '), end='', flush=True)\n```\n\n"
    "Naïve façades, 東京 and 🙂 are text like any other, though one character of theirs takes several tokens.\n"
)

_PEER = "whole"
_UNIT = "µs a token"
_HOPS_CHART = Chart("hops", "Processor time of each hop", "tokens a step", stacked=True)
# A step for a single token costs ten times as much a token: beside it the others could not be read.
_ALONE_CHART = Chart(
    "hops-of-one",
    "Processor time of each hop, of a token that comes alone",
    "tokens a step",
    stacked=True,
)
_SUM_CHART = Chart(
    "sum",
    "Processor time of all hops, beside that of the whole leg",
    "tokens a step",
    names=((OURS, "sum of the hops"), (_PEER, "the whole")),
)
_ASIDE_CHART = Chart(
    "aside", "Processor time of hops that only a slow client needs", "tokens a step"
)

# A step of few tokens comes so soon behind the one before; of many, when the front end is surely through.
_LEAST_INTERVAL_S = 0.002
_INTERVAL_A_TOKEN_S = 120e-6
# A step alone costs so much that few of them say enough, and many take long.
_LEAST_STEPS = 10
# All steps go by so often in a round: those without another thread, sending, receiving, the whole.
_STRETCHES = 4
_MOST_STEPS = 150


@dataclass(frozen=True, slots=True)
class Hops:
    """What to measure: ``rounds`` of about ``tokens`` tokens for each of ``batches``, the tokens of a step."""

    batches: tuple[int, ...]
    rounds: int = 5
    tokens: int = 3000


async def run_hops(model: str, hops: Hops, progress: Callable[[str], None]) -> Report:
    """Open the leg, measure, end it. ``progress`` is told now and then.

    Raises ``TriolegError`` if something of the leg does not start, or a stream ended.
    """
    allow_open_files(max(hops.batches), f"--batch is {max(hops.batches)}")
    tokenizer = load_tokenizer(model)
    figures = _Figures(hops)
    stretch_s = sum(steps_of(batch, hops.tokens).seconds for batch in hops.batches)
    progress(about_minutes(hops.rounds * _STRETCHES * stretch_s))
    with unwrapped():
        async with open_leg(model, max(hops.batches), tokenizer.encode(TEXT)[0]) as leg:
            # The first time, everything is slow.
            for batch in hops.batches:
                await figures.measure(
                    leg, work_of(tokenizer, batch, batch * _LEAST_STEPS), keep=False
                )
            for number in range(1, hops.rounds + 1):
                for batch in hops.batches:
                    await figures.measure(leg, work_of(tokenizer, batch, hops.tokens))
                progress(f"round {number} of {hops.rounds}")
    return figures.report()


def load_tokenizer(model: str) -> Tokenizer:
    """The model's. Raises ``ModelStoreError``."""
    return Tokenizer.from_directory(model_store.resolve(model, weights=False))


def work_of(
    tokenizer: Tokenizer, batch: int, tokens: int, *, most_steps: int = _MOST_STEPS
) -> Work:
    """About ``tokens`` tokens, ``batch`` a step, in at most so many steps."""
    steps = steps_of(batch, tokens, most_steps=most_steps)
    return Work(tokenizer, tokenizer.encode(TEXT, add_special_tokens=False), batch, steps)


def steps_of(batch: int, tokens: int, *, most_steps: int = _MOST_STEPS) -> Steps:
    """The steps of such work."""
    count = min(max(tokens // batch, _LEAST_STEPS), most_steps)
    return Steps(count, max(_LEAST_INTERVAL_S, batch * _INTERVAL_A_TOKEN_S))


class _Figures:
    """The report's series, which fill up."""

    def __init__(self, hops: Hops) -> None:
        self._hops = hops
        self._series: dict[tuple[str, int], Series] = {}
        self._tokens = self._merged = 0

    async def measure(self, leg: Leg, work: Work, *, keep: bool = True) -> None:
        """Every hop and the whole once. What is not to be kept was for warming up."""
        took = await measure_hops(work, leg.bodies[: work.batch])
        merged = leg.num_merged
        whole = await leg.cpu(work.token_ids, work.steps.interval)
        if not keep:
            return
        self._tokens += work.num_tokens
        self._merged += leg.num_merged - merged
        chart = _HOPS_CHART if work.batch > 1 else _ALONE_CHART
        for hop in HOPS:
            self._at(hop, work.batch, chart, layer=hop).note(OURS, took[hop])
        in_all = _a_token(whole.threads, work)
        self._at("the whole", work.batch, chart).note(OURS, in_all)
        engine = self._at("of it the engine's end", work.batch, _SUM_CHART, layer="engine's end")
        engine.note(OURS, _a_token(whole.engine, work))
        sums = self._at("sum of the hops", work.batch, _SUM_CHART, against=_PEER)
        sums.note(OURS, sum(took[hop] for hop in HOPS))
        sums.note(_PEER, in_all)
        for hop in ASIDE:
            self._at(f"aside: {hop}", work.batch, _ASIDE_CHART, layer=hop).note(OURS, took[hop])
        others = self._at("ZeroMQ's threads", work.batch, _SUM_CHART, layer="ZeroMQ's threads")
        others.note(OURS, _a_token(whole.others, work))

    def _at(
        self, what: str, batch: int, chart: Chart, *, layer: str = "", against: str | None = None
    ) -> Series:
        series = Series(
            f"{what}, {batch} a step", _UNIT, against=against, chart=chart, at=batch, layer=layer
        )
        return self._series.setdefault((what, batch), series)

    def report(self) -> Report:
        hops = self._hops
        return Report(
            f"trioleg bench hops: {_UNIT} of processor time",
            asdict(hops),
            read_machine(),
            [one for batch in hops.batches for (_, at), one in self._series.items() if at == batch],
            [
                "The whole: the threads of front end and engine's end, one step behind the other.",
                f"In the whole, {self._merged} of {self._tokens} tokens met an unread one.",
            ],
        )


def _a_token(nanoseconds: int, work: Work) -> float:
    return nanoseconds / 1000 / work.num_tokens
