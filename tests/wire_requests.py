"""What our front end says to an engine, in every form it has: for the tests of versions, and for the
script that let each vLLM version read it (tests/vllm/make_wire_frames.py)."""

from __future__ import annotations

from typing import Any

import msgspec

from trioleg.ipc.codec import encode_abort, encode_request, encode_utility
from trioleg.messages import EngineCoreRequest, EnginePoolingParams, EngineSamplingParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}

_PLAIN = EngineCoreRequest(
    request_id="req-1",
    prompt_token_ids=[1, 2, 3],
    mm_features=None,
    sampling_params=EngineSamplingParams(temperature=0.0, max_tokens=5, eos_token_id=2),
    pooling_params=None,
    arrival_time=1.5,
    lora_request=None,
    cache_salt=None,
    data_parallel_rank=None,
)
_SAMPLED = EngineSamplingParams(
    temperature=0.5,
    top_p=0.75,
    top_k=5,
    min_p=0.125,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    repetition_penalty=1.25,
    seed=-7,
    max_tokens=12,
    min_tokens=3,
    stop_token_ids=[7, 8],
    logprobs=2,
    prompt_logprobs=1,
    logit_bias={4: 1.5},
    allowed_token_ids=[4, 5],
    skip_reading_prefix_cache=True,
    eos_token_id=2,
    all_stop_token_ids=[2, 7, 8],
    bad_words_token_ids=[[9, 10]],
)
_SCORED = EngineSamplingParams(max_tokens=1, logprobs=0, logprob_token_ids=[4, 5], eos_token_id=2)
_FORMED = EngineSamplingParams(
    max_tokens=9,
    ignore_eos=True,
    structured_outputs={"json": SCHEMA, "_backend": "guidance"},
    repetition_detection={"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 3},
    extra_args={"kv_transfer_params": {"remote": 1}},
)
_changed = msgspec.structs.replace

# By the name of what it shows.
ADDS = {
    "plain": _PLAIN,
    "all of sampling": _changed(
        _PLAIN, sampling_params=_SAMPLED, cache_salt="salt", client_index=1, priority=-2
    ),
    "logprobs of some tokens": _changed(_PLAIN, sampling_params=_SCORED),
    "structured output": _changed(_PLAIN, sampling_params=_FORMED),
    "pooling": _changed(
        _PLAIN,
        sampling_params=None,
        pooling_params=EnginePoolingParams(use_activation=True, dimensions=8, task="embed"),
    ),
    # What follows the fourth element has moved, and can be left out.
    "an adapter": _changed(_PLAIN, lora_request=["poet", 1, "/adapters/poet", None]),
}

NO_ADDS = frozenset({"abort", "utility"})


def _of_a_later_head() -> bytes:
    """A request with a parameter that no version knows, and more elements than any version's has."""
    fields: list[Any] = msgspec.msgpack.decode(encode_request(_PLAIN))
    fields[3]["of_a_later_version"] = [1]
    defaults = [None, False, None, None, None, False, None, None]
    return msgspec.msgpack.encode([*fields, *defaults, "surplus"])


def _of_a_terse_head() -> bytes:
    """Only the elements without a default."""
    return msgspec.msgpack.encode(msgspec.msgpack.decode(encode_request(_PLAIN))[:9])


def sent() -> dict[str, bytes]:
    """Every body, by name."""
    return {
        **{name: encode_request(request) for name, request in ADDS.items()},
        "of a later head": _of_a_later_head(),
        "of a terse head": _of_a_terse_head(),
        "abort": encode_abort(["req-1", "req-2"]),
        "utility": encode_utility(1, 2**64 - 1, "sleep", [1, "abort"]),
    }
