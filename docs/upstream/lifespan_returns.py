"""An app that returns from its lifespan at once ends Hypercorn's Trio worker."""

import trio
from harness import verdict
from hypercorn.config import Config
from hypercorn.trio import serve


async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        return
    raise NotImplementedError


async def main():
    config = Config.from_mapping(bind=["127.0.0.1:0"], errorlog=None)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(serve, app, config)
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        error = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        return f"the server ended: {error!r}", True
    return "the server serves", False


verdict(main)
