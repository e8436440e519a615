"""The engine process: a core, a thread that steps it, and the tasks round it.

    run_engine: nursery
    ├─ watch_signals     SIGTERM, SIGINT: finish every request with ABORT, deliver that, leave
    ├─ watch_parent      the process that we must not outlive
    └─ join the head, load the core (a thread), then serve: nursery
       ├─ receive_requests   one task for each input leg: DEALER → inbox
       └─ nursery
          ├─ send_outputs    queue → PUSH (``output_sender``)
          └─ busy loop       one worker thread (``busy_loop``): inbox → core.step() → queue

Rules of this file: no frame from the wire may end the engine. What cannot be understood is answered
if it says whom to answer, logged, and dropped. What ends the engine is its core: then every client
gets ENGINE_CORE_DEAD behind what it was sent before, the traceback goes to stderr, the exit code is 1.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable

import trio

from ..errors import TriolegError, WireError
from ..ipc.codec import UndecodableRequest, decode_abort, decode_request, decode_utility
from ..ipc.curve import EngineKeys
from ..ipc.joining import EngineSockets, join_head
from ..ipc.parent import wait_gone
from ..ipc.sockets import ZmqSocket
from ..messages import EngineCoreRequestType, EngineReadyResponse
from .busy_loop import BusyLoop
from .interface import Core
from .output_sender import OutputSender

__all__ = ["receive_requests", "run_engine", "take_message"]

logger = logging.getLogger(__name__)

# The guardian says here who it is and whom it serves (``ipc/guardian.py``). We watch both: a guardian
# that is stopped cannot end us when the front end is gone.
_GUARDIAN_VARIABLE = "TRIOLEG_GUARDIAN_PIDS"
# Of every thread here, whatever the system's limit: a grammar that a trial's stack was enough for
# (``grammar_trial.py``) must fit into ours. It is address space; memory is only what is touched.
_STACK_BYTES = 16 * 2**20


async def run_engine(
    make_core: Callable[[], Core],
    handshake_address: str,
    *,
    engine_index: int = 0,
    parent_pid: int | None = None,
    keys: EngineKeys | None = None,
) -> int:
    """Runs one engine until it is told to leave; returns the process's exit code.

    ``make_core`` loads the model; it runs in a thread, after HELLO. ``parent_pid``: the engine leaves when that
    process is gone; None means the guardian and its front end, if one started us. ``keys``: for a front end that
    asks for them. 0 after SIGTERM or SIGINT (a second one does not wait for the step in progress), else 1, with the
    reason on stderr. From the main thread, where signals arrive.
    """
    threading.stack_size(_STACK_BYTES)
    engine = _Engine(make_core, handshake_address, engine_index, keys)
    by_guardian = os.environ.get(_GUARDIAN_VARIABLE, "").split(",")
    parents = [parent_pid] if parent_pid else [int(pid) for pid in by_guardian if pid]
    # Before anything loads: a signal must never find Python's default in place.
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.watch_signals, signals, nursery.cancel_scope)
            for parent in parents:
                nursery.start_soon(engine.watch_parent, parent, nursery.cancel_scope)
            await engine.run()
            nursery.cancel_scope.cancel()
    return engine.exit_code


class _Engine:
    def __init__(
        self,
        make_core: Callable[[], Core],
        handshake_address: str,
        engine_index: int,
        keys: EngineKeys | None,
    ) -> None:
        self.exit_code = 0
        self._make_core = make_core
        self._handshake_address = handshake_address
        self._engine_index = engine_index
        self._keys = keys
        self._core: Core | None = None
        self._loop: BusyLoop | None = None
        self._in_a_hurry = False

    async def watch_signals(
        self, signals: AsyncIterator[int], everything: trio.CancelScope
    ) -> None:
        await signals.__anext__()
        if self._loop is not None:
            self._loop.stop()
            await signals.__anext__()
        # Nothing to finish (still loading), or somebody who will not wait for it.
        self._in_a_hurry = True
        everything.cancel()

    async def watch_parent(self, pid: int, everything: trio.CancelScope) -> None:
        await wait_gone(pid)
        logger.error("process %d, which this engine belongs to, is gone", pid)
        self.exit_code = 1
        self._in_a_hurry = True
        everything.cancel()

    async def run(self) -> None:
        """Joins the head and serves. An error is logged, and is exit code 1."""
        try:
            sockets = await join_head(
                self._handshake_address,
                self._load,
                engine_index=self._engine_index,
                keys=self._keys,
            )
            await self._serve(sockets)
        except Exception as error:
            self.exit_code = 1
            if self._loop is None and isinstance(error, TriolegError):
                # A setting, a model or an address that cannot be: its sentence says it all, on one
                # line and as the command line begins it, so that a front end knows it for what it is.
                logger.error("trioleg: %s", " ".join(str(error).split()))  # noqa: TRY400
            else:
                logger.exception("engine %d ended by an error", self._engine_index)
            await trio.lowlevel.checkpoint()

    async def _load(self) -> EngineReadyResponse:
        # Abandoned when cancelled: a model half loaded is worth nothing, and the process is leaving.
        self._core = await trio.to_thread.run_sync(self._make_core, abandon_on_cancel=True)
        return self._core.ready

    async def _serve(self, sockets: EngineSockets) -> None:
        assert self._core is not None
        orderly = False
        try:
            sender = OutputSender(sockets.outputs, on_client_behind=self._abort_client)
            self._loop = BusyLoop(
                self._core,
                sender.hand_on,
                engine_index=self._engine_index,
                pause_s=sender.pause_s,
            )
            async with trio.open_nursery() as readers:
                for socket in sockets.inputs:
                    readers.start_soon(receive_requests, socket, self._loop, len(sockets.outputs))
                failure = await self._run_loop(self._loop, sender)
                readers.cancel_scope.cancel()
            if failure is not None:
                raise failure
            orderly = True
        finally:
            if not orderly:
                sockets.say_dead()
            if self._in_a_hurry:
                sockets.linger = 0.0
            await sockets.aclose()

    def _abort_client(self, client_index: int) -> None:
        assert self._loop is not None
        self._loop.abort_client(client_index)

    async def _run_loop(self, loop: BusyLoop, sender: OutputSender) -> Exception | None:
        """Steps until the loop ends, then sends what it left; returns the error that ended it.

        Returned and not raised, so that the sender's nursery is not cancelled with outputs queued.
        """
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sender.run)
            try:
                await trio.to_thread.run_sync(loop.run, abandon_on_cancel=True)
            except Exception as error:  # noqa: BLE001 (raised by the caller)
                failure = error
            finally:
                # If we were cancelled, the thread is still there: it leaves after its step.
                loop.stop()
            sender.finish()
        return failure


async def receive_requests(socket: ZmqSocket, loop: BusyLoop, clients: int) -> None:
    """Reads one input leg for ever. ``clients``: how many output legs there are to answer on."""
    while True:
        frames = await socket.recv_multipart()
        try:
            take_message(frames, loop, clients)
        except WireError as error:
            logger.warning("input leg: message dropped: %s", error)


def take_message(frames: list[bytes], loop: BusyLoop, clients: int) -> None:
    """Puts one message of an input leg into the inbox; ``WireError`` if it has to be dropped."""
    if len(frames) < 2:
        raise WireError(f"it has {len(frames)} frame; a type and a body are needed")
    try:
        message_type = EngineCoreRequestType(frames[0])
    except ValueError:
        raise WireError(f"type {frames[0][:8].hex()!r} is not known") from None
    if message_type is EngineCoreRequestType.ADD:
        _take_add(frames[1], loop, clients)
    elif message_type is EngineCoreRequestType.ABORT:
        loop.abort(decode_abort(frames[1]))
    elif message_type is EngineCoreRequestType.UTILITY:
        call = decode_utility(frames[1])
        _check_client(call.client_index, clients)
        loop.call_utility(call)
    else:
        raise WireError(f"{message_type.name} is of vLLM's own engines, which ours is none of")


def _take_add(body: bytes, loop: BusyLoop, clients: int) -> None:
    try:
        request = decode_request(body)
    except UndecodableRequest as error:
        if error.request_id is None:
            raise
        _check_client(error.client_index, clients)
        logger.warning("request %s refused: %s", error.request_id, error)
        loop.refuse(error.request_id, error.client_index, str(error))
    else:
        _check_client(request.client_index, clients)
        loop.add(request)


def _check_client(client_index: int, clients: int) -> None:
    if not 0 <= client_index < clients:
        raise WireError(f"client_index is {client_index}; allowed: 0 to {clients - 1}")
