"""A program: the leg of the asyncio twin; ``legs.py`` says what it takes.

Options: ``output_chunk_size``; ``graceful_timeout``, Hypercorn's own; ``loop=uvloop``; ``until``, a consumer's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from ...heap import settle_heap
from ...outputs import RequestOutput
from ...sampling_params import RequestOutputKind, SamplingParams
from ...tokenizer import Tokenizer
from ..asyncio_common.consumer import check_options, until_file
from ..asyncio_common.engine_process import start_engine
from ..asyncio_common.loop import run_in_loop
from ..asyncio_common.sockets import EngineSockets
from ..asyncio_twin import engine_link
from ..asyncio_twin.llm import LLM
from ..asyncio_twin.serve import serve
from ..inside.asyncio_watch import AsyncioWatch
from ..inside.faults import Frames, put_in
from ..inside.lanes import Lanes
from ..inside.probe import Probe
from .arguments import MODEL, Arguments, read_arguments
from .findings import Findings

__all__ = ["main"]

_OPTIONS = ("graceful_timeout", "loop", "output_chunk_size", "until")
# More than any scenario has its engine say.
_PARAMS = SamplingParams(
    max_tokens=10_000, ignore_eos=True, output_kind=RequestOutputKind.DELTA, temperature=0.0
)
_PROMPT = "Count."


def main() -> None:
    """Leaves as a program of this shape does: an uncaught error is a traceback, and 1."""
    arguments = read_arguments()
    check_options(arguments.options, _OPTIONS)
    probe = Probe(arguments.probe)
    if arguments.fault is not None:
        put_in(arguments.fault, _put_in_reader, [engine_link])
    run_in_loop(_run(arguments, probe), arguments.options.get("loop"))


def _put_in_reader(at_message: Callable[[Frames], None]) -> None:
    receive = EngineSockets.receive

    async def receive_failing(sockets: EngineSockets) -> Frames:
        frames = await receive(sockets)
        at_message(frames)
        return frames

    _replace(EngineSockets, "receive", receive_failing)


def _replace(owner: type, name: str, function: Callable[..., Any]) -> None:
    setattr(owner, name, function)


async def _run(arguments: Arguments, probe: Probe) -> None:
    loop = asyncio.get_running_loop()
    models: list[LLM] = []
    lanes = None if arguments.lanes is None else Lanes(arguments.lanes)
    watch = AsyncioWatch(lambda: sum(one.num_unfinished_requests for one in models), lanes)
    probe.attach(
        loop.call_soon_threadsafe,
        watch.census,
        None if lanes is None else watch.write_lanes,
        watch.steps,
    )
    chunk_size = arguments.options.get("output_chunk_size")
    more: Any = {} if chunk_size is None else {"chunk_size": int(chunk_size)}
    tokenizer = Tokenizer.from_directory(arguments.directory)
    llm = LLM(tokenizer, await start_engine(arguments.engine), **more)
    models.append(llm)
    try:
        if arguments.consume is None:
            # As trioleg's server and vLLM's have it: no collection's pause is a shape's doing.
            settle_heap()
            timeout = arguments.options.get("graceful_timeout")
            await serve(
                llm,
                MODEL,
                arguments.port or 0,
                graceful_timeout=None if timeout is None else float(timeout),
            )
        else:
            await _consume(arguments.consume, llm, arguments.options, watch)
    finally:
        llm.shutdown()
        if lanes is not None:
            watch.write_lanes()


# ---------------------------------------------------------------------- the leg as a library


async def _consume(name: str, llm: LLM, options: dict[str, str], watch: AsyncioWatch) -> None:
    findings = Findings()
    try:
        await _CONSUMERS[name](llm, findings, options)
    except Exception as error:
        findings.note_error(error)
        raise
    finally:
        findings.tell(watch.census())


def _stream(llm: LLM) -> AsyncGenerator[RequestOutput, None]:
    return llm.generate(_PROMPT, _PARAMS, llm.next_request_id())


async def _break(llm: LLM, findings: Findings, options: dict[str, str]) -> None:
    count = 0
    async for _ in _stream(llm):
        count += 1
        if count == 3:
            break
    findings.note_cause()
    await until_file(options["until"])


async def _forget(llm: LLM, findings: Findings, options: dict[str, str]) -> None:
    kept = [_stream(llm)]
    for _ in range(3):
        await anext(kept[0])
    findings.note_cause()
    await until_file(options["until"])


async def _crash(llm: LLM, findings: Findings, _options: dict[str, str]) -> None:
    await _fail_at(llm, 3, ValueError("the body"), findings)


async def _error_in_cleanup(llm: LLM, findings: Findings, _options: dict[str, str]) -> None:
    try:
        await _fail_at(llm, 3, ValueError("the body"), findings)
    finally:
        raise KeyError("the clean-up")


async def _two_errors(llm: LLM, findings: Findings, _options: dict[str, str]) -> None:
    await asyncio.gather(
        _fail_at(llm, 2, ValueError("first"), findings),
        _fail_at(llm, 2, KeyError("second"), findings),
    )


async def _fail_at(llm: LLM, output: int, error: Exception, findings: Findings) -> None:
    count = 0
    async for _ in _stream(llm):
        count += 1
        if count == output:
            findings.note_cause()
            raise error


_CONSUMERS: dict[str, Callable[[LLM, Findings, dict[str, str]], Awaitable[None]]] = {
    "break": _break,
    "forget": _forget,
    "error-in-cleanup": _error_in_cleanup,
    "two-errors": _two_errors,
    "crash": _crash,
}


if __name__ == "__main__":
    main()
