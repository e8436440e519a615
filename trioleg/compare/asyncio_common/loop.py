"""Which event loop a twin's program runs in."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Coroutine
from typing import Any

__all__ = ["run_in_loop"]


def run_in_loop(main: Coroutine[Any, Any, None], loop: str | None) -> None:
    """``asyncio.run``, in asyncio's own loop, or in uvloop's with "uvloop". Raises what ``main`` raises."""
    factory: Any = None
    if loop == "uvloop":
        factory = importlib.import_module("uvloop").new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main)
