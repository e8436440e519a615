"""An ``LLM`` on a scripted engine in this process: no socket, no thread, so virtual time works."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import msgspec
from tiny_tokenizers import byte_fallback_tokenizer, ids

from trioleg.config import LLMConfig
from trioleg.messages import EngineCoreRequestType
from trioleg.runtime.llm import LLM
from trioleg.testing import Script, ScriptedTransport, open_scripted_llm

__all__ = ["aborted", "added", "open_scripted", "script"]

TOKENIZER = byte_fallback_tokenizer()
PROMPT = ids("<s>", "a")


def script(*pieces: str, step: float = 0.1, **more: object) -> Script:
    """A script of pieces, one token a step, a tenth of a second apart."""
    steps = [[token_id] for token_id in ids(*pieces)]
    return msgspec.convert({"steps": steps, "step_interval_s": step, **more}, Script)


def open_scripted(
    script: Script, config: LLMConfig | None = None
) -> AbstractAsyncContextManager[tuple[LLM, ScriptedTransport]]:
    return open_scripted_llm(script, TOKENIZER, config)


def _sent(transport: ScriptedTransport, kind: EngineCoreRequestType) -> list[object]:
    return [msgspec.msgpack.decode(body) for sent, body in transport.sent if sent is kind]


def added(transport: ScriptedTransport) -> list[object]:
    """The ids of the requests that were sent."""
    return [fields[0] for fields in _sent(transport, EngineCoreRequestType.ADD)]


def aborted(transport: ScriptedTransport) -> list[object]:
    """The ids that were aborted, one entry for each ABORT message."""
    return _sent(transport, EngineCoreRequestType.ABORT)
