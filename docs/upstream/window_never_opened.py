"""HTTP/2: a stream whose window is shut wakes its writer again and again, and memory grows without a bound."""

import resource

import h2.config
import h2.connection
import h2.settings
import trio
from harness import serving, verdict

BOUND = 100 * 2**20


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


async def main():
    sent = 0

    async def app(scope, receive, send):
        nonlocal sent
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while sent < BOUND:  # a writer that is held back never gets far
                await send({"type": "http.response.body", "body": bytes(16384), "more_body": True})
                sent += 16384

    client = h2.connection.H2Connection(h2.config.H2Configuration())
    client.local_settings[h2.settings.SettingCodes.INITIAL_WINDOW_SIZE] = 0
    client.initiate_connection()
    headers = [(":method", "GET"), (":path", "/"), (":scheme", "http"), (":authority", "x")]
    client.send_headers(1, headers, end_stream=True)
    before = peak()
    async with serving(app) as connect:
        async with await connect() as stream:
            await stream.send_all(client.data_to_send())
            with trio.move_on_after(5):
                while sent < BOUND:
                    await trio.sleep(0.05)
    grown = (peak() - before) / 2**20
    saw = (
        f"window 0: the app was let write {sent / 2**20:.1f} MB, and memory grew by {grown:.0f} MB"
    )
    return saw, sent >= BOUND


verdict(main)
