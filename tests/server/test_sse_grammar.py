"""The strict parser itself: it takes a whole stream, and refuses it with any one rule broken."""

from __future__ import annotations

import pytest
from sse_grammar import read_stream

from trioleg.outputs import CompletionOutput, Logprob, RequestOutput
from trioleg.server.sse import DONE, KEEP_ALIVE, ChatCompletionFramer, error_event

ASKED = {
    "n": 2,
    "logprobs": True,
    "top_logprobs": 1,
    "return_token_ids": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
ERROR = error_event({"message": "no", "type": "server_error", "param": None, "code": None})


def outputs(index: int) -> list[RequestOutput]:
    logprobs = [{5: Logprob(-1.0, 1, "x", b"x")}]
    first = CompletionOutput(index, "x", [5], logprobs=logprobs)
    last = CompletionOutput(index, "y", [5], "stop", "y", logprobs=logprobs)
    return [RequestOutput("r", [1, 2], [one], False) for one in (first, last)]


def rich_stream() -> list[bytes]:
    """The events of a stream with everything in it."""
    framer = ChatCompletionFramer(
        "r",
        created=7,
        model="m",
        prompt_token_ids=[1, 2],
        n=2,
        top_logprobs=1,
        include_usage=True,
        continuous_usage=True,
        return_token_ids=True,
    )
    (a, b), (c, d) = outputs(0), outputs(1)
    frames = framer.frames(a) + KEEP_ALIVE + b"".join(map(framer.frames, (c, d, b)))
    return [event + b"\n\n" for event in (frames + framer.last_frames()).split(b"\n\n")[:-1]]


def test_a_whole_stream() -> None:
    stream = read_stream(b"".join(rich_stream()), ASKED)
    assert [one.content for one in stream.choices.values()] == ["xy", "xy"]
    assert [one.stop_reason for one in stream.choices.values()] == ["y", "y"]
    assert [one.token_ids for one in stream.choices.values()] == [[5, 5], [5, 5]]
    assert all(len(one.logprobs or []) == 2 for one in stream.choices.values())
    assert stream.usage == {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}
    assert (stream.num_comments, stream.num_chunks) == (1, 7)


def test_a_stream_that_ends_with_an_error() -> None:
    events = [*rich_stream()[:4], ERROR, DONE]
    stream = read_stream(b"".join(events), ASKED)
    assert stream.error is not None
    assert stream.choices[0].finish_reason is None


@pytest.mark.parametrize("dropped", [0, 4, 5, 6, 7, 8])
def test_no_event_can_be_missing(dropped: int) -> None:
    """Role chunk, finish chunks, usage, [DONE]."""
    events = rich_stream()
    del events[dropped]
    with pytest.raises(AssertionError):
        read_stream(b"".join(events), ASKED)


@pytest.mark.parametrize("at", range(9))
def test_nothing_but_a_comment_may_come_twice(at: int) -> None:
    events = rich_stream()
    events.insert(at, events[at])
    if events[at] == KEEP_ALIVE:
        assert read_stream(b"".join(events), ASKED).num_comments == 2
        return
    with pytest.raises(AssertionError):
        read_stream(b"".join(events), ASKED)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"chatcmpl-r"', b'"chatcmpl-s"'),
        (b'"created":7', b'"created":8'),
        (b'"model":"m"', b'"model":"n"'),
        (b"chat.completion.chunk", b"chat.completion"),
        (b'"finish_reason":null', b'"finish_reason":"why"'),
        (b',"finish_reason":null', b""),
        (b'"index":1', b'"index":2'),
        (b'"content":"y"', b'"text":"y"'),
        (b'"content":"y"', b'"role":"assistant","content":"y"'),
        (b'"content":"y"', b'"content":"y","content":"y"'),
        (b'"content":"y"', b'"content":"\xe2\x80\xa8"'),
        (b'"content":"y"', b'"content":"\xc2\x85"'),
        (b'"logprob":-1.0', b'"logprob":NaN'),
        (b'"logprob":-1.0', b'"logprob":null'),
        (b'"bytes":[120]', b'"bytes":[300]'),
        (b',"refusal":null', b""),
        (b'"token_ids":[5]', b'"token_ids":[5,5]'),
        (b',"token_ids":[5]', b""),
        (b',"prompt_token_ids":[1,2]', b""),
        (b'"total_tokens":6', b'"total_tokens":7'),
        (b'"completion_tokens":2,"total_tokens":4', b'"completion_tokens":3,"total_tokens":5'),
        (b": keep-alive\n\n", b"event: x\n\n"),
        (b"\n\ndata: [DONE]\n\n", b"\ndata: [DONE]\n\n"),
        (b"[DONE]\n\n", b"[DONE]\n"),
        (b"[DONE]\n\n", b"[DONE]\n\n\n"),
    ],
)
def test_one_broken_rule_is_enough(old: bytes, new: bytes) -> None:
    body = b"".join(rich_stream())
    assert old in body
    with pytest.raises((AssertionError, KeyError, ValueError)):
        read_stream(body.replace(old, new, 1), ASKED)


def test_an_error_is_the_end_and_never_beside_a_whole_answer() -> None:
    events = rich_stream()
    whole = events[:7]
    for bad in (
        [*whole, ERROR, DONE],
        [*events[:4], ERROR, ERROR, DONE],
        [*events[:4], ERROR, events[4], DONE],
        [*events[:8], ERROR, DONE],
        [*events[:4], ERROR],
    ):
        with pytest.raises(AssertionError):
            read_stream(b"".join(bad), ASKED)


@pytest.mark.parametrize("name", ["logprobs", "return_token_ids", "stream_options", "n"])
def test_what_was_not_asked_for_may_not_come(name: str) -> None:
    asked = {key: value for key, value in ASKED.items() if key != name}
    with pytest.raises(AssertionError):
        read_stream(b"".join(rich_stream()), asked)
