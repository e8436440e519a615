"""Whether the engine moves, and which of its memory is there.

Rules of this file: synchronous, between two steps, in the engine's own thread. A pause keeps new requests from
running, or everything; a sleep is a pause that also gives memory back.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import WireError
from .model import CausalLM
from .runner import ModelRunner
from .scheduler import Scheduler

__all__ = ["Sleeper"]


class Sleeper:
    """Pauses ``scheduler`` and releases what ``runner`` holds; ``load_model`` makes the model anew (None: it
    cannot be had again)."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        load_model: Callable[[], CausalLM] | None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._load_model = load_model
        self._stands_still = False
        # Of "weights" and "kv_cache", what has been given back.
        self.memory_away: set[str] = set()

    @property
    def paused(self) -> bool:
        """True while no new request runs."""
        return self._scheduler.paused

    @property
    def moves(self) -> bool:
        """True if requests may be computed at all."""
        return not (self._stands_still or self.memory_away)

    def pause(self, *, stop_running: bool) -> None:
        """New requests queue until ``resume``; those that run go on, unless ``stop_running``."""
        self._scheduler.paused, self._stands_still = True, stop_running

    def resume(self) -> None:
        """Ends a pause. All memory must be there."""
        self._scheduler.paused = self._stands_still = False

    def what_sleep_releases(self, level: int) -> set[str]:
        """What a sleep gives back; weights on a GPU from level 1 on, since that memory is what a sleep is for.
        Raises ``WireError`` for weights that cannot be had again."""
        if level == 0:
            return set()
        if level == 1 and self._runner.device.type == "cpu":
            return {"kv_cache"}
        if self._load_model is None:
            raise WireError("this engine cannot load its weights again; allowed: level 0 or 1")
        return {"kv_cache", "weights"}

    def release(self, what: set[str]) -> None:
        """Gives memory back. The engine must be paused, and no block in use."""
        self._runner.release(what - self.memory_away)
        self.memory_away |= what

    def take(self, tags: set[str] | None) -> None:
        """Takes again what is away of ``tags`` (None: all). Raises as loading does."""
        away = self.memory_away if tags is None else self.memory_away & tags
        if "weights" in away and self._load_model is not None:
            self._runner.take_model(self._load_model())
            self.memory_away.discard("weights")
        if "kv_cache" in away:
            self._runner.take_cache()
            self.memory_away.discard("kv_cache")
