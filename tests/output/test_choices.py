"""n > 1, stream intervals and output kinds: what a reader gets of each step, and when it is over."""

from __future__ import annotations

import pytest
from tiny_tokenizers import byte_fallback_tokenizer, ids

from trioleg.messages import EngineCoreOutput, FinishReason
from trioleg.output.processor import OutputProcessor, ProcessedOutputs
from trioleg.output.request_state import RequestState
from trioleg.outputs import EndingKind, RequestOutput
from trioleg.sampling_params import RequestOutputKind, SamplingParams

TOKENIZER = byte_fallback_tokenizer()


class Sink:
    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []

    def put(self, output: RequestOutput) -> bool:
        self.outputs.append(output)
        return True

    @property
    def seen(self) -> list[tuple[int, str, str | None]]:
        return [(o.index, o.text, o.finish_reason) for out in self.outputs for o in out.outputs]


def add(
    params: SamplingParams, *, stream_interval: int = 1
) -> tuple[OutputProcessor, RequestState, Sink]:
    processor, sink = OutputProcessor(), Sink()
    state = RequestState(
        "r",
        ids("<s>"),
        params,
        TOKENIZER,
        sink,
        max_tokens=100,
        stream_interval=stream_interval,
    )
    processor.add_request(state)
    return processor, state, sink


def out(name: str, *pieces: str, finish: FinishReason | None = None) -> EngineCoreOutput:
    return EngineCoreOutput(name, ids(*pieces), finish_reason=finish)


def kinds(processed: ProcessedOutputs) -> list[tuple[str, EndingKind]]:
    return [(name, ending.kind) for name, ending in processed.endings]


# ---------------------------------------------------------------------------- n > 1


def test_each_choice_is_a_request_of_the_engine() -> None:
    _, state, _ = add(SamplingParams(n=3))
    assert [choice.engine_request_id for choice in state.choices] == ["r-0", "r-1", "r-2"]
    _, state, _ = add(SamplingParams())
    assert [choice.engine_request_id for choice in state.choices] == ["r"]


def test_it_is_finished_when_all_choices_are() -> None:
    processor, _, sink = add(SamplingParams(n=2))
    processor.process([out("r-0", "a"), out("r-1", "b")])
    first = processor.process([out("r-1", "c", finish=FinishReason.LENGTH)])
    assert kinds(first) == []
    assert not sink.outputs[-1].finished
    second = processor.process([out("r-0", "b", finish=FinishReason.STOP)])
    assert kinds(second) == [("r", EndingKind.STOP)]
    assert [output.finished for output in sink.outputs] == [False, False, False, True]
    assert sink.seen == [(0, "a", None), (1, "b", None), (1, "c", "length"), (0, "", "stop")]
    assert processor.statistics().requests == 0
    assert processor.end_request("r") == []


def test_a_stop_string_of_one_choice_aborts_that_choice_alone() -> None:
    processor, _, sink = add(SamplingParams(n=2, stop=["c"]))
    processed = processor.process([out("r-0", "a", "c"), out("r-1", "b")])
    assert (processed.aborts, kinds(processed)) == (["r-0"], [])
    late = processor.process([out("r-0", "b"), out("r-1", "b", "c")])
    assert (late.unknown, late.aborts) == (["r-0"], ["r-1"])
    assert kinds(late) == [("r", EndingKind.STOP_STRING)]
    assert sink.seen == [(0, "a", "stop"), (1, "b", None), (1, "b", "stop")]


def test_an_error_of_one_choice_ends_all_and_names_the_live_ones() -> None:
    processor, _, sink = add(SamplingParams(n=4, stop=["bcz"]))
    processor.process([out("r-0", "a", finish=FinishReason.LENGTH), out("r-1", "a", "b")])
    processed = processor.process([out("r-2", finish=FinishReason.ERROR)])
    assert kinds(processed) == [("r", EndingKind.OUTPUT_ERROR)]
    assert processor.end_request("r") == ["r-1", "r-3"]
    assert sink.seen[-1] == (1, "b", None)
    assert processor.process([out("r-1", "c"), out("r-3", "c")]).unknown == ["r-1", "r-3"]


def test_two_bad_choices_of_one_step_are_one_ending() -> None:
    processor, _, _ = add(SamplingParams(n=3))
    outputs = [EngineCoreOutput(f"r-{i}", [-1]) for i in range(3)]
    processed = processor.process(outputs)
    assert kinds(processed) == [("r", EndingKind.OUTPUT_ERROR)]
    assert processed.unknown == []
    assert processor.end_request("r") == ["r-0", "r-1", "r-2"]


def test_final_only_waits_for_all_choices_and_keeps_their_order() -> None:
    processor, _, sink = add(SamplingParams(n=2, output_kind=RequestOutputKind.FINAL_ONLY))
    processor.process([out("r-1", "b", finish=FinishReason.LENGTH), out("r-0", "a")])
    assert sink.outputs == []
    processor.process([out("r-0", "b", finish=FinishReason.LENGTH)])
    (output,) = sink.outputs
    assert sink.seen == [(0, "ab", "length"), (1, "b", "length")]
    assert output.finished


def test_what_final_only_had_is_released_when_the_request_ends_badly() -> None:
    processor, _, sink = add(SamplingParams(n=2, output_kind=RequestOutputKind.FINAL_ONLY))
    processor.process([out("r-1", "b", finish=FinishReason.LENGTH), out("r-0", "a")])
    assert processor.end_request("r") == ["r-0"]
    assert sink.seen == [(0, "a", None), (1, "b", "length")]
    assert not sink.outputs[0].finished


def test_a_choice_has_the_seed_of_its_index() -> None:
    params = SamplingParams(n=3, seed=2**63 - 2, prompt_logprobs=1)
    made = [params.for_engine(max_tokens=1, eos_token_id=2, index=i) for i in range(3)]
    assert [one.seed for one in made] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert [one.prompt_logprobs for one in made] == [1, None, None]


# ---------------------------------------------------------------------------- intervals


@pytest.mark.parametrize(
    ("server", "request_", "expected"),
    [
        (1, None, [1] * 7),
        (1, 5, [1, 5, 1]),
        (5, None, [1, 5, 1]),
        (5, 2, [1, 5, 1]),
        (1, 2, [1, 2, 2, 2]),
    ],
)
def test_the_first_at_once_then_every_n_tokens_and_the_last(
    server: int, request_: int | None, expected: list[int]
) -> None:
    """A request may ask for longer intervals than the server's, never for shorter ones (B23)."""
    processor, _, sink = add(SamplingParams(stream_interval=request_), stream_interval=server)
    for _ in range(6):
        processor.process([out("r", "a")])
    processor.process([out("r", "b", finish=FinishReason.LENGTH)])
    assert [len(output.outputs[0].token_ids) for output in sink.outputs] == expected
    assert "".join(text for _, text, _ in sink.seen) == "aaaaaab"
    assert [finish for _, _, finish in sink.seen if finish] == ["length"]


def test_an_output_without_tokens_is_not_the_first() -> None:
    """Chunked prefill: the first token is still at once."""
    processor, _, sink = add(SamplingParams(stream_interval=5))
    processor.process([out("r")])
    processor.process([out("r", "a")])
    assert [len(output.outputs[0].token_ids) for output in sink.outputs] == [0, 1]


def test_what_waits_for_the_interval_is_released_at_a_bad_end() -> None:
    processor, state, sink = add(SamplingParams(stream_interval=5))
    for piece in ("a", "b", "c"):
        processor.process([out("r", piece)])
    assert state.choices[0].num_unsent_tokens == 2
    processor.end_request("r")
    assert sink.seen == [(0, "a", None), (0, "bc", None)]
    assert sink.outputs[-1].outputs[0].token_ids == ids("b", "c")


def test_cumulative_outputs_keep_the_interval() -> None:
    params = SamplingParams(stream_interval=2, output_kind=RequestOutputKind.CUMULATIVE)
    processor, _, sink = add(params)
    for piece in ("a", "b", "c", "a"):
        processor.process([out("r", piece)])
    assert [text for _, text, _ in sink.seen] == ["a", "abc"]


# ---------------------------------------------------------------------------- stop tokens


@pytest.mark.parametrize(("shown", "text"), [(False, "a"), (True, "ab")])
def test_a_stop_token_ends_a_step_of_several(shown: bool, text: str) -> None:
    """A8: hidden unless asked for, counted in any case, and nothing behind it is."""
    (b,) = ids("b")
    params = SamplingParams(stop_token_ids=[b], include_stop_str_in_output=shown)
    processor, _, sink = add(params)
    output = out("r", "a", "b", "c", finish=FinishReason.STOP)
    output.stop_reason = b
    processor.process([output])
    (completion,) = sink.outputs[0].outputs
    assert completion.text == text
    assert completion.token_ids == ids("a", "b")
    assert (completion.finish_reason, completion.stop_reason) == ("stop", b)


def test_without_detokenize_there_are_ids_and_no_text() -> None:
    processor, _, sink = add(SamplingParams(detokenize=False))
    processor.process([out("r", "a", "b", finish=FinishReason.LENGTH)])
    (completion,) = sink.outputs[0].outputs
    assert (completion.text, completion.token_ids) == ("", ids("a", "b"))
