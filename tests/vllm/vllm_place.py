"""Where the tests' own vLLM is, in which surroundings it runs, and what is asked of it by several of them."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

from programs import ROOT, Program

__all__ = [
    "MAX_MODEL_LEN",
    "VLLM",
    "VLLM_ENV",
    "VLLM_PYTHON",
    "VLLM_START_S",
    "clear_cases",
    "data_parallel",
    "free_port",
    "golden_cases",
    "ready_url",
]

# ``make test-vllm`` names it; by hand, one beside the project's own environment will do.
VLLM_PYTHON = Path(os.environ.get("TRIOLEG_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
VLLM = (str(VLLM_PYTHON), "-m", "vllm.entrypoints.cli.main")
VLLM_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB: enough for a small model
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONPATH": "",
}
_CLEAR_MARGIN = 0.04
MAX_MODEL_LEN = "1024"
# Loading vLLM takes about half a minute on two cores, compiling and warming up as much again.
VLLM_START_S = 600.0


def golden_cases() -> list[dict[str, Any]]:
    """SmolLM2's greedy answers in float32, and how clear each of their steps was."""
    golden = ROOT / "tests" / "data" / "smollm2_greedy.json"
    cases: list[dict[str, Any]] = json.loads(golden.read_text(encoding="utf-8"))["cases"]
    return cases


def clear_cases() -> list[tuple[str, str]]:
    """Questions and answers whose every step has a clear winner, so that two engines must agree."""
    return [
        (case["user"], case["text"])
        for case in golden_cases()
        if case["smallest_top1_margin"] > _CLEAR_MARGIN
    ]


def free_port() -> int:
    """vLLM cannot say which port it took, so it is given one."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def data_parallel(port: int) -> tuple[str, ...]:
    return ("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(port))


def ready_url(server: Program, engine: Program) -> str:
    try:
        return server.wait_for(r"ready: .* at (http://\S+)", VLLM_START_S)[1]
    except AssertionError as error:
        raise AssertionError(f"{error}\n-- the engine:\n{engine.said()}") from None
