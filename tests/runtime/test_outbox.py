"""``Outbox``: which ABORTs it remembers, so that it does not grow with the requests that it has served."""

from __future__ import annotations

import math

import trio
from trio.testing import MockClock

from trioleg.ipc.codec import decode_abort
from trioleg.messages import EngineCoreRequestType
from trioleg.runtime.outbox import DOUBT_S, Outbox


class Wire:
    """Notes the ABORTs that leave through it."""

    def __init__(self) -> None:
        self.aborted: list[list[str]] = []

    def send(self, message_type: EngineCoreRequestType, body: bytes) -> bool:
        assert message_type is EngineCoreRequestType.ABORT
        self.aborted.append(decode_abort(body))
        return True


async def test_only_aborts_that_may_be_lost_are_remembered(autojump_clock: MockClock) -> None:
    wire = Wire()
    outbox = Outbox(wire, lambda: True)
    outbox.abort(["old"])
    await trio.sleep(DOUBT_S * 1.5)
    outbox.abort(["young"])
    await trio.sleep(DOUBT_S / 2)
    outbox.abort(["new"])
    outbox.catch_up(-math.inf)
    assert wire.aborted[3:] == [["young", "new"]]


async def test_out_of_contact_all_are_remembered(autojump_clock: MockClock) -> None:
    wire, in_contact = Wire(), True
    outbox = Outbox(wire, lambda: in_contact)
    outbox.abort(["before"])
    in_contact = False
    await trio.sleep(DOUBT_S * 10)
    outbox.abort(["since"])
    in_contact = True
    outbox.catch_up(-math.inf)
    assert wire.aborted[2:] == [["before", "since"]]
