"""``scripted_server``: an OpenAI-compatible server with answers by script, to test programs that call one.

Only the engine is scripted. The LLM, its endings, the HTTP server and the socket are those that serve models, so
that what a program meets here is what it will meet there: deltas, usage, stop strings, error events, statuses.

All of it runs in a thread with a Trio loop of its own, since the program under test has the test's thread to
itself: synchronous, asyncio or Trio. The thread belongs to the block, and has ended when the block has been left.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, Unpack

import trio
from hypercorn import Config

from ..config import LLMConfig, ServerConfig
from ..engine.script import Script
from ..runtime.health import Health, LLMState
from ..runtime.llm import LLM
from ..server.app import create_app
from ..server.connection import ConnectionLimits, serve_connections
from ..server.serve import bind_sockets
from ..timeouts import Timeouts
from .answer_core import AnswerCore
from .answers import Answer, AnswerOptions, Content
from .llm import open_scripted_llm
from .records import ReceivedRequest, RecordingApp, RecordingLLM, Records
from .tokenizer import END_ID, byte_tokenizer
from .transport import ScriptedTransport

__all__ = ["ScriptedServer", "scripted_server"]

T = TypeVar("T")

# Bounds on what takes milliseconds: beyond them something is broken, and a test run should not hang.
_START_S = 30.0
_CALL_S = 10.0
_END_S = 10.0
# What is still open when a test is over has this long to take its last frames.
_GRACE_S = 1.0
_LOOK_AGAIN_S = 0.01
# A whole test session of engines that die.
_MAX_RESTARTS = 10_000


@dataclass(frozen=True, slots=True)
class _Inside:
    """What only the server's own thread may touch."""

    port: int
    token: trio.lowlevel.TrioToken
    shutdown: trio.Event
    llm: LLM
    first_transport: ScriptedTransport

    @property
    def transport(self) -> ScriptedTransport:
        """Of the engine of the moment."""
        transport = self.first_transport
        while transport.successor is not None:
            transport = transport.successor
        return transport


class ScriptedServer:
    """Made by ``scripted_server``. ``base_url`` is what OpenAI's clients take, ``model`` the one that is served.

    Its methods may be called from any thread. Those that wait block it: in an async test that shares its loop
    with the program, call them in a thread (``asyncio.to_thread``, ``trio.to_thread.run_sync``).
    """

    def __init__(self, model: str, inside: _Inside, records: Records) -> None:
        self.model = model
        self.url = f"http://127.0.0.1:{inside.port}"
        self.base_url = f"{self.url}/v1"
        self._inside = inside
        self._records = records

    def answer(self, content: Content, **how: Unpack[AnswerOptions]) -> None:
        """What the next request gets that has no answer yet; all its choices get the same.

        ``content``: a text, which is said word by word, or a list of pieces, said one a step. A piece of a list
        is a delta, unless it has to wait: bytes for their character's end, a text for what may become a
        stop string. A byte is a token, and the end of the answer one more: so ``usage`` and ``max_tokens`` count.
        ``how``: silences, deaths and errors, see ``AnswerOptions`` and ``Answer``. Raises ``ValueError``.
        """
        answer = Answer.of(content, how)
        with self._records.changed:
            self._records.answers.append(answer)

    def always(self, content: Content, **how: Unpack[AnswerOptions]) -> None:
        """What every request gets for which there is no ``answer``; without it these are refused with a 400."""
        answer = Answer.of(content, how)
        with self._records.changed:
            self._records.standing = answer

    @property
    def requests(self) -> list[ReceivedRequest]:
        """All POST requests so far, in the order in which their bodies were complete."""
        with self._records.changed:
            return list(self._records.requests)

    def wait_for_requests(self, count: int, timeout: float = 10.0) -> list[ReceivedRequest]:
        """``requests``, once there are ``count``. Raises ``TimeoutError``."""
        with self._records.changed:
            requests = self._records.requests
            if not self._records.changed.wait_for(lambda: len(requests) >= count, timeout):
                raise TimeoutError(f"{len(requests)} of {count} requests came in {timeout:g} s")
            return list(requests)

    def check(self) -> None:
        """Raise ``AssertionError`` if a request found no answer (its 400 may look like another failure to a
        program), or an ``answer`` found no request. The pytest fixture calls it where a test has passed."""
        complaints = self._records.complaints()
        if complaints:
            raise AssertionError("; ".join(complaints))

    @property
    def health(self) -> Health:
        """Whether requests are taken at this moment; as ``LLM.health``."""
        return self._call(self._inside.llm.health)

    def wait_ready(self, timeout: float = 30.0) -> None:
        """Return once requests are taken: behind a death, say. Raises ``TimeoutError``, and at once
        ``RuntimeError`` with the cause where the engine is dead and no other will come."""
        self._wait(lambda state: state is LLMState.READY, timeout, "ready")

    def _wait(self, is_there: Callable[[LLMState], bool], timeout: float, what: str) -> None:
        deadline = time.monotonic() + timeout
        while not is_there((health := self.health).state):
            if health.state is LLMState.DEAD:
                raise RuntimeError(f"never {what}: the engine is dead for good ({health.cause})")
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"not {what} within {timeout:g} s: {health.state}, {health.cause}"
                )
            time.sleep(_LOOK_AGAIN_S)

    def kill_engine(self) -> None:
        """The engine dies: running requests fail, and another engine is started about 1 s later (with
        ``restart_engine``). Returns once the server knows. RuntimeError unless there is a living one."""
        self._call(lambda: self._living_engine().inject_dead())
        self._wait(lambda state: state is not LLMState.READY, _CALL_S, "dead")

    def freeze_engine(self) -> None:
        """The engine stops as if by SIGSTOP: after 1 s its requests fail and new ones get 503; unless it is
        thawed, it is given up for dead after 15 s more. As ``kill_engine`` otherwise."""
        self._call(lambda: self._living_engine().freeze())
        self._wait(lambda state: state is not LLMState.READY, _CALL_S, "frozen")

    def thaw_engine(self) -> None:
        """The end of ``freeze_engine``."""
        self._call(lambda: self._inside.transport.thaw())

    def _living_engine(self) -> ScriptedTransport:
        health = self._inside.llm.health()
        if health.state is not LLMState.READY:
            raise RuntimeError(f"the engine is {health.state} ({health.cause}); allowed: ready")
        return self._inside.transport

    def _call(self, do: Callable[[], T]) -> T:
        """``do`` in the server's thread. RuntimeError once its block has been left."""
        future: Future[T] = Future()
        try:
            self._inside.token.run_sync_soon(_complete, future, do)
        except trio.RunFinishedError:
            raise RuntimeError("this scripted server has been closed") from None
        return future.result(_CALL_S)


def _complete(future: Future[T], do: Callable[[], T]) -> None:
    try:
        future.set_result(do())
    except Exception as error:  # noqa: BLE001 - the caller gets it; here it would end the loop
        future.set_exception(error)


@contextmanager
def scripted_server(
    *,
    model: str = "scripted",
    timeouts: Timeouts | None = None,
    restart_engine: bool = True,
    max_model_len: int = 131_072,
    keep_alive_interval: float | None = None,
) -> Iterator[ScriptedServer]:
    """Serve scripted answers on a free port of 127.0.0.1 while the block runs; for synchronous and async tests alike.

        with scripted_server() as server:
            server.answer(["Hel", "lo"])
            client = openai.OpenAI(base_url=server.base_url, api_key="any")

    ``model``: its only name, and /v1/models tells it; a request for another one gets a 404, one that names none is
    served. ``timeouts``: of requests that name none. ``restart_engine`` False: an engine that died stays dead.
    ``max_model_len``: tokens, which are bytes here, of a prompt and its answer. ``keep_alive_interval``: see
    ``ServerConfig.sse_keep_alive_interval``. What is still running when the block is left ends with an error event.
    Raises ``TriolegError`` if there is no port, RuntimeError if the server's thread does not end, and what ended
    it, if that was not the block's end.
    """
    records = Records()
    started: Future[_Inside] = Future()
    ended: Future[None] = Future()
    config = LLMConfig(
        timeouts=timeouts or Timeouts(),
        restart_engine=restart_engine,
        max_engine_restarts=_MAX_RESTARTS,
    )
    settings = ServerConfig(
        port=0, served_model_name=model, sse_keep_alive_interval=keep_alive_interval
    )
    # The engine of each request says what the request's answer says; this is only its size.
    script = Script(steps=[[END_ID]], max_model_len=max_model_len)
    serve = partial(_serve, script, config, settings, records, started)
    # A daemon, so that a thread that hangs fails one test and not the end of the run.
    thread = threading.Thread(
        target=_run, args=(serve, started, ended), name="scripted server", daemon=True
    )
    thread.start()
    inside = started.result(_START_S)
    try:
        yield ScriptedServer(model, inside, records)
    finally:
        with suppress(trio.RunFinishedError):
            inside.token.run_sync_soon(_shut_down, inside)
        try:
            ended.result(_END_S)
        except TimeoutError:
            raise RuntimeError(f"the scripted server has not ended within {_END_S:g} s") from None
        thread.join()


def _run(
    serve: Callable[[], Awaitable[None]], started: Future[_Inside], ended: Future[None]
) -> None:
    try:
        trio.run(serve)
    except Exception as error:  # noqa: BLE001 - whoever opens or leaves the block gets it
        (ended if started.done() else started).set_exception(error)
    else:
        ended.set_result(None)


async def _serve(
    script: Script,
    config: LLMConfig,
    settings: ServerConfig,
    records: Records,
    started: Future[_Inside],
) -> None:
    opened = open_scripted_llm(
        script,
        byte_tokenizer(),
        config,
        make_core=partial(AnswerCore, records),
        make_llm=partial(RecordingLLM, records),
    )
    async with opened as (llm, transport):
        listeners = []
        for one in await bind_sockets(settings):
            one.listen()
            listeners.append(trio.SocketListener(one))
        shutdown = trio.Event()
        port = listeners[0].socket.getsockname()[1]
        # Whoever connects from now on waits until the connections are served.
        started.set_result(
            _Inside(port, trio.lowlevel.current_trio_token(), shutdown, llm, transport)
        )
        await serve_connections(
            RecordingApp(create_app(llm, settings), records),
            Config(),
            listeners,
            shutdown=shutdown,
            limits=ConnectionLimits(graceful_timeout=_GRACE_S),
        )


def _shut_down(inside: _Inside) -> None:
    inside.llm.shut_down("the scripted server is being closed")
    inside.shutdown.set()
