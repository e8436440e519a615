"""Every ending in every phase, for every kind of reader, with one choice and with three.

Each cell of ``fault_matrix.FAULTS`` is played in virtual time, beside a request that has no part in it. What
each must hold: the frames' grammar, nothing of the text is lost, one count and one line of the log, the ABORT
that is due and no other, nothing left behind, and the next request gets what it should.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from ending_lines import EndingLines
from fault_cell import NEIGHBOUR_TOKENS, Cell, play_cell
from fault_matrix import (
    FAULTS,
    PHASES,
    Fault,
    document_tables,
    ending_rows,
    full_text,
    phase_rows,
)
from sse_grammar import Choice, read_answer, read_stream
from trio.testing import MockClock

from trioleg.errors import TriolegError
from trioleg.outputs import EndingKind, RequestOutput

# Nothing has been generated yet.
_EARLY = ("tokenizing", "queued", "prefill")
# Where it is not "stop".
_FINISHES = {EndingKind.LENGTH: "length", EndingKind.REPETITION: "repetition"}


def cells() -> Iterator[object]:
    for fault in FAULTS:
        for phase in PHASES:
            for mode in fault.modes:
                # generate() hands its answer over at once: nobody can be slow to read it.
                instant = mode == "generate" and phase == "answer not read yet"
                if fault.effect(phase) == "–" or fault.needs_connection or instant:
                    continue
                for n in (1, 3):
                    yield pytest.param(fault, phase, mode, n, id=f"{fault.name}-{phase}-{mode}-{n}")


@pytest.mark.parametrize(("fault", "phase", "mode", "n"), list(cells()))
async def test_cell(
    autojump_clock: MockClock,
    ending_lines: EndingLines,
    fault: Fault,
    phase: str,
    mode: str,
    n: int,
) -> None:
    cell = await play_cell(fault, phase, mode, n)
    lines = [line for line in ending_lines.lines if line[0].endswith("-1")]
    tokens = lines[0][2] if lines else 0
    effect = fault.effect(phase)
    if effect == "turned away":
        check_turned_away(cell)
    elif effect == "goes on":
        check_whole(cell, tokens)
    elif fault.error is None:
        check_left(cell)
    else:
        check_ended(cell, tokens - fault.unusable)
    check_counts(cell, [kind for _, kind, _ in lines])
    check_aborts(cell)
    check_others(cell)


def test_the_document_says_the_same() -> None:
    """Its tables are the rows that the cells have been held against."""
    endings, _, phases = document_tables()
    assert (endings, phases) == (ending_rows(), phase_rows())


# ---------------------------------------------------------------------------- the request


def choices_of(cell: Cell) -> dict[int, Choice]:
    """What the reader has got, whoever it is."""
    if cell.mode == "stream":
        assert (cell.answer.status, cell.answer.is_whole) == (200, True)
        return read_stream(cell.answer.body, cell.asked).choices
    if cell.mode == "plain":
        assert cell.answer.status == 200
        return read_answer(cell.answer.body, cell.asked).choices
    return {
        i: Choice(text, cell.finishes[i]) for i, text in cell.texts.items() if i in cell.finishes
    }


def check_turned_away(cell: Cell) -> None:
    """It came too late to be taken; nothing was sent for it."""
    assert cell.fault.late is not None
    error, status, code = cell.fault.late
    if cell.mode in ("stream", "plain"):
        assert (cell.answer.status, cell.answer.error["code"]) == (status, code)
        assert "partial" not in cell.answer.error
    else:
        assert type(cell.error) is error


def check_whole(cell: Cell, tokens: int) -> None:
    """As if nothing had been, but for the client that has left."""
    each = cell.asked["max_tokens"]
    assert tokens == each * cell.n
    if cell.fault.kind is EndingKind.LEFT:
        return
    check_answer(cell, [full_text(index, each) for index in range(cell.n)], "length")


def check_answer(cell: Cell, texts: list[str], finish: str) -> None:
    choices = choices_of(cell)
    assert [choices[index].content for index in range(cell.n)] == texts
    assert {one.finish_reason for one in choices.values()} == {finish}


def check_left(cell: Cell) -> None:
    assert not cell.answer.is_whole
    assert cell.error is None
    assert b"[DONE]" not in cell.answer.body


def check_ended(cell: Cell, tokens: int) -> None:
    fault, phase = cell.fault, cell.phase
    if phase in fault.texts:
        finish = _FINISHES.get(fault.kind, "stop")
        check_answer(cell, list(fault.texts[phase][: cell.n]), finish)
        return
    if phase in _EARLY:
        assert tokens == 0
        if (cell.mode, fault.tells) == ("stream", "abort"):
            # To a stream an abort is a finish, whenever it comes.
            check_answer(cell, [""] * cell.n, "abort")
        else:
            check_nothing_generated(cell)
        return
    texts = failed_texts(cell)
    assert sum(map(len, texts.values())) == tokens, "a part of the text is lost"
    for index, text in texts.items():
        assert text == full_text(index, len(text))
        assert len(text) >= 5
    if phase == "text held back" and cell.mode in ("stream", "receive"):
        assert cell.read_before < tokens, "nothing was held back"


def check_nothing_generated(cell: Cell) -> None:
    fault = cell.fault
    if cell.mode in ("stream", "plain"):
        assert cell.answer.status == fault.status
        check_error(cell, cell.answer.error)
        assert "partial" not in cell.answer.error
    else:
        assert type(cell.error) is fault.error
        assert not cell.has_partial


def check_error(cell: Cell, error: dict[str, Any]) -> None:
    assert (error["code"], error["param"]) == (cell.fault.code, cell.fault.parameter)


def failed_texts(cell: Cell) -> dict[int, str]:
    """What had been generated, as the reader has got it beside the error."""
    fault = cell.fault
    if cell.mode in ("receive", "generate"):
        assert type(cell.error) is fault.error
        return dict(cell.texts)
    if cell.mode == "plain":
        error = cell.answer.error
        assert cell.answer.status == fault.status
        check_error(cell, error)
        return {one["index"]: one["message"]["content"] for one in error["partial"]["choices"]}
    assert (cell.answer.status, cell.answer.is_whole) == (200, True)
    stream = read_stream(cell.answer.body, cell.asked)
    if fault.tells == "abort":
        assert stream.error is None
        assert {one.finish_reason for one in stream.choices.values()} == {"abort"}
    else:
        assert stream.error is not None
        check_error(cell, stream.error)
    return {index: one.content for index, one in stream.choices.items()}


# ---------------------------------------------------------------------------- everything else


def check_counts(cell: Cell, kinds: list[str]) -> None:
    """Once by the counter, once in the log, and the same."""
    fault = cell.fault
    own = {"ends": [fault.kind], "goes on": [EndingKind.LENGTH], "turned away": []}
    expected = own[fault.effect(cell.phase)]
    assert kinds == expected
    neighbour = fault.kind if fault.widely else EndingKind.LENGTH
    assert cell.endings == Counter([*expected, neighbour])
    assert cell.turned_away == (fault.effect(cell.phase) == "turned away")


def check_aborts(cell: Cell) -> None:
    frames, fault, due = cell.aborted(), cell.fault, set(cell.engine_ids)
    is_told = fault.effect(cell.phase) == "ends" and cell.phase != "tokenizing"
    if not is_told or fault.aborts.startswith("nothing"):
        due = set()
    elif fault.aborts == "ABORT of its other choices":
        due -= {cell.engine_ids[0]}
    assert Counter(one for frame in frames for one in frame) == Counter(due)
    if fault.kind is not EndingKind.STOP_STRING:
        # Choices that meet a stop string in different steps are told of one by one.
        assert len(frames) == bool(due)


def check_others(cell: Cell) -> None:
    """The neighbour fares as it should, and so does whoever comes next."""
    fault = cell.fault
    if fault.widely:
        assert type(cell.neighbour) is fault.error
    else:
        check_generated(cell.neighbour, NEIGHBOUR_TOKENS)
    if fault.afterwards is not None:
        assert type(cell.successor) is fault.afterwards
    else:
        check_generated(cell.successor, 4)


def check_generated(output: RequestOutput | TriolegError | None, tokens: int) -> None:
    assert isinstance(output, RequestOutput), output
    for one in output.outputs:
        assert one.text == full_text(one.index, tokens)
