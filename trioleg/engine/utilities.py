"""What may be called by name on a running engine: sleep, pause, caches, counts, profile.

Rules of this file: synchronous, between two steps, in the engine's own thread. Names, arguments and
answers are those of vLLM's engine core, where it has them; whatever else it has is refused by name. An
answer is a plain value, or a future that a later step completes.

Pausing: "abort" ends every request, "wait" lets those finish that run, "keep" stops everything where it
stands; in each case new requests queue until the engine is resumed. Sleeping is a pause that
also gives memory back: the cache's from level 1 on, the weights' too at level 2. What was kept is
computed anew after waking up.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from ..errors import WireError
from .profiler import Profiler
from .request import Request
from .scheduler import Scheduler
from .sleeper import Sleeper

__all__ = ["Utilities"]

logger = logging.getLogger(__name__)

_MODES = ("abort", "wait", "keep")
_LEVELS = (0, 1, 2)
_TAGS = ("weights", "kv_cache", "scheduling")


class Utilities:
    """The methods, bound to one engine. ``call`` is the only entry from the wire.

    ``live_requests``: those by id that wait for their grammars included; ``finish_all`` ends them.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        sleeper: Sleeper,
        profiler: Profiler,
        *,
        live_requests: Callable[[], dict[str, Request]],
        finish_all: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._sleeper = sleeper
        self._profiler = profiler
        self._live_requests = live_requests
        self._finish_all = finish_all
        # What is done, and answered, once nothing runs any more.
        self._waiting: list[tuple[Future[None], Callable[[], None]]] = []
        self._methods: dict[str, Callable[..., Any]] = {
            one.__name__: one
            for one in (
                self.get_kv_cache_group_metadata,
                self.get_num_unfinished_requests,
                self.get_request_counts,
                self.get_supported_tasks,
                self.get_weight_version,
                self.is_scheduler_paused,
                self.is_sleeping,
                self.list_loras,
                self.list_requests,
                self.pause_scheduler,
                self.profile,
                self.reset_encoder_cache,
                self.reset_mm_cache,
                self.reset_prefix_cache,
                self.resume_scheduler,
                self.sleep,
                self.wake_up,
            )
        }

    def call(self, method: str, args: Sequence[Any]) -> Any:
        """One call. Raises ``WireError`` for an unknown name or arguments that do not fit."""
        function = self._methods.get(method)
        if function is None:
            known = ", ".join(self._methods)
            raise WireError(f"utility {_shown(method)} is unknown; known: {known}")
        signature = inspect.signature(function)
        try:
            signature.bind(*args)
        except TypeError:
            raise WireError(
                f"utility {method!r} got {_shown(list(args))}; allowed: {signature}"
            ) from None
        return function(*args)

    def after_step(self) -> None:
        """Does and answers what waited for the last request to finish."""
        if self._waiting and not self._scheduler.has_started:
            waiting, self._waiting = self._waiting, []
            for future, then in waiting:
                _complete(future, then)

    # ------------------------------------------------------------------ what there is

    def get_supported_tasks(self) -> list[str]:
        return ["generate"]

    def get_weight_version(self) -> str:
        return "default"

    def get_kv_cache_group_metadata(self) -> list[dict[str, Any]]:
        """One group: every layer caches alike."""
        pool = self._scheduler.pool
        return [{"group_idx": 0, "block_size": pool.block_size, "num_blocks": pool.num_blocks}]

    def get_num_unfinished_requests(self) -> int:
        return len(self._live_requests())

    def get_request_counts(self) -> list[int]:
        """Running, waiting."""
        running = len(self._scheduler.running)
        return [running, len(self._live_requests()) - running]

    def list_requests(self) -> list[dict[str, Any]]:
        """Every live request. Counts are tokens."""
        return [
            {
                "request_id": request.request_id,
                "client_index": request.client_index,
                "status": "running" if request.block_ids else "waiting",
                "priority": request.priority,
                "num_prompt_tokens": request.num_prompt_tokens,
                "num_output_tokens": request.num_output_tokens,
                "num_computed_tokens": request.num_computed_tokens,
                "num_cached_tokens": request.num_cached_tokens or 0,
                "num_preemptions": request.num_preemptions,
            }
            for request in self._live_requests().values()
        ]

    def list_loras(self) -> list[int]:
        """There are none."""
        return []

    # ------------------------------------------------------------------ caches

    def reset_mm_cache(self) -> None:
        """There is none."""

    def reset_encoder_cache(self) -> None:
        """There is none."""

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forgets all kept blocks: True. False, and nothing done, while requests use blocks, unless
        ``reset_running_requests``: those lose their blocks first and are computed anew."""
        _check_flag("reset_running_requests", reset_running_requests)
        # There is no connector whose cache could be reset as well.
        _check_flag("reset_connector", reset_connector)
        if reset_running_requests:
            self._scheduler.preempt_all()
        return self._scheduler.reset_prefix_cache()

    # ------------------------------------------------------------------ pause and sleep

    def is_scheduler_paused(self) -> bool:
        return self._sleeper.paused

    def pause_scheduler(self, mode: str = "abort", clear_cache: bool = True) -> Future[None] | None:
        """No new request runs until ``resume_scheduler``. Answered once the mode is fulfilled."""
        _check_flag("clear_cache", clear_cache)
        _check_one_of("mode", mode, _MODES)
        return self._pause(mode, self._clear_cache if clear_cache else _do_nothing)

    def resume_scheduler(self) -> None:
        """Ends a pause; what had queued is served. Raises ``WireError`` while memory is away."""
        if self._sleeper.memory_away:
            away = ", ".join(sorted(self._sleeper.memory_away))
            raise WireError(f"the engine sleeps without its {away}; allowed: wake_up first")
        self._resume()

    def is_sleeping(self) -> bool:
        """True while paused, too, as on vLLM's engine."""
        return self._sleeper.paused

    def sleep(self, level: int = 1, mode: str = "abort") -> Future[None] | None:
        """Pauses; level 1 gives the cache's memory back (on a GPU the weights' too), level 2 both."""
        _check_one_of("level", level, _LEVELS)
        _check_one_of("mode", mode, _MODES)
        what = self._sleeper.what_sleep_releases(level)

        def fall_asleep() -> None:
            if what:
                self._clear_cache()
                self._sleeper.release(what)

        return self._pause(mode, fall_asleep)

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Takes memory again, of what ``tags`` name or of all. True: all of it is there, and the engine
        goes on. Raises as loading the model does, and then still sleeps."""
        if tags is not None:
            if not isinstance(tags, list):
                raise _refusal("tags", tags, f"a list of {', '.join(_TAGS)}, or None")
            for tag in tags:
                _check_one_of("tags", tag, _TAGS)
        self._sleeper.take(None if tags is None else set(tags))
        if self._sleeper.memory_away:
            return False
        self._resume()
        return True

    def _pause(self, mode: str, then: Callable[[], None]) -> Future[None] | None:
        if mode == "abort":
            self._finish_all()
        self._sleeper.pause(stop_running=mode == "keep")
        if mode != "wait" or not self._scheduler.has_started:
            then()
            return None
        future: Future[None] = Future()
        self._waiting.append((future, then))
        return future

    def _resume(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future, _ in waiting:
            future.set_exception(WireError("the engine was resumed before its requests were done"))
        self._sleeper.resume()

    def _clear_cache(self) -> None:
        self.reset_prefix_cache(reset_running_requests=True)

    # ------------------------------------------------------------------ profile

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> str | None:
        """Starts torch's profiler, or ends it and answers with the path of the trace (Chrome's form)."""
        _check_flag("is_start", is_start)
        if profile_prefix is not None and not isinstance(profile_prefix, str):
            raise _refusal("profile_prefix", profile_prefix, "a string, or None")
        if is_start:
            self._profiler.start(profile_prefix)
            return None
        return str(self._profiler.stop())


def _complete(future: Future[None], then: Callable[[], None]) -> None:
    try:
        then()
    except Exception as error:
        logger.exception("what waited for the requests to finish has failed")
        future.set_exception(error)
    else:
        future.set_result(None)


def _do_nothing() -> None:
    """What is left to do after a pause that clears no cache."""


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise _refusal(name, value, "true or false")


def _check_one_of(name: str, value: Any, allowed: Sequence[Any]) -> None:
    if isinstance(value, bool) or value not in allowed:
        raise _refusal(name, value, ", ".join(map(str, allowed)))


def _refusal(name: str, value: Any, allowed: str) -> WireError:
    return WireError(f"{name} is {_shown(value)}; allowed: {allowed}")


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
