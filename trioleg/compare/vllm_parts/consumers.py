"""Programs that use vLLM as a library: ``AsyncLLM.generate`` under ``asyncio.run``, as vLLM's documents show it.

Each does one thing that programs do to a stream, on purpose or by mistake, tells in one line of JSON what it saw, and
leaves as it would in service: an error that nobody caught ends it, with its traceback.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from ..programs.arguments import Arguments
from ..programs.findings import Findings
from .options import UNTIL, shutdown_timeout
from .server import MAX_MODEL_LEN
from .watching import Watching

__all__ = ["CONSUMERS", "consume"]

# No consumer sees the end of its stream by itself.
_MAX_TOKENS = 1000
_PROMPT = "Count."
# Only so long does a program that goes on with other work take to see that it is over.
_LOOK_EVERY_S = 0.01


class Story:
    """What a consumer works with: the library, and its findings."""

    def __init__(self, llm: Any, arguments: Arguments, census: Callable[[], Any]) -> None:
        self._findings = Findings()
        self._llm = llm
        self._until = Path(arguments.options.get(UNTIL, os.devnull))
        self._census = census

    def stream(self, name: str) -> AsyncIterator[Any]:
        """Of a request with this id."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=_MAX_TOKENS, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        stream: AsyncIterator[Any] = self._llm.generate(_PROMPT, params, request_id=name)
        return stream

    def note_cause(self) -> None:
        """It happens now. Of several the first counts."""
        self._findings.note_cause()

    async def go_on_and_tell(self) -> None:
        """Other work, until the scenario has seen enough."""
        while not self._until.exists():
            await asyncio.sleep(_LOOK_EVERY_S)
        self.tell(None)

    def tell(self, error: BaseException | None) -> None:
        """The one line; ``error``: what has come out of the library's own block."""
        if error is not None:
            self._findings.note_error(error)
        self._findings.tell(self._census())


def consume(arguments: Arguments, watching: Watching) -> None:
    """Of ``CONSUMERS``, the one that is asked for. Raises what comes out of it."""
    assert arguments.consume is not None
    asyncio.run(_use_llm(arguments, watching, CONSUMERS[arguments.consume]))


async def _use_llm(
    arguments: Arguments, watching: Watching, use: Callable[[Story], Awaitable[None]]
) -> None:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    with watching.loop():
        settings = AsyncEngineArgs(
            model=str(arguments.directory),
            max_model_len=MAX_MODEL_LEN,
            shutdown_timeout=shutdown_timeout(arguments.options),
        )
        llm = AsyncLLM.from_engine_args(settings)
        watching.take_front_end(llm)
        story = Story(llm, arguments, watching.census)
        try:
            try:
                await use(story)
            finally:
                llm.shutdown()
        except BaseException as error:
            story.tell(error)
            raise


# -------------------------------------------------------------------- what they do


async def leave_loop(story: Story) -> None:
    """``break``: the third output was enough."""
    count = 0
    async for _ in story.stream("one"):
        count += 1
        if count == 3:
            story.note_cause()
            break
    await story.go_on_and_tell()


async def forget(story: Story) -> None:
    """Three outputs are taken; the stream stays in a list, and nobody closes it."""
    kept = [story.stream("one")]
    for _ in range(3):
        await anext(kept[0])
    story.note_cause()
    await story.go_on_and_tell()


async def crash(story: Story) -> None:
    """The loop's body fails at the third output."""
    await _fail_at(3, story, "one", ValueError("the body"))


async def fail_in_cleanup(story: Story) -> None:
    """The loop's body fails, and so does what was to clean up behind it."""
    try:
        await _fail_at(3, story, "one", ValueError("the body"))
    finally:
        raise KeyError("the clean-up")


async def fail_twice(story: Story) -> None:
    """Two streams, each read by a task of its own, which fail at the same step."""
    await asyncio.gather(
        _fail_at(2, story, "one", ValueError("first")),
        _fail_at(2, story, "two", KeyError("second")),
    )


async def _fail_at(number: int, story: Story, name: str, error: Exception) -> None:
    count = 0
    async for _ in story.stream(name):
        count += 1
        if count == number:
            story.note_cause()
            raise error


CONSUMERS: dict[str, Callable[[Story], Awaitable[None]]] = {
    "break": leave_loop,
    "forget": forget,
    "crash": crash,
    "error-in-cleanup": fail_in_cleanup,
    "two-errors": fail_twice,
}
