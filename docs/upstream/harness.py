"""A plain Hypercorn on a free port, a raw client, and the verdict: what every reproduction here shares."""

import sys
from contextlib import asynccontextmanager
from functools import partial

import trio
from hypercorn.config import Config
from hypercorn.trio import serve

GET = b"GET / HTTP/1.1\r\nHost: x\r\n%s\r\n"


@asynccontextmanager
async def serving(app, shutdown=None, **settings):
    """Yields ``connect()``, which opens a stream to a Hypercorn that serves ``app``; cancels it at the end."""

    async def without_lifespan(scope, receive, send):
        if scope["type"] == "lifespan":
            raise NotImplementedError  # an app that returns would end the server: lifespan_returns.py
        await app(scope, receive, send)

    config = Config.from_mapping(bind=["127.0.0.1:0"], errorlog=None, **settings)
    trigger = None if shutdown is None else shutdown.wait
    async with trio.open_nursery() as nursery:
        run = partial(serve, without_lifespan, config, mode="asgi", shutdown_trigger=trigger)
        (bind,) = await nursery.start(run)
        yield partial(trio.open_tcp_stream, "127.0.0.1", int(bind.rpartition(":")[2]))
        await trio.sleep(0.1)  # an error on its way out of the server would give way to the cancel
        nursery.cancel_scope.cancel()


async def end_of(stream, seconds):
    """What came until the end of the stream; the second value: whether it ended within ``seconds``."""
    got = b""
    with trio.move_on_after(seconds):
        try:
            while data := await stream.receive_some():
                got += data
        except trio.BrokenResourceError:
            return got, True
        return got, True
    return got, False


def verdict(main):
    """Runs ``main``, which returns a sentence and whether the fault is there: exit code 0; 1: it is gone."""
    saw, is_there = trio.run(main)
    print(saw)
    sys.exit(0 if is_there else 1)
