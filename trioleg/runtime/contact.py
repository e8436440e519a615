"""``Contact``: whether an engine can be reached, and what that means.

    in contact ◄───────────── back ─────────────────────────── back ───────┐
        │ a connection is lost,    │                                       │
        │ or a message cannot leave│                                       │
        └──► out of contact (new requests wait) ── not back ──► frozen (requests have been told)
                       │ not back, and the output                          │ not back for long
                       │ connection is closed                              │
                       └────────────────────────► dead ◄───────────────────┘

A broken connection is not death: reconnects take 20 to 100 ms. An engine that is stopped (by a signal, a
debugger, swap) answers no heartbeats and comes back as it was. The slow second rule is for one whose sockets
are well and whose steps are not: work, no message for a long time, and no answer to a question.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from ..config import LLMConfig
from ..ipc.transport import Transport

__all__ = ["Contact", "ContactEvents"]

# On one machine a connection is closed by one of its ends. A peer that closed the output leg is given the time
# of a reconnect, 20 to 100 ms, and not the whole of ``unreachable_timeout``.
_CLOSED_GRACE_S = 0.25
# How long the answer to the question may take, behind a long silence.
_ANSWER_TIMEOUT_S = 10.0
# How often the silence is looked at, in its bound.
_LOOKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ContactEvents:
    """What the owner of a ``Contact`` does: ``on_lost(cause)`` notes it, ``on_frozen(cause)`` tells the requests,
    ``on_back(lost_at, outputs_broke)`` makes good what may have been lost, ``ask`` returns when the engine has
    answered something, ``silent_since`` is when the engine was last heard of while it had work, None without work."""

    on_lost: Callable[[str], None]
    on_frozen: Callable[[str], None]
    on_back: Callable[[float, bool], None]
    ask: Callable[[], Awaitable[None]]
    silent_since: Callable[[], float | None]


@dataclass(slots=True)
class _Trouble:
    """Of one of the two rules. ``lost`` and ``frozen`` as ``Contact`` has them."""

    lost: str | None = None
    frozen: str | None = None


class Contact:
    """``watch_connection`` and ``watch_steps`` are tasks of the link; either returns a cause of death."""

    def __init__(self, transport: Transport, config: LLMConfig, events: ContactEvents) -> None:
        self._transport = transport
        self._config = config
        self._events = events
        # Apart, for one rule's good news is no news for the other.
        self._connection, self._steps = _Trouble(), _Trouble()

    @property
    def lost(self) -> str | None:
        """Why the engine is out of contact at this moment; None if it is not."""
        return self._connection.lost or self._steps.lost

    @property
    def frozen(self) -> str | None:
        """The same, once it has lasted long enough for its requests to be told."""
        return self._connection.frozen or self._steps.frozen

    @trio.lowlevel.enable_ki_protection
    async def watch_connection(self) -> str:
        """Follow the connections until the engine has to be given up."""
        transport, trouble, breaks = self._transport, self._connection, 0
        while True:
            trouble.lost = await transport.wait_lost()
            self._events.on_lost(trouble.lost)
            lost_at = trio.current_time()
            patience = self._config.unreachable_timeout
            back = await self._is_back_in(min(_CLOSED_GRACE_S, patience))
            if not back and not (transport.is_local and transport.is_output_lost):
                back = await self._is_back_in(patience - _CLOSED_GRACE_S)
            if not back:
                cause = await self._lasting_loss(trio.current_time() - lost_at)
                if cause is not None:
                    return cause
            self._come_back(trouble, lost_at, outputs_broke=transport.output_breaks > breaks)
            breaks = transport.output_breaks

    async def _is_back_in(self, seconds: float) -> bool:
        with trio.move_on_after(max(0.0, seconds)) as waiting:
            await self._transport.wait_back()
        return not waiting.cancelled_caught

    async def _lasting_loss(self, seconds: float) -> str | None:
        """The cause of death; None: it came back after all."""
        lasting = f"{self._connection.lost}, and was not back in {seconds:.2g} s"
        if self._transport.is_output_lost:
            return f"{lasting} (the process is gone, or the network between is)"
        lasting += " (the process is stopped, or the network between is down)"
        return await self._freeze(self._connection, lasting, self._transport.wait_back)

    @trio.lowlevel.enable_ki_protection
    async def watch_steps(self) -> str:
        """Follow the engine's messages until it has to be given up."""
        patience, trouble = self._config.step_timeout, self._steps
        while True:
            await trio.sleep(patience / _LOOKS)
            since = self._events.silent_since()
            if since is None or self.lost is not None or trio.current_time() - since < patience:
                continue
            with trio.move_on_after(_ANSWER_TIMEOUT_S) as asking:
                await self._events.ask()
            if asking.cancelled_caught and self.lost is None:
                lost_at = trio.current_time()
                trouble.lost = (
                    f"it has had work for {patience:g} s, makes no step and answers nothing"
                )
                cause = await self._freeze(trouble, trouble.lost, self._events.ask)
                if cause is not None:
                    return cause
                self._come_back(trouble, lost_at, outputs_broke=False)

    async def _freeze(
        self, trouble: _Trouble, cause: str, back: Callable[[], Awaitable[None]]
    ) -> str | None:
        """Tell the requests and wait; the cause of death, or None: it is back."""
        trouble.frozen = cause
        self._events.on_frozen(cause)
        with trio.move_on_after(self._config.frozen_timeout):
            await back()
            return None
        return f"{cause}, and was given up after {self._config.frozen_timeout:g} s more"

    def _come_back(self, trouble: _Trouble, lost_at: float, *, outputs_broke: bool) -> None:
        trouble.lost = trouble.frozen = None
        if self.lost is None:
            self._events.on_back(lost_at, outputs_broke)
