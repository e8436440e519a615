"""A scenario to begin with: a client leaves at the very moment at which its last token is on its way."""

from __future__ import annotations

import time

from trioleg.compare.observing import asking, note_leaks, receive_tokens, said, warm_up
from trioleg.compare.scenario import Scene, scenario
from trioleg.compare.seen import phrase


@scenario(
    "client-leaves-at-the-last-token",
    "leaving",
    asks="A client leaves while its last token is on its way: does anything stay behind?",
)
async def play(scene: Scene) -> None:
    """Either of the two may come first; whichever it is, the request is over for all."""
    async with scene.serving() as server:
        before = await warm_up(server)
        number = (await server.puppet.state()).arrived
        async with asking(server) as exchange:
            await server.puppet.wait_requests(number + 1)
            await server.puppet.say([number])
            await receive_tokens(exchange, 1)
            scene.outcome.cause_at = time.monotonic()
            await server.puppet.say([number], finish="length")
            scene.outcome.client = phrase(said(exchange))
        await note_leaks(scene.outcome, server, before)
