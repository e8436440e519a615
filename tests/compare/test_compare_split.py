"""The experiment of the split, tiny: both shapes on both loops do all the work, and the words for what came of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from trioleg.compare.outcome import Outcome
from trioleg.compare.scenarios.split import note, verdict
from trioleg.compare.split.measure import LOOPS, ONE, TWO, load_of, measure
from trioleg.compare.split.work import CHUNK_SIZE, Load, Work
from trioleg.compare.taskgroup_twin.mailbox import Mailbox
from trioleg.ipc.codec import OutputEncoder
from trioleg.messages import EngineCoreOutput, EngineCoreOutputs
from trioleg.tokenizer import Tokenizer

_IDS = [504, 1453, 28, 339, 5248]


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_directory(smollm2)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("shape", [ONE, TWO])
def test_a_shape_takes_in_all_that_is_sent(tokenizer, loop: str, shape: str) -> None:
    batch = CHUNK_SIZE + 2
    measured = measure(loop, shape, tokenizer, _IDS, Load(batch, messages=12, warm_up=2))
    assert measured.cpu_us > 0
    assert measured.messages_s > 0
    assert 0 < measured.p50_ms <= measured.p99_ms
    # With one task there is nobody else to receive.
    if shape == ONE:
        assert (measured.posted, measured.overlapped, measured.longest_queue) == (0, 0, 0)
    else:
        assert measured.posted > 0
        assert measured.longest_queue <= 14


def _frames(batch: int) -> list[bytes]:
    outputs = [EngineCoreOutput(f"0123456789ab-{number}", [504]) for number in range(batch)]
    buffer = bytearray()
    OutputEncoder().encode_into(EngineCoreOutputs(outputs=outputs, timestamp=1.0), buffer)
    return [bytes(buffer)]


def test_overlap_is_what_comes_between_two_slices(tokenizer) -> None:
    mailboxes: list[Mailbox] = []

    def make_sink() -> Mailbox:
        mailboxes.append(Mailbox(aggregate=True, max_bytes=2**20))
        return mailboxes[-1]

    load = Load(CHUNK_SIZE + 1, messages=2, warm_up=1)
    work = Work(tokenizer, _IDS, load, make_sink)
    frames = _frames(load.batch)
    assert list(work.process(work.decode(frames))) == [False, True]
    first, second = work.decode(frames), None
    work.posted()
    for is_last in work.process(first):
        if not is_last:
            second = work.decode(frames)
    assert second is not None
    assert not work.is_done
    list(work.process(second))
    assert work.is_done
    measured = work.measured()
    assert (measured.posted, measured.overlapped) == (0.5, 0.5)
    assert all(mailbox.take().outputs[0].token_ids == [504] * 3 for mailbox in mailboxes)


def test_loads_are_bounded() -> None:
    assert load_of(1, 30_000, is_paced=False) == Load(1, 2000)
    assert load_of(1024, 1000, is_paced=False).messages == 40
    paced = load_of(64, 30_000, is_paced=True)
    assert paced.period * paced.messages == pytest.approx(1.5)


def _line(batch: int, shape: str, cpu_us: float, *, paced: bool) -> dict:
    line = {"batch": batch, "paced": paced, "shape": shape, "cpu_us": cpu_us, "messages_s": 9.0}
    return {
        **line,
        "p50_ms": 1.0,
        "p99_ms": 2.0,
        "posted": 1.0,
        "overlapped": 0.25,
        "longest_queue": 7,
    }


def test_an_outcome_says_which_is_better_where() -> None:
    outcome = Outcome("split", "trioleg", 1)
    costs = {(1, ONE): 10.0, (1, TWO): 12.0, (64, ONE): 10.0, (64, TWO): 10.1}
    lines = [
        _line(batch, shape, cost, paced=paced)
        for (batch, shape), cost in costs.items()
        for paced in (True, False)
    ]
    note(outcome, lines)
    assert outcome.figures["µs/token, 1 output, two tasks"] == 12.0
    assert outcome.figures["messages/s saturated, 64 outputs, one task"] == 9.0
    assert (
        outcome.figures["share with a message taken while processing, 64 outputs, two tasks"]
        == 0.25
    )
    assert outcome.figures["two tasks / one, processor time, paced, 1 output"] == 1.2
    assert (
        "processor time, paced, two tasks / one: one task less at 1 (1.20); within 5% at 64 (1.01)"
        in outcome.remarks
    )


def test_two_tasks_may_be_better() -> None:
    assert verdict({16: 0.5}) == "two tasks less at 16 (0.50)"
