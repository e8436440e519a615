"""trioleg: the return leg of an LLM server, as a tree of Trio nurseries.

The layering, which a test enforces (arrows are imports, and run one way):

    server → runtime → {ipc, output} → {messages, outputs, sampling_params, prompts} → {errors, config}
    config → {timeouts, lora} → errors
    engine → {messages, sampling_params, tokenizer, grammar_gate, model_files, ipc}
    {engine, runtime} → grammar_gate → structured_outputs
    sampling_params → {structured_outputs, param_checks}
    model_store → gguf_convert;  prompts → tokenizer → {chat_template, pooling_model, token_pieces}
    {model_store, gguf_convert, tokenizer, pooling_model} → model_files → errors
    offline → {engine, output};  batch_files → {errors, config}

``testing``, ``compare`` and the programs (``cli``, ``serving``, ``batch``, ``bench``, ``chat``, ``chat_server``, ``pull_bar``,
``trace``, ``trace_table``) may import anything; nothing imports ``cli``. The public names are resolved on first
use, so that a process that wants one part (the engine, say) loads only that part.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import offline
    from .config import EngineConfig, LLMConfig, ServerConfig, VLLMConfig
    from .errors import (
        DeadlineExceeded,
        EngineDeadError,
        EngineStartError,
        EngineUnavailableError,
        InvalidRequestError,
        LoRAAdapterNotFoundError,
        ModelStoreError,
        OutputError,
        OverloadedError,
        ReaderTooSlow,
        RequestAborted,
        RequestEnded,
        RequestRefused,
        ServerShutdown,
        TriolegError,
        WireError,
    )
    from .lora import LoRAModulePath, LoRARequest
    from .outputs import (
        CompletionOutput,
        Ending,
        EndingKind,
        Logprob,
        PoolingOutput,
        PoolingRequestOutput,
        RequestMetrics,
        RequestOutput,
    )
    from .prompts import TokenizeParams
    from .runtime.health import Health, LLMState
    from .runtime.llm import LLM
    from .runtime.opening import open_llm
    from .runtime.request_stream import RequestStream
    from .sampling_params import (
        PoolingParams,
        RepetitionDetectionParams,
        RequestOutputKind,
        SamplingParams,
        StopHoldBack,
    )
    from .server.app import create_app
    from .server.serve import serve
    from .structured_outputs import StructuredOutputsParams
    from .timeouts import Timeouts
    from .tokenizer import Tokenizer

_HOMES = {
    "config": ("EngineConfig", "LLMConfig", "ServerConfig", "VLLMConfig"),
    "errors": (
        "DeadlineExceeded",
        "EngineDeadError",
        "EngineStartError",
        "EngineUnavailableError",
        "InvalidRequestError",
        "LoRAAdapterNotFoundError",
        "ModelStoreError",
        "OutputError",
        "OverloadedError",
        "ReaderTooSlow",
        "RequestAborted",
        "RequestEnded",
        "RequestRefused",
        "ServerShutdown",
        "TriolegError",
        "WireError",
    ),
    "lora": ("LoRAModulePath", "LoRARequest"),
    "outputs": (
        "CompletionOutput",
        "Ending",
        "EndingKind",
        "Logprob",
        "PoolingOutput",
        "PoolingRequestOutput",
        "RequestMetrics",
        "RequestOutput",
    ),
    "prompts": ("TokenizeParams",),
    "runtime.health": ("Health", "LLMState"),
    "runtime.llm": ("LLM",),
    "runtime.opening": ("open_llm",),
    "runtime.request_stream": ("RequestStream",),
    "sampling_params": (
        "PoolingParams",
        "RepetitionDetectionParams",
        "RequestOutputKind",
        "SamplingParams",
        "StopHoldBack",
    ),
    "server.app": ("create_app",),
    "timeouts": ("Timeouts",),
    "tokenizer": ("Tokenizer",),
    "server.serve": ("serve",),
    "structured_outputs": ("StructuredOutputsParams",),
}
# Used by their own names: ``trioleg.offline.generate``.
_MODULES = ("offline",)
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "LLM",
    "CompletionOutput",
    "DeadlineExceeded",
    "Ending",
    "EndingKind",
    "EngineConfig",
    "EngineDeadError",
    "EngineStartError",
    "EngineUnavailableError",
    "Health",
    "InvalidRequestError",
    "LLMConfig",
    "LLMState",
    "LoRAAdapterNotFoundError",
    "LoRAModulePath",
    "LoRARequest",
    "Logprob",
    "ModelStoreError",
    "OutputError",
    "OverloadedError",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "ReaderTooSlow",
    "RepetitionDetectionParams",
    "RequestAborted",
    "RequestEnded",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "RequestRefused",
    "RequestStream",
    "SamplingParams",
    "ServerConfig",
    "ServerShutdown",
    "StopHoldBack",
    "StructuredOutputsParams",
    "Timeouts",
    "TokenizeParams",
    "Tokenizer",
    "TriolegError",
    "VLLMConfig",
    "WireError",
    "create_app",
    "offline",
    "open_llm",
    "serve",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
