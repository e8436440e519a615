"""A program: an engine that only talks.

    python -m trioleg.compare.split.feed ADDRESS IDS --batch N --messages N --period SECONDS

It connects a PUSH to ADDRESS and sends steps with a token for each of N requests, which say IDS one after the other,
each from another place on. A period of 0: as fast as whoever reads takes them. A message's ``timestamp`` is when it
was sent, by the monotonic clock, which all processes of a machine share. It leaves when everything has been taken.
"""

from __future__ import annotations

import argparse
import time

import zmq

from ...ipc.codec import OutputEncoder
from ...messages import EngineCoreOutput, EngineCoreOutputs

__all__ = ["main", "request_ids"]

# Enough that the reader never waits for us, and few enough that they are new when they are sent.
_SEND_HIGH_WATER = 8


def request_ids(batch: int) -> list[str]:
    """Those of a step, as long as those of a server."""
    return [f"0123456789ab-{number}" for number in range(batch)]


def _steps(batch: int, token_ids: list[int]) -> list[list[EngineCoreOutput]]:
    ids, count = request_ids(batch), len(token_ids)
    return [
        [
            EngineCoreOutput(one, [token_ids[(step + 7 * number) % count]])
            for number, one in enumerate(ids)
        ]
        for step in range(count)
    ]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="An engine that only talks.")
    parser.add_argument("address")
    parser.add_argument("ids", type=lambda text: [int(one) for one in text.split(",")])
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--messages", type=int, required=True)
    parser.add_argument("--period", type=float, required=True)
    options = parser.parse_args()
    steps = _steps(options.batch, options.ids)
    encoder, buffer = OutputEncoder(), bytearray()
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.setsockopt(zmq.SNDHWM, _SEND_HIGH_WATER)
        push.connect(options.address)
        due = time.monotonic()
        for number in range(options.messages):
            time.sleep(max(0.0, due - time.monotonic()))
            due += options.period
            outputs = steps[number % len(steps)]
            encoder.encode_into(
                EngineCoreOutputs(outputs=outputs, timestamp=time.monotonic()), buffer
            )
            push.send(buffer)


if __name__ == "__main__":
    main()
