"""Every setting, with its default and the reason for it.

Rules of this file: frozen values, imports only ``errors``, ``lora``, ``timeouts`` and ``vllm_flags``. Durations are
seconds, sizes bytes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .errors import InvalidRequestError
from .lora import LoRAModulePath
from .timeouts import Timeouts, check_timeout, check_timeouts
from .vllm_flags import why_not

__all__ = [
    "DETOKENIZERS",
    "DTYPES",
    "SCHEDULING_POLICIES",
    "EngineConfig",
    "LLMConfig",
    "ServerConfig",
    "VLLMConfig",
]

# Two implementations of one contract: "fast" decodes in the tokenizers library, "readable" step by step
# in Python, with offsets that a debugger can show.
DETOKENIZERS = ("fast", "readable")

# Counts of tokens, requests and blocks: int32, as torch and the wire have them.
_LARGEST = 2**31 - 1

_LAST_PORT = 65535

# "auto" is the checkpoint's own dtype.
DTYPES = ("auto", "float32", "bfloat16", "float16")

# "auto" is the model's own, "vllm" none of it.
GENERATION_CONFIGS = ("auto", "vllm")

# First come first served; or the smallest ``priority`` first, and among equals the same.
SCHEDULING_POLICIES = ("fcfs", "priority")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How our own torch engine is started; names and meanings are vLLM's flags.

    ``dtype``: see ``DTYPES``; "auto" is the checkpoint's. ``device``: a torch device; "auto" takes a GPU if there
    is one. ``scheduling_policy``: see ``SCHEDULING_POLICIES``; "priority" lets requests name one.
    ``max_model_len`` None: the model's own context. ``max_num_seqs``: requests running at once; more
    wait in the engine. ``max_num_batched_tokens``: tokens of one step, prompt chunks included.
    ``max_logprobs``: how many of the most probable tokens a request may ask for at each position; -1: all
    that there are. ``enable_prefix_caching``: keep the keys and values of finished requests, for prompts
    that begin alike. ``num_gpu_blocks_override``: blocks of the key/value cache; None: what memory allows.
    ``torch_profiler_dir``: where traces of torch's profiler go; None: it cannot be turned on.
    """

    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    max_logprobs: int = 20
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    num_gpu_blocks_override: int | None = None
    torch_profiler_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            allowed = ", ".join(DTYPES)
            raise InvalidRequestError(
                f"dtype is {self.dtype!r}; allowed: {allowed}", parameter="dtype"
            )
        if self.scheduling_policy not in SCHEDULING_POLICIES:
            raise InvalidRequestError(
                f"scheduling_policy is {self.scheduling_policy!r}; allowed: "
                f"{', '.join(SCHEDULING_POLICIES)}",
                parameter="scheduling_policy",
            )
        _check_integer("max_num_seqs", self.max_num_seqs)
        _check_integer("max_num_batched_tokens", self.max_num_batched_tokens)
        if self.max_model_len is not None:
            _check_integer("max_model_len", self.max_model_len)
        if self.num_gpu_blocks_override is not None:
            _check_integer("num_gpu_blocks_override", self.num_gpu_blocks_override)
        if self.max_logprobs != -1:
            _check_integer("max_logprobs", self.max_logprobs, 0, "-1 (no bound), or an integer")

    def arguments(self) -> list[str]:
        """These settings as ``trioleg engine`` takes them."""
        flags = [
            f"--dtype={self.dtype}",
            f"--device={self.device}",
            f"--max-num-seqs={self.max_num_seqs}",
            f"--max-num-batched-tokens={self.max_num_batched_tokens}",
            f"--max-logprobs={self.max_logprobs}",
            f"--{'' if self.enable_prefix_caching else 'no-'}enable-prefix-caching",
            f"--scheduling-policy={self.scheduling_policy}",
        ]
        if self.max_model_len is not None:
            flags.append(f"--max-model-len={self.max_model_len}")
        if self.num_gpu_blocks_override is not None:
            flags.append(f"--num-gpu-blocks-override={self.num_gpu_blocks_override}")
        if self.torch_profiler_dir is not None:
            flags.append(f"--torch-profiler-dir={self.torch_profiler_dir.absolute()}")
        return flags


@dataclass(frozen=True, kw_only=True, slots=True)
class VLLMConfig:
    """A stock vLLM engine that we start, with ``vllm serve MODEL --headless``.

    ``python``: an interpreter whose environment has vLLM; None: this one's, or that of the ``vllm`` on the PATH.
    ``arguments``: more flags of ``vllm serve``, but for those by which an engine joins its front end, and those that
    are for vLLM's own (``vllm_flags.py``).
    """

    python: Path | str | None = None
    arguments: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.python is not None and not isinstance(self.python, Path | str):
            _check_type("python", self.python, Path)
        if not isinstance(self.arguments, list | tuple):
            raise InvalidRequestError(
                f"arguments is {self.arguments!r:.60}; allowed: a list of strings",
                parameter="arguments",
            )
        object.__setattr__(self, "arguments", tuple(self.arguments))
        for argument in self.arguments:
            _check_type("arguments", argument, str)
            why = why_not(argument)
            if why is not None:
                # What is behind "=" may be a secret.
                flag = argument.partition("=")[0]
                raise InvalidRequestError(
                    f"arguments hold {flag!r}, {why}; allowed: other flags of vllm serve",
                    parameter="arguments",
                )


def _check_type(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise InvalidRequestError(
            f"{name} is {value!r:.60}; allowed: {kind.__name__}", parameter=name
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_integer(name: str, value: Any, minimum: int = 1, what: str = "an integer") -> None:
    if not _is_number(value) or not minimum <= value <= _LARGEST:
        allowed = f"{what} from {minimum} to {_LARGEST}"
        raise InvalidRequestError(f"{name} is {value!r:.60}; allowed: {allowed}", parameter=name)


def _chunk_size() -> int:
    """128, vLLM's default for its own loop, or TRIOLEG_OUTPUT_PROC_CHUNK_SIZE."""
    text = os.environ.get("TRIOLEG_OUTPUT_PROC_CHUNK_SIZE", "128")
    try:
        size: int | str = int(text)
    except ValueError:
        size = text
    _check_integer("TRIOLEG_OUTPUT_PROC_CHUNK_SIZE", size)
    return int(size)


def _check_lora_modules(modules: Any) -> None:
    _check_type("lora_modules", modules, tuple)
    for one in modules:
        _check_type("lora_modules", one, LoRAModulePath)
    names = [one.name for one in modules]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequestError(
                f"lora_modules names {name!r} twice; allowed: names that differ",
                parameter="lora_modules",
            )


_POSITIVE_INTEGERS = (
    "output_chunk_size",
    "mailbox_max_bytes",
    "unread_max_bytes",
    "max_inflight_requests",
    "max_queued_prompt_tokens",
    "max_engine_restarts",
)


# Of ``EngineConfig``, what the front end has to know of any engine.
_OF_ANY_ENGINE = ("max_logprobs", "scheduling_policy")


def _refuse_settings_of_another(engine: EngineConfig) -> None:
    """What is said of our own engine means nothing for vLLM's."""
    for one in fields(EngineConfig):
        value = getattr(engine, one.name)
        if one.name not in _OF_ANY_ENGINE and value != one.default:
            flag = f"--{one.name.replace('_', '-')}"
            raise InvalidRequestError(
                f"{one.name} is {value!r} beside vllm; allowed: {one.default!r}, and {flag} in VLLMConfig.arguments",
                parameter=one.name,
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LLMConfig:
    """How ``open_llm`` behaves, whatever engine is behind it."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    # The engine is vLLM's and not our own. ``engine`` may say max_logprobs and scheduling_policy then, which both sides
    # must know; whatever else is among its own arguments.
    vllm: VLLMConfig | None = None
    # Outputs processed between two checkpoints of the reader.
    output_chunk_size: int = field(default_factory=_chunk_size)
    # Which detokenizer: see DETOKENIZERS.
    detokenizer: str = "fast"
    # Sampling parameters that a request does not name: those of the model's generation_config.json, or the API's own.
    # Names and meanings are vLLM's.
    generation_config: str = "auto"
    # Outputs are handed over every that many tokens at most; a request may ask for fewer outputs.
    stream_interval: int = 1
    # Unread output of one request. 100,000 tokens are about 1 MB, with 20 logprobs each 260 MB: a reader that far
    # behind is not coming back.
    mailbox_max_bytes: int = 16 * 2**20
    # Of all requests together; beyond it the reader that is furthest behind is ended. As much as 32 readers at
    # their own bound, or 500 that are 100,000 tokens behind.
    unread_max_bytes: int = 512 * 2**20
    # Of requests that name none of their own.
    timeouts: Timeouts = field(default_factory=Timeouts)
    # Requests that have begun and not ended, each of the n choices of one counted; more are turned away. 64 run at
    # once in our engine, so most of these would wait.
    max_inflight_requests: int = 4096
    # Prompts whose first token has not come, n times for n choices; more are turned away. Front end and engine
    # keep 4 million ids in about 150 MB each.
    max_queued_prompt_tokens: int = 2**22
    # From launch to the first answer. vLLM's own bound for the same wait.
    start_timeout: float = 600.0
    # A broken connection to the engine is no more than that for so long: reconnects take 20 to 100 ms.
    unreachable_timeout: float = 1.0
    # An engine that has work and has sent nothing for so long is asked whether it is there. A first
    # request with logprobs has taken vLLM 14 s.
    step_timeout: float = 60.0
    # An engine that does not answer comes back (from a debugger, from swap), or is given up after this.
    frozen_timeout: float = 15.0
    # Whether an engine that died is followed by another one, and how often in a row that may fail.
    restart_engine: bool = False
    max_engine_restarts: int = 5
    # LoRA adapters that every engine of it loads before it counts as ready.
    lora_modules: tuple[LoRAModulePath, ...] = ()
    # How long an engine that was asked to leave may take before it is killed.
    engine_stop_timeout: float = 5.0
    # Where engines join: the front end's folder that ``trioleg keys`` made. Only engines with a key that is in it
    # can join, over an encrypted wire; vLLM's own engines have no way to.
    curve_keys: Path | None = None
    # Where engines join without keys: the address may be one that other machines reach, and so whoever is there.
    allow_unauthenticated: bool = False

    def __post_init__(self) -> None:
        if self.detokenizer not in DETOKENIZERS:
            raise InvalidRequestError(
                f"detokenizer is {self.detokenizer!r}; allowed: {', '.join(DETOKENIZERS)}",
                parameter="detokenizer",
            )
        if self.generation_config not in GENERATION_CONFIGS:
            raise InvalidRequestError(
                f"generation_config is {self.generation_config!r:.60}; allowed: "
                f"{', '.join(GENERATION_CONFIGS)}",
                parameter="generation_config",
            )
        _check_integer("stream_interval", self.stream_interval)
        _check_type("engine", self.engine, EngineConfig)
        if self.vllm is not None:
            _check_type("vllm", self.vllm, VLLMConfig)
            _refuse_settings_of_another(self.engine)
        _check_type("restart_engine", self.restart_engine, bool)
        _check_type("allow_unauthenticated", self.allow_unauthenticated, bool)
        if self.curve_keys is not None:
            _check_type("curve_keys", self.curve_keys, Path)
            if self.allow_unauthenticated:
                raise InvalidRequestError(
                    "allow_unauthenticated is True beside curve_keys, which let nobody in without a key; "
                    "allowed: one of them",
                    parameter="allow_unauthenticated",
                )
        _check_lora_modules(self.lora_modules)
        for name in _POSITIVE_INTEGERS:
            _check_integer(name, getattr(self, name))
        check_timeouts(self.timeouts)
        for name in ("start", "unreachable", "step", "frozen", "engine_stop"):
            check_timeout(f"{name}_timeout", getattr(self, f"{name}_timeout"), optional=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """How ``serve`` listens. Port 0 takes a free one."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    # Client pools keep connections for 60 to 75 s; a server that closes first makes them see RST.
    keep_alive_timeout: float = 75.0
    # After a signal: requests that are running may go on for so long. With the last frames, the connections'
    # closing and the engine's end (2, 3 and 5 s at most) it fits into the 30 s that Kubernetes waits before it kills.
    drain_timeout: float = 15.0
    # After the streams have ended: what is left of connections is closed.
    graceful_timeout: float = 3.0
    # Beyond it clients get a 503. None: what the system's limit on open files leaves room for.
    max_connections: int | None = None
    # The bound on one write that makes no progress: a client that stopped reading.
    write_timeout: float = 30.0
    # After the engine's death the server says so for this long, then ends. Load balancers probe every
    # 5 to 10 s; a supervisor that restarts us should not have to wait longer.
    engine_death_linger: float = 10.0
    # A chat request with 100,000 tokens of text is about 0.5 MB.
    max_body_bytes: int = 16 * 2**20
    # From a request's head to the end of its body: half a megabyte over 70 kbit/s. A request's own
    # timeouts may be shorter.
    body_timeout: float = 60.0
    # Sleep, pause, caches and adapters over HTTP, for operators: whoever reaches the port may use them.
    enable_engine_controls: bool = False
    # A comment after so much silence of a stream, while it waits in a queue, say; None: none. Proxies
    # cut connections that are silent for 30 to 60 s. The first comment sends the 200: what fails
    # behind it is told by an error event, no longer by a status.
    sse_keep_alive_interval: float | None = None
    # Who asks for anything but a probe or the metrics names one of these (``Authorization: Bearer KEY``), or gets a
    # 401. None of them: whoever reaches the server may ask.
    api_keys: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        _check_type("host", self.host, str)
        _check_type("api_keys", self.api_keys, tuple)
        if not all(isinstance(key, str) and key for key in self.api_keys):
            raise InvalidRequestError(
                "api_keys has one that is no text, or empty; allowed: a tuple of texts",
                parameter="api_keys",
            )
        _check_type("enable_engine_controls", self.enable_engine_controls, bool)
        _check_integer("max_body_bytes", self.max_body_bytes)
        if not _is_number(self.port) or not 0 <= self.port <= _LAST_PORT:
            allowed = f"an integer from 0 to {_LAST_PORT}"
            raise InvalidRequestError(
                f"port is {self.port!r:.60}; allowed: {allowed}", parameter="port"
            )
        check_timeout("sse_keep_alive_interval", self.sse_keep_alive_interval)
        check_timeout("body_timeout", self.body_timeout, optional=False)
        if self.max_connections is not None:
            _check_integer("max_connections", self.max_connections)
        for name in ("keep_alive", "drain", "graceful", "write"):
            check_timeout(
                f"{name}_timeout",
                getattr(self, f"{name}_timeout"),
                optional=False,
                may_be_zero=True,
            )
        check_timeout(
            "engine_death_linger", self.engine_death_linger, optional=False, may_be_zero=True
        )
