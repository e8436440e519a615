"""The output sender: from the busy loop's hands to the clients' sockets (hop 1 to hop 2).

Rules of this file: it blocks on nothing but its queue. A send only hands memory to ZeroMQ's own
thread, so neither a slow client nor a client that is away can hold up the model or another client.

Sending is zero-copy: ZeroMQ reads the very buffer that was encoded into, and says through a tracker
when it has let go of it. Until then the buffer may not be touched; then it is used again. Spare
buffers are kept up to the number of sockets and one, so a burst leaves no hoard behind. pyzmq would
copy anything below 64 KiB and call it done at once: ``copy_threshold`` 0 is what makes this real.
Arrays travel behind the body in frames of their own, whose memory is nobody's to use again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import trio
import zmq

from ..ipc.codec import Frame, OutputEncoder
from ..ipc.sockets import ZmqSocket
from ..messages import EngineCoreOutputs

__all__ = ["OutputSender", "OutputSenderStatistics"]

logger = logging.getLogger(__name__)

# Over a million tokens of one stream: a client that far behind is away, or will never catch up.
MAX_BYTES_IN_FLIGHT = 64 * 2**20
# Where all clients are so far behind that the engine had better wait for them, and how long it does at a step: it
# goes at a walk, and does not stop, since a client may be away for good.
_CONGESTED_BYTES = 8 * 2**20
_CONGESTED_QUEUE = 1000
_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class OutputSenderStatistics:
    """``queued``: not yet encoded. ``in_flight``, ``bytes_in_flight``: held by ZeroMQ, a client
    each. ``spare_buffers``: ready for use again. ``made_buffers``: ever allocated."""

    queued: int
    sent: int
    in_flight: tuple[int, ...]
    bytes_in_flight: tuple[int, ...]
    spare_buffers: int
    made_buffers: int


@dataclass(slots=True)
class _Client:
    socket: ZmqSocket
    # Oldest first: a socket lets go of its messages in the order that it got them.
    pending: deque[_Pending] = field(default_factory=deque)
    bytes_in_flight: int = 0
    is_behind: bool = False


@dataclass(frozen=True, slots=True)
class _Pending:
    """A message that ZeroMQ still reads: ``size`` bytes in all frames, ``buffer`` the first of them."""

    tracker: zmq.MessageTracker
    buffer: bytearray
    size: int


class OutputSender:
    """Encodes and sends what ``hand_on`` gets, in that order, to ``sockets[client_index]``.

    The sockets stay the caller's to close. ``on_client_behind(client_index)`` is called at each send
    to a client of whom more than ``max_bytes_in_flight`` bytes are unsent.
    """

    def __init__(
        self,
        sockets: Sequence[ZmqSocket],
        *,
        on_client_behind: Callable[[int], None],
        max_bytes_in_flight: int = MAX_BYTES_IN_FLIGHT,
    ) -> None:
        self._clients = [_Client(socket) for socket in sockets]
        self._on_client_behind = on_client_behind
        self._max_bytes_in_flight = max_bytes_in_flight
        self._token = trio.lowlevel.current_trio_token()
        self._queue: deque[tuple[int, EngineCoreOutputs]] = deque()
        self._parked = trio.lowlevel.ParkingLot()
        self._finishing = False
        self._encoder = OutputEncoder()
        self._spare: list[bytearray] = []
        self._max_spare = len(sockets) + 1
        self._sent = self._made_buffers = 0

    def hand_on(self, client_index: int, outputs: EngineCoreOutputs) -> None:
        """Queues one message. From any thread; never blocks, never raises."""
        self._queue.append((client_index, outputs))
        # The loop outlives Trio's run when the process is leaving in a hurry.
        with suppress(trio.RunFinishedError):
            # idempotent: a thousand messages before the sender runs are one wake.
            self._token.run_sync_soon(self._parked.unpark_all, idempotent=True)

    def pause_s(self) -> float:
        """How long not to make the next step, 0 unless every client is behind. From any thread."""
        in_flight = min((client.bytes_in_flight for client in self._clients), default=0)
        is_congested = in_flight > _CONGESTED_BYTES or len(self._queue) > _CONGESTED_QUEUE
        return _PAUSE_S if is_congested else 0.0

    def finish(self) -> None:
        """``run`` returns once the queue is empty. From Trio's thread, after the last ``hand_on``."""
        self._finishing = True
        self._parked.unpark_all()

    async def run(self) -> None:
        """Sends until ``finish``. A cancelled run leaves the rest of the queue unsent."""
        while self._queue or not self._finishing:
            if not self._queue:
                self._reclaim()
                await self._parked.park()
                continue
            self._send(*self._queue.popleft())
            # The loop's thread may fill the queue as fast as it empties.
            await trio.lowlevel.checkpoint()
        await trio.lowlevel.checkpoint()

    def _send(self, client_index: int, outputs: EngineCoreOutputs) -> None:
        self._reclaim()
        buffer = self._take_buffer()
        client = self._clients[client_index]
        tracker, size = _send(client.socket, self._encoder.encode_into(outputs, buffer))
        self._sent += 1
        if tracker.done:
            self._give_back(buffer)
            return
        client.pending.append(_Pending(tracker, buffer, size))
        client.bytes_in_flight += size
        self._check_bound(client_index, client)

    def _take_buffer(self) -> bytearray:
        if self._spare:
            return self._spare.pop()
        self._made_buffers += 1
        return bytearray()

    def _give_back(self, buffer: bytearray) -> None:
        if len(self._spare) < self._max_spare:
            self._spare.append(buffer)

    def _reclaim(self) -> None:
        for client in self._clients:
            while client.pending and client.pending[0].tracker.done:
                pending = client.pending.popleft()
                client.bytes_in_flight -= pending.size
                self._give_back(pending.buffer)

    def _check_bound(self, client_index: int, client: _Client) -> None:
        was_behind = client.is_behind
        client.is_behind = client.bytes_in_flight > self._max_bytes_in_flight
        if client.is_behind:
            self._on_client_behind(client_index)
        if client.is_behind and not was_behind:
            logger.warning(
                "client %d has not taken %d bytes of outputs (allowed: %d); its requests are aborted",
                client_index,
                client.bytes_in_flight,
                self._max_bytes_in_flight,
            )

    def statistics(self) -> OutputSenderStatistics:
        """The sender's figures now. From Trio's thread."""
        self._reclaim()
        return OutputSenderStatistics(
            queued=len(self._queue),
            sent=self._sent,
            in_flight=tuple(len(client.pending) for client in self._clients),
            bytes_in_flight=tuple(client.bytes_in_flight for client in self._clients),
            spare_buffers=len(self._spare),
            made_buffers=self._made_buffers,
        )


def _send(socket: ZmqSocket, frames: Sequence[Frame | bytearray]) -> tuple[zmq.MessageTracker, int]:
    """Sends one message without copying it. Its tracker is done when ZeroMQ has let go of every frame."""
    # Made here, since pyzmq's own send_multipart gives the last frame's tracker alone.
    parts = [zmq.Frame(frame, track=True, copy_threshold=0) for frame in frames]
    socket.send_multipart(parts, copy=False)
    return zmq.MessageTracker(*parts), sum(len(part) for part in parts)
