"""Each vLLM release from 0.23 to 0.33: what its engine says is read, and what we say it can read.

The frames in tests/data/wire are made by each release's own structs and encoder, and so is what is recorded
there of our own bodies (tests/vllm/make_wire_frames.py says how).
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from wire_arrays import read_array, read_rows
from wire_requests import ADDS, sent

from trioleg import SamplingParams
from trioleg.config import LLMConfig
from trioleg.engine.script import Script
from trioleg.errors import (
    EngineStartError,
    InvalidRequestError,
    OutputError,
    RequestRefused,
    WireError,
)
from trioleg.ipc.codec import decode_ready, encode, is_engine_dead, make_output_decoder
from trioleg.ipc.versions import lora_array
from trioleg.lora import LoRARequest
from trioleg.messages import EngineCoreOutputs, EngineCoreRequestType, FinishReason
from trioleg.runtime.engines import Engine
from trioleg.runtime.llm import LLM
from trioleg.runtime.opening import running
from trioleg.testing.tokenizer import byte_tokenizer
from trioleg.testing.transport import ScriptedTransport

Json = dict[str, Any]

FOLDER = Path(__file__).parents[1] / "data" / "wire"
RELEASES = [f"0.{minor}" for minor in range(23, 34)]
# As the recorded logprobs of the prompt have it: 39 rows are about these tokens but the first.
PROMPT = [200, *range(0, 78, 2)]
GENEROUS_S = 30.0

every_release = pytest.mark.parametrize("release", RELEASES)
ROWS = [
    [([99, 100], [-1.5, -0.5], 2)],
    [([97, 98], [-1.5, -0.5], 2), ([102, 103], [-1.5, -0.5], 2)],
]
PICKLE = msgspec.msgpack.Ext(1, b"cos\nsystem\n")
PROMPT_ROWS = [([2 * i, 2 * i + 1], [-0.25, -0.25], 1) for i in range(39)]


@cache
def record(release: str) -> Json:
    whole: Json = json.loads((FOLDER / f"{release}.json").read_text())
    return whole


def frames(release: str, name: str) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in record(release)["frames"][name]]


def ready(release: str) -> bytes:
    return bytes.fromhex(record(release)["ready"])


def read(release: str, name: str) -> EngineCoreOutputs:
    return make_output_decoder(decode_ready(ready(release)).vllm_version)(frames(release, name))


# ---------------------------------------------------------------------- what an engine says


@every_release
def test_the_ready_response(release: str, caplog: pytest.LogCaptureFixture) -> None:
    said = decode_ready(ready(release))
    minor = int(release.partition(".")[2])
    assert (said.max_model_len, said.num_gpu_blocks, said.block_size) == (2048, 512, 16)
    assert said.vllm_version.startswith(f"{release}.")
    assert said.max_num_seqs == (128 if minor >= 27 else 0)
    assert said.supports_lora is (True if minor >= 29 else None)
    assert not caplog.records


@pytest.mark.parametrize("length", [0, -5])
def test_a_model_without_room_is_none(length: int) -> None:
    said = msgspec.msgpack.decode(ready("0.33")) | {"max_model_len": length}
    with pytest.raises(WireError, match=f"max_model_len {length}; allowed: 1 and more"):
        decode_ready(encode(said))


def test_the_oldest_says_six_things() -> None:
    said = msgspec.msgpack.decode(ready("0.23"))
    assert list(said) == [
        "max_model_len",
        "num_gpu_blocks",
        "block_size",
        "dp_stats_address",
        "dtype",
        "vllm_version",
    ]


@every_release
def test_a_first_output(release: str) -> None:
    message = read(release, "first")
    (output,) = message.outputs
    assert (output.request_id, output.new_token_ids, output.finish_reason) == ("req-1", [99], None)
    assert [event.type for event in output.events or []] == [1, 2]
    assert output.prefill_stats is not None
    assert output.prefill_stats.num_prompt_tokens == 40
    assert output.prefill_stats.num_cached_tokens == 32
    assert output.trace_headers == {"traceparent": "00-1"}
    assert read_rows(output.new_logprobs, frames(release, "first")) == ROWS[0]
    whole = frames(release, "first")
    assert len(whole) == 3
    assert read_rows(output.new_prompt_logprobs_tensors, whole) == PROMPT_ROWS


@every_release
def test_the_outputs_behind_it(release: str) -> None:
    (middle,) = read(release, "two tokens").outputs
    assert middle.new_token_ids == [97, 102]
    assert read_rows(middle.new_logprobs) == ROWS[1]
    (last,) = read(release, "last").outputs
    assert (last.new_token_ids, last.finish_reason) == ([0xC3, 0xA9], FinishReason.LENGTH)
    assert read_array(last.routed_experts) == [[[1, 1]], [[1, 1]]]
    assert (last.num_nans_in_logits, last.error) == (0, None)
    assert read(release, "aborted").outputs[0].finish_reason is FinishReason.ABORT
    assert read(release, "error").outputs[0].finish_reason is FinishReason.ERROR
    assert read_array(read(release, "pooled").outputs[0].pooling_output) == [1.0, 1.0, 1.0]


@every_release
def test_all_else_that_an_engine_says(release: str) -> None:
    message = read(release, "stats")
    stats = message.scheduler_stats
    assert stats is not None
    assert stats.prefix_cache_stats is not None
    assert (message.outputs, message.timestamp) == ([], 12.25)
    assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage) == (1, 2, 0.25)
    assert (stats.prefix_cache_stats.queries, stats.prefix_cache_stats.hits) == (40, 32)
    answer = read(release, "answer").utility_output
    refusal = read(release, "refusal").utility_output
    assert answer is not None
    assert refusal is not None
    assert (answer.call_id, answer.result) == (7, [None, ["generate"]])
    assert (refusal.call_id, refusal.failure_message) == (8, "no such method")
    assert is_engine_dead(frames(release, "sentinel"))


# ---------------------------------------------------------------------- what we say


@every_release
def test_what_is_recorded_is_what_we_say(release: str) -> None:
    assert record(release)["sent"] == {name: body.hex() for name, body in sent().items()}


@every_release
@pytest.mark.parametrize("name", ADDS)
def test_each_of_our_requests_is_read_as_it_was_meant(release: str, name: str) -> None:
    request, theirs = ADDS[name], record(release)["read"][name]
    for field in ("request_id", "prompt_token_ids", "arrival_time", "cache_salt"):
        assert theirs[field] == getattr(request, field)
    assert theirs.get("client_index", 0) == request.client_index
    assert theirs.get("priority", 0) == request.priority
    if request.sampling_params is None:
        assert theirs["pooling_params"] == {
            "use_activation": True,
            "dimensions": 8,
            "task": "embed",
        }
    else:
        ours = msgspec.to_builtins(request.sampling_params, str_keys=True)
        both = {key: theirs["sampling_params"].get(key) for key in ours}
        assert {key: in_order(value) for key, value in both.items()} == ours
    if request.lora_request is not None:
        adapter = {"lora_name": "poet", "lora_int_id": 1, "lora_path": "/adapters/poet"}
        assert theirs["lora_request"] == adapter


def in_order(value: Any) -> Any:
    """What travels as a list and is a set there."""
    return sorted(value) if isinstance(value, list) else value


@every_release
def test_more_than_a_version_knows_and_the_least_are_the_same_to_it(release: str) -> None:
    theirs = record(release)["read"]
    assert theirs["of a later head"] == theirs["of a terse head"] == theirs["plain"]


@every_release
def test_our_other_bodies(release: str) -> None:
    theirs = record(release)["read"]
    assert theirs["abort"] == ["req-1", "req-2"]
    assert theirs["utility"] == [1, 2**64 - 1, "sleep", [1, "abort"]]


class _WithTensorizer(msgspec.Struct, array_like=True):
    """``LoRARequest`` as releases before 0.32 have it."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    tensorizer_config_dict: dict | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class _WithoutTensorizer(msgspec.Struct, array_like=True):
    """As 0.32 has it."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


@pytest.mark.parametrize(
    "adapter",
    [
        LoRARequest("poet", 1, "/poet"),
        LoRARequest("poet", 1, "/poet", "base", load_inplace=True),
        LoRARequest("poet", 1, "/poet", is_3d_lora_weight=True),
    ],
)
@pytest.mark.parametrize(
    ("version", "theirs"),
    [
        ("0.23.0", _WithTensorizer),
        ("0.31.1+cpu", _WithTensorizer),
        ("0.32.0", _WithoutTensorizer),
        ("1.0", _WithoutTensorizer),
        ("0.1.dev7+g1234", _WithoutTensorizer),
    ],
)
def test_an_adapter_is_read_as_it_was_meant(adapter, version: str, theirs: type) -> None:
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(lora_array(adapter, version)), type=theirs)
    meant = msgspec.structs.asdict(adapter)
    assert {name: getattr(read, name) for name in meant} == meant


# ---------------------------------------------------------------------- a whole request


class RecordedEngine(ScriptedTransport):
    """Answers every request with the release's own messages, under the request's id."""

    def __init__(self, release: str, names: tuple[str, ...], **changes: Any) -> None:
        super().__init__(Script(steps=[[0]]))
        said = msgspec.msgpack.decode(ready(release)) | changes
        self.ready = decode_ready(encode(said))
        self.release = release
        self.names = names

    def send(self, message_type: EngineCoreRequestType, body: bytes) -> bool:
        said = msgspec.msgpack.decode(body)
        if message_type is EngineCoreRequestType.ADD:
            for name in self.names:
                head, *arrays = frames(self.release, name)
                message = msgspec.msgpack.decode(head)
                for output in message[1]:
                    output[0] = said[0]
                self.inject([encode(message), *arrays])
        elif message_type is EngineCoreRequestType.UTILITY:
            message = msgspec.msgpack.decode(frames(self.release, "answer")[0])
            message[4][0] = said[1]
            self.inject([encode(message)])
        return True


@asynccontextmanager
async def open_recorded(release: str, *names: str, **changes: Any) -> AsyncIterator[LLM]:
    @asynccontextmanager
    async def open_engine() -> AsyncIterator[Engine]:
        transport = RecordedEngine(release, names, **changes)
        yield Engine(0, transport.ready, transport)
        await transport.aclose()

    llm = LLM("recorded", byte_tokenizer(), open_engine, LLMConfig())
    with trio.fail_after(GENEROUS_S):
        async with running(llm):
            yield llm


@every_release
async def test_a_whole_request(release: str) -> None:
    params = SamplingParams(max_tokens=5, logprobs=1, prompt_logprobs=1)
    async with open_recorded(release, "first", "two tokens", "stats", "last") as llm:
        answer = await llm.generate(PROMPT, params)
        statistics = llm.statistics()
    (choice,) = answer.outputs
    assert (choice.text, choice.finish_reason) == ("café", "length")
    assert choice.token_ids == list("café".encode())
    assert answer.num_cached_tokens == 32
    assert choice.cumulative_logprob == -1.5 * 5
    assert [sorted(one) for one in choice.logprobs or []] == [
        [token, token + 1] for token in choice.token_ids
    ]
    prompt = answer.prompt_logprobs
    assert prompt is not None
    assert [prompt[0], *(sorted(one or {}) for one in prompt[1:])] == [
        None,
        *(ids for ids, _, _ in PROMPT_ROWS),
    ]
    assert answer.metrics is not None
    assert answer.metrics.queue == 0.5
    assert statistics.engines[0].scheduler.num_waiting_reqs == 2


@pytest.mark.parametrize(
    ("release", "changes", "waiting"),
    [("0.26", {}, 0), ("0.27", {}, 0), ("0.27", {"max_num_seqs": 1}, 2)],
)
async def test_an_engine_that_does_not_say_its_seats_is_taken_to_have_enough(
    release: str, changes: Json, waiting: int
) -> None:
    async with open_recorded(release, "stats", "last", **changes) as llm:
        await llm.generate(PROMPT)
        link = llm._entrance.link()
        assert link.load == (1, waiting)


async def test_an_error_that_blames_the_request() -> None:
    async with open_recorded("0.33", "first", "refused") as llm:
        with pytest.raises(RequestRefused, match="Invalid structured outputs: no such grammar"):
            await llm.generate(PROMPT)


async def test_an_error_that_blames_nobody() -> None:
    async with open_recorded("0.33", "paused") as llm:
        with pytest.raises(OutputError, match=r"Generation is paused\. Please retry"):
            await llm.generate(PROMPT)


@every_release
async def test_an_error_without_a_word(release: str) -> None:
    async with open_recorded(release, "error") as llm:
        with pytest.raises(OutputError, match="the engine reports an error for this request"):
            await llm.generate(PROMPT)


# ---------------------------------------------------------------------- what nobody may send


@every_release
def test_pickle_is_refused_wherever_it_stands(release: str) -> None:
    """Also in a field that nobody reads; where only a number may stand, for that reason."""
    refused = pytest.raises(WireError, match=r"extension type 1 is refused|got `ext`")
    decode = make_output_decoder(f"{release}.0")
    for place in range(len(msgspec.msgpack.decode(frames(release, "last")[0])[1][0])):
        message = msgspec.msgpack.decode(frames(release, "last")[0])
        message[1][0][place] = PICKLE
        with refused:
            decode([encode(message)])
    answer = msgspec.msgpack.decode(frames(release, "answer")[0])
    answer[4][2] = [None, PICKLE]
    with refused:
        decode([encode(answer)])
    with refused:
        decode_ready(encode(msgspec.msgpack.decode(ready(release)) | {"dtype": PICKLE}))


# ---------------------------------------------------------------------- versions that are not known


@pytest.mark.parametrize("version", ["0.34.0", "1.0.0", "0.1.dev1+g0a1b2c3", "dev"])
async def test_an_unknown_version_works_with_one_warning(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    names = ("first", "two tokens", "last")
    async with open_recorded("0.33", *names, vllm_version=version) as llm:
        for _ in range(2):
            assert (await llm.generate(PROMPT)).outputs[0].text == "café"
    warnings = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert warnings == [
        f"the engine is vLLM {version}, whose wire is not known here (known: 0.23 to 0.33): it is read like 0.33"
    ]


async def test_one_whose_frames_have_moved_is_named() -> None:
    """0.23's first output, from an engine that claims to be newer than all that we know."""
    async with open_recorded("0.23", "last", vllm_version="0.40.1") as llm:
        with pytest.raises(OutputError, match=r"\(vLLM 0\.40\.1, whose wire is not known here"):
            await llm.generate(PROMPT)


async def test_frames_of_a_known_version_that_do_not_decode_name_it() -> None:
    async with open_recorded("0.23", "last", vllm_version="0.33.0") as llm:
        with pytest.raises(OutputError, match=r"\(vLLM 0\.33\.0\) of .* cannot be decoded"):
            await llm.generate(PROMPT)


@pytest.mark.parametrize("version", ["9" * 5000 + ".1", "one\nline", "é" * 1000])
def test_whatever_it_calls_itself_is_one_short_line(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    decode_ready(encode(msgspec.msgpack.decode(ready("0.33")) | {"vllm_version": version}))
    (warning,) = [one.getMessage() for one in caplog.records]
    assert len(warning) < 160
    assert warning.isprintable()


@pytest.mark.parametrize("version", ["0.26.0", "0.32.1+cpu", "0.33.0rc1", "0.33.1.dev5+gabc"])
def test_builds_of_a_known_release(version: str, caplog: pytest.LogCaptureFixture) -> None:
    said = msgspec.msgpack.decode(ready("0.33")) | {"vllm_version": version}
    assert decode_ready(encode(said)).vllm_version == version
    assert not caplog.records


@pytest.mark.parametrize("version", ["", "0.22.1", "0.9.2", "0.22.1.dev3+gabc"])
def test_an_older_one_is_refused(version: str) -> None:
    said = msgspec.msgpack.decode(ready("0.23")) | {"vllm_version": version}
    with pytest.raises(EngineStartError, match=r"too old; allowed: vLLM 0\.23 to 0\.33"):
        decode_ready(encode(said))


async def test_what_would_harm_others_is_not_asked_of_an_engine_that_does_not_look() -> None:
    params = SamplingParams(max_tokens=5, logprobs=1, logprob_token_ids=[5])
    async with open_recorded("0.33", "first") as llm:
        with pytest.raises(InvalidRequestError, match="would spoil the logprobs of other requests"):
            await llm.generate(PROMPT, params)
