"""An ``LLM`` on a scripted engine in this process: no socket, no thread, so virtual time works."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import trio
from tiny_tokenizers import byte_fallback_tokenizer, ids

from trioleg.config import LLMConfig
from trioleg.engine.scripted import Script
from trioleg.messages import EngineCoreRequestType
from trioleg.runtime.engines import Engine
from trioleg.runtime.llm import LLM
from trioleg.testing.transport import ScriptedTransport

__all__ = ["aborted", "added", "open_scripted", "script"]

TOKENIZER = byte_fallback_tokenizer()
PROMPT = ids("<s>", "a")


def script(*pieces: str, step: float = 0.1, **more: object) -> Script:
    """A script of pieces, one token a step, a tenth of a second apart."""
    steps = [[token_id] for token_id in ids(*pieces)]
    return msgspec.convert({"steps": steps, "step_interval_s": step, **more}, Script)


async def _inline(tokenize: Callable[[], list[int]]) -> list[int]:
    await trio.lowlevel.checkpoint()
    return tokenize()


@asynccontextmanager
async def open_scripted(
    script: Script, config: LLMConfig | None = None
) -> AsyncIterator[tuple[LLM, ScriptedTransport]]:
    transport = ScriptedTransport(script)
    engine = Engine(0, transport.ready, transport)
    llm = LLM("tiny", TOKENIZER, engine, config or LLMConfig(), run_sync=_inline)
    async with trio.open_nursery() as nursery:
        await nursery.start(llm.link.run)
        yield llm, transport
        llm.close()
        nursery.cancel_scope.cancel()


def _sent(transport: ScriptedTransport, kind: EngineCoreRequestType) -> list[object]:
    return [msgspec.msgpack.decode(body) for sent, body in transport.sent if sent is kind]


def added(transport: ScriptedTransport) -> list[object]:
    """The ids of the requests that were sent."""
    return [fields[0] for fields in _sent(transport, EngineCoreRequestType.ADD)]


def aborted(transport: ScriptedTransport) -> list[object]:
    """The ids that were aborted, one entry for each ABORT message."""
    return _sent(transport, EngineCoreRequestType.ABORT)
