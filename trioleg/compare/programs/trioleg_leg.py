"""A program: the leg of trioleg; ``legs.py`` says what it takes.

The server is ``trioleg serve`` with another engine; a consumer (``trioleg_consumers.py``) uses ``open_llm``. What is put
in before either starts: that engine, the scenario's fault, and a note of the ``LLM`` that is made, for the census.
``--option direct=off`` has every frame go by its stream's own task, as it would under another server.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import trio

from ...config import LLMConfig, ServerConfig
from ...errors import TriolegError
from ...ipc.transport import ZmqTransport
from ...runtime import opening, outbox
from ...runtime.engines import Engine, start_program
from ...runtime.llm import LLM
from ...server import routes
from ...server.stream import serve_stream
from ...serving import run_server
from ...timeouts import Timeouts
from ..inside.faults import put_in
from ..inside.lanes import Lanes
from ..inside.probe import Probe
from ..inside.trio_watch import TrioWatch
from .arguments import MODEL, Arguments, read_arguments
from .trioleg_consumers import CONSUMERS, consume

__all__ = ["main"]

# Of sysexits.h: a wrong use, which no leg's own failure answers with.
_NO_SUCH_THING = 64
_SERVER_OPTIONS: dict[str, Callable[[str], Any]] = {"drain_timeout": float, "write_timeout": float}
_LLM_OPTIONS: dict[str, Callable[[str], Any]] = {
    "max_inflight_requests": int,
    "mailbox_max_bytes": int,
    "output_chunk_size": int,
}
_OPTIONS = (*_SERVER_OPTIONS, *_LLM_OPTIONS, "direct", "total_timeout", "until")


def main() -> None:
    """Leaves as ``trioleg serve`` does: an error of ours is one line on stderr, and 1."""
    arguments = read_arguments()
    _refuse_what_is_not_there(arguments)
    _take_engine(arguments.engine)
    llms = _note_llms()
    lanes = None if arguments.lanes is None else Lanes(arguments.lanes)
    watch = TrioWatch(lambda: sum(map(_live_requests, llms)), lanes)
    if arguments.fault is not None:
        put_in(arguments.fault, _put_in_reader, [outbox])
    if arguments.options.get("direct") == "off":
        _take_direct_way_off()
    run = partial(_watched, Probe(arguments.probe), watch, _what_to_run(arguments, watch))
    try:
        trio.run(run, instruments=[] if lanes is None else [watch])
    except TriolegError as error:
        if arguments.consume is not None:
            raise
        sys.exit(f"trioleg: {error}")
    finally:
        if lanes is not None:
            lanes.write()


def _refuse_what_is_not_there(arguments: Arguments) -> None:
    unknown = [name for name in arguments.options if name not in _OPTIONS]
    if arguments.consume is not None and arguments.consume not in CONSUMERS:
        unknown.append(arguments.consume)
    if unknown:
        sys.stderr.write(f"no such thing: {unknown[0]}\n")
        sys.exit(_NO_SUCH_THING)


def _take_engine(command: Sequence[str]) -> None:
    def start(
        _directory: Path, config: LLMConfig, *, script: Path | None = None
    ) -> AbstractAsyncContextManager[Engine]:
        assert script is None
        return start_program(command, config)

    vars(opening)["start_engine"] = start


def _take_direct_way_off() -> None:
    by_task: Any = serve_stream

    def serve(*arguments: Any, **more: Any) -> Any:
        *others, _direct = arguments
        return by_task(*others, None, **more)

    vars(routes)["serve_stream"] = serve


def _note_llms() -> list[LLM]:
    """Those that will be opened: a server shows its own to nobody."""
    llms: list[LLM] = []

    def make(*arguments: Any, **more: Any) -> LLM:
        llms.append(LLM(*arguments, **more))
        return llms[-1]

    vars(opening)["LLM"] = make
    return llms


def _live_requests(llm: LLM) -> int:
    """Streams that are open and states of requests: the same ones, unless something was left behind."""
    statistics = llm.statistics()
    states = sum(engine.processor.requests for engine in statistics.engines)
    return max(statistics.open_streams, states)


def _put_in_reader(at_message: Callable[[Sequence[bytes | memoryview]], None]) -> None:
    receive = ZmqTransport.receive

    async def receive_failing(self: ZmqTransport) -> list[bytes]:
        frames = await receive(self)
        at_message(frames)
        return frames

    ZmqTransport.receive = receive_failing  # type: ignore[method-assign]


def _what_to_run(arguments: Arguments, watch: TrioWatch) -> Callable[[], Awaitable[None]]:
    given = arguments.options
    directory = str(arguments.directory)
    config = LLMConfig(
        **{name: read(given[name]) for name, read in _LLM_OPTIONS.items() if name in given},
        timeouts=Timeouts(
            total=float(given["total_timeout"]) if "total_timeout" in given else None
        ),
    )
    if arguments.consume is not None:
        until = Path(given["until"]) if "until" in given else None
        return partial(consume, arguments.consume, directory, config, until, watch.census)
    # As ``trioleg serve`` has it.
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("trioleg").setLevel("INFO")
    server = ServerConfig(
        port=arguments.port or 0,
        served_model_name=MODEL,
        **{name: read(given[name]) for name, read in _SERVER_OPTIONS.items() if name in given},
    )
    return partial(run_server, directory, config, server, None)


async def _watched(probe: Probe, watch: TrioWatch, run: Callable[[], Awaitable[None]]) -> None:
    token = trio.lowlevel.current_trio_token()
    probe.attach(token.run_sync_soon, watch.census, watch.write_lanes, watch.steps)
    await run()


if __name__ == "__main__":
    main()
