"""Small programs that use the leg of today's asyncio as a library, as a user would write them.

What their bodies raise goes on, as it would in service. The last argument is the file that ends their other work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeAlias

from ...sampling_params import RequestOutputKind, SamplingParams
from ..asyncio_common.consumer import until_file
from ..taskgroup_twin.llm import LLM
from ..taskgroup_twin.request_stream import RequestStream
from .findings import Findings

__all__ = ["CONSUMERS", "Consumer", "Start"]

Start: TypeAlias = Callable[[], AbstractAsyncContextManager[LLM]]
Consumer: TypeAlias = Callable[[Start, list[LLM], Findings, str], Awaitable[None]]

_PROMPT = "The return leg"
_PARAMS = SamplingParams(max_tokens=1000, output_kind=RequestOutputKind.DELTA)
_FORGETS_BY = (
    "no stream is had but by a block, whose __aenter__ has to be called by hand to forget one"
)


async def _take(stream: RequestStream, count: int) -> None:
    async for _ in stream:
        count -= 1
        if not count:
            return


async def _break(start: Start, llms: list[LLM], findings: Findings, until: str) -> None:
    async with start() as llm:
        llms.append(llm)
        async with llm.open_stream(_PROMPT, _PARAMS) as stream:
            number = 0
            async for _ in stream:
                number += 1
                if number == 3:
                    break
            findings.note_cause()
        await until_file(until)


async def _forget(start: Start, llms: list[LLM], findings: Findings, until: str) -> None:
    findings.remark = _FORGETS_BY
    forgotten: list[Any] = []
    async with start() as llm:
        llms.append(llm)
        block = llm.open_stream(_PROMPT, _PARAMS)
        stream = await block.__aenter__()  # to forget the rest is what this is about
        forgotten += [block, stream]
        await _take(stream, 3)
        findings.note_cause()
        await until_file(until)


async def _crash(start: Start, llms: list[LLM], findings: Findings, _until: str) -> None:
    async with start() as llm:
        llms.append(llm)
        async with llm.open_stream(_PROMPT, _PARAMS) as stream:
            await _take(stream, 3)
            findings.note_cause()
            raise ValueError("the body")


async def _error_in_cleanup(start: Start, llms: list[LLM], findings: Findings, _until: str) -> None:
    async with start() as llm:
        llms.append(llm)
        async with llm.open_stream(_PROMPT, _PARAMS) as stream:
            try:
                await _take(stream, 3)
                findings.note_cause()
                raise ValueError("the body")
            finally:
                raise KeyError("the clean-up")


async def _two_errors(start: Start, llms: list[LLM], findings: Findings, _until: str) -> None:
    async def fail(llm: LLM, error: Exception) -> None:
        async with llm.open_stream(_PROMPT, _PARAMS) as stream:
            await _take(stream, 2)
            findings.note_cause()
            raise error

    async with start() as llm, asyncio.TaskGroup() as group:
        llms.append(llm)
        group.create_task(fail(llm, ValueError("first")))
        group.create_task(fail(llm, KeyError("second")))


CONSUMERS: dict[str, Consumer] = {
    "break": _break,
    "forget": _forget,
    "error-in-cleanup": _error_in_cleanup,
    "two-errors": _two_errors,
    "crash": _crash,
}
