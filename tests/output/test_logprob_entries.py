"""Logprobs: each token's entry exactly once, with its token, whatever becomes of the token's text."""

from __future__ import annotations

import math
from typing import Any

import pytest
from made_arrays import array, logprobs_lists, logprobs_tensors
from tiny_tokenizers import byte_fallback_tokenizer, ids

from trioleg.errors import OutputError
from trioleg.messages import ArrayData, EngineCoreOutput, LogprobsLists, NdArray
from trioleg.output.arrays import read_array
from trioleg.output.logprobs import read_logprobs, read_prompt_logprobs
from trioleg.output.processor import OutputProcessor
from trioleg.output.request_state import RequestState
from trioleg.outputs import EndingKind, RequestOutput
from trioleg.sampling_params import RequestOutputKind, SamplingParams

TOKENIZER = byte_fallback_tokenizer()
PIECES = TOKENIZER.pieces
A, B, C = ids("a", "b", "c")


# ---------------------------------------------------------------------------- arrays


@pytest.mark.parametrize(
    ("dtype", "code", "values"),
    [
        ("<i4", "i", [1, -2, 3]),
        ("int64", "q", [1, -2, 2**40]),
        ("<f4", "f", [0.5, -math.inf, 2.0]),
        ("float16", "e", [0.5, -2.0, 65504.0]),
        ("<f8", "d", [0.1, 0.2, 0.3]),
    ],
)
def test_arrays_come_as_plain_numbers(dtype: str, code: str, values: list[float]) -> None:
    wire = array(dtype, code, [3], values)
    assert read_array(wire, (), "x") == ((3,), values)
    in_a_frame = [dtype, [3], 2]
    frames = [b"body", b"other", memoryview(wire[2])]
    assert read_array(in_a_frame, frames, "x") == ((3,), values)
    in_process = NdArray(dtype, [3, 1], ArrayData(bytearray(wire[2])))
    assert read_array(in_process, (), "x") == ((3, 1), values)
    of_elements = memoryview(wire[2]).cast("H")
    assert read_array(NdArray(dtype, [3], ArrayData(of_elements)), (), "x") == ((3,), values)


def test_bfloat16_is_the_upper_half_of_a_float() -> None:
    wire = array("bfloat16", "H", [4], [0x3F80, 0xC000, 0x0000, 0xFF80])
    assert read_array(wire, (), "x") == ((4,), [1.0, -2.0, 0.0, -math.inf])


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        (None, r"x from the engine: NoneType; allowed: \[dtype, shape, data\]"),
        (["<i4", [2]], r"allowed: \[dtype, shape, data\]"),
        (["<i4", [-1], b""], r"allowed: \[dtype, shape, data\]"),
        (["<i4", 3, b""], r"allowed: \[dtype, shape, data\]"),
        (["<i4", [2**62, 2**62], b""], r"allowed: \[dtype, shape, data\]"),
        (["<i4", [1] * 5000, b"1234"], r"allowed: \[dtype, shape, data\]"),
        (["<i4", [2**31 - 1] * 4, b""], "0 bytes; allowed: "),
        ([4, [1], b"1234"], r"allowed: \[dtype, shape, data\]"),
        (["<U1", [1], b"1234"], "dtype '<U1'; allowed: <i4"),
        (["<i4", [2], b"1234"], r"4 bytes; allowed: 8, for <i4 \[2\]"),
        (["<i4", [1], 0], "data 0; allowed: bytes, or the number of a frame, 1 to 1"),
        (["<i4", [1], 2], "data 2; allowed"),
        (["<i4", [1], True], "data True; allowed"),
    ],
)
def test_what_does_not_fit_together_is_refused(wire: Any, message: str) -> None:
    with pytest.raises(OutputError, match=message):
        read_array(wire, [b"body", b"1234"], "x")


# ---------------------------------------------------------------------------- entries


def test_the_chosen_token_comes_first_then_the_most_probable() -> None:
    wire = logprobs_lists([[(C, -3.0), (A, -0.5), (B, -1.0)]], [7])
    (entry,) = read_logprobs(wire, [C], 2, PIECES, ())
    assert [(i, one.logprob, one.rank, one.decoded_token) for i, one in entry.items()] == [
        (C, -3.0, 7, "c"),
        (A, -0.5, 1, "a"),
        (B, -1.0, 2, "b"),
    ]


def test_a_chosen_token_among_the_most_probable_is_listed_once() -> None:
    wire = logprobs_lists([[(B, -1.0), (A, -0.5), (B, -1.0)]], [2])
    (entry,) = read_logprobs(wire, [B], 2, PIECES, ())
    assert [(i, one.rank) for i, one in entry.items()] == [(B, 2), (A, 1)]


def test_a_row_may_be_wider_than_was_asked_for() -> None:
    """An engine computes its whole batch alike."""
    wire = logprobs_lists([[(C, -3.0), (A, -0.5), (B, -1.0)]], [7])
    assert [list(entry) for entry in read_logprobs(wire, [C], 0, PIECES, ())] == [[C]]


def test_all_tokens_are_as_many_as_the_row_has() -> None:
    wire = logprobs_lists([[(C, -3.0), (A, -0.5), (B, -1.0), (C, -3.0)]], [3])
    (entry,) = read_logprobs(wire, [C], -1, PIECES, ())
    assert [(i, one.rank) for i, one in entry.items()] == [(C, 3), (A, 1), (B, 2)]


def test_tokens_that_were_asked_for_by_id_have_no_rank() -> None:
    """One of them may be the chosen one; a wider row has another request's columns behind them."""
    wire = logprobs_lists([[(B, -1.0), (C, -3.0), (B, -1.0), (A, -math.inf)]], [2])
    (entry,) = read_logprobs(wire, [B], (C, B), PIECES, ())
    assert [(i, one.logprob, one.rank) for i, one in entry.items()] == [
        (B, -1.0, 2),
        (C, -3.0, None),
    ]
    with pytest.raises(OutputError, match="new_logprobs from the engine: not those of logprob_tok"):
        read_logprobs(wire, [B], (C, A), PIECES, ())
    with pytest.raises(OutputError, match=r"1 rows of 4; allowed: at least 1 rows .* of 5"):
        read_logprobs(wire, [B], (C, B, A, A), PIECES, ())


def test_the_prompts_first_token_has_no_entry() -> None:
    wire = logprobs_tensors([[(B, -0.5)], [(C, -1.5)]], [1, 2])
    first, second, third = read_prompt_logprobs(wire, [A, B, C], 0, PIECES, ())
    assert first is None
    assert second is not None
    assert second[B].logprob == -0.5
    assert third is not None
    assert third[C].rank == 2


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        (None, "new_logprobs from the engine: nothing; allowed: three arrays"),
        ([1, 2], "new_logprobs from the engine: list; allowed: three arrays"),
        (logprobs_lists([[(A, 0.0)]], [1]), "1 rows of 1; allowed: at least 2 rows"),
        (logprobs_lists([[(A, 0.0)], [(C, 0.0)]], [1, 1]), "about other tokens"),
        (logprobs_lists([[(A, 0.0)], [(B, math.nan)]], [1, 1]), f"NaN for token id {B}"),
        (logprobs_lists([[(A, 0.0)], [(B, math.inf)]], [1, 1]), f"infinity for token id {B}"),
        (
            [
                array("<f4", "f", [2, 1], [A, B]),
                *logprobs_lists([[(A, 0.0)], [(B, 0.0)]], [1, 1])[1:],
            ],
            "ids and ranks are integers",
        ),
        (
            LogprobsLists(
                *logprobs_lists([[(A, 0.0)], [(B, 0.0)]], [1, 1])[:2], array("<i8", "q", [1], [1])
            ),
            "differ",
        ),
    ],
)
def test_logprobs_that_do_not_fit_their_tokens_are_refused(wire: Any, message: str) -> None:
    with pytest.raises(OutputError, match=message):
        read_logprobs(wire, [A, B], 0, PIECES, ())


# ---------------------------------------------------------------------------- in the loop


def run(
    params: SamplingParams, *steps: list[str], arrays: list[Any] | None = None
) -> list[RequestOutput]:
    """What a request without a sink gets, each token with the logprob minus its place."""
    processor = OutputProcessor()
    processor.add_request(
        RequestState("r", ids("<s>", "a", "b"), params, TOKENIZER, max_tokens=100)
    )
    outputs, place = [], 0
    for number, pieces in enumerate(steps):
        rows = [[(token_id, -1.0 - place - i)] for i, token_id in enumerate(ids(*pieces))]
        place += len(rows)
        output = EngineCoreOutput("r", ids(*pieces))
        output.new_logprobs = logprobs_lists(rows, [1] * len(rows))
        if number == 0 and arrays is not None:
            output.new_prompt_logprobs_tensors = arrays
        outputs += processor.process([output]).request_outputs
    assert all(isinstance(one, RequestOutput) for one in outputs)
    return outputs  # type: ignore[return-value]


def entries_of(outputs: list[RequestOutput]) -> list[tuple[int, float]]:
    return [
        (i, logprob.logprob)
        for output in outputs
        for entry in output.outputs[0].logprobs or ()
        for i, logprob in entry.items()
    ]


def test_a_held_back_token_brings_its_entry_at_once() -> None:
    """B9: never after its text, and the bytes say what the text cannot yet."""
    outputs = run(SamplingParams(logprobs=0), ["caf"], ["C3"], ["A9"])
    assert [one.outputs[0].text for one in outputs] == ["caf", "", "é"]
    assert [len(one.outputs[0].logprobs or ()) for one in outputs] == [1, 1, 1]
    entries = [entry for one in outputs for entry in one.outputs[0].logprobs or ()]
    pieces = [logprob for entry in entries for logprob in entry.values()]
    assert b"".join(one.token_bytes for one in pieces) == "café".encode()
    assert [one.decoded_token for one in pieces] == ["caf", r"\xc3", r"\xa9"]


def test_entries_end_with_the_token_that_completes_a_stop_string() -> None:
    """The tokens that the engine made behind it have neither ids nor logprobs (A9)."""
    (output,) = run(SamplingParams(logprobs=0, stop=["bc"]), ["a", "b", "c", "a", "a"])
    assert output.outputs[0].token_ids == [A, B, C]
    assert entries_of([output]) == [(A, -1.0), (B, -2.0), (C, -3.0)]
    assert output.outputs[0].cumulative_logprob == -6.0


def test_the_interval_merges_entries_and_loses_none() -> None:
    """Seven tokens by three: each has its entry, in order (B23)."""
    params = SamplingParams(logprobs=0, stream_interval=3)
    outputs = run(params, *[["a"]] * 7)
    assert [len(one.outputs[0].token_ids) for one in outputs] == [1, 3, 3]
    assert entries_of(outputs) == [(A, -1.0 - place) for place in range(7)]


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA])
def test_the_cumulative_logprob_is_always_of_the_whole(kind: RequestOutputKind) -> None:
    outputs = run(SamplingParams(logprobs=0, output_kind=kind), ["a"], ["b"])
    assert [one.outputs[0].cumulative_logprob for one in outputs] == [-1.0, -3.0]
    sizes = [len(one.outputs[0].logprobs or ()) for one in outputs]
    assert sizes == ([1, 2] if kind is RequestOutputKind.CUMULATIVE else [1, 1])


def test_tokens_by_id_bring_logprobs_without_being_asked_for_them() -> None:
    processor = OutputProcessor()
    params = SamplingParams(logprob_token_ids=[B])
    processor.add_request(RequestState("r", [A], params, TOKENIZER, max_tokens=9))
    output = EngineCoreOutput("r", [A])
    output.new_logprobs = logprobs_lists([[(A, -1.0), (B, -2.0)]], [1])
    (one,) = processor.process([output]).request_outputs
    assert isinstance(one, RequestOutput)
    assert one.outputs[0].cumulative_logprob == -1.0
    assert entries_of([one]) == [(A, -1.0), (B, -2.0)]


def test_without_asking_there_are_none() -> None:
    (output,) = run(SamplingParams(), ["a"])
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_prompt_logprobs_come_once_or_with_the_whole(kind: RequestOutputKind) -> None:
    arrays = logprobs_tensors([[(A, -0.5)], [(B, -1.5)]], [1, 2])
    params = SamplingParams(prompt_logprobs=0, output_kind=kind, logprobs=0)
    outputs = run(params, ["a"], ["b"], arrays=arrays)
    have_them = [one.prompt_logprobs is not None for one in outputs]
    expected = {"CUMULATIVE": [True, True], "DELTA": [True, False], "FINAL_ONLY": []}
    assert have_them == expected[kind.name]


@pytest.mark.parametrize(
    ("params", "cause"),
    [
        (SamplingParams(logprobs=1), "new_logprobs from the engine: nothing"),
        (SamplingParams(prompt_logprobs=1), "prompt_logprobs were asked for; the engine sent none"),
    ],
)
def test_an_engine_that_forgets_them_is_told_on(params: SamplingParams, cause: str) -> None:
    processor = OutputProcessor()
    processor.add_request(RequestState("r", [A, B], params, TOKENIZER, max_tokens=9))
    ((_, ending),) = processor.process([EngineCoreOutput("r", [A])]).endings
    assert ending.kind is EndingKind.OUTPUT_ERROR
    assert cause in ending.cause


def test_a_token_whose_figures_cannot_be_read_leaves_no_text_behind() -> None:
    processor = OutputProcessor()
    state = RequestState("r", [A], SamplingParams(logprobs=0), TOKENIZER, max_tokens=9)
    processor.add_request(state)
    good, bad = (EngineCoreOutput("r", [token_id]) for token_id in (A, B))
    good.new_logprobs = logprobs_lists([[(A, -1.0)]], [1])
    bad.new_logprobs = logprobs_lists([[(B, math.nan)]], [1])
    assert len(processor.process([good]).request_outputs) == 1
    assert len(processor.process([bad]).endings) == 1
    assert state.release() is None


def test_ids_that_are_none_have_no_bytes() -> None:
    wire = logprobs_lists([[(A, -1.0), (-1, -2.0), (2**31 - 1, -3.0)]], [1])
    (entry,) = read_logprobs(wire, [A], 2, PIECES, ())
    assert [one.token_bytes for one in entry.values()] == [b"a", b"", b""]


def test_a_bad_id_with_logprobs_is_the_same_error() -> None:
    processor = OutputProcessor()
    processor.add_request(
        RequestState("r", [A], SamplingParams(logprobs=0), TOKENIZER, max_tokens=9)
    )
    output = EngineCoreOutput("r", [A, -1])
    output.new_logprobs = logprobs_lists([[(A, -1.0)], [(-1, -2.0)]], [1, 1])
    ((_, ending),) = processor.process([output]).endings
    assert "token id -1; this model's ids are 0 to" in ending.cause
