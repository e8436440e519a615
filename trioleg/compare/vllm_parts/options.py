"""What a scenario may ask of vLLM's leg, in vLLM's own flags; and how it says that it has no such thing."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Container, Mapping

__all__ = ["CHUNK_SIZE", "UNTIL", "flags", "refuse_unless", "set_environment", "shutdown_timeout"]

# EX_USAGE: what the caller asked for is not there.
_NO_SUCH_THING = 64
_DRAIN, _INFLIGHT, CHUNK_SIZE, UNTIL = (
    "drain_timeout",
    "max_inflight_requests",
    "output_chunk_size",
    "until",
)
OPTIONS = frozenset({_DRAIN, _INFLIGHT, CHUNK_SIZE, UNTIL})


def refuse_unless(name: str, allowed: Container[str]) -> None:
    """Leave by ``SystemExit``, with a line on stderr, if vLLM has nothing that ``name`` stands for."""
    if name not in allowed:
        sys.stderr.write(f"no such thing: {name}, in vLLM\n")
        raise SystemExit(_NO_SUCH_THING)


def set_environment(options: Mapping[str, str]) -> None:
    """Before vLLM is imported."""
    if CHUNK_SIZE in options:
        os.environ["VLLM_V1_OUTPUT_PROC_CHUNK_SIZE"] = options[CHUNK_SIZE]


def shutdown_timeout(options: Mapping[str, str]) -> int:
    """vLLM's default is 0: live requests are aborted. It counts whole seconds, so ours are rounded up."""
    return math.ceil(float(options.get(_DRAIN, "0")))


def flags(options: Mapping[str, str]) -> list[str]:
    """Of ``vllm serve``."""
    given = ["--shutdown-timeout", str(shutdown_timeout(options))]
    if _INFLIGHT in options:
        given += ["--max-num-queued-reqs", options[_INFLIGHT]]
    return given
