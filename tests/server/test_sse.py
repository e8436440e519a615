"""Frames: one chunk for each output that has something to say, and nothing that splits a line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trioleg.outputs import CompletionOutput, RequestOutput
from trioleg.server.sse import DONE, ChatCompletionFramer, error_event


def framer(*, include_usage: bool = False) -> ChatCompletionFramer:
    return ChatCompletionFramer("r-1", created=7, model="m", include_usage=include_usage)


def output(text: str, *token_ids: int, finish: str | None = None, **more: Any) -> RequestOutput:
    completion = CompletionOutput(0, text, list(token_ids), finish, more.pop("stop_reason", None))
    return RequestOutput("r-1", [1, 2], [completion], finish is not None, **more)


def chunks(frames: bytes) -> list[dict[str, Any]]:
    events = frames.decode().split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") for event in events)
    return [json.loads(event[6:]) for event in events if event != "data: [DONE]"]


def deltas(frames: bytes) -> list[Any]:
    return [(c["choices"][0]["delta"], c["choices"][0]["finish_reason"]) for c in chunks(frames)]


def test_the_role_comes_once_and_first() -> None:
    stream = framer()
    assert deltas(stream.frames(output("Hi", 5))) == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "Hi"}, None),
    ]
    assert deltas(stream.frames(output("!", 6))) == [({"content": "!"}, None)]


def test_an_output_with_nothing_at_all_makes_no_chunk_only_at_the_beginning() -> None:
    stream = framer()
    assert stream.frames(output("")) == b""
    stream.frames(output("Hi", 5))
    assert deltas(stream.frames(output(""))) == [({"content": ""}, None)]


def test_a_held_back_token_makes_a_chunk_with_empty_content() -> None:
    stream = framer()
    stream.frames(output("caf", 5))
    assert deltas(stream.frames(output("", 6))) == [({"content": ""}, None)]


def test_the_finish_chunk() -> None:
    stream = framer()
    stream.frames(output("Hi", 5))
    (chunk,) = chunks(stream.frames(output(".", 6, finish="stop", stop_reason="END")))
    assert chunk["choices"] == [
        {
            "index": 0,
            "delta": {"content": "."},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": "END",
        }
    ]
    assert stream.last_frames() == DONE


def test_an_answer_that_is_empty_from_the_start_still_finishes() -> None:
    assert deltas(framer().frames(output("", 2, finish="stop"))) == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": ""}, "stop"),
    ]


def test_id_created_model_and_object_are_the_same_in_every_chunk() -> None:
    stream = framer(include_usage=True)
    frames = stream.frames(output("a", 1)) + stream.frames(output("b", 2, finish="length"))
    frames += stream.last_frames()
    heads = {(c["id"], c["created"], c["model"], c["object"]) for c in chunks(frames)}
    assert heads == {("chatcmpl-r-1", 7, "m", "chat.completion.chunk")}


def test_usage_comes_once_in_a_chunk_of_its_own() -> None:
    stream = framer(include_usage=True)
    frames = stream.frames(output("a", 1, num_cached_tokens=1))
    frames += stream.frames(output("b", 2, 3, finish="length")) + stream.last_frames()
    *others, last = chunks(frames)
    assert all(chunk["usage"] is None for chunk in others)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert frames.endswith(DONE)


def test_without_include_usage_no_chunk_has_the_field() -> None:
    assert all("usage" not in chunk for chunk in chunks(framer().frames(output("a", 1))))


@pytest.mark.parametrize(
    "text", ["\u2028", "\u2029", "\u0085", "a\u2028b\u2029c\u0085d", "\x0b\x1c\r\n"]
)
def test_nothing_splits_a_data_line(text: str) -> None:
    stream = ChatCompletionFramer("r", created=7, model=f"m{text}", include_usage=False)
    frames = stream.frames(output(text, 1))
    assert chunks(frames)[1]["choices"][0]["delta"]["content"] == text
    assert chunks(frames)[1]["model"] == f"m{text}"
    lines = [line for line in frames.decode().splitlines() if line]
    assert len(lines) == 2
    assert all(line.startswith("data: ") for line in lines)


@pytest.mark.parametrize("text", ["é", "â€", "🦊", "\u2027\u202a", "Â", "â\u0080\u00a8"])
def test_other_characters_are_left_alone(text: str) -> None:
    assert chunks(framer().frames(output(text, 1)))[1]["choices"][0]["delta"]["content"] == text


def test_an_aborted_stream_finishes_every_choice() -> None:
    stream = framer()
    stream.frames(output("a", 1))
    assert deltas(stream.abort_frames()) == [({}, "abort")]


def test_the_error_event() -> None:
    event = error_event({"message": "no\u2028way", "type": "server_error"})
    assert event == b'data: {"error":{"message":"no\\u2028way","type":"server_error"}}\n\n'
