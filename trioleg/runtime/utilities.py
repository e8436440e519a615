"""What may be asked of a running engine beside requests: caches, pause, sleep, profile.

An engine answers between two of its steps, so a call takes as long as the step in progress. Every method
raises ``WireError`` with the engine's own words if it refuses, or for an answer of another kind than it
should be, and ``EngineDeadError`` if the engine is gone. Cancelling stops the waiting, not the engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

from ..errors import InvalidRequestError, WireError
from ..lora import LoRARequest, check_lora_id

__all__ = ["EngineUtilities"]

_Answer = TypeVar("_Answer")

_MODES = ("abort", "wait", "keep")
_LEVELS = (0, 1, 2)
# What an engine can take back by itself.
_TAGS = ("weights", "kv_cache", "scheduling")


class EngineUtilities(ABC):
    """vLLM's names, on our engine and on vLLM's."""

    @abstractmethod
    async def call_utility(self, method: str, *args: Any) -> Any:
        """Call any method of the engine that may be called by name; the answer is a plain value."""

    async def get_supported_tasks(self) -> list[str]:
        """What the engine's model can do: "generate", "embed", …; at least one."""
        tasks = await self.call_utility("get_supported_tasks")
        if not isinstance(tasks, list) or not tasks or not all(isinstance(t, str) for t in tasks):
            raise _unexpected("get_supported_tasks", tasks, "a list of tasks, such as 'generate'")
        return tasks

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, *, reset_external: bool = False
    ) -> bool:
        """Forget what finished requests have left. False: not done, since requests are running;
        ``reset_running_requests`` has those computed anew instead. ``reset_external``: a cache outside of vLLM's
        engine as well."""
        asked = (reset_running_requests, reset_external)
        return await self._call(bool, "reset_prefix_cache", *asked)

    async def pause(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Let new requests wait in the engine. ``mode``: running ones are aborted ("abort"), end first
        ("wait"), or stop where they stand ("keep"). ``clear_cache``: what requests have left in the prefix
        cache is forgotten; those that were kept are computed anew."""
        _check("mode", mode, _MODES)
        await self.call_utility("pause_scheduler", mode, clear_cache)

    async def resume(self) -> None:
        """End a pause."""
        await self.call_utility("resume_scheduler")

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Pause (``mode``: see there), and give memory back: level 1 the cache's, and on a GPU the weights' as
        well; 2 both in any case; 0 none. Requests that come meanwhile wait."""
        _check("level", level, _LEVELS)
        _check("mode", mode, _MODES)
        await self.call_utility("sleep", level, mode)

    async def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Take the memory again, or some of it ("weights", "kv_cache"). True: the engine goes on."""
        if isinstance(tags, str):
            raise InvalidRequestError(
                f"tags is {tags!r}; allowed: a list of names, or None", parameter="tags"
            )
        for tag in tags or ():
            _check("tags", tag, _TAGS)
        return await self._call(bool, "wake_up", None if tags is None else list(tags))

    async def is_sleeping(self) -> bool:
        """True while paused or asleep, as vLLM has it."""
        return await self._call(bool, "is_sleeping")

    async def is_paused(self) -> bool:
        """True while new requests wait, asleep or not."""
        return await self._call(bool, "is_scheduler_paused")

    @abstractmethod
    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter under its id, or say that it is there."""

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter. False: there was none with this id."""
        check_lora_id("lora_id", lora_id)
        return await self._call(bool, "remove_lora", lora_id)

    async def list_loras(self) -> set[int]:
        """The ids of the adapters that the engine has at the moment. One of vLLM's forgets those that were used
        least recently, and loads them again when a request needs them."""
        return set(await self._call(list, "list_loras"))

    async def pin_lora(self, lora_id: int) -> bool:
        """Let the engine keep an adapter, whatever else is used. Our own engine knows of none."""
        check_lora_id("lora_id", lora_id)
        return await self._call(bool, "pin_lora", lora_id)

    async def start_profile(self, prefix: str | None = None) -> None:
        """Turn the engine's profiler on, if it was started with a folder for traces."""
        await self.call_utility("profile", True, prefix)

    async def stop_profile(self) -> str | None:
        """Turn it off. Our engine answers with the path of the trace, on its own machine."""
        path = await self.call_utility("profile", False)
        return path if isinstance(path, str) else None

    async def _call(self, kind: type[_Answer], method: str, *args: Any) -> _Answer:
        answer = await self.call_utility(method, *args)
        if not isinstance(answer, kind):
            raise _unexpected(method, answer, kind.__name__)
        return answer


def _check(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed or isinstance(value, bool):
        words = ", ".join(map(str, allowed))
        raise InvalidRequestError(f"{name} is {value!r:.60}; allowed: {words}", parameter=name)


def _unexpected(method: str, answer: Any, allowed: str) -> WireError:
    return WireError(f"the engine answers {method} with {answer!r}; allowed: {allowed}")
