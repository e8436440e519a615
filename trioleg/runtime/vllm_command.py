"""The command line of a stock vLLM engine: where vLLM is found, and what it is told.

Rules of this file: nothing of vLLM is imported, here or anywhere; it is a program that speaks our wire.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

from ..config import LLMConfig
from ..errors import EngineStartError

__all__ = ["find_vllm", "join_command", "vllm_arguments"]

_MODULE = "vllm.entrypoints.cli.main"


def find_vllm(python: Path | str | None) -> list[str]:
    """The beginning of a command that runs vLLM. ``python``: an interpreter that has it; None: this one, or
    whichever the ``vllm`` on the PATH has.

    Raises ``EngineStartError`` that says what to do.
    """
    if python is not None:
        if shutil.which(python) is None:
            raise EngineStartError(
                f"vllm_python is {str(python)!r}, which is no program; allowed: an interpreter whose "
                "environment has vLLM"
            )
        return [str(python), "-m", _MODULE]
    if importlib.util.find_spec("vllm") is not None:
        return [sys.executable, "-m", _MODULE]
    program = shutil.which("vllm")
    if program is None:
        raise EngineStartError(
            "vLLM is not in this environment, and no vllm is on the PATH; install it (pip install vllm), or name "
            "an interpreter that has it with --vllm-python"
        )
    return [program]


def vllm_arguments(directory: Path, handshake_address: str, config: LLMConfig) -> list[str]:
    """What ``vllm`` is told, for an engine that joins at ``handshake_address`` (tcp)."""
    assert config.vllm is not None
    agreed = (
        f"--max-logprobs={config.engine.max_logprobs}",
        f"--scheduling-policy={config.engine.scheduling_policy}",
    )
    return [*_joining(str(directory), handshake_address), *agreed, *config.vllm.arguments]


def join_command(model: str, handshake_address: str) -> list[str]:
    """A command by which an engine of vLLM's, started by somebody, joins at ``handshake_address`` (tcp)."""
    return ["vllm", *_joining(model, handshake_address)]


def _joining(model: str, handshake_address: str) -> list[str]:
    host, _, port = handshake_address.removeprefix("tcp://").rpartition(":")
    address = ("--data-parallel-address", host.strip("[]"), "--data-parallel-rpc-port", port)
    return ["serve", model, "--headless", *address]
