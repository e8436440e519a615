"""The scripted engine's pause and sleep: requests wait until it is over.

Rules of this file: pure. It has no memory to give back, so sleep is a pause that remembers its level.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import InvalidRequestError

__all__ = ["ScriptedPause"]


class ScriptedPause:
    """``finish_all`` ends every request with ABORT. ``is_on``: no step is to be made."""

    def __init__(self, finish_all: Callable[[], None]) -> None:
        self.is_on = False
        self._finish_all = finish_all
        self._level = 0
        self.utilities: dict[str, Callable[..., Any]] = {
            "pause_scheduler": self.pause_scheduler,
            "resume_scheduler": self.resume_scheduler,
            "is_scheduler_paused": lambda: self.is_on,
            "sleep": self.sleep,
            "wake_up": self.wake_up,
            "is_sleeping": lambda: self.is_on,
        }

    def pause_scheduler(self, mode: str, clear_cache: bool) -> None:  # noqa: ARG002 - vLLM's arguments
        if mode not in ("abort", "keep"):
            raise InvalidRequestError(f"mode is {mode!r}; allowed here: abort, keep")
        if mode == "abort":
            self._finish_all()
        self.is_on = True

    def resume_scheduler(self) -> None:
        if self._level:
            raise InvalidRequestError("the engine sleeps; wake it up first")
        self.is_on = False

    def sleep(self, level: int, mode: str) -> None:
        self.pause_scheduler(mode, level > 0)
        self._level = level

    def wake_up(self, tags: list[str] | None) -> bool:
        """Awake with everything, or with what needs everything: to be scheduled."""
        if tags is None or "scheduling" in tags:
            self._level, self.is_on = 0, False
        return not self.is_on
