"""An app that returns before it has read a long body leaves its connection's tasks behind for ever."""

import contextlib

import trio
from harness import serving, verdict

NUM = 20
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
BODY = bytes(2**20)


async def app(scope, receive, send):
    await trio.sleep(0.1)  # by now the queue of received messages is full
    raise RuntimeError("refused, body unread")


async def main():
    async with serving(app, keep_alive_timeout=0.2) as connect:
        before = trio.lowlevel.current_statistics().tasks_living
        for _ in range(NUM):
            async with await connect() as client:
                with trio.move_on_after(0.2):
                    with contextlib.suppress(trio.BrokenResourceError):
                        await client.send_all(HEAD % len(BODY) + BODY)
        await trio.sleep(1)
        left = trio.lowlevel.current_statistics().tasks_living - before
    return f"{NUM} clients came and closed; tasks still living 1 s later: {left}", left >= NUM


verdict(main)
