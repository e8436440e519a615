"""Small programs that use trioleg as a library, and do what is asked of every leg's consumers, as one writes it with
``open_llm`` and ``open_stream``. Each prints one line of JSON at its end, its findings, and leaves with what it raised.

    break             leaves its loop after the third output, and goes on with other work
    forget            keeps a stream that it never closes, for which it has to call the block's method by hand
    error-in-cleanup  raises after the third output, and once more while it cleans up
    two-errors        two readers of one nursery raise at the same step
    crash             raises after the third output
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import trio

from ...bench.processes import until
from ...config import LLMConfig
from ...runtime.llm import LLM
from ...runtime.opening import open_llm
from ...runtime.request_stream import RequestStream
from ...sampling_params import SamplingParams
from .findings import Findings

__all__ = ["CONSUMERS", "consume"]

# Other work is over when its file is there; this is for a scenario that has gone.
_OTHER_WORK_S = 30.0
_LOOK_EVERY_S = 0.01
_FORGETS_BY = (
    "no stream is had but by a block, whose __aenter__ has to be called by hand to forget one"
)


async def consume(
    name: str,
    directory: str,
    config: LLMConfig,
    over: Path | None,
    census: Callable[[], dict[str, Any]],
) -> None:
    """Run the consumer ``name`` (of ``CONSUMERS``). ``over``: the file that ends its other work. Raises what comes
    out of it, once the findings are printed."""
    findings = Findings()
    try:
        async with open_llm(directory, config) as llm:
            await CONSUMERS[name](llm, findings, over)
    except BaseException as error:
        findings.note_error(error)
        raise
    finally:
        findings.tell(census())


def _stream(llm: LLM) -> AbstractAsyncContextManager[RequestStream]:
    return llm.open_stream("Count.", SamplingParams(max_tokens=1000, ignore_eos=True))


async def _break(llm: LLM, findings: Findings, over: Path | None) -> None:
    async with _stream(llm) as stream:
        await _take(stream, 3)
        findings.note_cause()
    await _other_work(over)


async def _forget(llm: LLM, findings: Findings, over: Path | None) -> None:
    findings.remark = _FORGETS_BY
    block = _stream(llm)
    stream = await block.__aenter__()
    await _take(stream, 3)
    findings.note_cause()
    await _other_work(over)
    # Kept until here.
    del block, stream


async def _error_in_cleanup(llm: LLM, findings: Findings, _over: Path | None) -> None:
    async with _stream(llm) as stream:
        try:
            await _take(stream, 3)
            findings.note_cause()
            raise ValueError("the body")
        finally:
            raise KeyError("the clean-up")


async def _two_errors(llm: LLM, findings: Findings, _over: Path | None) -> None:
    async def read(error: Exception) -> None:
        async with _stream(llm) as stream:
            await _take(stream, 2)
            findings.note_cause()
            raise error

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read, ValueError("first"))
        nursery.start_soon(read, KeyError("second"))


async def _crash(llm: LLM, findings: Findings, _over: Path | None) -> None:
    async with _stream(llm) as stream:
        await _take(stream, 3)
        findings.note_cause()
        raise ValueError("the body")


async def _take(stream: RequestStream, outputs: int) -> None:
    async for _output in stream:
        outputs -= 1
        if not outputs:
            break


async def _other_work(over: Path | None) -> None:
    async def is_over() -> bool:
        await trio.lowlevel.checkpoint()
        return over is not None and over.exists()  # noqa: ASYNC240 - a look at a local folder

    await until(is_over, _OTHER_WORK_S, every=_LOOK_EVERY_S)


CONSUMERS: dict[str, Callable[[LLM, Findings, Path | None], Awaitable[None]]] = {
    "break": _break,
    "forget": _forget,
    "error-in-cleanup": _error_in_cleanup,
    "two-errors": _two_errors,
    "crash": _crash,
}
