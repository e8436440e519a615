"""A program: the leg of today's asyncio; ``legs.py`` says what it takes. What uses it as a library is in
``taskgroup_consumers.py``."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ...config import LLMConfig
from ...errors import TriolegError
from ...heap import settle_heap
from ...timeouts import Timeouts
from ..asyncio_common.loop import run_in_loop
from ..inside.asyncio_watch import AsyncioWatch
from ..inside.faults import Frames, put_in
from ..inside.lanes import Lanes
from ..inside.probe import Probe
from ..taskgroup_twin import engine_link
from ..taskgroup_twin.engine_link import EngineLink
from ..taskgroup_twin.llm import LLM, open_llm
from ..taskgroup_twin.serve import serve
from .arguments import MODEL, Arguments, read_arguments
from .findings import Findings
from .taskgroup_consumers import CONSUMERS, Consumer, Start

__all__ = ["main"]

_NO_SUCH_THING = 64
_OF_LLM = {"max_inflight_requests": int, "mailbox_max_bytes": int, "output_chunk_size": int}
_OF_SERVER = {"drain_timeout": float, "write_timeout": float}
_OTHERS = ("loop", "total_timeout", "until")


def main() -> None:
    """An error of ours is one line on stderr, and 1; any other is a traceback, and 1."""
    arguments = read_arguments()
    unknown = set(arguments.options) - {*_OF_LLM, *_OF_SERVER, *_OTHERS}
    if unknown:
        sys.stderr.write(f"no such thing: {', '.join(sorted(unknown))}\n")
        sys.exit(_NO_SUCH_THING)
    if arguments.fault is not None:
        put_in(arguments.fault, _in_reader, [engine_link])
    try:
        run_in_loop(_run(arguments, Probe(arguments.probe)), arguments.options.get("loop"))
    except TriolegError as error:
        if arguments.consume is not None:
            raise
        sys.exit(f"trioleg: {error}")


def _in_reader(at_message: Callable[[Frames], None]) -> None:
    take = EngineLink._take

    async def take_noting(self: EngineLink, frames: Sequence[memoryview]) -> None:
        at_message(frames)
        await take(self, frames)

    vars(engine_link)["EngineLink"]._take = take_noting


async def _run(arguments: Arguments, probe: Probe) -> None:
    options = arguments.options
    llms: list[LLM] = []
    watch = AsyncioWatch(
        lambda: sum(llm.num_requests for llm in llms),
        None if arguments.lanes is None else Lanes(arguments.lanes),
    )
    lanes = None if arguments.lanes is None else watch.write_lanes
    loop = asyncio.get_running_loop()
    probe.attach(loop.call_soon_threadsafe, watch.census, lanes, watch.steps)
    start = partial(open_llm, arguments.directory, arguments.engine, _config(options))
    try:
        if arguments.consume is not None:
            await _consume(CONSUMERS[arguments.consume], start, llms, watch, options)
            return
        async with start() as llm:
            llms.append(llm)
            # As trioleg's server and vLLM's have it: no collection's pause is a shape's doing.
            settle_heap()
            served = {
                name: kind(options[name]) for name, kind in _OF_SERVER.items() if name in options
            }
            await serve(llm, MODEL, arguments.port or 0, **served)
    finally:
        if lanes is not None:
            lanes()


async def _consume(
    consumer: Consumer,
    start: Start,
    llms: list[LLM],
    watch: AsyncioWatch,
    options: dict[str, str],
) -> None:
    findings = Findings()
    try:
        await consumer(start, llms, findings, options.get("until", os.devnull))
    except BaseException as error:
        findings.note_error(error)
        raise
    finally:
        findings.tell(watch.census())


def _config(options: dict[str, str]) -> LLMConfig:
    given: dict[str, Any] = {
        name: kind(options[name]) for name, kind in _OF_LLM.items() if name in options
    }
    if "total_timeout" in options:
        given["timeouts"] = Timeouts(total=float(options["total_timeout"]))
    return LLMConfig(**given)


if __name__ == "__main__":
    main()
