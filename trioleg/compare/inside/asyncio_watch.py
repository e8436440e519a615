"""``AsyncioWatch``: what the tasks of an asyncio loop do. Standard library alone.

Plan: a census asks asyncio itself. Steps are counted where asyncio's own loop runs its callbacks, from the moment that
somebody asks. Lanes need to see what goes into a coroutine and what comes out: a task factory puts a coroutine of ours
round each, with the same frame, name and code to look at. Tasks that are there before it are not seen.

Not pretty: both reach into asyncio (``Handle._run``, ``__self__`` of a task's callbacks), which has no hook for it.
uvloop runs its callbacks out of sight, so there steps are counted with lanes alone.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .lanes import Lane, Lanes

__all__ = ["AsyncioWatch"]

_NAMED_BY_NOBODY = re.compile(r"Task-\d+")


class AsyncioWatch:
    """For the running loop. ``requests``: how many live ones the front end holds. ``lanes``: where to record, None:
    nothing is. Its methods are for ``Probe.attach``, and for the loop's thread."""

    def __init__(self, requests: Callable[[], int], lanes: Lanes | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._requests = requests
        self._lanes = lanes
        self._steps: int | None = None
        if lanes is not None:
            self._record(lanes)

    def census(self) -> dict[str, Any]:
        """See ``probe.py``."""
        names = Counter(_name(task) for task in asyncio.all_tasks(self._loop))
        return {"tasks": names.total(), "names": dict(names), "requests": self._requests()}

    def write_lanes(self) -> int:
        """See ``Lanes.write``. Raises ``ValueError`` if nothing is recorded."""
        if self._lanes is None:
            raise ValueError("nothing is recorded without --lanes")
        return self._lanes.write()

    def steps(self) -> int:
        """Since the first call. Raises ``ValueError`` where they cannot be counted."""
        if self._steps is None:
            if self._lanes is None and not hasattr(self._loop, "_run_once"):
                kind = type(self._loop).__module__
                raise ValueError(f"the steps of a loop of {kind} are counted with --lanes alone")
            if self._lanes is None:
                self._count_callbacks()
            self._steps = 0
        return self._steps

    def _note_step(self) -> None:
        if self._steps is not None:
            self._steps += 1

    def _count_callbacks(self) -> None:
        run = asyncio.Handle._run

        def counted(handle: Any) -> None:
            if isinstance(getattr(handle._callback, "__self__", None), asyncio.Task):
                self._note_step()
            run(handle)

        asyncio.Handle._run = counted  # type: ignore[method-assign, assignment]

    def _record(self, lanes: Lanes) -> None:
        make = self._loop.get_task_factory() or _plain_task

        def watched(
            loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **more: Any
        ) -> Any:
            lane = lanes.lane(more.get("name") or _code_name(coroutine), _lane_of_current(loop))
            return make(loop, _Watched(coroutine, lane, lanes, self._note_step), **more)

        self._loop.set_task_factory(watched)  # type: ignore[arg-type]


def _plain_task(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **more: Any
) -> asyncio.Task[Any]:
    return asyncio.Task(coroutine, loop=loop, **more)


def _lane_of_current(loop: asyncio.AbstractEventLoop) -> Lane | None:
    task = asyncio.current_task(loop)
    coroutine = None if task is None else task.get_coro()
    return coroutine.lane if isinstance(coroutine, _Watched) else None


def _name(task: asyncio.Task[Any]) -> str:
    name = task.get_name()
    return _code_name(task.get_coro()) if _NAMED_BY_NOBODY.fullmatch(name) else name


def _code_name(coroutine: object) -> str:
    return str(getattr(coroutine, "__qualname__", type(coroutine).__qualname__))


class _Watched(Coroutine[Any, Any, Any]):
    """A coroutine that tells of its steps. What it does not have itself is the inner one's: its frame, say, by which
    ``Task.get_stack`` and asyncio's own words of a task find it."""

    def __init__(
        self,
        inner: Coroutine[Any, Any, Any],
        lane: Lane,
        lanes: Lanes,
        note_step: Callable[[], None],
    ) -> None:
        self.lane = lane
        self._inner = inner
        self._lanes = lanes
        self._note_step = note_step
        self._is_named = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __await__(self) -> Any:
        return self._inner.__await__()

    def send(self, value: Any) -> Any:
        """One step."""
        return self._step(self._inner.send, value)

    def throw(self, *error: Any) -> Any:
        """One step, which begins with an error: of what it waited for, or a cancel."""
        if isinstance(error[0], asyncio.CancelledError):
            self._lanes.note(self.lane, "cancelled", ", ".join(map(str, error[0].args)))
        return self._step(self._inner.throw, *error)

    def close(self) -> None:
        """Nobody goes on with it."""
        self._inner.close()

    def _step(self, go_on: Callable[..., Any], *what: Any) -> Any:
        self._take_name()
        self._note_step()
        note, lane = self._lanes.note, self.lane
        note(lane, "resumed")
        try:
            result = go_on(*what)
        except StopIteration:
            note(lane, "ended")
            raise
        except asyncio.CancelledError:
            note(lane, "ended", "cancelled")
            raise
        except BaseException as error:
            note(lane, "raised", repr(error))
            raise
        note(lane, "parked")
        return result

    def _take_name(self) -> None:
        """Loops name a task once it is made."""
        task = None if self._is_named else asyncio.current_task()
        if task is not None:
            self._is_named = True
            self.lane.name = _name(task)
