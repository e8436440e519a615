"""vLLM's own output processor, played by cases that come as JSON lines: the peer of a comparison.

    python vllm_output_peer.py NAME=TOKENIZER_FOLDER ... < cases > answers

Run by the Python that vLLM is installed for; imports nothing of trioleg. A case (``output_cases.py``)
names a tokenizer, a prompt, parameters and the steps of an engine. Each goes through
``vllm.v1.engine.output_processor.OutputProcessor`` as vLLM's server would send it; the answer is one line:
every output that came of it, and what the engine would be told to abort. ``detokenizer`` in a case says
which of vLLM's two it is; vLLM itself decides that by the class of the tokenizer, and that one question
is answered here instead.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

# vLLM's log lines go to standard output, where our answers belong.
_answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)

import numpy as np  # noqa: E402
import tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402
from vllm.sampling_params import RequestOutputKind, SamplingParams  # noqa: E402
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason, detokenizer  # noqa: E402
from vllm.v1.engine.output_processor import OutputProcessor  # noqa: E402
from vllm.v1.outputs import LogprobsLists  # noqa: E402

Json = dict[str, Any]


def load_tokenizer(folder: str) -> PreTrainedTokenizerFast:
    """The same tokenizer.json as the other side's, without any of transformers' corrections to it."""
    backend = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    backend.no_truncation()
    backend.no_padding()
    added = backend.get_added_tokens_decoder().values()
    special = [token.content for token in added if token.special]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        additional_special_tokens=special,
        clean_up_tokenization_spaces=False,
    )


def play(case: Json, tokenizer: PreTrainedTokenizerFast) -> Json:
    """Every output of the case, or what vLLM raised over it."""
    detokenizer.uses_fast_detokenizer = lambda _: case["detokenizer"] == "fast"
    processor = OutputProcessor(
        tokenizer, log_stats=False, stream_interval=case["engine_stream_interval"]
    )
    answer: Json = {"outputs": [], "aborts": [], "error": None}
    try:
        processor.add_request(make_request(case), prompt=None)
        for step in case["steps"]:
            done = processor.process_outputs([make_output(step)])
            answer["outputs"] += [describe(output) for output in done.request_outputs]
            answer["aborts"] += done.reqs_to_abort
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        answer["error"] = f"{type(error).__name__}: {error}"
    return answer


def make_request(case: Json) -> EngineCoreRequest:
    params = case["params"] | {"output_kind": RequestOutputKind(case["params"]["output_kind"])}
    return EngineCoreRequest(
        request_id="r",
        external_req_id="r",
        prompt_token_ids=case["prompt"],
        mm_features=None,
        sampling_params=SamplingParams(**params),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def make_output(step: Json) -> EngineCoreOutput:
    finish = step["finish"]
    return EngineCoreOutput(
        request_id="r",
        new_token_ids=list(step["ids"]),
        new_logprobs=make_logprobs(step["logprobs"]),
        finish_reason=None if finish is None else FinishReason[finish.upper()],
        stop_reason=step["stop_reason"],
    )


def make_logprobs(rows: Json | None) -> LogprobsLists | None:
    if rows is None:
        return None
    return LogprobsLists(
        np.array(rows["token_ids"], np.int32),
        np.array(rows["logprobs"], np.float32),
        np.array(rows["ranks"], np.int64),
    )


def describe(output: Any) -> Json:
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


def main() -> None:
    folders = dict(argument.split("=", 1) for argument in sys.argv[1:])
    loaded = {name: load_tokenizer(folder) for name, folder in folders.items()}
    for line in sys.stdin:
        case = json.loads(line)
        print(json.dumps(play(case, loaded[case["tokenizer"]])), file=_answers)
    _answers.flush()


if __name__ == "__main__":
    main()
