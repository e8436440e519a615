"""Every setting, with its default and the reason for it.

Rules of this file: frozen values, imports only ``errors``. Durations are seconds, sizes bytes.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field

from .errors import InvalidRequestError

__all__ = ["DETOKENIZERS", "DTYPES", "EngineConfig", "LLMConfig", "ServerConfig"]

# Two implementations of one contract: "fast" decodes in the tokenizers library, "readable" step by step
# in Python, with offsets that a debugger can show.
DETOKENIZERS = ("fast", "readable")

# "auto" is the checkpoint's own dtype.
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How our own torch engine is started; names and meanings are vLLM's flags.

    ``max_model_len`` None: the model's own context. ``max_num_seqs``: requests running at once; more
    wait in the engine. ``max_num_batched_tokens``: tokens of one step, prompt chunks included.
    """

    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            allowed = ", ".join(DTYPES)
            raise InvalidRequestError(
                f"dtype is {self.dtype!r}; allowed: {allowed}", parameter="dtype"
            )
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequestError(
                    f"{name} is {value}; allowed: an integer of at least 1", parameter=name
                )

    def arguments(self) -> list[str]:
        """These settings as ``trioleg engine`` takes them."""
        flags = [
            f"--dtype={self.dtype}",
            f"--device={self.device}",
            f"--max-num-seqs={self.max_num_seqs}",
            f"--max-num-batched-tokens={self.max_num_batched_tokens}",
        ]
        if self.max_model_len is not None:
            flags.append(f"--max-model-len={self.max_model_len}")
        return flags


def _chunk_size() -> int:
    """128, vLLM's default for its own loop, or TRIOLEG_OUTPUT_PROC_CHUNK_SIZE."""
    text = os.environ.get("TRIOLEG_OUTPUT_PROC_CHUNK_SIZE", "128")
    if not text.isdecimal() or int(text) < 1:
        raise InvalidRequestError(
            f"TRIOLEG_OUTPUT_PROC_CHUNK_SIZE is {text!r}; allowed: an integer of at least 1",
            parameter="TRIOLEG_OUTPUT_PROC_CHUNK_SIZE",
        )
    return int(text)


@dataclass(frozen=True, kw_only=True, slots=True)
class LLMConfig:
    """How ``open_llm`` behaves, whatever engine is behind it."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    # Outputs processed between two checkpoints of the reader.
    output_chunk_size: int = field(default_factory=_chunk_size)
    # Which detokenizer: see DETOKENIZERS.
    detokenizer: str = "fast"
    # Outputs are handed over every that many tokens at most; a request may ask for fewer outputs.
    stream_interval: int = 1
    # Unread output of one request, text and ids. 100,000 tokens are about 4 MB: a reader that far
    # behind is not coming back.
    mailbox_max_bytes: int = 16 * 2**20
    # From launch to READY. vLLM's own bound for the same wait.
    start_timeout: float = 600.0
    # A broken connection to the engine is death only after this long: reconnects take 20 to 100 ms.
    unreachable_timeout: float = 1.0
    # How long an engine that was asked to leave may take before it is killed.
    engine_stop_timeout: float = 5.0

    def __post_init__(self) -> None:
        if self.detokenizer not in DETOKENIZERS:
            raise InvalidRequestError(
                f"detokenizer is {self.detokenizer!r}; allowed: {', '.join(DETOKENIZERS)}",
                parameter="detokenizer",
            )
        if self.stream_interval < 1:
            raise InvalidRequestError(
                f"stream_interval is {self.stream_interval}; allowed: an integer of at least 1",
                parameter="stream_interval",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """How ``serve`` listens. Port 0 takes a free one."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    # Client pools keep connections for 60 to 75 s; a server that closes first makes them see RST.
    keep_alive_timeout: float = 75.0
    # After the streams have ended: what is left of connections is closed.
    graceful_timeout: float = 3.0
    # The bound on one write that makes no progress: a client that stopped reading.
    write_timeout: float = 30.0
    # After the engine's death the server says so for this long, then ends. Load balancers probe every
    # 5 to 10 s; a supervisor that restarts us should not have to wait longer.
    engine_death_linger: float = 10.0
    # A chat request with 100,000 tokens of text is about 0.5 MB.
    max_body_bytes: int = 16 * 2**20
    # A comment after so much silence of a stream, while it waits in a queue, say; None: none. Proxies
    # cut connections that are silent for 30 to 60 s. The first comment sends the 200: what fails
    # behind it is told by an error event, no longer by a status.
    sse_keep_alive_interval: float | None = None

    def __post_init__(self) -> None:
        interval = self.sse_keep_alive_interval
        if interval is not None and not 0 < interval < math.inf:
            raise InvalidRequestError(
                f"sse_keep_alive_interval is {interval}; allowed: seconds above 0, or None",
                parameter="sse_keep_alive_interval",
            )
