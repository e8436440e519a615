"""The interpreter that has vLLM, asked before anything else is started: it is named by hand, and easily wrong."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import trio

from ..errors import InvalidRequestError

__all__ = ["read_vllm_folder", "read_vllm_version"]

_SAY_VERSION = "from importlib.metadata import version; print(version('vllm'))"
# Found without being imported, which takes seconds.
_SAY_FOLDER = (
    "from importlib.util import find_spec; print(find_spec('vllm').submodule_search_locations[0])"
)
_VERSION = re.compile(r"\d[\w.+-]*")
# An interpreter answers in a tenth of a second; this is for a machine under load.
_ANSWER_S = 60.0


async def read_vllm_version(python: str | Path) -> str:
    """Of the environment of ``python``. Raises ``InvalidRequestError`` if it is no program, or has no vLLM."""
    version = await _ask(python, _SAY_VERSION)
    if not _VERSION.fullmatch(version):
        raise _refusal(python, "it does not tell vLLM's version")
    return version


async def read_vllm_folder(python: str | Path) -> Path:
    """Of its sources, in the environment of ``python``. Raises as ``read_vllm_version``."""
    folder = Path(await _ask(python, _SAY_FOLDER))
    if not (folder / "__init__.py").is_file():
        raise _refusal(python, "it does not tell where vLLM's sources are")
    return folder


async def _ask(python: str | Path, question: str) -> str:
    """What it prints; "" if it takes too long."""
    command = [str(python), "-c", question]
    told = b""
    try:
        with trio.move_on_after(_ANSWER_S):
            process = await trio.run_process(command, capture_stdout=True, capture_stderr=True)
            told = bytes(process.stdout)
    except OSError as error:
        raise _refusal(python, f"it cannot be run ({error.strerror})") from error
    except subprocess.CalledProcessError as error:
        raise _refusal(python, "it has no vLLM") from error
    return told.decode(errors="replace").strip()


def _refusal(python: str | Path, why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"--vllm-python is {str(python)!r}, but {why}; allowed: an interpreter whose environment has vLLM",
        parameter="vllm_python",
    )
