"""An ``LLM`` on a scripted engine in this process: the whole leg without a socket, a thread or torch.

Works under Trio's autojump clock, so a test of minutes takes microseconds a token:

    script = Script(steps=[list(b"caf"), [0xC3], [0xA9]], step_interval_s=60.0, finish="length")
    async with open_scripted_llm(script, byte_tokenizer()) as (llm, transport):
        answer = await llm.generate("Where?")  # "café", two minutes later

``transport`` shows what the engine was sent and lets a test interfere (``ScriptedTransport``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import trio

from ..config import LLMConfig
from ..engine.scripted import Script, ScriptedCore
from ..runtime.engines import Engine
from ..runtime.llm import LLM
from ..runtime.opening import running
from ..tokenizer import Tokenizer
from .transport import ScriptedTransport

__all__ = ["open_scripted_llm"]


async def _inline(tokenize: Callable[[], list[int]]) -> list[int]:
    """Tokenizes at once: the autojump clock would jump over a thread's time."""
    await trio.lowlevel.checkpoint()
    return tokenize()


@asynccontextmanager
async def open_scripted_llm(
    script: Script,
    tokenizer: Tokenizer,
    config: LLMConfig | None = None,
    *,
    make_core: Callable[..., ScriptedCore] = ScriptedCore,
    make_llm: Callable[..., LLM] = LLM,
) -> AsyncIterator[tuple[LLM, ScriptedTransport]]:
    """Yield an LLM whose engine plays ``script``, and the transport between them.

    With ``LLMConfig.restart_engine``, an engine that died is followed by one that plays the script from the
    start, without its faults; ``LLM.statistics`` tells, and ``transport.successor`` is its transport.
    Leaving the block ends open streams. Unlike ``open_llm`` it does not raise ``EngineDeadError`` when
    the engine died meanwhile. ``make_core`` and ``make_llm`` are for subclasses of the two.
    """
    transports = [ScriptedTransport(script, make_core=make_core)]

    @asynccontextmanager
    async def open_engine() -> AsyncIterator[Engine]:
        transport = transports[-1]
        try:
            yield Engine(0, transport.ready, transport)
        finally:
            transport.successor = ScriptedTransport(
                msgspec.structs.replace(script, faults=[]), make_core=make_core
            )
            transports.append(transport.successor)
            await transport.aclose()

    llm = make_llm(
        "scripted",
        tokenizer,
        open_engine,
        config or LLMConfig(),
        run_sync=_inline,
        clock=trio.current_time,
    )
    async with running(llm):
        yield llm, transports[0]
