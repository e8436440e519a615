"""The one loop: who gets what, and what it reports about endings."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_tokenizers import PIECES, byte_fallback_tokenizer, ids

from trioleg.errors import InvalidRequestError, RequestRefused
from trioleg.messages import EngineCoreOutput, FinishReason, PrefillStats, refusal_reason
from trioleg.output.processor import OutputProcessor, ProcessedOutputs
from trioleg.output.request_state import RequestState
from trioleg.outputs import CompletionOutput, EndingKind, RequestOutput
from trioleg.sampling_params import RequestOutputKind, SamplingParams
from trioleg.structured_outputs import StructuredOutputsParams

TOKENIZER = byte_fallback_tokenizer()


class Sink:
    def __init__(self, accepts: bool = True) -> None:
        self.outputs: list[RequestOutput] = []
        self.accepts = accepts

    def put(self, output: RequestOutput) -> bool:
        self.outputs.append(output)
        return self.accepts

    @property
    def texts(self) -> list[str]:
        return [output.outputs[0].text for output in self.outputs]


def add(
    processor: OutputProcessor, request_id: str, params: SamplingParams, sink: Sink | None = None
) -> None:
    state = RequestState(
        request_id, ids("<s>"), params, TOKENIZER, sink, max_tokens=params.max_tokens or 100
    )
    processor.add_request(state)


def step(
    processor: OutputProcessor,
    request_id: str,
    *pieces: str,
    finish: FinishReason | None = None,
    stop_reason: int | str | None = None,
) -> ProcessedOutputs:
    output = EngineCoreOutput(
        request_id, ids(*pieces), finish_reason=finish, stop_reason=stop_reason
    )
    return processor.process([output])


def kinds(
    processor: OutputProcessor, processed: ProcessedOutputs
) -> list[tuple[str, EndingKind, list[str]]]:
    """Each ending, with the ids that the engine has to be told of."""
    aborts = processed.aborts
    return [
        (name, end.kind, aborts + processor.end_request(name)) for name, end in processed.endings
    ]


def test_with_a_sink_nothing_is_returned_and_without_one_everything() -> None:
    processor, sink = OutputProcessor(), Sink()
    add(processor, "online", SamplingParams(), sink)
    add(processor, "batch", SamplingParams())
    outputs = [EngineCoreOutput(name, ids("a")) for name in ("online", "batch")]
    processed = processor.process(outputs)
    assert sink.texts == ["a"]
    assert [output.request_id for output in processed.request_outputs] == ["batch"]


def test_delta() -> None:
    processor, sink = OutputProcessor(), Sink()
    add(processor, "r", SamplingParams(), sink)
    for piece in ("caf", "C3", "A9"):
        step(processor, "r", piece)
    processed = step(processor, "r", "</s>", finish=FinishReason.STOP)
    assert sink.texts == ["caf", "", "é", ""]
    assert sink.outputs[-1].outputs == [CompletionOutput(0, "", ids("</s>"), "stop")]
    assert sink.outputs[-1].finished
    assert kinds(processor, processed) == [("r", EndingKind.STOP, [])]
    assert processor.statistics().requests == 0


def test_cumulative() -> None:
    processor, sink = OutputProcessor(), Sink()
    add(processor, "r", SamplingParams(output_kind=RequestOutputKind.CUMULATIVE), sink)
    for piece in ("a", "b"):
        step(processor, "r", piece)
    step(processor, "r", "c", finish=FinishReason.LENGTH)
    assert sink.texts == ["a", "ab", "abc"]
    assert sink.outputs[-1].outputs[0].token_ids == ids("a", "b", "c")


def test_final_only() -> None:
    processor, sink = OutputProcessor(), Sink()
    add(processor, "r", SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY), sink)
    for piece in ("a", "b"):
        step(processor, "r", piece)
    assert sink.outputs == []
    step(processor, "r", "c", finish=FinishReason.LENGTH)
    assert sink.outputs[0].outputs == [CompletionOutput(0, "abc", ids("a", "b", "c"), "length")]


def test_a_stop_string_is_promoted_and_needs_an_abort() -> None:
    processor, sink = OutputProcessor(), Sink()
    add(processor, "r", SamplingParams(stop=["bc"]), sink)
    processed = step(processor, "r", "a", "b", "c", "a")
    assert kinds(processor, processed) == [("r", EndingKind.STOP_STRING, ["r"])]
    assert sink.outputs[0].outputs == [
        CompletionOutput(0, "a", ids("a", "b", "c"), "stop", stop_reason="bc")
    ]


def test_a_stop_string_in_the_engines_own_last_step_needs_no_abort() -> None:
    processor, sink = OutputProcessor(), Sink()
    add(processor, "r", SamplingParams(stop=["bc"]), sink)
    processed = step(processor, "r", "b", "c", finish=FinishReason.LENGTH)
    assert kinds(processor, processed) == [("r", EndingKind.STOP_STRING, [])]
    assert sink.outputs[0].outputs[0].finish_reason == "stop"


def test_held_back_text_is_flushed_at_every_other_finish() -> None:
    processor, sink = OutputProcessor(), Sink()
    add(processor, "r", SamplingParams(stop=["bcz"]), sink)
    step(processor, "r", "a", "b", "c")
    step(processor, "r", "</s>", finish=FinishReason.STOP)
    assert sink.texts == ["a", "bc"]


@pytest.mark.parametrize("bad", [-1, len(PIECES) + 10, 2**40])
def test_a_bad_id_ends_its_request_and_no_other(bad: int) -> None:
    processor, sinks = OutputProcessor(), [Sink() for _ in range(10)]
    for number, sink in enumerate(sinks):
        add(processor, str(number), SamplingParams(), sink)
    outputs = [EngineCoreOutput(str(number), ids("a")) for number in range(10)]
    for number in (2, 5, 7):
        outputs[number].new_token_ids = [bad]
    processed = processor.process(outputs)
    assert [(name, end.kind) for name, end in processed.endings] == [
        (name, EndingKind.OUTPUT_ERROR) for name in ("2", "5", "7")
    ]
    assert all(str(bad) in end.cause for _, end in processed.endings)
    assert [processor.end_request(name) for name, _ in processed.endings] == [["2"], ["5"], ["7"]]
    assert [sink.texts for sink in sinks] == [[] if n in (2, 5, 7) else ["a"] for n in range(10)]


def test_more_tokens_than_asked_for_are_an_error() -> None:
    processor, sink = OutputProcessor(), Sink()
    add(processor, "r", SamplingParams(max_tokens=3), sink)
    step(processor, "r", "a", "b")
    ((_, ending),) = processor.process([EngineCoreOutput("r", ids("a") * 2_000_000)]).endings
    assert ending.kind is EndingKind.OUTPUT_ERROR
    assert ending.cause == "the engine sent 2000002 tokens; this request may have 3 (max_tokens)"
    assert processor.end_request("r") == ["r"]
    assert sink.texts == ["ab"]


def test_what_a_step_had_before_its_bad_token_is_kept() -> None:
    processor, sink = OutputProcessor(), Sink()
    add(processor, "r", SamplingParams(), sink)
    processed = processor.process([EngineCoreOutput("r", [*ids("a", "b"), -1])])
    assert kinds(processor, processed) == [("r", EndingKind.OUTPUT_ERROR, ["r"])]
    assert sink.texts == ["ab"]


@pytest.mark.parametrize(
    ("params", "reason", "parameter", "cause"),
    [
        (
            {},
            refusal_reason("priority", "priority is 1; allowed: 0"),
            "priority",
            "priority is 1; al",
        ),
        ({}, refusal_reason(None, "too much: (a): b"), None, "too much: (a): b"),
        (
            {"structured_outputs": StructuredOutputsParams(regex="a", where="response_format")},
            refusal_reason("structured_outputs.regex", "not so"),
            "response_format",
            "not so",
        ),
    ],
)
def test_an_engines_refusal_names_the_parameter(
    params: dict[str, Any], reason: str, parameter: str | None, cause: str
) -> None:
    processor, sink = OutputProcessor(), Sink()
    add(processor, "r", SamplingParams(**params), sink)
    output = EngineCoreOutput("r", [], finish_reason=FinishReason.ERROR, stop_reason=reason)
    ((_, ending),) = processor.process([output]).endings
    assert ending.kind is EndingKind.REFUSED
    error = ending.error()
    assert isinstance(error, RequestRefused)
    assert isinstance(error, InvalidRequestError)
    assert error.parameter == parameter
    assert str(error).startswith(cause)


@pytest.mark.parametrize("reason", [None, 5, "InvalidRequestError", "InvalidRequestError(x", "no"])
def test_any_other_reason_blames_nobody(reason: int | str | None) -> None:
    processor, sink = OutputProcessor(), Sink()
    add(processor, "r", SamplingParams(), sink)
    output = EngineCoreOutput("r", [], finish_reason=FinishReason.ERROR, stop_reason=reason)
    ((_, ending),) = processor.process([output]).endings
    assert ending.kind is EndingKind.OUTPUT_ERROR


def test_the_engines_error_and_its_reason() -> None:
    processor, sink = OutputProcessor(), Sink()
    add(processor, "r", SamplingParams(), sink)
    processed = step(processor, "r", finish=FinishReason.ERROR, stop_reason="min_p is 2.0")
    ((_, ending),) = processed.endings
    assert (ending.kind, ending.cause) == (EndingKind.OUTPUT_ERROR, "min_p is 2.0")
    assert processor.end_request("r") == []


def test_ending_a_request_releases_what_was_held_back() -> None:
    processor, sink = OutputProcessor(), Sink()
    add(processor, "r", SamplingParams(stop=["bcz"]), sink)
    step(processor, "r", "a", "b", "c")
    processor.end_request("r")
    assert sink.texts == ["a", "bc"]
    assert not sink.outputs[-1].finished
    processor.end_request("r")
    assert step(processor, "r", "a").unknown == ["r"]


def test_a_sink_over_its_bound_is_reported() -> None:
    processor = OutputProcessor()
    add(processor, "r", SamplingParams(), Sink(accepts=False))
    assert kinds(processor, step(processor, "r", "a")) == [("r", EndingKind.READER_TOO_SLOW, ["r"])]


def test_cached_tokens_come_with_the_first_output() -> None:
    processor, sink = OutputProcessor(), Sink()
    add(processor, "r", SamplingParams(), sink)
    stats = PrefillStats(num_prompt_tokens=1, num_cached_tokens=16)
    processor.process([EngineCoreOutput("r", ids("a"), prefill_stats=stats)])
    assert sink.outputs[0].num_cached_tokens == 16
