"""A transport whose engine is a ``ScriptedCore`` in this process, on Trio's own clock.

Rules of this file: no thread, no process, no socket, so it works under the autojump clock. Messages
cross as bytes all the same, through the real codec and the engine's real inbox, in both directions.

Its plan: the engine steps inside ``receive``. While nobody receives, nothing happens; that lets a
test say exactly what the engine has done.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

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
    ``make_core`` makes an engine of another kind than ``ScriptedCore``, with the same arguments.
    """

    def __init__(
        self,
        script: Script,
        *,
        engine_index: int = 0,
        make_core: Callable[..., ScriptedCore] = ScriptedCore,
    ) -> None:
        self.core = make_core(script, clock=trio.current_time, on_fault=self._on_fault)
        self.ready = self.core.ready
        self.sent: list[tuple[EngineCoreRequestType, bytes]] = []
        # The next engine's, once this one's has been closed: see ``open_scripted_llm``.
        self.successor: ScriptedTransport | None = None
        self._loop = BusyLoop(self.core, self._hand_on, engine_index=engine_index)
        self._encoder = OutputEncoder()
        self._messages: deque[list[bytes | memoryview]] = deque()
        self._news = trio.lowlevel.ParkingLot()
        self._is_running = True
        self._is_reachable = True
        self._contact = trio.lowlevel.ParkingLot()
        self._lost: str | None = None
        self._is_output_lost = False
        # As ``Transport.is_local``; False for one that plays a machine further away.
        self.is_local = True
        self._output_breaks = 0
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
            if not self._is_closed:
                self._lose("a message to it could not leave")
            return False
        self.sent.append((message_type, body))
        take_message([message_type.value, body], self._loop, clients=1)
        self._news.unpark_all()
        return True

    async def wait_lost(self) -> str:
        """As ``Transport.wait_lost``."""
        await trio.lowlevel.checkpoint()
        while self._lost is None:
            await self._contact.park()
        return self._lost

    async def wait_back(self) -> None:
        """As ``Transport.wait_back``."""
        await trio.lowlevel.checkpoint()
        while not self._is_reachable:
            await self._contact.park()
        self._lost = None

    @property
    def is_output_lost(self) -> bool:
        """As ``Transport.is_output_lost``."""
        return self._is_output_lost

    @property
    def output_breaks(self) -> int:
        """As ``Transport.output_breaks``."""
        return self._output_breaks

    def _lose(self, why: str) -> None:
        self._lost = self._lost or why
        self._contact.unpark_all()

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
        self._contact.unpark_all()

    def freeze(self, why: str = "its input connection is lost") -> None:
        """Stops the engine where it stands: no step, no answer, no way to it; ``thaw`` lets it go on."""
        self._is_running = self._is_reachable = False
        self._lose(why)

    def thaw(self) -> None:
        """The end of ``freeze``: it goes on as if nothing had been."""
        self._is_running = self._is_reachable = True
        self._contact.unpark_all()
        self._news.unpark_all()

    def break_outputs(self) -> None:
        """The output leg's connection breaks, and is there again at once: outputs may have been lost."""
        self._output_breaks += 1
        self._lose("its output connection is lost")

    def make_unreachable(self, why: str = "its transport was cut") -> None:
        """Cuts the engine off for good, as its process's end does: both legs are closed."""
        self._is_running = self._is_reachable = False
        self._is_output_lost = True
        self._output_breaks += 1
        self._lose(why)

    def _hand_on(self, client_index: int, outputs: EngineCoreOutputs) -> None:
        assert client_index == 0, "a scripted transport has one client"
        self.inject([bytes(frame) for frame in self._encoder.encode_into(outputs, bytearray())])

    def _on_fault(self, how: FaultKind) -> None:
        if how == "raise":
            self.inject_dead()
        elif how != "hang":
            self.make_unreachable("its process is gone")
        raise _EngineIsDeadError
