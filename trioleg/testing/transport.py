"""A transport whose engine is a ``ScriptedCore`` in this process, on Trio's own clock.

Rules of this file: no thread, no process, no socket, so it works under the autojump clock. Messages
cross as bytes all the same, through the real codec and the engine's real inbox, in both directions.

Its plan: the engine steps inside ``receive``. While nobody receives, nothing happens; that lets a
test say exactly what the engine has done.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import trio

from ..engine.busy_loop import BusyLoop
from ..engine.process import take_message
from ..engine.scripted import FaultKind, Script, ScriptedCore
from ..ipc.codec import OutputEncoder
from ..messages import ENGINE_CORE_DEAD, EngineCoreOutputs, EngineCoreRequestType

__all__ = ["ScriptedTransport"]


class _EngineIsDeadError(Exception):
    """Leaves the step in which the script's fault strikes."""


class ScriptedTransport:
    """A ``Transport`` to a scripted engine, with a hand in it for tests.

    ``ready`` is what a handshake would have given; ``core`` the engine; ``sent`` every message that
    the engine got, as (type, body). Of a script's faults, "raise" makes the engine send the death
    sentinel, "exit" and "sigkill" make it unreachable, "hang" silent; then it does nothing more.
    """

    def __init__(self, script: Script, *, engine_index: int = 0) -> None:
        self.core = ScriptedCore(script, clock=trio.current_time, on_fault=self._on_fault)
        self.ready = self.core.ready
        self.sent: list[tuple[EngineCoreRequestType, bytes]] = []
        self._loop = BusyLoop(self.core, self._hand_on, engine_index=engine_index)
        self._encoder = OutputEncoder()
        self._messages: deque[list[bytes | memoryview]] = deque()
        self._news = trio.lowlevel.ParkingLot()
        self._is_running = True
        self._is_reachable = True
        self._unreachable = trio.Event()
        self._why_unreachable = ""
        self._is_closed = False

    async def receive(self) -> list[bytes | memoryview]:
        """As ``Transport.receive``; raises ``trio.ClosedResourceError`` after ``aclose``."""
        await trio.lowlevel.checkpoint()
        while not self._messages:
            wait = self._advance()
            if wait > 0 and not self._messages:
                with trio.move_on_after(wait):
                    await self._news.park()
        return self._messages.popleft()

    def _advance(self) -> float:
        """One round of the engine; returns the seconds until it has something to do again."""
        if self._is_closed:
            raise trio.ClosedResourceError("this transport is closed")
        if not self._is_running:
            return math.inf
        try:
            wait = self._loop.advance()
        except _EngineIsDeadError:
            # The fault may have left a message: no wait before that is looked for.
            self._is_running = False
            return 0.0
        return math.inf if wait is None else wait

    def send(self, message_type: EngineCoreRequestType, body: bytes) -> bool:
        """As ``Transport.send``: False while the engine cannot be reached."""
        if not self._is_reachable or self._is_closed:
            return False
        self.sent.append((message_type, body))
        take_message([message_type.value, body], self._loop, clients=1)
        self._news.unpark_all()
        return True

    async def wait_unreachable(self) -> str:
        """As ``Transport.wait_unreachable``."""
        await self._unreachable.wait()
        return self._why_unreachable

    async def aclose(self) -> None:
        """As ``Transport.aclose``."""
        self._is_closed = True
        self._news.unpark_all()
        await trio.lowlevel.checkpoint()

    def inject(self, frames: Sequence[bytes | memoryview]) -> None:
        """Puts one message on the output leg, whatever it is."""
        self._messages.append(list(frames))
        self._news.unpark_all()

    def inject_dead(self) -> None:
        """The death sentinel; the engine does nothing more."""
        self._is_running = False
        self.inject([ENGINE_CORE_DEAD])

    def refuse_sends(self, *, refuse: bool = True) -> None:
        """Lets sends fail, as while a connection is down for a moment; False ends that."""
        self._is_reachable = not refuse

    def make_unreachable(self, why: str = "its transport was cut") -> None:
        """Cuts the engine off for good: sends fail, and ``wait_unreachable`` returns ``why``."""
        self._is_running = self._is_reachable = False
        self._why_unreachable = why
        self._unreachable.set()

    def _hand_on(self, client_index: int, outputs: EngineCoreOutputs) -> None:
        assert client_index == 0, "a scripted transport has one client"
        self.inject([bytes(frame) for frame in self._encoder.encode_into(outputs, bytearray())])

    def _on_fault(self, how: FaultKind) -> None:
        if how == "raise":
            self.inject_dead()
        elif how != "hang":
            self.make_unreachable("its process is gone")
        raise _EngineIsDeadError
