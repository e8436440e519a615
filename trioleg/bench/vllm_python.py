"""The interpreter that has vLLM, asked before anything else is started: it is named by hand, and easily wrong."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import trio

from ..errors import InvalidRequestError

__all__ = ["read_vllm_version"]

_SAY_VERSION = "from importlib.metadata import version; print(version('vllm'))"
_VERSION = re.compile(r"\d[\w.+-]*")
# An interpreter answers in a tenth of a second; this is for a machine under load.
_ANSWER_S = 60.0


async def read_vllm_version(python: str | Path) -> str:
    """Of the environment of ``python``. Raises ``InvalidRequestError`` if it is no program, or has no vLLM."""
    told = b""
    with trio.move_on_after(_ANSWER_S):
        told = await _ask(str(python))
    version = told.decode(errors="replace").strip()
    if not _VERSION.fullmatch(version):
        raise _refusal(python, "it does not tell vLLM's version")
    return version


async def _ask(python: str) -> bytes:
    command = [python, "-c", _SAY_VERSION]
    try:
        told = await trio.run_process(command, capture_stdout=True, capture_stderr=True)
    except OSError as error:
        raise _refusal(python, f"it cannot be run ({error.strerror})") from error
    except subprocess.CalledProcessError as error:
        raise _refusal(python, "it has no vLLM") from error
    return bytes(told.stdout)


def _refusal(python: str | Path, why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"--vllm-python is {str(python)!r}, but {why}; allowed: an interpreter whose environment has vLLM",
        parameter="vllm_python",
    )
