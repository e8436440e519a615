"""``lifespan.shutdown.failed`` is lost: Hypercorn's Trio worker ends as if all were well."""

import trio
from harness import verdict
from hypercorn.config import Config
from hypercorn.trio import serve


async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.failed", "message": "the engine had died"})


async def main():
    config = Config.from_mapping(bind=["127.0.0.1:0"], errorlog=None)
    try:
        await serve(app, config, shutdown_trigger=trio.lowlevel.checkpoint)
    except BaseExceptionGroup as group:
        return f"the server says: {group.exceptions[0]!r}", False
    return "the server returned, and said nothing", True


verdict(main)
