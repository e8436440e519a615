"""Our side of the comparison: a case (``output_cases.py``) through trioleg's output processor."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from real_tokenizers import real_tokenizer

from trioleg.messages import EngineCoreOutput, FinishReason, LogprobsLists, NdArray
from trioleg.output.processor import OutputProcessor, ProcessedOutputs
from trioleg.output.request_state import RequestState
from trioleg.outputs import EndingKind, RequestOutput
from trioleg.sampling_params import SamplingParams

Json = dict[str, Any]


class Sink:
    """A reader that is always there."""

    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []

    def put(self, output: RequestOutput) -> bool:
        self.outputs.append(output)
        return True


def play(case: Json, detokenizer: str) -> Json:
    """Every output of the case, in the peer's form; ``detokenizer`` is "fast" or "readable"."""
    params = SamplingParams(**case["params"], stop_hold_back="fixed")
    sink = Sink()
    state = RequestState(
        "r",
        case["prompt"],
        params,
        real_tokenizer(case["tokenizer"]),
        sink,
        max_tokens=case["params"]["max_tokens"],
        detokenizer=detokenizer,
        stream_interval=case["engine_stream_interval"],
    )
    processor = OutputProcessor()
    processor.add_request(state)
    answer: Json = {"outputs": [], "aborts": [], "error": None}
    for step in case["steps"]:
        processed = processor.process([_output(step)])
        answer["aborts"] += processed.aborts
        if _was_aborted(processed):
            # Where vLLM finishes the text with "abort", ours is an ending that the runtime tells.
            processor.end_request("r")
    answer["outputs"] = [_describe(output) for output in sink.outputs]
    return answer


def _was_aborted(processed: ProcessedOutputs) -> bool:
    return any(ending.kind is EndingKind.ABORTED for _, ending in processed.endings)


def _output(step: Json) -> EngineCoreOutput:
    finish = step["finish"]
    return EngineCoreOutput(
        "r",
        list(step["ids"]),
        new_logprobs=_logprobs(step["logprobs"]),
        finish_reason=None if finish is None else FinishReason[finish.upper()],
        stop_reason=step["stop_reason"],
    )


def _logprobs(rows: Json | None) -> LogprobsLists | None:
    if rows is None:
        return None
    shape = [len(rows["token_ids"]), len(rows["token_ids"][0])]
    return LogprobsLists(
        _array("<i4", "i", shape, [one for row in rows["token_ids"] for one in row]),
        _array("<f4", "f", shape, [one for row in rows["logprobs"] for one in row]),
        _array("<i8", "q", shape[:1], rows["ranks"]),
    )


def _array(dtype: str, letter: str, shape: list[int], values: Sequence[float]) -> NdArray:
    return NdArray(dtype, shape, struct.pack(f"<{len(values)}{letter}", *values))


def _describe(output: RequestOutput) -> Json:
    (one,) = output.outputs
    logprobs = None
    if one.logprobs is not None:
        logprobs = [[[i, p.logprob, p.rank] for i, p in row.items()] for row in one.logprobs]
    return {
        "text": one.text,
        "token_ids": list(one.token_ids),
        "finish_reason": one.finish_reason,
        "stop_reason": one.stop_reason,
        "finished": output.finished,
        "logprobs": logprobs,
        "cumulative_logprob": one.cumulative_logprob,
    }
