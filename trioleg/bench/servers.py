"""The servers under test: with an engine of their own, or with one that has joined."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from ..errors import TriolegError
from ..ipc.launch import private_ipc_dir
from ..serving import READY_LINE
from .processes import START_S, Program, descendants, running, until

__all__ = [
    "ENDLESS",
    "Server",
    "attached_server",
    "engine_of",
    "engine_of_pid",
    "open_attaching",
    "own_server",
    "ready_port",
    "starting_server",
]

# Goes on until its requests are ended, 20 tokens a second each, as a small model on a CPU does.
ENDLESS: Mapping[str, Any] = {"token_ids": [504, 3575, 282], "step_interval_s": 0.05}


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is ready; ``engine_pid`` of the engine that it was ready with."""

    program: Program
    port: int
    engine_pid: int


@contextmanager
def _script_file(script: Mapping[str, Any]) -> Iterator[Path]:
    with private_ipc_dir() as folder:
        path = folder / "script.json"
        path.write_text(json.dumps(script))
        yield path


@asynccontextmanager
async def starting_server(
    model: str, script: Mapping[str, Any], *options: str
) -> AsyncIterator[Program]:
    """A server with an engine process of its own, from the moment that the program starts."""
    with _script_file(script) as path:
        arguments = ("-m", "trioleg.bench.scripted_server", model, str(path), *options)
        async with running(*arguments, folder=path.parent) as program:
            yield program


@asynccontextmanager
async def own_server(model: str, script: Mapping[str, Any], *options: str) -> AsyncIterator[Server]:
    """The same when it is ready. ``options`` of ``scripted_server``. Raises ``TriolegError``."""
    async with starting_server(model, script, *options) as program:
        port = await ready_port(program)
        yield Server(program, port, await engine_of(program))


def engine_of_pid(pid: int) -> int | None:
    """The process of the engine that the server ``pid`` has started; None if it has none now."""
    # The guardian, then its child: the engine.
    family = descendants(pid)
    return family[1] if len(family) >= 2 else None


async def engine_of(program: Program) -> int:
    """The same, once there is one. Raises ``TriolegError`` if that does not come."""
    found: list[int] = []

    async def is_there() -> bool:
        await trio.lowlevel.checkpoint()
        pid = engine_of_pid(program.pid)
        found.extend([] if pid is None else [pid])
        return bool(found)

    if not await until(is_there, START_S):
        raise TriolegError(f"a server under test had no engine within {START_S:g} s")
    return found[0]


@asynccontextmanager
async def open_attaching(model: str, *options: str) -> AsyncIterator[tuple[Program, str]]:
    """``trioleg serve --attach``, with more ``options`` if there are any, and the address at which it waits for an
    engine."""
    with private_ipc_dir() as folder:
        address = f"ipc://{folder}/handshake"
        options = ("--port", "0", "--log-level", "warning", "--attach", address, *options)
        arguments = ("-m", "trioleg", "serve", model, *options)
        async with running(*arguments, folder=folder) as program:
            yield program, address


@asynccontextmanager
async def attached_server(
    model: str, script: Mapping[str, Any], *options: str
) -> AsyncIterator[Server]:
    """A server with an engine that was started on its own. ``options`` of ``trioleg serve``.

    Raises ``TriolegError``.
    """
    with _script_file(script) as path:
        async with open_attaching(model, *options) as (program, address):
            engine = ("-m", "trioleg", "engine", "--script", str(path), "--handshake", address)
            async with running(*engine, folder=path.parent) as engine_program:
                yield Server(program, await ready_port(program), engine_program.pid)


async def ready_port(program: Program) -> int:
    url = (await program.wait_for(READY_LINE))["url"]
    return int(url.rpartition(":")[2])
