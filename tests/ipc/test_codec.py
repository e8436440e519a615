"""The codec: vLLM's own messages, ours there and back, and everything that is not a message."""

from __future__ import annotations

import contextlib
import random
from array import array

import msgspec
import pytest
from wire_arrays import read_array, read_rows

from trioleg.errors import WireError
from trioleg.ipc.codec import (
    OutputEncoder,
    UndecodableRequest,
    decode_abort,
    decode_outputs,
    decode_request,
    decode_utility,
    encode_abort,
    encode_request,
    encode_utility,
    is_engine_dead,
)
from trioleg.messages import (
    ENGINE_CORE_DEAD,
    ArrayData,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineSamplingParams,
    FinishReason,
    LogprobsLists,
    LogprobsTensors,
    NdArray,
    SchedulerStats,
)

pack = msgspec.msgpack.encode

PREFILL = {
    "num_prompt_tokens": 7,
    "num_computed_tokens": 7,
    "num_cached_tokens": 3,
    "num_local_cached_tokens": 3,
    "num_external_cached_tokens": 0,
    "num_cache_creation_tokens": 0,
}
EVENTS = [{"type": 1, "timestamp": 11.0}, {"type": 2, "timestamp": 11.5}]
FIRST = ["req-1", [33], *[None] * 5, EVENTS, *[None] * 3, PREFILL, None, 0, *[None] * 4]
LAST = ["req-1", [7302], None, None, None, 1, *[None] * 7, 0, *[None] * 4]
STATS = {"num_running_reqs": 1, "kv_cache_usage": 0.25, "prefix_cache_stats": {"hits": 2}}


def request(**changes: object) -> EngineCoreRequest:
    fields = {
        "request_id": "r-1",
        "prompt_token_ids": [1, 2, 3],
        "mm_features": None,
        "sampling_params": EngineSamplingParams(temperature=0.0, eos_token_id=2),
        "pooling_params": None,
        "arrival_time": 1.5,
        "lora_request": None,
        "cache_salt": None,
        "data_parallel_rank": None,
    }
    return EngineCoreRequest(**(fields | changes))  # type: ignore[arg-type]


def test_a_first_and_a_last_output_of_vllm() -> None:
    body = pack([0, [FIRST, LAST], STATS, 12.25, None, None, None, None, "default"])
    outputs = decode_outputs([memoryview(body)])
    first, last = outputs.outputs
    assert (outputs.engine_index, outputs.timestamp, outputs.weight_version) == (
        0,
        12.25,
        "default",
    )
    assert outputs.scheduler_stats is not None
    assert outputs.scheduler_stats.kv_cache_usage == 0.25
    assert (first.new_token_ids, first.finish_reason) == ([33], None)
    assert first.prefill_stats is not None
    assert first.prefill_stats.num_cached_tokens == 3
    assert [event.type for event in first.events or []] == [1, 2]
    assert (last.new_token_ids, last.finish_reason) == ([7302], FinishReason.LENGTH)


def test_a_newer_peer_adds_fields_and_an_older_one_leaves_some_out() -> None:
    newer = decode_outputs(
        [pack([1, [[*LAST, None, "of a later version"]], None, 2.0, *[None] * 5, "new"])]
    )
    assert newer.outputs[0].request_id == "req-1"
    older = decode_outputs([pack([1, [LAST[:13]], None, 2.0])])
    assert (older.engine_index, older.outputs[0].finish_reason) == (1, FinishReason.LENGTH)


def test_a_utility_answer() -> None:
    answer = decode_outputs([pack([0, [], None, 3.0, [9, None, [None, ["generate"]]]])])
    assert answer.utility_output is not None
    assert (answer.utility_output.call_id, answer.utility_output.result) == (
        9,
        [None, ["generate"]],
    )


def test_arrays_stay_as_they_are_inline_or_in_frames_of_their_own() -> None:
    inline = msgspec.msgpack.Ext(3, b"\x01\0\0\0")
    output = [*LAST]
    output[2] = [["<i4", [1, 1], inline], ["<f4", [1, 1], 1], ["<i8", [1], 2], None]
    outputs = decode_outputs([pack([0, [output], None, 4.0]), b"\0\0\0\0", b"\1" + b"\0" * 7])
    token_ids, logprobs, _, _ = outputs.outputs[0].new_logprobs
    assert token_ids == ["<i4", [1, 1], b"\x01\0\0\0"]
    assert logprobs == ["<f4", [1, 1], 1]


@pytest.mark.parametrize("code", [1, 2, 4])
def test_pickles_are_refused_on_both_legs(code: int) -> None:
    poison = msgspec.msgpack.Ext(code, b"cos\nsystem\n")
    output = [*LAST]
    output[4] = poison
    with pytest.raises(WireError, match=f"extension type {code} is refused"):
        decode_outputs([pack([0, [output], None, 4.0])])
    add = msgspec.msgpack.decode(encode_request(request()))
    add[6] = poison
    with pytest.raises(UndecodableRequest, match="refused") as caught:
        decode_request(pack(add))
    assert caught.value.request_id == "r-1"


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"", "truncated"),
        (b"\xc1", "malformed"),
        (ENGINE_CORE_DEAD, "Expected `array`"),
        (pack([0, [], None, 1.0]) + b"\0", "trailing"),
        (pack({"engine_index": 0}), "Expected `array`"),
        (pack(["0", []]), "Expected `int`"),
        (pack([0, [["r", [1], None, None, None, 7]], None, 1.0]), "Invalid enum value 7"),
        (pack([0, [["r", ["x"]]], None, 1.0]), "Expected `int`"),
        (pack([0, [["r"]], None, 1.0]), "at least length 2"),
        (b"\x92\0\x91\x93\xa1r\x90" + b"\x91" * 100_000, "recursion"),
    ],
)
def test_what_is_wrong_with_a_message_is_said(body: bytes, complaint: str) -> None:
    with pytest.raises(WireError, match=complaint):
        decode_outputs([body])


def test_a_message_without_frames() -> None:
    with pytest.raises(WireError, match="no frames"):
        decode_outputs([])


def test_only_a_lone_sentinel_is_a_death_notice() -> None:
    assert is_engine_dead([ENGINE_CORE_DEAD])
    assert is_engine_dead([memoryview(ENGINE_CORE_DEAD)])
    assert not is_engine_dead([])
    assert not is_engine_dead([ENGINE_CORE_DEAD, b""])
    assert not is_engine_dead([ENGINE_CORE_DEAD + b"\0"])


def test_requests_there_and_back() -> None:
    sent = request(client_index=1, priority=-2)
    assert decode_request(encode_request(sent)) == sent
    assert decode_abort(encode_abort(("a", "b"))) == ["a", "b"]
    call = decode_utility(encode_utility(1, 2**64 - 1, "is_sleeping", (True,)))
    assert (call.client_index, call.call_id, call.method, call.args) == (
        1,
        2**64 - 1,
        "is_sleeping",
        [True],
    )


def test_a_request_of_nine_elements_takes_the_defaults() -> None:
    body = pack(["r", [1], None, {"n": 1, "stop": ["x"]}, None, 0.0, None, None, None])
    decoded = decode_request(body)
    assert decoded.client_index == 0
    assert decoded.sampling_params is not None
    assert decoded.sampling_params.max_tokens == 16


@pytest.mark.parametrize(
    ("fields", "request_id", "client_index"),
    [
        (["r", [1], None, {"temperature": "hot"}, None, 0.0, None, None, None], "r", 0),
        (["r", "text", *[None] * 9, 3], "r", 3),
        (["r", "text", *[None] * 9, "three"], "r", 0),
        (["r"], "r", 0),
        ([7, [1]], None, 0),
        ([], None, 0),
        ("r", None, 0),
    ],
)
def test_a_bad_request_still_says_whom_to_answer(
    fields: object, request_id: str | None, client_index: int
) -> None:
    with pytest.raises(UndecodableRequest) as caught:
        decode_request(pack(fields))
    assert (caught.value.request_id, caught.value.client_index) == (request_id, client_index)


def test_a_hundred_thousand_mutations_raise_wire_errors_alone() -> None:
    chance = random.Random(20)
    output = pack([0, [FIRST, LAST], STATS, 12.25, [1, None, [None, 2]], ["r"]])
    add = encode_request(request(client_index=1))
    for seed_body, decode in ((output, lambda body: decode_outputs([body])), (add, decode_request)):
        for _ in range(50_000):
            body = bytearray(seed_body)
            for _ in range(chance.randint(1, 4)):
                body[chance.randrange(len(body))] = chance.randrange(256)
            with contextlib.suppress(WireError):
                decode(bytes(body[: chance.randint(0, 2 * len(body))]))


def test_a_buffer_is_used_again_unless_it_is_held() -> None:
    encoder, buffer = OutputEncoder(), bytearray()
    long = EngineCoreOutputs(outputs=[EngineCoreOutput("r" * 500, [1])], timestamp=1.0)
    short = EngineCoreOutputs(timestamp=2.0)
    assert encoder.encode_into(long, buffer)[0] is buffer
    encoder.encode_into(short, buffer)
    assert decode_outputs([bytes(buffer)]) == short
    with memoryview(buffer), pytest.raises(BufferError):
        encoder.encode_into(long, buffer)


def floats(count: int) -> NdArray:
    return NdArray("float32", [count], ArrayData(memoryview(array("f", range(count)))))


def encode_pooled(*counts: int) -> list[bytes]:
    """The frames of a message with an array of that many floats in each of its outputs."""
    outputs = [EngineCoreOutput(f"r{i}", [], pooling_output=floats(i)) for i in counts]
    frames = OutputEncoder().encode_into(EngineCoreOutputs(outputs=outputs), bytearray())
    return [bytes(frame) for frame in frames]


def test_small_arrays_stay_in_the_body_and_large_ones_get_frames_of_their_own() -> None:
    frames = encode_pooled(63, 64, 0, 1000)
    assert [len(frame) for frame in frames[1:]] == [256, 4000]
    raw = msgspec.msgpack.decode(frames[0])
    small, first, empty, second = (output[4] for output in raw[1])
    assert (small[2].code, len(small[2].data)) == (3, 252)
    assert (first[2], second[2]) == (1, 2)
    assert (empty[1], empty[2].data) == ([0], b"")
    decoded = decode_outputs(frames)
    for output, count in zip(decoded.outputs, (63, 64, 0, 1000), strict=True):
        assert read_array(output.pooling_output, frames) == list(range(count))


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_logprobs_there_and_back(rows: int) -> None:
    def arrays(ids: str, logprobs: str, ranks: str, code: str) -> list[NdArray]:
        values = array("i", range(3 * rows)), array("f", range(3 * rows)), array(code, range(rows))
        shapes = [rows, 3], [rows, 3], [rows]
        names = zip((ids, logprobs, ranks), shapes, values, strict=True)
        return [NdArray(name, shape, ArrayData(one.tobytes())) for name, shape, one in names]

    output = EngineCoreOutput("r", [5] * rows)
    output.new_logprobs = LogprobsLists(*arrays("<i4", "<f4", "<i8", "q"))
    output.new_prompt_logprobs_tensors = LogprobsTensors(*arrays("int32", "float32", "int32", "i"))
    message = EngineCoreOutputs(outputs=[output], timestamp=1.0)
    frames = [bytes(f) for f in OutputEncoder().encode_into(message, bytearray())]
    # Only arrays of 256 bytes and more travel alone: at 40 rows all but the 32-bit ranks.
    assert len(frames) == {1: 1, 7: 1, 40: 6}[rows]
    (read,) = decode_outputs(frames).outputs
    expected = [
        ([3 * i, 3 * i + 1, 3 * i + 2], [3.0 * i, 3.0 * i + 1, 3.0 * i + 2], i) for i in range(rows)
    ]
    assert read_rows(read.new_logprobs, frames) == expected
    assert read_rows(read.new_prompt_logprobs_tensors, frames) == expected
    assert (len(read.new_logprobs), len(read.new_prompt_logprobs_tensors)) == (4, 5)


def test_a_message_that_failed_leaves_nothing_behind() -> None:
    encoder, buffer = OutputEncoder(), bytearray()
    good = EngineCoreOutput("r", [], pooling_output=floats(100))
    bad = EngineCoreOutput("s", [], pooling_output=object())
    with pytest.raises(NotImplementedError, match="object has no form on this wire"):
        encoder.encode_into(EngineCoreOutputs(outputs=[good, bad]), buffer)
    frames = encoder.encode_into(EngineCoreOutputs(outputs=[good]), buffer)
    assert frames[0] is buffer
    assert len(frames) == 2


def test_figures_that_an_engine_does_not_have_are_left_out() -> None:
    """vLLM's head takes no nil for them."""
    body = OutputEncoder().encode_into(
        EngineCoreOutputs(scheduler_stats=SchedulerStats(num_running_reqs=1)), bytearray()
    )[0]
    assert msgspec.msgpack.decode(bytes(body))[2] == {"num_running_reqs": 1}
