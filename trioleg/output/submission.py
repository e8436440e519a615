"""``Submission``: a prompt and its parameters, made into what the front end remembers and the engine gets.

Pure. The one place where that happens, whoever asks: a server's stream, a program's, or a batch. What only
the model can tell of the parameters (is there room for so many tokens? is that an id of its vocabulary?)
is checked here, and bad words become token ids; after that the engine must take the request, since on this
wire a bad one can end it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidRequestError
from ..lora import LoRARequest
from ..messages import EngineCoreRequest, EnginePoolingParams, EngineSamplingParams
from ..param_checks import check_token_ids
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


# vLLM's bound: an engine of its own may refuse more.
_BAD_WORDS_MAX = 128


def default_sampling_params(tokenizer: Tokenizer, **asked: Any) -> SamplingParams:
    """The model's own defaults (generation_config.json), overridden by what is asked for.

    Raises ``InvalidRequestError``.
    """
    recommended = tokenizer.generation_defaults
    known = SamplingParams.__dataclass_fields__
    defaults = {name: value for name, value in recommended.items() if name in known}
    return SamplingParams(**(defaults | asked))


@dataclass(frozen=True, slots=True)
class Submission:
    """``state`` is for the output processor, and first; then ``engine_requests`` go to the engine: one
    for each choice, and none once it has them."""

    state: RequestState | PoolingState
    engine_requests: list[EngineCoreRequest]

    @property
    def engine_request_ids(self) -> list[str]:
        """The ids under which the engine has it."""
        return [choice.engine_request_id for choice in self.state.choices]


def make_submission(
    request_id: str,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    tokenizer: Tokenizer,
    *,
    max_model_len: int,
    max_logprobs: int,
    sink: OutputSink | None = None,
    detokenizer: str = "fast",
    stream_interval: int = 1,
    arrival: float | None = None,
    priority: int = 0,
    cache_salt: str | None = None,
    lora_request: LoRARequest | None = None,
    scheduling_policy: str = "fcfs",
) -> Submission:
    """A request for tokens. ``prompt_token_ids`` are checked already (``trioleg/prompts.py``).

    ``max_model_len``, ``max_logprobs`` (-1: no bound) and ``scheduling_policy`` are the engine's.
    ``arrival``: when the request came, by the monotonic clock. ``priority``, ``cache_salt``, ``lora_request``: see
    ``LLM.open_stream``. The others: see ``RequestState``. Raises ``InvalidRequestError``.
    """
    _check_priority(priority, scheduling_policy)
    _check_cache_salt(cache_salt)
    max_tokens = _max_tokens(params, len(prompt_token_ids), max_model_len)
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids"):
        check_token_ids(name, getattr(params, name), tokenizer.vocab_size)
    _check_logprobs(params, max_logprobs, tokenizer.vocab_size)
    _check_prompt_logprobs(params, len(prompt_token_ids), tokenizer.vocab_size)
    bad_words_token_ids = _bad_words_token_ids(params.bad_words, tokenizer)
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
                bad_words_token_ids=bad_words_token_ids,
                index=choice.index,
            ),
            priority=priority,
            cache_salt=cache_salt,
            lora_request=lora_request,
        )
        for choice in state.choices
    ]
    return Submission(state, requests)


def make_pooling_submission(
    request_id: str,
    prompt_token_ids: Sequence[int],
    params: PoolingParams,
    *,
    max_model_len: int | None = None,
    sink: OutputSink | None = None,
    arrival: float | None = None,
    priority: int = 0,
    cache_salt: str | None = None,
    scheduling_policy: str = "fcfs",
) -> Submission:
    """A request to a pooling model; see ``make_submission``. Raises ``InvalidRequestError``, also if the prompt is
    longer than ``max_model_len``."""
    _check_priority(priority, scheduling_policy)
    _check_cache_salt(cache_salt)
    if max_model_len is not None and len(prompt_token_ids) > max_model_len:
        raise InvalidRequestError(
            f"the prompt has {len(prompt_token_ids)} tokens; allowed: at most {max_model_len}",
            parameter="prompt",
        )
    state = PoolingState(request_id, prompt_token_ids, sink, arrival=arrival)
    request = _engine_request(
        request_id,
        state.prompt_token_ids,
        pooling_params=params.for_engine(),
        priority=priority,
        cache_salt=cache_salt,
    )
    return Submission(state, [request])


def _engine_request(
    request_id: str,
    prompt_token_ids: list[int],
    *,
    sampling_params: EngineSamplingParams | None = None,
    pooling_params: EnginePoolingParams | None = None,
    priority: int = 0,
    cache_salt: str | None = None,
    lora_request: LoRARequest | None = None,
) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        mm_features=None,
        sampling_params=sampling_params,
        pooling_params=pooling_params,
        arrival_time=time.time(),
        lora_request=lora_request,
        cache_salt=cache_salt,
        data_parallel_rank=None,
        priority=priority,
    )


# What a 32-bit integer holds: engines compare priorities, and need no more.
_PRIORITY_MAX = 2**31 - 1


def _check_priority(priority: Any, scheduling_policy: str) -> None:
    is_number = isinstance(priority, int) and not isinstance(priority, bool)
    if not is_number or not -_PRIORITY_MAX <= priority <= _PRIORITY_MAX:
        allowed = f"an integer from {-_PRIORITY_MAX} to {_PRIORITY_MAX}"
    elif priority and scheduling_policy != "priority":
        allowed = f"0, since the engine's scheduling policy is {scheduling_policy}"
    else:
        return
    raise InvalidRequestError(
        f"priority is {_shown(priority)}; allowed: {allowed}", parameter="priority"
    )


def _check_cache_salt(cache_salt: Any) -> None:
    if cache_salt is None or (isinstance(cache_salt, str) and cache_salt and _is_utf8(cache_salt)):
        return
    raise InvalidRequestError(
        f"cache_salt is {_shown(cache_salt)}; allowed: a string that is not empty, of Unicode "
        "characters, or null",
        parameter="cache_salt",
    )


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: Any) -> str:
    shown = ascii(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


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


def _check_logprobs(params: SamplingParams, max_logprobs: int, vocab_size: int) -> None:
    """How many there may be is the engine's own setting; a chat request says top_logprobs for logprobs."""
    names = {"logprobs": "logprobs (top_logprobs)", "prompt_logprobs": "prompt_logprobs"}
    if params.logprob_token_ids:
        # They have a bound of their own, and logprobs is only their number.
        del names["logprobs"]
    for name, spelled in names.items():
        k = getattr(params, name)
        asked = vocab_size if k == -1 else k
        if asked is not None and max_logprobs != -1 and asked > max_logprobs:
            raise InvalidRequestError(
                f"{spelled} is {k}; allowed: 0 to {max_logprobs}, which is max_logprobs, or null",
                parameter=name,
            )


# All in one output: a figure takes 4 µs to read, in which nobody else is served, and 250 bytes. 20 for each token of
# a prompt of 13,000 are as many.
_PROMPT_LOGPROBS_MAX = 2**18


def _check_prompt_logprobs(params: SamplingParams, prompt_len: int, vocab_size: int) -> None:
    k = params.prompt_logprobs
    most = _PROMPT_LOGPROBS_MAX // prompt_len - 1
    if k is not None and (vocab_size if k == -1 else k) > most:
        raise InvalidRequestError(
            f"prompt_logprobs is {k}; allowed: at most {max(most, 0)} for a prompt of {prompt_len} tokens "
            f"({_PROMPT_LOGPROBS_MAX} figures in all)",
            parameter="prompt_logprobs",
        )


def _bad_words_token_ids(bad_words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """vLLM's rule: a word as it begins a text, and, where that is one other token and no more of them, as
    it stands behind a space. Raises ``InvalidRequestError``."""
    found: list[list[int]] = []
    for word in bad_words:
        first = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        if not first:
            raise InvalidRequestError(
                f"bad_words holds {word!r}; allowed: words of at least one token",
                parameter="bad_words",
            )
        spaced = tokenizer.encode(f" {word.lstrip()}", add_special_tokens=False)
        found.append(first)
        if spaced and spaced[0] != first[0] and len(spaced) == len(first):
            found.append(spaced)
    if len(found) > _BAD_WORDS_MAX:
        raise InvalidRequestError(
            f"bad_words become {len(found)} sequences of tokens; allowed: at most {_BAD_WORDS_MAX}",
            parameter="bad_words",
        )
    for one in found:
        check_token_ids("bad_words", one, tokenizer.vocab_size)
    return found
