"""Frames: one chunk for each output that has something to say, and nothing that splits a line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trioleg.outputs import CompletionOutput, Logprob, RequestOutput
from trioleg.server.sse import DONE, ChatCompletionFramer, error_event


def framer(model: str = "m", **more: Any) -> ChatCompletionFramer:
    return ChatCompletionFramer("r-1", created=7, model=model, prompt_token_ids=[1, 2], **more)


def output(
    text: str,
    *token_ids: int,
    finish: str | None = None,
    stop_reason: int | str | None = None,
    index: int = 0,
    logprobs: list[dict[int, Logprob]] | None = None,
    cached: int | None = None,
) -> RequestOutput:
    one = CompletionOutput(index, text, list(token_ids), finish, stop_reason, logprobs)
    return RequestOutput("r-1", [1, 2], [one], finish is not None, cached)


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
    frames = stream.frames(output("a", 1, cached=1))
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
    stream = framer(f"m{text}")
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
    """Those that are finished not again, those that have said nothing yet with their role."""
    stream = framer(n=3)
    stream.frames(output("a", 1, finish="stop"))
    stream.frames(output("b", 1, index=1))
    got = [(c["choices"][0]["index"], *d) for c, d in both(stream.abort_frames())]
    assert got == [
        (1, {"content": ""}, "abort"),
        (2, {"role": "assistant", "content": ""}, None),
        (2, {"content": ""}, "abort"),
    ]


def both(frames: bytes) -> list[Any]:
    return list(zip(chunks(frames), deltas(frames), strict=True))


def test_choices_have_their_own_role_and_skip_rule() -> None:
    stream = framer(n=2)
    two = output("x", 5, index=1)
    two.outputs.append(CompletionOutput(0, "", []))
    frames = stream.frames(two) + stream.frames(output("y", 6)) + stream.frames(output("", index=1))
    assert [(c["choices"][0]["index"], d[0]) for c, d in both(frames)] == [
        (1, {"role": "assistant", "content": ""}),
        (1, {"content": "x"}),
        (0, {"role": "assistant", "content": ""}),
        (0, {"content": "y"}),
        (1, {"content": ""}),
    ]


def test_usage_counts_the_prompt_once_and_all_choices() -> None:
    stream = framer(n=2, include_usage=True)
    stream.frames(output("a", 1, 2, finish="stop"))
    stream.frames(output("b", 3, finish="stop", index=1))
    (last,) = chunks(stream.last_frames())
    assert last["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


def test_continuous_usage_is_that_of_the_chunks_choice() -> None:
    stream = framer(n=2, include_usage=True, continuous_usage=True)
    frames = stream.frames(output("a", 1, 2)) + stream.frames(output("b", 3, index=1))
    frames += stream.frames(output("c", 4, finish="stop"))
    frames += stream.frames(output("d", 5, finish="stop", index=1)) + stream.last_frames()
    counted = [chunk["usage"]["completion_tokens"] for chunk in chunks(frames)]
    assert counted == [0, 2, 0, 1, 3, 2, 5]
    assert all(
        c["usage"]["total_tokens"] == 2 + n for c, n in zip(chunks(frames), counted, strict=True)
    )


def test_token_ids_of_the_prompt_come_once_and_of_the_answer_with_their_text() -> None:
    stream = framer(n=2, return_token_ids=True)
    frames = stream.frames(output("a", 1)) + stream.frames(output("", 3, 4, index=1))
    first, *others = chunks(frames)
    assert first["prompt_token_ids"] == [1, 2]
    assert not any("prompt_token_ids" in chunk for chunk in others)
    assert [c["choices"][0].get("token_ids") for c in [first, *others]] == [None, [1], None, [3, 4]]


def test_logprobs_come_with_their_output_though_its_text_is_held_back() -> None:
    stream = framer(top_logprobs=1)
    entry = {
        5: Logprob(-1.0, 2, "\u2028\u0085", "\u2028\u0085".encode()),
        6: Logprob(-0.5, 1, "b", b"b"),
    }
    frames = stream.frames(output("", 5, logprobs=[entry])) + stream.frames(output("ab", 6, 6))
    assert len(frames.decode().splitlines()) == 6
    role, held, text = (chunk["choices"][0] for chunk in chunks(frames))
    assert (role["logprobs"], text["logprobs"]) == (None, None)
    assert held["delta"] == {"content": ""}
    (got,) = held["logprobs"]["content"]
    assert (got["token"], got["bytes"]) == ("\u2028\u0085", [0xE2, 0x80, 0xA8, 0xC2, 0x85])
    assert [one["token"] for one in got["top_logprobs"]] == ["b"]


def test_the_error_event() -> None:
    event = error_event({"message": "no\u2028way", "type": "server_error"})
    assert event == b'data: {"error":{"message":"no\\u2028way","type":"server_error"}}\n\n'
