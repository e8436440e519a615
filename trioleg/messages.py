"""The engine-core wire's messages (hop 2), as msgspec structs.

This is vLLM's engine-core protocol as ``WIRE_VERSION`` has it; ``ipc/versions.py`` knows where others differ. Names
and positions are vLLM's, so that the two sources can be read side by side. Structs marked ``array_like`` travel as
arrays and are decoded by position; new trailing fields of a newer peer are ignored, missing ones take their
default.

Rules of this file: plain data, no behaviour beyond small helpers, no imports but ``errors``. Fields typed ``Any``
are carried but not looked at.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

__all__ = [
    "ENGINE_CORE_DEAD",
    "ENGINE_SHUTTING_DOWN",
    "WIRE_VERSION",
    "ArrayData",
    "EngineCoreEvent",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "EngineCoreRequestType",
    "EngineHandshakeInit",
    "EngineHandshakeStatus",
    "EnginePoolingParams",
    "EngineReadyResponse",
    "EngineSamplingParams",
    "FinishReason",
    "HandshakeAddresses",
    "LogprobsLists",
    "LogprobsTensors",
    "NdArray",
    "PrefillStats",
    "PrefixCacheStats",
    "RequestError",
    "SchedulerStats",
    "UtilityOutput",
    "engine_identity",
    "read_refusal",
    "refusal_reason",
]

# What our engines' ready responses say: a head knows the positions by it.
WIRE_VERSION = "0.33.0"

# Our engine's stop_reason for what it ends, with ABORT, because it is told to leave: nobody has aborted that
# request. (vLLM's engine says nothing, and its head takes any string.)
ENGINE_SHUTTING_DOWN = "the engine is shutting down"

# A lone frame of these 16 bytes on an output leg: an engine's last word. It names no engine.
ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"


def engine_identity(rank: int) -> bytes:
    """The identity of an engine's DEALER sockets: its rank, 2 bytes little-endian."""
    return rank.to_bytes(2, "little")


class EngineCoreRequestType(enum.Enum):
    """The type frame of the input leg: one byte."""

    ADD = b"\x00"
    ABORT = b"\x01"
    START_DP_WAVE = b"\x02"
    UTILITY = b"\x03"
    # vLLM's executor says it to its own engine, which ends by it; it is heard from a front end, too.
    EXECUTOR_FAILED = b"\x04"


class FinishReason(enum.IntEnum):
    """Why an engine finished a request; the numbers travel on the wire."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


# How our engine spells the stop_reason of a request that ends with ERROR by its own fault. Other engines
# send a sentence at most, which blames nobody.
_REFUSAL = "InvalidRequestError"


def refusal_reason(parameter: str | None, sentence: str) -> str:
    """The stop_reason of a request that cannot be served as it was asked for."""
    return f"{_REFUSAL}({parameter or ''}): {sentence}"


def read_refusal(stop_reason: int | str | None) -> tuple[str | None, str] | None:
    """Parameter and sentence of what ``refusal_reason`` made; None for any other stop_reason."""
    if not isinstance(stop_reason, str) or not stop_reason.startswith(f"{_REFUSAL}("):
        return None
    parameter, separator, sentence = stop_reason[len(_REFUSAL) + 1 :].partition("): ")
    return (parameter or None, sentence) if separator else None


class EngineSamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The part of vLLM's SamplingParams that an engine reads: a map on the wire.

    The head's own fields (stop strings, detokenize, output_kind, …) may be present and are ignored,
    as every unknown key is. Defaults are vLLM's; note ``max_tokens``: 16 when left out.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    structured_outputs: Any = None
    # True: nothing of this prompt is taken from the prefix cache. None: as prompt_logprobs need it.
    skip_reading_prefix_cache: bool | None = None
    repetition_detection: Any = None
    thinking_token_budget: Any = None
    trace_decode_token_ids: Any = None
    watermarking: Any = None
    extra_args: Any = None
    eos_token_id: int | None = msgspec.field(default=None, name="_eos_token_id")
    # The union of all stop ids, the primary eos included: masked until min_tokens are out.
    all_stop_token_ids: list[int] = msgspec.field(default_factory=list, name="_all_stop_token_ids")
    bad_words_token_ids: list[list[int]] | None = msgspec.field(
        default=None, name="_bad_words_token_ids"
    )


class EnginePoolingParams(msgspec.Struct, array_like=True, omit_defaults=True):
    """The part of vLLM's PoolingParams that we use: an array on the wire, unlike SamplingParams.

    ``task`` is "embed", "classify" or another one that the engine's get_supported_tasks names. The head
    fills in what is left open: an engine would take ``use_activation`` None for no.
    """

    use_activation: bool | None = None
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    task: str | None = None


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True):
    """ADD: one request, as an engine takes it. Nine elements are enough on the wire."""

    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: Any
    sampling_params: EngineSamplingParams | None
    pooling_params: EnginePoolingParams | None
    arrival_time: float
    lora_request: Any
    cache_salt: str | None
    data_parallel_rank: int | None
    prompt_embeds: Any = None
    prompt_is_token_ids: Any = None
    # Which output leg the answers go to, whichever input leg the request came by.
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0


class ArrayData:
    """The bytes of an array that is about to be sent. ``ipc/codec.py`` decides whether they travel
    inside the body or in a frame of their own; whoever made ``buffer`` may not change it any more."""

    __slots__ = ("buffer",)

    def __init__(self, buffer: bytes | bytearray | memoryview) -> None:
        self.buffer = buffer


class NdArray(msgspec.Struct, array_like=True):
    """An array or tensor. ``dtype`` as numpy spells it ("<i4") or as torch does ("float32").

    ``data``: the elements in C order, as bytes; or, after decoding, the number of the message's frame
    that holds them (the body is frame 0); or ``ArrayData``, to be encoded.
    """

    dtype: str
    shape: list[int]
    data: Any


class LogprobsLists(msgspec.Struct, array_like=True):
    """Logprobs of the n tokens of one output, each with k alternatives.

    ``token_ids`` int32 and ``logprobs`` float32, both [n, k + 1]: column 0 is the sampled token, then
    come the k most probable ones in order (the sampled one again, if it is among them). ``ranks``
    int64 [n]: the sampled token's rank, from 1. The fourth is vLLM's own business.
    """

    token_ids: NdArray
    logprobs: NdArray
    ranks: NdArray
    cu_num_generated_tokens: Any = None


class LogprobsTensors(msgspec.Struct, array_like=True):
    """Logprobs of a prompt of P tokens: as ``LogprobsLists``, with P - 1 rows and int32 ranks, in
    torch's spelling. Row i is about prompt token i + 1. The last two are vLLM's own business."""

    token_ids: NdArray
    logprobs: NdArray
    ranks: NdArray
    cu_num_generated_tokens: Any = None
    extra: Any = None


class PrefillStats(msgspec.Struct, kw_only=True):
    """Comes with a request's first token: what its prompt cost. Counts are tokens."""

    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_local_cached_tokens: int = 0
    num_external_cached_tokens: int = 0
    num_cache_creation_tokens: int = 0


class EngineCoreEvent(msgspec.Struct):
    """One event of a request's life in the engine; ``timestamp`` is its monotonic clock."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3

    type: int
    timestamp: float


class RequestError(msgspec.Struct, kw_only=True):
    """Why an engine ended a request with ERROR (since 0.33). ``code``: "validation_error" if the request itself
    is to blame; ``message``: a sentence for whoever asked; ``retryable``: it may work another time."""

    VALIDATION_ERROR = "validation_error"

    code: str = ""
    message: str = ""
    retryable: bool = False


class EngineCoreOutput(msgspec.Struct, array_like=True):
    """What one step made for one request.

    The arrays (``LogprobsLists``, ``LogprobsTensors``, an ``NdArray``) are typed ``Any``: one that is
    malformed is its own request's fault, found where it is read, and must not spoil the message.
    """

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    new_prompt_logprobs_tensors: Any = None
    pooling_output: Any = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    events: list[EngineCoreEvent] | None = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    trace_headers: Any = None
    prefill_stats: PrefillStats | None = None
    routed_experts: Any = None
    num_nans_in_logits: int = 0
    mm_cache_miss_hashes: Any = None
    new_sampling_mask: Any = None
    spec_decode_metrics: Any = None
    prompt_token_id_logprobs: Any = None
    error: RequestError | None = None


class PrefixCacheStats(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a prefix cache was asked in one step: ``queries`` and ``hits`` are tokens, of ``requests`` that
    were admitted; those that had been preempted before count apart. ``reset``: it was emptied."""

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0


class SchedulerStats(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An engine's figures after a step: a map; peers may send more keys than these, or leave some out.

    vLLM's head takes no nil for ``prefix_cache_stats``, but does without it.
    """

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    step_counter: int = 0
    # 0 (nothing used) to 1 (every block of the key/value cache used).
    kv_cache_usage: float = 0.0
    prefix_cache_stats: PrefixCacheStats | None = None


class UtilityOutput(msgspec.Struct, array_like=True):
    """The answer to one UTILITY call. ``result`` is ``[type_info | None, value]``, or None."""

    call_id: int
    failure_message: str | None = None
    result: Any = None


class EngineCoreOutputs(msgspec.Struct, array_like=True):
    """One message of an output leg: what one step made for one client."""

    engine_index: int = 0
    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    # The engine's CLOCK_MONOTONIC in seconds: comparable on one host only. Never 0.0.
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None
    finished_requests: list[str] | None = None
    wave_complete: int | None = None
    start_wave: int | None = None
    weight_version: str | None = None


class EngineHandshakeStatus(msgspec.Struct, kw_only=True, omit_defaults=True):
    """HELLO and READY, engine to head on the handshake leg: a map."""

    status: str
    local: bool = msgspec.field(default=False)
    headless: bool = msgspec.field(default=False)


class HandshakeAddresses(msgspec.Struct, kw_only=True):
    """Where the engine connects: index i of both lists belongs to client i."""

    inputs: list[str]
    outputs: list[str]
    coordinator_input: str | None = None
    coordinator_output: str | None = None
    frontend_stats_publish_address: str | None = None


class EngineHandshakeInit(msgspec.Struct, kw_only=True):
    """INIT, the head's one reply on the handshake leg: a map."""

    addresses: HandshakeAddresses
    parallel_config: dict[str, Any] = {}


class EngineReadyResponse(msgspec.Struct, kw_only=True):
    """The engine's first frame on each input leg. vLLM's head insists on every key that its own version has
    without a default; ours needs the first two and ``vllm_version``, as 0.23 sends them.

    ``max_num_seqs`` 0 (before 0.27) and ``supports_lora`` None (before 0.29): the engine does not say.
    ``validates_requests``: the engine looks at what it is sent and refuses it alone, as ours do. vLLM's do not, nor
    do they know this key.
    """

    max_model_len: int
    num_gpu_blocks: int
    block_size: int = 16
    dp_stats_address: str | None = None
    dtype: str = "float32"
    vllm_version: str = ""
    world_size: int = 1
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    data_parallel_rank: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    instance_id: str = ""
    supports_lora: bool | None = None
    max_loras: int = 0
    mamba_block_size: int | None = None
    # None for a model without a key/value cache.
    kv_cache_size_tokens: int | None = 0
    kv_cache_max_concurrency: float | None = 0.0
    kv_events_config: Any = None
    weight_transfer_backend: Any = None
    enable_sleep_mode: bool = False
    supports_draft_weight_updates: bool = False
    effective_attention_block_size: int | None = 16
    validates_requests: bool = False
