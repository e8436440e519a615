"""Shipped fakes, for tests of programs that call an LLM server or embed trioleg. See docs/testing.md.

``scripted_server``, also a pytest fixture, is an OpenAI-compatible server with scripted answers: for programs of any
kind. ``open_scripted_llm`` is an ``LLM`` in the test's own Trio loop, on virtual time if wanted;
``ScriptedTransport``, ``Script`` and ``byte_tokenizer`` are what it is made of.

The names are resolved on first use: pytest loads this package in every run, for its plugin.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..engine.script import Fault, Script
    from .llm import open_scripted_llm
    from .records import ReceivedRequest
    from .server import ScriptedServer, scripted_server
    from .tokenizer import byte_tokenizer
    from .transport import ScriptedTransport

_HOMES = {
    "Fault": "..engine.script",
    "ReceivedRequest": ".records",
    "Script": "..engine.script",
    "ScriptedServer": ".server",
    "ScriptedTransport": ".transport",
    "byte_tokenizer": ".tokenizer",
    "open_scripted_llm": ".llm",
    "scripted_server": ".server",
}

__all__ = [
    "Fault",
    "ReceivedRequest",
    "Script",
    "ScriptedServer",
    "ScriptedTransport",
    "byte_tokenizer",
    "open_scripted_llm",
    "scripted_server",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
