"""Requests from prompt to last output, and everything that can end them, in virtual time."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from scripted_llm import PROMPT, TOKENIZER, aborted, added, open_scripted, script
from tiny_tokenizers import ids
from trio.testing import MockClock

from trioleg.config import EngineConfig, LLMConfig
from trioleg.errors import (
    EngineDeadError,
    EngineUnavailableError,
    InvalidRequestError,
    OutputError,
    ReaderTooSlow,
    RequestAborted,
    ServerShutdown,
    WireError,
)
from trioleg.ipc.codec import decode_request
from trioleg.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequestType,
    FinishReason,
    SchedulerStats,
)
from trioleg.outputs import Ending, EndingKind
from trioleg.runtime.request_stream import RequestStream
from trioleg.sampling_params import RequestOutputKind, SamplingParams

CAFE = ("caf", "C3", "A9", "</s>")


async def texts(stream: RequestStream) -> list[str]:
    return [output.outputs[0].text async for output in stream]


async def test_a_stream_from_first_token_to_end_of_channel(autojump_clock: MockClock) -> None:
    async with open_scripted(script(*CAFE)) as (llm, transport):
        async with llm.open_stream(PROMPT, SamplingParams()) as stream:
            assert await texts(stream) == ["caf", "", "é", ""]
            assert stream.ending is not None
            assert stream.ending.kind is EndingKind.STOP
            with pytest.raises(trio.EndOfChannel):
                await stream.receive()
        assert added(transport) == [stream.request_id]
        assert aborted(transport) == []
        assert llm.statistics().endings == {EndingKind.STOP: 1}
        assert llm.statistics().engines[0].processor.requests == 0


async def test_generate(autojump_clock: MockClock) -> None:
    async with open_scripted(script(*CAFE)) as (llm, _):
        output = await llm.generate(PROMPT, SamplingParams(max_tokens=3))
        assert output.outputs[0].text == "café"
        assert (output.outputs[0].finish_reason, output.finished) == ("length", True)
        assert output.prompt_token_ids == PROMPT


async def test_text_and_cumulative(autojump_clock: MockClock) -> None:
    async with open_scripted(script(*CAFE)) as (llm, _):
        params = SamplingParams(output_kind=RequestOutputKind.CUMULATIVE)
        async with llm.open_stream("a", params) as stream:
            assert await texts(stream) == ["caf", "caf", "café", "café"]


async def test_a_slow_reader_gets_one_merged_output(autojump_clock: MockClock) -> None:
    async with (
        open_scripted(script(*CAFE)) as (llm, _),
        llm.open_stream(PROMPT, SamplingParams()) as stream,
    ):
        await trio.sleep(10)
        output = await stream.receive()
        assert (output.outputs[0].text, output.finished) == ("café", True)
        assert stream.statistics().num_merges == 3


async def test_leaving_the_block_early_aborts(autojump_clock: MockClock) -> None:
    async with open_scripted(script(*CAFE)) as (llm, transport):
        async with llm.open_stream(PROMPT, SamplingParams()) as stream:
            await stream.receive()
        assert aborted(transport) == [[stream.request_id]]
        with pytest.raises(trio.ClosedResourceError):
            await stream.receive()
        assert llm.statistics().endings == {EndingKind.LEFT: 1}
        assert llm.statistics().open_streams == 0


async def test_a_cancelled_reader_aborts_and_cancelled_passes(autojump_clock: MockClock) -> None:
    async with open_scripted(script(*CAFE, first_token_delay_s=60.0)) as (llm, transport):
        with trio.move_on_after(1) as scope:
            async with llm.open_stream(PROMPT, SamplingParams()) as stream:
                await stream.receive()
        assert scope.cancelled_caught
        assert aborted(transport) == [[stream.request_id]]


async def test_a_cancelled_receive_loses_nothing(autojump_clock: MockClock) -> None:
    async with (
        open_scripted(script(*CAFE)) as (llm, _),
        llm.open_stream(PROMPT, SamplingParams()) as stream,
    ):
        text = ""
        while not (text and stream.ending):
            with trio.move_on_after(0.03):
                text += (await stream.receive()).outputs[0].text
        assert text + "".join(await texts(stream)) == "café"


async def test_a_second_reader_is_refused(mock_clock: MockClock) -> None:
    async with (
        open_scripted(script(*CAFE)) as (llm, _),
        llm.open_stream(PROMPT, SamplingParams()) as stream,
        trio.open_nursery() as nursery,
    ):
        await stream.receive()
        nursery.start_soon(stream.receive)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await stream.receive()
        nursery.cancel_scope.cancel()


async def test_a_stop_string_ends_with_one_abort(autojump_clock: MockClock) -> None:
    async with open_scripted(script("a", "b", "c", "a")) as (llm, transport):
        async with llm.open_stream(PROMPT, SamplingParams(stop=["bc"])) as stream:
            outputs = [output.outputs[0] async for output in stream]
        assert [output.text for output in outputs] == ["a", "", ""]
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", "bc")
        assert aborted(transport) == [[stream.request_id]]
        assert llm.statistics().endings == {EndingKind.STOP_STRING: 1}


async def test_the_serving_scope_is_cancelled_by_a_bad_ending_only(
    autojump_clock: MockClock,
) -> None:
    async with open_scripted(script("a", "</s>")) as (llm, _):
        async with llm.open_stream(PROMPT, SamplingParams()) as stream:
            with stream.serving() as scope:
                await trio.sleep(5)
            assert not scope.cancelled_caught
            assert stream.ending is not None
        async with llm.open_stream(PROMPT, SamplingParams()) as stream:
            with stream.serving() as scope:
                stream.end(Ending(EndingKind.SHUTDOWN, "closing"))
                await trio.sleep(5)
            assert scope.cancelled_caught
            with stream.serving() as scope:
                await trio.sleep(5)
            assert scope.cancelled_caught


async def test_the_first_ending_wins(autojump_clock: MockClock) -> None:
    async with open_scripted(script(*CAFE)) as (llm, transport):
        async with llm.open_stream(PROMPT, SamplingParams()) as stream:
            stream.end(Ending(EndingKind.SHUTDOWN, "first"))
            stream.end(Ending(EndingKind.ENGINE_DEAD, "second"))
            with pytest.raises(ServerShutdown, match="first"):
                await stream.receive()
            with pytest.raises(ServerShutdown, match="first"):
                await stream.receive()
        assert aborted(transport) == [[stream.request_id]]


async def test_held_back_text_comes_before_the_error(autojump_clock: MockClock) -> None:
    async with (
        open_scripted(script("a", "b", "c", "a")) as (llm, _),
        llm.open_stream(PROMPT, SamplingParams(stop=["bcz"])) as stream,
    ):
        assert (await stream.receive()).outputs[0].text == "a"
        assert (await stream.receive()).outputs[0].text == ""
        stream.end(Ending(EndingKind.SHUTDOWN, "closing"))
        assert (await stream.receive()).outputs[0].text == "b"
        with pytest.raises(ServerShutdown):
            await stream.receive()


# ---------------------------------------------------------------------------- the engine's faults


async def test_the_sentinel_ends_streams_after_what_had_been_decoded(
    autojump_clock: MockClock,
) -> None:
    faulty = script(*CAFE, faults=[{"after_steps": 2, "how": "raise"}])
    async with open_scripted(faulty) as (llm, transport):
        async with llm.open_stream(PROMPT, SamplingParams()) as stream:
            assert (await stream.receive()).outputs[0].text == "caf"
            with pytest.raises(
                EngineDeadError, match="engine 0 is dead: it reported its own death"
            ):
                await texts(stream)
        assert "reported its own death" in await llm.wait_dead()
        assert aborted(transport) == []
        with pytest.raises(EngineDeadError):
            async with llm.open_stream(PROMPT, SamplingParams()):
                pass
        assert len(added(transport)) == 1


async def test_generate_keeps_what_there_was(autojump_clock: MockClock) -> None:
    faulty = script(*CAFE, faults=[{"after_steps": 1, "how": "raise"}])
    async with open_scripted(faulty) as (llm, _):
        with pytest.raises(EngineDeadError) as caught:
            await llm.generate(PROMPT, SamplingParams())
        assert caught.value.partial.outputs[0].text == "caf"


async def test_an_engine_out_of_reach_is_dead(autojump_clock: MockClock) -> None:
    async with open_scripted(script(*CAFE, first_token_delay_s=60.0)) as (llm, transport):
        async with llm.open_stream(PROMPT, SamplingParams()) as stream:
            transport.make_unreachable("the cable is cut")
            with pytest.raises(EngineDeadError, match="the cable is cut"):
                await stream.receive()
        assert llm.cause_of_death is not None


async def test_an_add_that_cannot_leave_waits_for_the_connection(
    autojump_clock: MockClock,
) -> None:
    async with open_scripted(script(*CAFE)) as (llm, transport):
        transport.refuse_sends()
        async with llm.open_stream(PROMPT, SamplingParams()) as stream:
            await trio.sleep(0.9)
            assert added(transport) == []
            transport.refuse_sends(refuse=False)
            assert "".join(await texts(stream)) == "café"
        assert aborted(transport) == []


async def test_an_undecodable_message_ends_the_streams_that_may_have_lost_tokens(
    autojump_clock: MockClock,
) -> None:
    async with open_scripted(script(*CAFE)) as (llm, transport):
        async with llm.open_stream(PROMPT, SamplingParams()) as stream:
            transport.inject([b"\xc1"])
            with pytest.raises(OutputError):
                await texts(stream)
        assert (await llm.generate(PROMPT, SamplingParams())).outputs[0].text == "café"


async def test_a_bad_token_id_is_one_requests_error(autojump_clock: MockClock) -> None:
    faulty = script(
        *CAFE, faults=[{"after_steps": 1, "how": "bad_token_id", "request": 0, "token_id": -1}]
    )
    async with open_scripted(faulty) as (llm, transport):
        async with (
            llm.open_stream(PROMPT, SamplingParams()) as bad,
            llm.open_stream(PROMPT, SamplingParams()) as good,
        ):
            with pytest.raises(OutputError, match="token id -1"):
                await texts(bad)
            assert "".join(await texts(good)) == "café"
        assert aborted(transport) == [[bad.request_id]]


async def test_the_engines_abort(autojump_clock: MockClock) -> None:
    async with open_scripted(script(*CAFE, first_token_delay_s=60.0)) as (llm, transport):
        async with llm.open_stream(PROMPT, SamplingParams()) as stream:
            output = EngineCoreOutput(stream.request_id, [], finish_reason=FinishReason.ABORT)
            message = EngineCoreOutputs(outputs=[output], timestamp=1.0)
            transport.inject([msgspec.msgpack.encode(message)])
            with pytest.raises(RequestAborted):
                await stream.receive()
        assert aborted(transport) == []


async def test_a_reader_over_the_bound_ends_alone(autojump_clock: MockClock) -> None:
    config = LLMConfig(mailbox_max_bytes=2_000)
    long = script(*["a"] * 200, step=0.01)
    async with open_scripted(long, config) as (llm, transport):
        async with llm.open_stream(PROMPT, SamplingParams()) as slow:
            assert (await llm.generate(PROMPT, SamplingParams(max_tokens=190))).finished
            unread = await slow.receive()
            assert set(unread.outputs[0].text) == {"a"}
            with pytest.raises(ReaderTooSlow):
                await texts(slow)
        assert aborted(transport) == [[slow.request_id]]


async def test_a_stranger_is_aborted_once_and_a_latecomer_ignored(
    autojump_clock: MockClock,
) -> None:
    async with open_scripted(script(*CAFE)) as (llm, transport):
        async with llm.open_stream(PROMPT, SamplingParams()) as stream:
            await stream.receive()
        for name in ("another-1", "another-1", stream.request_id):
            message = EngineCoreOutputs(outputs=[EngineCoreOutput(name, [5])], timestamp=1.0)
            transport.inject([msgspec.msgpack.encode(message)])
        await trio.sleep(1)
        assert aborted(transport) == [[stream.request_id], ["another-1"]]
        assert llm.statistics().engines[0].stale_outputs == 1


async def test_a_large_step_is_processed_in_slices(autojump_clock: MockClock) -> None:
    config = LLMConfig(output_chunk_size=2)
    async with (
        open_scripted(script(*CAFE), config) as (llm, _),
        trio.open_nursery() as nursery,
    ):
        finished: list[str] = []

        async def one() -> None:
            output = await llm.generate(PROMPT, SamplingParams())
            finished.append(output.outputs[0].text)

        for _ in range(7):
            nursery.start_soon(one)
        await trio.sleep(5)
        assert finished == ["café"] * 7


# ---------------------------------------------------------------------------- utilities, the end


async def test_utilities_answer_or_fail(autojump_clock: MockClock) -> None:
    async with open_scripted(script(*CAFE)) as (llm, _):
        assert await llm.call_utility("is_sleeping") is False
        with pytest.raises(WireError, match="make_coffee"):
            await llm.call_utility("make_coffee")


async def test_a_utility_call_does_not_outlive_the_engine(autojump_clock: MockClock) -> None:
    hanging = script(*CAFE, faults=[{"after_steps": 0, "how": "hang"}])
    async with open_scripted(hanging) as (llm, transport), trio.open_nursery() as nursery:

        async def call() -> None:
            with pytest.raises(EngineDeadError, match="gone"):
                await llm.call_utility("is_sleeping")

        async with llm.open_stream(PROMPT, SamplingParams()):
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(call)
            await trio.testing.wait_all_tasks_blocked()
            transport.make_unreachable("gone")


async def test_a_utility_call_of_an_engine_out_of_contact(autojump_clock: MockClock) -> None:
    async with open_scripted(script(*CAFE)) as (llm, transport):
        transport.freeze()
        with pytest.raises(EngineUnavailableError, match="is_sleeping could not be asked"):
            await llm.call_utility("is_sleeping")


async def test_shut_down_ends_streams_and_refuses_new_ones(autojump_clock: MockClock) -> None:
    async with (
        open_scripted(script(*CAFE)) as (llm, transport),
        llm.open_stream(PROMPT, SamplingParams()) as stream,
    ):
        await stream.receive()
        llm.shut_down("the server is shutting down")
        with pytest.raises(ServerShutdown, match="the server is shutting down"):
            await stream.receive()
        assert aborted(transport) == [[stream.request_id]]
        with pytest.raises(ServerShutdown):
            await llm.generate(PROMPT, SamplingParams())


async def test_a_stream_that_outlives_its_llm_is_closed(autojump_clock: MockClock) -> None:
    async with open_scripted(script(*CAFE)) as (llm, transport):
        outlived = llm.open_stream(PROMPT, SamplingParams())
        stream = await outlived.__aenter__()
    with pytest.raises(trio.ClosedResourceError):
        await stream.receive()
    await outlived.__aexit__(None, None, None)
    assert aborted(transport) == [[stream.request_id]]


# ---------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("prompt", "params", "parameter"),
    [
        ([], {}, "prompt"),
        (5, {}, "prompt"),
        ([-1], {}, "prompt"),
        ([TOKENIZER.vocab_size], {}, "prompt"),
        ([True], {}, "prompt"),
        ([1] * 2048, {}, "prompt"),
        ("a" * (2048 * 6 + 1), {}, "prompt"),
        ("", {}, "prompt"),
        ([{"role": "user", "content": "x"}], {}, "messages"),
        (b"ab", {}, "prompt"),
        (bytearray(b"ab"), {}, "prompt"),
        ([{"role": "user", "content": "x"}, "y"], {}, "messages[1]"),
        ([{"role": "user", "content": "x", "tool_calls": [1]}], {}, "messages[0]"),
        ([{"role": "user", "content": 5}], {}, "messages[0].content"),
        ([1] * 2000, {"max_tokens": 49}, "max_tokens"),
        ([1] * 2000, {"min_tokens": 49}, "min_tokens"),
        ([1], {"stop_token_ids": [TOKENIZER.vocab_size]}, "stop_token_ids"),
    ],
)
async def test_refused_before_anything_is_sent(
    autojump_clock: MockClock, prompt: object, params: dict, parameter: str
) -> None:
    async with open_scripted(script(*CAFE)) as (llm, transport):
        with pytest.raises(InvalidRequestError) as caught:
            await llm.generate(prompt, SamplingParams(**params))  # type: ignore[arg-type]
        assert caught.value.parameter == parameter
        assert added(transport) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"priority": 1},
            "priority is 1; allowed: 0, since the engine's scheduling policy is fcfs",
        ),
        ({"priority": 2**31}, "priority is 2147483648; allowed: an integer from"),
        ({"priority": "1"}, "priority is '1'; allowed: an integer"),
        ({"priority": True}, "priority is True"),
        ({"cache_salt": ""}, "cache_salt is ''; allowed: a string that is not empty"),
        ({"cache_salt": 5}, "cache_salt is 5"),
        ({"cache_salt": "\ud800"}, r"cache_salt is '\\ud800'; allowed: .* of Unicode characters"),
    ],
)
async def test_a_bad_priority_or_salt_is_refused(
    autojump_clock: MockClock, options: dict[str, Any], message: str
) -> None:
    async with open_scripted(script(*CAFE)) as (llm, transport):
        with pytest.raises(InvalidRequestError, match=message) as caught:
            await llm.generate(PROMPT, **options)
        assert caught.value.parameter == next(iter(options))
        assert added(transport) == []


async def test_priority_and_salt_go_to_the_engine(autojump_clock: MockClock) -> None:
    config = LLMConfig(engine=EngineConfig(scheduling_policy="priority"))
    async with open_scripted(script(*CAFE), config) as (llm, transport):
        await llm.generate(PROMPT, SamplingParams(n=2), priority=-3, cache_salt="mine")
        bodies = [body for kind, body in transport.sent if kind is EngineCoreRequestType.ADD]
        requests = [decode_request(body) for body in bodies]
        assert [(one.priority, one.cache_salt) for one in requests] == [(-3, "mine")] * 2


@pytest.mark.parametrize("params", [5, "x", True, {}])
async def test_params_of_another_kind_are_refused(
    autojump_clock: MockClock, params: object
) -> None:
    async with open_scripted(script(*CAFE)) as (llm, _):
        with pytest.raises(InvalidRequestError) as caught:
            await llm.generate(PROMPT, params)  # type: ignore[arg-type]
        assert caught.value.parameter == "params"


@pytest.mark.parametrize("usage", [float("nan"), float("inf"), -1.0, 2.0])
async def test_free_blocks_of_an_engine_that_talks_nonsense(
    autojump_clock: MockClock, usage: float
) -> None:
    async with open_scripted(script(*CAFE)) as (llm, transport):
        stats = SchedulerStats(kv_cache_usage=usage)
        message = EngineCoreOutputs(scheduler_stats=stats, timestamp=1.0)
        transport.inject([msgspec.msgpack.encode(message)])
        await trio.sleep(1)
        (engine,) = llm.statistics().engines
        assert engine.num_free_blocks in (0, engine.num_gpu_blocks)


async def test_the_longest_prompt_leaves_room_for_one_token(autojump_clock: MockClock) -> None:
    async with open_scripted(script(*CAFE)) as (llm, _):
        output = await llm.generate([*ids("a")] * 2047, SamplingParams())
        assert output.outputs[0].finish_reason == "length"
        assert len(output.outputs[0].token_ids) == 1


async def test_a_cancel_at_any_checkpoint_of_submitting_leaves_nothing(
    autojump_clock: MockClock,
) -> None:
    async with open_scripted(script(*CAFE, first_token_delay_s=60.0)) as (llm, transport):
        for prompt in ("a", PROMPT):
            before = len(added(transport))
            with trio.CancelScope() as scope:
                scope.cancel()
                async with llm.open_stream(prompt, SamplingParams()):
                    pytest.fail("the submit has a checkpoint, so this is never reached")
            assert scope.cancelled_caught
            assert len(added(transport)) == before
        assert llm.statistics().open_streams == 0
        assert llm.statistics().engines[0].processor.requests == 0
