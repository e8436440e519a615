"""Every way in which a request can end (B1): whole streams by the strict parser, each ending both after
the first output, where the stream has to tell it, and before, where there is still a status."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import pytest
import trio
from scripted_app import Answer, ScriptedApp, open_app
from sse_grammar import read_answer, read_stream
from test_streaming_protocol import play
from tiny_tokenizers import ids
from trio.testing import MockClock

from trioleg.config import LLMConfig, ServerConfig
from trioleg.engine.scripted import Script
from trioleg.ipc.codec import decode_request, encode
from trioleg.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequestType,
    FinishReason,
    refusal_reason,
)

End: TypeAlias = Callable[[ScriptedApp], None]

ENDLESS = play(*("a", "b", "c") * 300)
LATE = play("a", "b", first_token_delay_s=3)
ASKED = pytest.mark.parametrize(
    "asked",
    [{}, {"n": 3, "stream_options": {"include_usage": True}}],
    ids=["one", "three choices"],
)


async def ended_by(
    end: End, at: float, script: Script, config: ServerConfig | None = None, **asked: Any
) -> Answer:
    """The answer to a request that ``end`` strikes so many seconds after it was sent."""
    answer = Answer()
    async with open_app(script, config) as app:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(app.ask, answer, **asked))
                await trio.sleep(at)
                end(app)
    return answer


# ---------------------------------------------------------------------------- good endings


@ASKED
@pytest.mark.parametrize(
    ("more", "finish", "stop_reason", "content"),
    [
        ({"max_tokens": 3}, "length", None, "abc"),
        ({"max_tokens": 1}, "length", None, "a"),
        ({"stop": ["bc"]}, "stop", "bc", "a"),
        ({"stop": "a"}, "stop", "a", ""),
        ({"stop": "bc", "include_stop_str_in_output": True}, "stop", "bc", "abc"),
        ({"stop_token_ids": [265], "min_tokens": 4}, "stop", 265, "abcab"),
    ],
)
async def test_good_endings(
    autojump_clock: MockClock,
    asked: dict[str, Any],
    more: dict[str, Any],
    finish: str,
    stop_reason: Any,
    content: str,
) -> None:
    async with open_app(ENDLESS) as app:
        answer = await app.ask(stream=True, **asked, **more)
    stream = read_stream(answer.body, asked)
    assert stream.error is None
    for choice in stream.choices.values():
        got = (choice.finish_reason, choice.stop_reason, choice.content)
        assert got == (finish, stop_reason, content)


async def test_the_end_of_sequence_token(autojump_clock: MockClock) -> None:
    async with open_app(play("a", "</s>", "b")) as app:
        answer = await app.ask(stream=True)
    (choice,) = read_stream(answer.body).choices.values()
    assert (choice.content, choice.finish_reason, choice.stop_reason) == ("a", "stop", None)


# ---------------------------------------------------------------------------- bad endings


def die(app: ScriptedApp) -> None:
    app.transport.inject_dead()


def be_cut_off(app: ScriptedApp) -> None:
    app.transport.make_unreachable("its process was killed")


def shut_down(app: ScriptedApp) -> None:
    app.llm.shut_down("the server is shutting down")


def send_a_bad_id(app: ScriptedApp) -> None:
    send(app, [-1], None)


def report_an_error(app: ScriptedApp) -> None:
    send(app, [], FinishReason.ERROR)


def refuse(app: ScriptedApp) -> None:
    reason = refusal_reason("structured_outputs", "structured_outputs is too much; allowed: less")
    send(app, [], FinishReason.ERROR, reason)


def abort(app: ScriptedApp) -> None:
    app.transport.core.finish_all()


def send(
    app: ScriptedApp,
    token_ids: list[int],
    finish: FinishReason | None,
    stop_reason: str | None = None,
) -> None:
    """An output of the engine's for the first request that it was sent."""
    first = next(body for kind, body in app.transport.sent if kind is EngineCoreRequestType.ADD)
    request_id = decode_request(first).request_id
    output = EngineCoreOutput(request_id, token_ids, finish_reason=finish, stop_reason=stop_reason)
    app.transport.inject([encode(EngineCoreOutputs(outputs=[output]))])


BAD_ENDINGS = pytest.mark.parametrize(
    ("end", "status", "code"),
    [
        (die, 503, "engine_dead"),
        (be_cut_off, 503, "engine_dead"),
        (shut_down, 503, "server_shutdown"),
        (send_a_bad_id, 500, "output_error"),
        (report_an_error, 500, "output_error"),
        (refuse, 400, None),
    ],
)


@ASKED
@BAD_ENDINGS
async def test_a_bad_ending_in_the_middle(
    autojump_clock: MockClock, end: End, status: int, code: str | None, asked: dict[str, Any]
) -> None:
    """One error event and [DONE]; what had been generated before it is there."""
    asked = {**asked, "logprobs": True}
    answer = await ended_by(end, 0.55, ENDLESS, stream=True, **asked)
    stream = read_stream(answer.body, asked)
    assert (answer.status, answer.is_whole) == (200, True)
    assert stream.error is not None
    assert stream.error["code"] == code
    assert all(one.content.startswith("abcab") for one in stream.choices.values())
    assert all(len(one.logprobs or []) == len(one.content) for one in stream.choices.values())


@BAD_ENDINGS
@pytest.mark.parametrize("n", [1, 2])
async def test_a_bad_ending_gives_out_what_was_held_back(
    autojump_clock: MockClock, end: End, status: int, code: str | None, n: int
) -> None:
    """By a server whose writes have a checkpoint before anything is written, as this app's have."""
    asked = {"n": n, "stop": "cabd", "return_token_ids": True}
    answer = await ended_by(end, 0.55, ENDLESS, stream=True, **asked)
    stream = read_stream(answer.body, asked)
    assert stream.error is not None
    for choice in stream.choices.values():
        assert choice.content.startswith("abcab")
        assert len(choice.content) == len(choice.token_ids or [])


@pytest.mark.parametrize("stream", [True, False])
@BAD_ENDINGS
async def test_a_bad_ending_before_the_first_token(
    autojump_clock: MockClock, end: End, status: int, code: str | None, stream: bool
) -> None:
    """B2: whatever it is, it is a status and JSON."""
    answer = await ended_by(end, 1, LATE, stream=stream, n=2, logprobs=True)
    assert (answer.status, answer.error["code"]) == (status, code)


@BAD_ENDINGS
async def test_a_bad_ending_behind_a_keep_alive_comment(
    autojump_clock: MockClock, end: End, status: int, code: str | None
) -> None:
    """The comment has sent the 200, so no status is left to say it with."""
    config = ServerConfig(sse_keep_alive_interval=1)
    answer = await ended_by(end, 2.5, LATE, config, stream=True)
    stream = read_stream(answer.body)
    assert (answer.status, stream.num_chunks) == (200, 0)
    assert stream.num_comments in (2, 3)
    assert stream.error is not None
    assert stream.error["code"] == code


@BAD_ENDINGS
async def test_a_plain_answer_that_fails_has_what_was_generated(
    autojump_clock: MockClock, end: End, status: int, code: str | None
) -> None:
    answer = await ended_by(end, 0.55, ENDLESS, n=2, logprobs=True, return_token_ids=True)
    assert (answer.status, answer.error["code"]) == (status, code)
    for one in answer.error["partial"]["choices"]:
        assert one["finish_reason"] is None
        assert one["message"]["content"].startswith("abcab")
        assert len(one["logprobs"]["content"]) == len(one["token_ids"])


async def test_a_nan_never_becomes_json(autojump_clock: MockClock) -> None:
    """It ends the request; the logprobs before it are there."""
    script = play(*"abcab", "▁Paris", "a", odd_logprobs={ids("▁Paris")[0]: "nan"})
    asked = {"logprobs": True, "n": 2}
    async with open_app(script) as app:
        answer = await app.ask(stream=True, **asked)
    stream = read_stream(answer.body, asked)
    assert stream.error is not None
    assert "NaN" in stream.error["message"]
    assert all(len(one.logprobs or []) == 5 for one in stream.choices.values())


@pytest.mark.parametrize("stream", [True, False])
async def test_a_token_that_was_ruled_out(autojump_clock: MockClock, stream: bool) -> None:
    """-inf is -9999.0, as OpenAI spells it."""
    script = play("a", "b", odd_logprobs={ids("b")[0]: "-inf"})
    asked = {"logprobs": True}
    async with open_app(script) as app:
        answer = await app.ask(stream=stream, **asked)
    read = read_stream if stream else read_answer
    first, second = read(answer.body, asked).choices[0].logprobs or []
    assert first["logprob"] > -9999.0
    assert second["logprob"] == -9999.0


async def test_a_choice_that_is_whole_does_not_save_the_others(autojump_clock: MockClock) -> None:
    """An engine for one at a time: the first answer is whole when the second goes wrong."""
    script = play("a", "b", max_num_seqs=1, faults=[{"after_steps": 3, "how": "raise"}])
    async with open_app(script) as app:
        answer = await app.ask(stream=True, n=2)
    stream = read_stream(answer.body, {"n": 2})
    assert stream.error is not None
    assert [stream.choices[i].finish_reason for i in (0, 1)] == ["length", None]


# ---------------------------------------------------------------------------- aborts


@ASKED
async def test_an_abort_is_a_finish(autojump_clock: MockClock, asked: dict[str, Any]) -> None:
    answer = await ended_by(abort, 0.55, ENDLESS, stream=True, **asked)
    stream = read_stream(answer.body, asked)
    assert stream.error is None
    for choice in stream.choices.values():
        assert (choice.finish_reason, choice.content[:5]) == ("abort", "abcab")


async def test_an_abort_finishes_a_choice_that_has_said_nothing(autojump_clock: MockClock) -> None:
    script = play(*"abc" * 300, max_num_seqs=1)
    answer = await ended_by(abort, 0.55, script, stream=True, n=2)
    stream = read_stream(answer.body, {"n": 2})
    got = [(one.content[:5], one.finish_reason) for _, one in sorted(stream.choices.items())]
    assert got == [("abcab", "abort"), ("", "abort")]


async def test_an_abort_behind_a_keep_alive_comment(autojump_clock: MockClock) -> None:
    """Nothing was generated: a role and a finish for each choice, and the prompt is counted."""
    asked = {"n": 2, "stream_options": {"include_usage": True}}
    config = ServerConfig(sse_keep_alive_interval=1)
    answer = await ended_by(abort, 2.5, LATE, config, stream=True, **asked)
    stream = read_stream(answer.body, asked)
    assert [one.finish_reason for one in stream.choices.values()] == ["abort", "abort"]
    assert stream.usage == {"prompt_tokens": 4, "completion_tokens": 0, "total_tokens": 4}


# ---------------------------------------------------------------------------- clients


async def test_a_reader_that_is_too_slow(autojump_clock: MockClock) -> None:
    """The client takes one part and no more: the write is given up, and the error told if it can be."""
    answer = Answer(reads=trio.Event())
    config = LLMConfig(mailbox_max_bytes=2000)
    async with open_app(ENDLESS, llm_config=config) as app, trio.open_nursery() as nursery:
        nursery.start_soon(partial(app.ask, answer, stream=True))
        # 2000 bytes are unread long before, and then a client has two seconds for the last frames.
        await trio.sleep(5.5)
        assert app.llm.statistics().endings == {"reader_too_slow": 1}
        assert answer.reads is not None
        answer.reads.set()
    stream = read_stream(answer.body)
    assert stream.error is not None
    assert stream.error["code"] == "reader_too_slow"
    assert len(stream.choices[0].content) > 10


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_is_sent_nothing_more(
    autojump_clock: MockClock, stream: bool
) -> None:
    answer = Answer()
    async with open_app(ENDLESS) as app, trio.open_nursery() as nursery:
        nursery.start_soon(partial(app.ask, answer, stream=stream, n=2))
        await trio.sleep(0.55)
        num_parts = len(answer.parts)
        answer.leave.set()
        await trio.sleep(10)
        aborts = [kind for kind, _ in app.transport.sent if kind is EngineCoreRequestType.ABORT]
        assert len(aborts) == 1
        assert app.llm.statistics().endings == {"left": 1}
    assert (len(answer.parts), answer.is_whole) == (num_parts, False)
