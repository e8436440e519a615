"""The in-process scripted engine, under the autojump clock."""

from __future__ import annotations

import pytest
import trio
from wire_arrays import read_rows

from trioleg.engine.scripted import Fault, Script
from trioleg.ipc.codec import (
    decode_outputs,
    encode_abort,
    encode_request,
    encode_utility,
    is_engine_dead,
)
from trioleg.messages import (
    EngineCoreRequest,
    EngineCoreRequestType,
    EngineSamplingParams,
    FinishReason,
)
from trioleg.testing.transport import ScriptedTransport


def add(transport: ScriptedTransport, request_id: str, max_tokens: int = 3) -> bool:
    request = EngineCoreRequest(
        request_id, [1], None, EngineSamplingParams(max_tokens=max_tokens), *[None] * 5
    )
    request.arrival_time = 0.0
    return transport.send(EngineCoreRequestType.ADD, encode_request(request))


async def test_a_request_takes_the_scripts_time_and_no_more(autojump_clock) -> None:
    transport = ScriptedTransport(
        Script(token_ids=[8], first_token_delay_s=10.0, step_interval_s=2.0), engine_index=3
    )
    start = trio.current_time()
    assert add(transport, "r")
    seen: list[tuple[float, FinishReason | None]] = []
    for _ in range(3):
        outputs = decode_outputs(await transport.receive())
        assert outputs.engine_index == 3
        seen += [(trio.current_time() - start, o.finish_reason) for o in outputs.outputs]
    assert [reason for _, reason in seen] == [None, None, FinishReason.LENGTH]
    assert seen[0][0] == pytest.approx(10.0)
    assert seen[2][0] - seen[1][0] == pytest.approx(2.0)
    assert [kind for kind, _ in transport.sent] == [EngineCoreRequestType.ADD]


async def test_a_message_wakes_a_receiver_that_waits(autojump_clock) -> None:
    transport = ScriptedTransport(Script(token_ids=[8]))
    async with trio.open_nursery() as nursery:

        async def receive() -> None:
            frames = await transport.receive()
            assert decode_outputs(frames).utility_output is not None

        nursery.start_soon(receive)
        await trio.testing.wait_all_tasks_blocked()
        transport.send(EngineCoreRequestType.UTILITY, encode_utility(0, 1, "is_sleeping", []))


async def test_an_aborted_request_says_nothing_more(autojump_clock) -> None:
    transport = ScriptedTransport(Script(token_ids=[8], step_interval_s=1.0))
    add(transport, "r", 100)
    await transport.receive()
    transport.send(EngineCoreRequestType.ABORT, encode_abort(["r"]))
    outputs = decode_outputs(await transport.receive())
    assert outputs.outputs == []
    assert outputs.scheduler_stats is not None
    assert outputs.scheduler_stats.num_running_reqs == 0
    with trio.move_on_after(1_000) as waited:
        await transport.receive()
    assert waited.cancelled_caught


async def test_a_cancelled_receive_loses_nothing(autojump_clock) -> None:
    transport = ScriptedTransport(Script(token_ids=[1, 2, 3, 4], step_interval_s=0.5))
    add(transport, "r", 100)
    got: list[int] = []
    await trio.lowlevel.checkpoint()
    for _ in range(1_000):
        with trio.move_on_after(0.3):
            outputs = decode_outputs(await transport.receive())
            got += [i for output in outputs.outputs for i in output.new_token_ids]
    assert got == [1, 2, 3, 4] * 25


@pytest.mark.parametrize("how", ["exit", "sigkill"])
async def test_a_process_that_is_gone(autojump_clock, how) -> None:
    transport = ScriptedTransport(Script(token_ids=[8], faults=[Fault(after_steps=1, how=how)]))
    add(transport, "r")
    await transport.receive()
    with trio.move_on_after(1_000) as waited:
        await transport.receive()
    assert waited.cancelled_caught
    assert await transport.wait_lost() == "its process is gone"
    assert add(transport, "s") is False


async def test_an_engine_that_dies_and_one_that_hangs(autojump_clock) -> None:
    dying = ScriptedTransport(Script(token_ids=[8], faults=[Fault(after_steps=0, how="raise")]))
    add(dying, "r")
    assert is_engine_dead(await dying.receive())
    hanging = ScriptedTransport(Script(token_ids=[8], faults=[Fault(after_steps=0, how="hang")]))
    add(hanging, "r")
    with trio.move_on_after(1_000) as waited:
        await hanging.receive()
    assert waited.cancelled_caught
    assert add(hanging, "s") is True


async def test_a_hand_in_it(autojump_clock) -> None:
    transport = ScriptedTransport(Script(token_ids=[8]))
    transport.refuse_sends()
    assert add(transport, "r") is False
    transport.refuse_sends(refuse=False)
    assert add(transport, "r") is True
    transport.inject([b"anything", b"aux"])
    assert await transport.receive() == [b"anything", b"aux"]
    assert await transport.wait_lost() == "a message to it could not leave"
    await transport.wait_back()
    transport.make_unreachable("cut")
    assert await transport.wait_lost() == "cut"
    await transport.aclose()
    with pytest.raises(trio.ClosedResourceError):
        await transport.receive()


async def test_arrays_come_in_frames_of_their_own(autojump_clock) -> None:
    transport = ScriptedTransport(Script(token_ids=[8]))
    request = EngineCoreRequest(
        "r", [4] * 100, None, EngineSamplingParams(prompt_logprobs=1), *[None] * 5
    )
    request.arrival_time = 0.0
    transport.send(EngineCoreRequestType.ADD, encode_request(request))
    frames = await transport.receive()
    assert [len(frame) for frame in frames[1:]] == [99 * 2 * 4, 99 * 2 * 4, 99 * 4]
    (output,) = decode_outputs(frames).outputs
    rows = read_rows(output.new_prompt_logprobs_tensors, frames)
    assert rows == [([4, 3], [-2.0, -1.0], 2)] * 99
