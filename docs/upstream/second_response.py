"""An app that is cancelled while it sends its response head ends the whole server."""

import h11
import trio
from harness import GET, end_of, serving, verdict


async def app(scope, receive, send):
    with trio.CancelScope() as left:  # a disconnect under quart-trio does this, or any timeout
        left.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": []})


async def main():
    try:
        async with serving(app) as connect:
            async with await connect() as client:
                await client.send_all(GET % b"")
                await end_of(client, 1)
    except* h11.LocalProtocolError as group:
        error = group
    else:
        return "the server lives", False
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"the server ended: {error!r}", True


verdict(main)
