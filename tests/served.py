"""What the tests of endings with real processes share: a server with a scripted engine, and its clients.

The engine counts, so a token that is lost, doubled or changed shows in the text.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import trio
from programs import TRIOLEG, Program, alive, descendants, running, wait_until

from trioleg.model_store import resolve
from trioleg.tokenizer import Tokenizer

_PROGRAM = (sys.executable, str(Path(__file__).with_name("scripted_serve.py")))

# For an engine that goes on until it is stopped, and for what it says first.
COUNTED = " ".join(map(str, range(400)))

# Generous: it bounds how long a broken program holds up a test, and nothing in a sound one is near it.
GENEROUS_S = 30.0


def counting_ids() -> list[int]:
    return Tokenizer.from_directory(resolve("smollm2-135m")).encode(COUNTED)


@dataclass
class Server:
    """A running ``trioleg serve``. ``joined`` is its engine where that is somebody else's program."""

    program: Program
    joined: Program | None = None
    url: str = ""
    _asked: int = 0

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    @property
    def descriptors(self) -> int:
        """How many files and sockets the program has open."""
        return len(os.listdir(f"/proc/{self.program.process.pid}/fd"))

    def tasks(self) -> int:
        """How many Trio tasks the program has, as ``scripted_serve.py`` says when it is asked."""
        self._asked += 1
        self.signal(signal.SIGUSR1)
        return int(self.program.wait_for(rf"answer {self._asked}: (\d+) tasks")[1])

    @property
    def engine(self) -> int:
        """The process id of the engine of the moment."""
        return self.joined.process.pid if self.joined else self.family[1]

    @property
    def guardian(self) -> int:
        return self.family[0]

    @property
    def family(self) -> list[int]:
        """Guardian and engine, where the engine is the server's own."""
        return descendants(self.program.process.pid)

    def signal(self, *numbers: int) -> None:
        for number in numbers:
            self.program.process.send_signal(number)
            # Several at once are one to the system, so each gets a chance to be heard.
            os.sched_yield()

    async def wait(self, seconds: float = GENEROUS_S) -> int:
        """The exit code; the clients go on meanwhile."""
        return await trio.to_thread.run_sync(self.program.wait, seconds)

    @property
    def last_line(self) -> str:
        return self.program.stderr.splitlines()[-1]


def write_script(folder: Path, **script: Any) -> Path:
    """A script that counts, a token every 2 ms, unless ``script`` says otherwise.

    It replaces the one of before in one go, which an engine may be reading.
    """
    file = folder / "script.json"
    fields = {"token_ids": counting_ids(), "step_interval_s": 0.002, **script}
    new = file.with_suffix(".new")
    new.write_text(json.dumps(fields))
    return new.replace(file)


@contextmanager
def starting(
    folder: Path,
    *options: str,
    attached: bool = False,
    joining: tuple[str, ...] = (),
    llm: dict[str, Any] | None = None,
    server: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    files: tuple[int, int] | None = None,
    **script: Any,
) -> Iterator[Server]:
    """A server that has been started. ``attached``: its engine is a program of its own, which joins it,
    with the options ``joining``.

    ``options`` are of the command line, ``llm`` and ``server`` settings of the two configurations, ``files`` the
    soft and the hard limit on open files.
    """
    file = str(write_script(folder, **script))
    settings: dict[str, Any] = {"llm": llm or {}, "server": server or {}}
    if files is not None:
        settings["files"] = files
    if attached:
        options = ("--attach", "tcp://127.0.0.1:0", *options)
    else:
        settings["script"] = file
    if "--config" not in options:
        options = ("--port", "0", *options)
    argv = (*_PROGRAM, json.dumps(settings), "serve", "smollm2-135m", *options)
    with ExitStack() as stack:
        started = Server(stack.enter_context(running(*argv, env=env)))
        if attached:
            address = started.program.wait_for(r"waiting for an engine to join at (\S+)")[1]
            engine = (*TRIOLEG, "engine", "--script", file, "--handshake", address, *joining)
            started.joined = stack.enter_context(running(*engine))
        yield started


@contextmanager
def serving(folder: Path, *options: str, **more: Any) -> Iterator[Server]:
    """``starting``, and the engine is ready."""
    with starting(folder, *options, **more) as server:
        server.url = server.program.wait_for(r"ready: .* at (https?://\S+|unix:.+)")[1]
        yield server


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process makes no step while the block runs."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        if alive(pid):
            os.kill(pid, signal.SIGCONT)


@dataclass
class Answer:
    """What has come so far of one answer, streamed or whole."""

    status: int = 0
    headers: Any = None
    text: str = ""
    error: dict[str, Any] | None = None
    finish_reason: str | None = None
    is_done: bool = False
    ids: set[str] = field(default_factory=set)

    @property
    def is_told(self) -> bool:
        """It ended in an error, in the form of its kind: a status, or an event and the end of all."""
        return self.error is not None and self.finish_reason is None and self.is_done

    @property
    def is_exact(self) -> bool:
        return self.finish_reason is not None and self.is_done and COUNTED.startswith(self.text)


class Client:
    """Asks one server. Made by ``open_client``, whose block bounds and ends everything here."""

    def __init__(self, url: str, http: httpx2.AsyncClient, nursery: trio.Nursery) -> None:
        self._url = url
        self._http = http
        self._nursery = nursery
        self._changes = trio.lowlevel.ParkingLot()

    async def until(self, condition: Callable[[], object]) -> None:
        """Returns when ``condition()``, which is about this client's answers, is true."""
        while not condition():
            await self._changes.park()

    def ask(self, *, stream: bool = True, max_tokens: int = 300, **fields: Any) -> Answer:
        """Begin a request; its answer fills as it comes."""
        answer = Answer()
        body = {
            "messages": [{"role": "user", "content": "Count"}],
            "max_tokens": max_tokens,
            "stream": stream,
            **fields,
        }
        self._nursery.start_soon(self._read, answer, body)
        return answer

    async def answered(self, **request: Any) -> Answer:
        """A whole request, from the question to the end."""
        answer = self.ask(**request)
        await self.until(lambda: answer.is_done)
        return answer

    async def _read(self, answer: Answer, body: dict[str, Any]) -> None:
        url = f"{self._url}/v1/chat/completions"
        async with self._http.stream("POST", url, json=body) as response:
            answer.status, answer.headers = response.status_code, response.headers
            self._changes.unpark_all()
            if response.headers["content-type"].startswith("text/event-stream"):
                async for line in response.aiter_lines():
                    _take_event(answer, line)
                    self._changes.unpark_all()
            else:
                await response.aread()
                _take_whole(answer, response.json())
                self._changes.unpark_all()

    async def get(self, path: str) -> httpx2.Response:
        return await self._http.get(f"{self._url}{path}")

    async def until_health(self, status: int, word: str = "") -> httpx2.Response:
        """Asks until /health has this status and, in its body, this word.

        Each time on a connection of its own: an idle one may be closed in the moment in which it is used again.
        """
        while True:
            url = f"{self._url}/health"
            response = await self._http.get(url, headers={"Connection": "close"})
            if response.status_code == status and word in response.text:
                return response
            await trio.lowlevel.checkpoint()

    async def metric(self, name: str) -> float:
        """The figure's value, summed over its labels."""
        lines = (await self.get("/metrics")).text.splitlines()
        return sum(
            float(line.split()[-1]) for line in lines if line.startswith((f"{name}{{", f"{name} "))
        )

    async def until_in_engine(self, *, running: int, waiting: int) -> None:
        """So many requests are in the engine, as its own last word has it."""
        while True:
            figures = [
                await self.metric(f"trioleg_engine_{kind}_requests")
                for kind in ("running", "waiting")
            ]
            if figures == [running, waiting]:
                return

    async def until_idle(self) -> None:
        await self.until_in_engine(running=0, waiting=0)


def _take_event(answer: Answer, line: str) -> None:
    data = line.removeprefix("data: ")
    assert not answer.is_done or not line, "nothing comes behind [DONE]"
    if data == "[DONE]":
        answer.is_done = True
    elif data:
        event = json.loads(data)
        if "error" in event:
            assert answer.error is None
            answer.error = event["error"]
            return
        answer.ids.add(event["id"])
        (choice,) = event["choices"]
        answer.text += choice["delta"].get("content") or ""
        answer.finish_reason = choice["finish_reason"]


def _take_whole(answer: Answer, body: dict[str, Any]) -> None:
    answer.is_done = True
    answer.error = body.get("error")
    whole = (answer.error or {}).get("partial") or ({} if answer.error else body)
    if whole:
        answer.ids.add(whole["id"])
        (choice,) = whole["choices"]
        answer.text = choice["message"]["content"]
        answer.finish_reason = None if answer.error else choice["finish_reason"]


@asynccontextmanager
async def open_client(server: Server, seconds: float = GENEROUS_S) -> AsyncIterator[Client]:
    """A client of ``server``; the block waits for no answer, and may take ``seconds``."""
    with trio.fail_after(seconds):
        limits = httpx2.Limits(max_connections=None)
        make = partial(httpx2.AsyncClient, trust_env=False, timeout=None, limits=limits)
        async with make() as http, trio.open_nursery() as nursery:
            yield Client(server.url, http, nursery)
            nursery.cancel_scope.cancel(reason="the client is done")


def wait_gone(*pids: int) -> None:
    """Returns when none of the processes is there any more."""
    wait_until(lambda: not any(map(alive, pids)))
