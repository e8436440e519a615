"""Prompts of 5 MB on their way through the tokenizer: probes are answered beside 1,000 streams, streams go on, and a
small prompt does not wait. What it comes to in milliseconds is measured by ``trioleg bench load``."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import trio
from programs import TRIOLEG, running

NUM_STREAMS = 1000
# A server that forgets its probes takes 30 s. This is far over what one takes here with every core busy
# elsewhere (1.8 s): the test is of order, not of speed.
PATIENCE = 5.0
# The same of the streams: a text that is tokenized with the interpreter's lock held stops all of them for 4 s.
LONGEST_GAP = 2.0
BOUND = 120.0
PROBE = b"GET /health HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n"


@contextmanager
def serving_many(tmp_path: Path, *, step: float = 1.0) -> Iterator[int]:
    """The port of a server whose engine takes all streams at once, and contexts of 65,536 tokens."""
    script = {
        "token_ids": [504, 3575, 282],
        "step_interval_s": step,
        "max_num_seqs": NUM_STREAMS,
        "max_model_len": 65536,
        "num_gpu_blocks": 65536,
    }
    file = tmp_path / "script.json"
    file.write_text(json.dumps(script))
    serve = ("serve", "smollm2-135m", "--port", "0", "--attach", "tcp://127.0.0.1:0")
    with running(*TRIOLEG, *serve) as server:
        address = server.wait_for(r"waiting for an engine to join at (\S+)")[1]
        with running(*TRIOLEG, "engine", "--script", str(file), "--handshake", address):
            port = urlsplit(server.wait_for(r"ready: .* at (http://\S+)")[1]).port
            assert port is not None
            yield port


def chat(content: str, *, stream: bool, max_tokens: int = 900) -> bytes:
    messages = [{"role": "user", "content": content}]
    # The engine sets blocks aside for all of them: 64 for each stream.
    body = {"messages": messages, "stream": stream, "max_tokens": max_tokens}
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: test\r\nContent-Length: {len(data)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + data


async def exchange(port: int, request: bytes) -> bytes:
    """To the end of file."""
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(request)
        return b"".join([part async for part in stream])


async def read_on(
    port: int, gaps: list[float] | None = None, *, task_status: trio.TaskStatus[None]
) -> None:
    """One stream, read for ever; started with its first bytes. ``gaps``: between what comes."""
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(chat("Go on", stream=True))
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")
        task_status.started()
        last = trio.current_time()
        while await stream.receive_some():
            now = trio.current_time()
            if gaps is not None:
                gaps.append(now - last)
            last = now


async def ask_too_much(port: int) -> None:
    """Tokenized, counted, and refused."""
    answer = await exchange(port, chat("a few words " * 400_000, stream=False))
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"65536" in answer


async def test_probes_beside_a_thousand_streams(smollm2: Path, tmp_path: Path) -> None:
    took: list[float] = []
    with serving_many(tmp_path) as port, trio.fail_after(BOUND):
        async with trio.open_nursery() as streams:
            async with trio.open_nursery() as openers:
                for _ in range(NUM_STREAMS):
                    openers.start_soon(streams.start, partial(read_on, port))
            refused = trio.Event()

            async def wait_refused() -> None:
                await ask_too_much(port)
                refused.set()

            streams.start_soon(wait_refused)
            while not refused.is_set():
                start = trio.current_time()
                with trio.fail_after(PATIENCE):
                    assert (await exchange(port, PROBE)).startswith(b"HTTP/1.1 200")
                took.append(trio.current_time() - start)
            streams.cancel_scope.cancel()
    assert len(took) > 1
    logging.getLogger(__name__).info("%d probes, the slowest %.3f s", len(took), max(took))


async def test_streams_and_small_prompts_beside_big_ones(smollm2: Path, tmp_path: Path) -> None:
    gaps: list[float] = []
    num_refused = 0
    with serving_many(tmp_path, step=0.1) as port, trio.fail_after(BOUND):
        async with trio.open_nursery() as streams:
            for _ in range(50):
                await streams.start(read_on, port, gaps)
            gaps.clear()

            async def count_refused() -> None:
                nonlocal num_refused
                await ask_too_much(port)
                num_refused += 1

            async with trio.open_nursery() as big_ones:
                for _ in range(2):
                    big_ones.start_soon(count_refused)
                small = 0
                while not num_refused:
                    answer = await exchange(port, chat("Hi", stream=False, max_tokens=1))
                    assert answer.startswith(b"HTTP/1.1 200")
                    small += 1
            streams.cancel_scope.cancel()
    # The last one may have been answered after the first big one.
    assert small > 1
    assert len(gaps) > 50
    assert max(gaps) < LONGEST_GAP
