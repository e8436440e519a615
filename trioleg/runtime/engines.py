"""Where an engine comes from: started here and owned, or started by somebody else and let in.

Either way a block yields an ``Engine`` that is ready, and closes its transport before anything else
on the way out, so that the last ABORTs are delivered while the engine still listens.
"""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import trio

from ..config import LLMConfig
from ..errors import EngineStartError
from ..ipc.curve import read_front_end_keys
from ..ipc.doorkeeper import Doorkeeper
from ..ipc.handshake import AcceptedEngine, EngineListener, listen_for_engine
from ..ipc.launch import EngineProcess, open_engine_process, private_ipc_dir
from ..ipc.transport import Transport
from ..messages import EngineReadyResponse
from .attach_address import EXPOSED, is_private, refuse_exposed
from .engine_watch import EngineWatch, ProcessWatch
from .unwrap import unwrapped
from .vllm_command import find_vllm, join_command, vllm_arguments

__all__ = [
    "Engine",
    "OpenEngine",
    "listen_for_engines",
    "start_engine",
    "start_program",
    "start_vllm_engine",
]

_log = logging.getLogger("trioleg.engine")

# How our programs begin the sentence that they end with.
_COMPLAINT = "trioleg: "


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that is ready. ``watch`` is None for a process that is not ours."""

    rank: int
    ready: EngineReadyResponse
    transport: Transport
    watch: EngineWatch | None = None


@asynccontextmanager
async def start_engine(
    directory: Path, config: LLMConfig, *, script: Path | None = None
) -> AsyncIterator[Engine]:
    """Start our engine for the model in ``directory``, or the scripted one, and wait until it is ready.

    Raises ``EngineStartError`` with the engine's last error. Leaving the block ends the process.
    """
    argv = [sys.executable, "-m", "trioleg", "engine"]
    argv += (
        [str(directory), *config.engine.arguments()]
        if script is None
        else ["--script", str(script)]
    )
    _log.info("starting the engine of %s", directory if script is None else script)
    async with start_program(argv, config) as engine:
        yield engine


@asynccontextmanager
async def start_program(argv: Sequence[str], config: LLMConfig) -> AsyncIterator[Engine]:
    """Start an engine by its command, which gets ``--handshake ADDRESS`` behind it; see ``start_engine``."""
    with private_ipc_dir() as folder:
        async with listen_for_engine(f"ipc://{folder}/handshake") as listener:
            command = [*argv, "--handshake", listener.address]
            async with _running(command, folder, listener, config) as engine:
                yield engine


@asynccontextmanager
async def start_vllm_engine(directory: Path, config: LLMConfig) -> AsyncIterator[Engine]:
    """Start a stock vLLM engine for the model in ``directory`` and wait until it is ready.

    Its command line takes a host and a port for the handshake alone; all that follows goes through sockets in a
    folder that only this user can enter. Raises ``EngineStartError`` with the engine's last error. Leaving the
    block ends its launcher and all that it has started.
    """
    assert config.vllm is not None
    command = find_vllm(config.vllm.python)
    with private_ipc_dir() as folder:
        async with listen_for_engine("tcp://127.0.0.1:0", folder) as listener:
            argv = [*command, *vllm_arguments(directory, listener.address, config)]
            _log.info("starting vLLM's engine: %s", shlex.join(argv))
            async with _running(argv, folder, listener, config) as engine:
                yield engine


@asynccontextmanager
async def _running(
    argv: Sequence[str], folder: Path, listener: EngineListener, config: LLMConfig
) -> AsyncIterator[Engine]:
    """A process of ours, from its start to its end; the block begins when it is ready."""
    output = _EngineOutput()
    async with open_engine_process(
        argv,
        on_stderr_line=output.take_line,
        stop_timeout=config.engine_stop_timeout,
        ipc_dir=folder,
    ) as process:
        accepted = None
        with trio.move_on_after(config.start_timeout):
            accepted = await _accept(listener, process, output)
        if accepted is None:
            raise EngineStartError(f"the engine was not ready within {config.start_timeout:g} s")
        process.forget_output()
        try:
            yield Engine(accepted.rank, accepted.ready, accepted.transport, ProcessWatch(process))
        finally:
            await accepted.transport.aclose()


OpenEngine: TypeAlias = Callable[[], AbstractAsyncContextManager[Engine]]


class _EngineOutput:
    """The lines of an engine of ours: logged, but for the one that says why it does not start. That is kept
    in ``complaint``, for the error, and so said once."""

    def __init__(self) -> None:
        self.complaint = ""

    def take_line(self, line: str) -> None:
        if line.startswith(_COMPLAINT):
            self.complaint = line.removeprefix(_COMPLAINT)
        else:
            _log.info("%s", line)


async def _accept(
    listener: EngineListener, process: EngineProcess, output: _EngineOutput
) -> AcceptedEngine:
    """Wait for the engine or its exit, whichever is first."""
    accepted: list[AcceptedEngine] = []
    failures: list[str] = []

    async def accept() -> None:
        accepted.append(await listener.accept())
        nursery.cancel_scope.cancel(reason="the engine is ready")

    async def watch() -> None:
        ended = await process.wait()
        # Messages such as pydantic's have several lines.
        reason = " ".join((output.complaint or process.last_error).split())
        failures.append(f"{ended}: {reason}" if reason else str(ended))
        nursery.cancel_scope.cancel(reason="the engine has ended")

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept)
            nursery.start_soon(watch)
    except BaseException:
        # A cancel from outside may come after the engine, and nobody else knows of it yet.
        for engine in accepted:
            await engine.transport.aclose()
        raise
    if not accepted:
        raise EngineStartError(f"the engine did not start: {failures[0]}")
    return accepted[0]


@asynccontextmanager
async def listen_for_engines(address: str, config: LLMConfig) -> AsyncIterator[OpenEngine]:
    """Bind a handshake address; the block gets what waits there, without a bound, for one engine to join, and
    then for another one. An engine that says HELLO while another one serves is heard when that is gone.

    Raises ``InvalidRequestError`` for keys that cannot be used, and for an address that others can reach with
    neither ``curve_keys`` nor ``allow_unauthenticated`` in ``config``; ``EngineStartError`` for one that cannot
    be bound. An engine goes on when its block is left: it is not ours.
    """
    if not is_private(address) and config.curve_keys is None:
        if not config.allow_unauthenticated:
            refuse_exposed(address)
        _log.warning("attach is %s, which is not this machine's alone: %s", address, EXPOSED)
    async with _open_doorkeeper(config.curve_keys) as doorkeeper:
        async with listen_for_engine(address, doorkeeper=doorkeeper) as listener:

            @asynccontextmanager
            async def join() -> AsyncIterator[Engine]:
                _log.info("waiting for an engine to join at %s", listener.address)
                # vLLM's engines have no keys.
                if listener.address.startswith("tcp:") and doorkeeper is None:
                    command = shlex.join(join_command("MODEL", listener.address))
                    _log.info("one of vLLM's does with: %s", command)
                accepted = await listener.accept()
                _log.info("engine %d has joined", accepted.rank)
                try:
                    yield Engine(accepted.rank, accepted.ready, accepted.transport)
                finally:
                    await accepted.transport.aclose()

            yield join


@asynccontextmanager
async def _open_doorkeeper(curve_keys: Path | None) -> AsyncIterator[Doorkeeper | None]:
    if curve_keys is None:
        yield None
        return
    keys = await trio.to_thread.run_sync(read_front_end_keys, curve_keys)
    with unwrapped() as body:
        async with trio.open_nursery() as nursery:
            try:
                yield Doorkeeper(keys, nursery)
            except BaseException as error:
                body.error = error
                raise
            nursery.cancel_scope.cancel(reason="nobody is to come in any more")
