"""An ``LLM`` on a scripted engine in this process: the whole leg without a socket, a thread or torch.

Works under Trio's autojump clock, so a test of minutes takes microseconds a token:

    tokenizer = Tokenizer.from_directory(Path("docs/examples/cafe"))
    script = Script(steps=[[260], [198], [172]], step_interval_s=0.1, finish="length")
    async with open_scripted_llm(script, tokenizer) as (llm, transport):
        answer = await llm.generate([1])  # "café"

``transport`` shows what the engine was sent and lets a test interfere (``ScriptedTransport``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from ..config import LLMConfig
from ..engine.script import Script
from ..runtime.engines import Engine
from ..runtime.llm import LLM
from ..runtime.unwrap import unwrapped
from ..tokenizer import Tokenizer
from .transport import ScriptedTransport

__all__ = ["open_scripted_llm"]


async def _inline(tokenize: Callable[[], list[int]]) -> list[int]:
    """Tokenizes at once: the autojump clock would jump over a thread's time."""
    await trio.lowlevel.checkpoint()
    return tokenize()


@asynccontextmanager
async def open_scripted_llm(
    script: Script, tokenizer: Tokenizer, config: LLMConfig | None = None
) -> AsyncIterator[tuple[LLM, ScriptedTransport]]:
    """Yield an LLM whose engine plays ``script``, and the transport between them.

    Leaving the block ends open streams. Unlike ``open_llm`` it does not raise ``EngineDeadError`` when
    the engine died meanwhile.
    """
    transport = ScriptedTransport(script)
    engine = Engine(0, transport.ready, transport)
    llm = LLM(
        "scripted",
        tokenizer,
        engine,
        config or LLMConfig(),
        run_sync=_inline,
        clock=trio.current_time,
    )
    with unwrapped() as body:
        async with trio.open_nursery() as nursery:
            await nursery.start(llm.link.run, name="engine link")
            await llm.check_tasks()
            try:
                yield llm, transport
            except BaseException as error:
                body.error = error
                raise
            finally:
                llm.close()
                nursery.cancel_scope.cancel(reason="the LLM's block has been left")
