"""``Submission``: a prompt and its parameters, made into what the front end remembers and the engine gets.

Pure. The one place where that happens, whoever asks: a server's stream, a program's, or a batch. What only
the model can tell of the parameters (is there room for so many tokens? is that an id of its vocabulary?)
is checked here; after that the engine must take the request, since on this wire a bad one can end it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidRequestError
from ..messages import EngineCoreRequest, EnginePoolingParams, EngineSamplingParams
from ..sampling_params import PoolingParams, SamplingParams
from ..tokenizer import Tokenizer
from .pooling import PoolingState
from .request_state import OutputSink, RequestState

__all__ = [
    "Submission",
    "default_sampling_params",
    "make_pooling_submission",
    "make_submission",
]


# Of what a model's author may recommend, what SamplingParams has a name for.
_DEFAULTS = ("temperature", "top_p", "top_k")


def default_sampling_params(tokenizer: Tokenizer, **asked: Any) -> SamplingParams:
    """The model's own defaults (generation_config.json), overridden by what is asked for.

    Raises ``InvalidRequestError``.
    """
    recommended = tokenizer.generation_defaults
    defaults = {name: recommended[name] for name in _DEFAULTS if name in recommended}
    return SamplingParams(**(defaults | asked))


@dataclass(frozen=True, slots=True)
class Submission:
    """``state`` is for the output processor, and first; then ``engine_requests`` go to the engine: one
    for each choice."""

    state: RequestState | PoolingState
    engine_requests: list[EngineCoreRequest]


def make_submission(
    request_id: str,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    tokenizer: Tokenizer,
    *,
    max_model_len: int,
    sink: OutputSink | None = None,
    detokenizer: str = "fast",
    stream_interval: int = 1,
    arrival: float | None = None,
) -> Submission:
    """A request for tokens. ``prompt_token_ids`` are checked already (``trioleg/prompts.py``).

    ``max_model_len``: the engine's. ``arrival``: when the request came, by the monotonic clock. The
    others: see ``RequestState``. Raises ``InvalidRequestError``.
    """
    max_tokens = _max_tokens(params, len(prompt_token_ids), max_model_len)
    _check_ids("stop_token_ids", params.stop_token_ids, tokenizer.vocab_size)
    state = RequestState(
        request_id,
        prompt_token_ids,
        params,
        tokenizer,
        sink,
        max_tokens=max_tokens,
        detokenizer=detokenizer,
        stream_interval=stream_interval,
        arrival=arrival,
    )
    requests = [
        _engine_request(
            choice.engine_request_id,
            state.prompt_token_ids,
            sampling_params=params.for_engine(
                max_tokens=max_tokens,
                eos_token_id=tokenizer.eos_token_id,
                other_eos_token_ids=tokenizer.other_eos_token_ids,
                index=choice.index,
            ),
        )
        for choice in state.choices
    ]
    return Submission(state, requests)


def make_pooling_submission(
    request_id: str,
    prompt_token_ids: Sequence[int],
    params: PoolingParams,
    *,
    sink: OutputSink | None = None,
    arrival: float | None = None,
) -> Submission:
    """A request to a pooling model."""
    state = PoolingState(request_id, prompt_token_ids, sink, arrival=arrival)
    request = _engine_request(
        request_id, state.prompt_token_ids, pooling_params=params.for_engine()
    )
    return Submission(state, [request])


def _engine_request(
    request_id: str,
    prompt_token_ids: list[int],
    *,
    sampling_params: EngineSamplingParams | None = None,
    pooling_params: EnginePoolingParams | None = None,
) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        mm_features=None,
        sampling_params=sampling_params,
        pooling_params=pooling_params,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def _max_tokens(params: SamplingParams, prompt_len: int, max_model_len: int) -> int:
    """What max_tokens comes to beside this prompt."""
    left = max_model_len - prompt_len
    for name in ("max_tokens", "min_tokens"):
        value = getattr(params, name)
        if value is not None and value > left:
            raise InvalidRequestError(
                f"{name} is {value}; allowed: at most {left}, which is max_model_len "
                f"({max_model_len}) less the prompt's {prompt_len} tokens",
                parameter=name,
            )
    return left if params.max_tokens is None else params.max_tokens


def _check_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if token_id >= vocab_size:
            raise InvalidRequestError(
                f"{name} holds {token_id}; allowed: 0 to {vocab_size - 1}", parameter=name
            )
