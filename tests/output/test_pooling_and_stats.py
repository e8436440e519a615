"""Pooling outputs on their own branch of the loop, and what the loop notes about time."""

from __future__ import annotations

import pytest
from made_arrays import array
from tiny_tokenizers import byte_fallback_tokenizer, ids

from trioleg.messages import EngineCoreEvent, EngineCoreOutput, FinishReason
from trioleg.output.merge import OutputMerger
from trioleg.output.pooling import PoolingState
from trioleg.output.processor import OutputProcessor
from trioleg.output.request_state import RequestState
from trioleg.output.stats import IterationStats
from trioleg.outputs import EndingKind, PoolingOutput, PoolingRequestOutput
from trioleg.sampling_params import SamplingParams

TOKENIZER = byte_fallback_tokenizer()
VECTOR = array("float32", "f", [1, 2], [0.5, -0.5])


def test_a_tensor_is_the_one_output() -> None:
    processor = OutputProcessor()
    processor.add_request(PoolingState("p", ids("a")))
    nothing = processor.process([EngineCoreOutput("p", [])])
    assert (nothing.request_outputs, nothing.endings) == ([], [])
    last = EngineCoreOutput("p", [], pooling_output=VECTOR, finish_reason=FinishReason.STOP)
    processed = processor.process([last])
    (output,) = processed.request_outputs
    assert isinstance(output, PoolingRequestOutput)
    assert output.outputs == PoolingOutput([0.5, -0.5], (1, 2))
    assert output.finished
    assert [(name, end.kind) for name, end in processed.endings] == [("p", EndingKind.STOP)]
    assert processor.statistics().requests == 0


@pytest.mark.parametrize(
    ("finish", "data", "kind", "cause"),
    [
        (FinishReason.STOP, None, EndingKind.OUTPUT_ERROR, "without a pooling_output"),
        (FinishReason.STOP, ["<U1", [1], b""], EndingKind.OUTPUT_ERROR, "dtype '<U1'"),
        (FinishReason.ERROR, None, EndingKind.OUTPUT_ERROR, "reports an error"),
        (FinishReason.ABORT, None, EndingKind.ABORTED, "the engine aborted"),
    ],
)
def test_bad_ends(finish: FinishReason, data: object, kind: EndingKind, cause: str) -> None:
    processor = OutputProcessor()
    processor.add_request(PoolingState("p", ids("a")))
    output = EngineCoreOutput("p", [], pooling_output=data, finish_reason=finish)
    ((_, ending),) = processor.process([output]).endings
    assert ending.kind is kind
    assert cause in ending.cause
    assert processor.end_request("p") == []


def test_a_merger_replaces_them() -> None:
    merger = OutputMerger(aggregate=False)
    for value in (1.0, 2.0):
        merger.put(PoolingRequestOutput("p", [1], PoolingOutput([value], (1,))))
    taken = merger.take()
    assert isinstance(taken, PoolingRequestOutput)
    assert taken.outputs.data == [2.0]
    assert merger.num_merges == 1


def test_times_of_a_request_and_of_its_steps() -> None:
    processor = OutputProcessor()
    for name, n in (("one", 1), ("two", 2)):
        state = RequestState(
            name, ids("<s>", "a"), SamplingParams(n=n), TOKENIZER, max_tokens=9, arrival=100.0
        )
        processor.add_request(state)
    events = [EngineCoreEvent(1, 10.0), EngineCoreEvent(2, 10.5), EngineCoreEvent(3, 10.6)]
    first = IterationStats()
    outputs = [
        EngineCoreOutput("one", ids("a"), events=events),
        EngineCoreOutput("two-0", ids("a")),
        EngineCoreOutput("two-1", ids("a", "b")),
    ]
    processor.process(outputs, timestamp=11.0, now=102.0, stats=first)
    assert first == IterationStats(3, 4, 4, [2.0, 2.0, 2.0])
    processor.process([EngineCoreOutput("one", ids("b"))], timestamp=11.5, now=102.5)
    last = IterationStats()
    end = EngineCoreOutput("one", ids("c"), finish_reason=FinishReason.LENGTH)
    (output,) = processor.process([end], timestamp=13.0, now=104.0, stats=last).request_outputs
    assert last.inter_token_latencies == [1.5]
    (finished,) = last.finished_requests
    assert (finished.request_id, finished.kind) == ("one", EndingKind.LENGTH)
    assert (finished.num_prompt_tokens, finished.num_output_tokens) == (2, 3)
    metrics = finished.metrics
    assert output.metrics == metrics
    assert (metrics.queue, metrics.prefill) == (0.5, 0.5)
    assert (metrics.time_to_first_token, metrics.inter_token, metrics.end_to_end) == (2.0, 1.0, 4.0)


def test_what_cannot_be_known_is_none() -> None:
    processor = OutputProcessor()
    processor.add_request(RequestState("r", [1], SamplingParams(), TOKENIZER, max_tokens=9))
    end = EngineCoreOutput("r", ids("a"), finish_reason=FinishReason.LENGTH)
    (output,) = processor.process([end], timestamp=1.0, now=2.0).request_outputs
    metrics = output.metrics
    assert metrics is not None
    assert (metrics.queue, metrics.inter_token, metrics.end_to_end) == (None, None, None)
