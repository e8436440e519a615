"""The phases that a request can be in when it is cancelled, each as a script and what to ask for in it.

``is_reached`` says, from the engine's side and ours, that the request (the last one of the LLM's) is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from tiny_tokenizers import ids

from trioleg.messages import EngineCoreRequestType
from trioleg.runtime.llm import LLM
from trioleg.testing import Script, ScriptedTransport

__all__ = ["PHASES", "Phase", "aborted_ids"]


@dataclass(frozen=True)
class Phase:
    """``needs_occupant``: another request has to be there first, to take the only place."""

    name: str
    script: Script
    is_reached: Callable[[LLM, ScriptedTransport], bool]
    asked: Mapping[str, Any] = field(default_factory=dict)
    needs_occupant: bool = False

    def __str__(self) -> str:
        return self.name


def endless(*pieces: str, **more: object) -> Script:
    """These tokens again and again, until the context is full."""
    fields = {"token_ids": ids(*pieces), "step_interval_s": 0.01, **more}
    return msgspec.convert(fields, Script)


def _waits_in_the_engine(llm: LLM, transport: ScriptedTransport) -> bool:
    return bool(transport.core._waiting) and len(llm.live_requests()) == 2


def _runs_without_a_token(llm: LLM, transport: ScriptedTransport) -> bool:
    return bool(transport.core._running) and llm.live_requests()[-1].num_output_tokens == 0


def _has_tokens(llm: LLM, transport: ScriptedTransport) -> bool:
    live = llm.live_requests()
    return bool(live) and live[-1].num_output_tokens > 6


PHASES = [
    Phase("queued", endless("a", max_num_seqs=1), _waits_in_the_engine, needs_occupant=True),
    Phase("prefill", endless("a", first_token_delay_s=600), _runs_without_a_token),
    Phase("decoding", endless("a", "b", "c"), _has_tokens),
    # Whatever comes could be the beginning of this stop string, so nothing of it reaches the reader.
    Phase("held back", endless("b", "c"), _has_tokens, {"stop": "bc" * 500 + "z"}),
]


def aborted_ids(transport: ScriptedTransport) -> list[list[str]]:
    """The ids in each ABORT that the engine has had."""
    return [
        msgspec.msgpack.decode(body)
        for kind, body in transport.sent
        if kind is EngineCoreRequestType.ABORT
    ]
