"""A strict parser of a whole stream of a chat completion: every rule of ours at once.

    stream  = { chunk | comment }, ending, "data: [DONE]"
    ending  = a finish chunk for each choice, [ usage ]  |  one error event
    choices = role chunk, { chunk }, finish chunk, each for itself, mixed in any way

``read_stream`` raises AssertionError for whatever is not so, and returns what the client has in the end.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Choice", "Stream", "read_answer", "read_stream"]

_DONE = "data: [DONE]"
_HEAD = ("id", "object", "created", "model")
_FINISHES = ("stop", "length", "abort", "repetition")


@dataclass
class Choice:
    """One choice, joined. ``logprobs``, ``token_ids``: None unless they were asked for."""

    content: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[str, Any]] | None = None
    token_ids: list[int] | None = None
    # Of each chunk behind the role's, in order.
    deltas: list[str] = field(default_factory=list, compare=False)


@dataclass
class Stream:
    """``num_comments``: keep-alive comments; they are in no other field."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    prompt_token_ids: list[int] | None = None
    num_comments: int = 0
    num_chunks: int = 0


def read_stream(body: bytes, asked: dict[str, Any] | None = None) -> Stream:
    """Parse the body of an answer to the request ``asked`` (its parameters; {} is the plainest)."""
    reader = _Reader(asked or {})
    *events, done = _events(body)
    assert done == _DONE, f"the stream ends with {done!r}"
    for event in events:
        reader.read(event)
    return reader.finish()


def read_answer(body: bytes, asked: dict[str, Any] | None = None) -> Stream:
    """An answer that is not streamed, in the same form, so that the two can be compared."""
    asked = asked or {}
    answer = _json(body.decode())
    stream = Stream(usage=answer["usage"], prompt_token_ids=answer.get("prompt_token_ids"))
    assert answer["object"] == "chat.completion"
    assert [one["index"] for one in answer["choices"]] == list(range(asked.get("n", 1)))
    for one in answer["choices"]:
        choice = Choice(one["message"]["content"], one["finish_reason"], one["stop_reason"])
        choice.logprobs = _entries(one["logprobs"], asked)
        choice.token_ids = one.get("token_ids")
        assert (choice.token_ids is not None) == bool(asked.get("return_token_ids"))
        stream.choices[one["index"]] = choice
    return stream


def _events(body: bytes) -> list[str]:
    """The events, each one line. Also a client that splits at every line end of Unicode sees them so."""
    text = body.decode()
    assert text.splitlines() == text.split("\n")[:-1], "a line holds another kind of line end"
    *blocks, rest = text.split("\n\n")
    assert rest == "", f"behind the last event stands {rest!r}"
    assert not any("\n" in block for block in blocks), "an event of several lines"
    return blocks


def _json(text: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs), f"a name twice in {text!r}"
        return dict(pairs)

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, object_pairs_hook=once, parse_constant=no_constant)


class _Reader:
    def __init__(self, asked: dict[str, Any]) -> None:
        options = asked.get("stream_options") or {}
        self._asked = asked
        self._n = asked.get("n", 1)
        self._include_usage = options.get("include_usage", False)
        self._continuous = options.get("continuous_usage_stats", False)
        self._returns_ids = asked.get("return_token_ids", False)
        self._head: list[Any] | None = None
        self._counted: dict[int, int] = {}
        self._stream = Stream()

    def read(self, event: str) -> None:
        if event.startswith(": "):
            self._stream.num_comments += 1
            return
        assert event.startswith("data: "), f"no data line: {event!r}"
        assert event != _DONE, "[DONE] twice"
        assert self._stream.error is None, "something follows an error event"
        assert self._stream.usage is None, "something follows the usage chunk"
        payload = _json(event.removeprefix("data: "))
        if "error" in payload:
            self._read_error(payload)
        else:
            self._read_chunk(payload)

    def _read_error(self, payload: dict[str, Any]) -> None:
        assert set(payload) == {"error"}
        assert set(payload["error"]) == {"message", "type", "param", "code"}
        assert payload["error"]["message"]
        self._stream.error = payload["error"]

    def _read_chunk(self, chunk: dict[str, Any]) -> None:
        stream = self._stream
        first = stream.num_chunks == 0
        stream.num_chunks += 1
        fields = {*_HEAD, "choices"}
        if self._include_usage:
            fields.add("usage")
        if self._returns_ids and first:
            fields.add("prompt_token_ids")
            stream.prompt_token_ids = chunk.get("prompt_token_ids")
        assert set(chunk) == fields, f"fields of a chunk: {sorted(chunk)}"
        head = [chunk[name] for name in _HEAD]
        assert self._head in (None, head), f"{head} is not {self._head}"
        assert head[1] == "chat.completion.chunk"
        self._head = head
        if not chunk["choices"]:
            self._read_last_usage(chunk["usage"])
            return
        (one,) = chunk["choices"]
        self._read_choice(one)
        if self._include_usage:
            self._read_usage(chunk["usage"], one)

    def _read_choice(self, one: dict[str, Any]) -> None:
        index, finish = one["index"], one["finish_reason"]
        assert index in range(self._n), f"index {index}"
        fields = {"index", "delta", "logprobs", "finish_reason"}
        choice = self._stream.choices.get(index)
        if choice is None:
            choice = self._stream.choices[index] = Choice()
            choice.logprobs = [] if self._asked.get("logprobs") else None
            choice.token_ids = [] if self._returns_ids else None
            assert set(one) == fields, f"fields of a role chunk: {sorted(one)}"
            assert one["delta"] == {"role": "assistant", "content": ""}
            assert (one["logprobs"], finish) == (None, None)
            return
        assert choice.finish_reason is None, f"choice {index} goes on behind its finish"
        assert finish is None or finish in _FINISHES
        fields |= {"token_ids"} if self._returns_ids else set()
        fields |= {"stop_reason"} if finish is not None else set()
        assert set(one) == fields, f"fields of a choice: {sorted(one)}"
        assert set(one["delta"]) == {"content"}, "the role comes once"
        choice.content += one["delta"]["content"]
        choice.deltas.append(one["delta"]["content"])
        choice.finish_reason, choice.stop_reason = finish, one.get("stop_reason")
        self._read_tokens(choice, one)

    def _read_tokens(self, choice: Choice, one: dict[str, Any]) -> None:
        entries = _entries(one["logprobs"], self._asked)
        if choice.logprobs is not None:
            choice.logprobs += entries or []
        if choice.token_ids is not None:
            choice.token_ids += one["token_ids"]
            if choice.logprobs is not None:
                assert len(choice.logprobs) == len(choice.token_ids), "logprobs beside their tokens"

    def _read_usage(self, usage: dict[str, Any] | None, one: dict[str, Any]) -> None:
        if not self._continuous:
            assert usage is None, "usage before the end"
            return
        tokens = _checked_usage(usage)
        before = self._counted.get(one["index"], 0)
        assert tokens >= before
        if "token_ids" in one:
            assert tokens == before + len(one["token_ids"])
        self._counted[one["index"]] = tokens

    def _read_last_usage(self, usage: dict[str, Any]) -> None:
        self._check_finishes()
        tokens = _checked_usage(usage)
        if self._continuous:
            assert tokens == sum(self._counted.values())
        ids = [one.token_ids for one in self._stream.choices.values()]
        assert not self._returns_ids or tokens == sum(len(one or []) for one in ids)
        self._stream.usage = usage

    def finish(self) -> Stream:
        if self._stream.error is None:
            self._check_finishes()
            assert (self._stream.usage is not None) == self._include_usage
        else:
            finished = [one.finish_reason is not None for one in self._stream.choices.values()]
            assert not (all(finished) and len(finished) == self._n), (
                "an error behind a whole answer"
            )
        return self._stream

    def _check_finishes(self) -> None:
        finishes = {i: one.finish_reason for i, one in self._stream.choices.items()}
        assert sorted(finishes) == list(range(self._n)), f"choices {sorted(finishes)}"
        assert None not in finishes.values(), f"a choice without a finish: {finishes}"


def _entries(logprobs: Any, asked: dict[str, Any]) -> list[dict[str, Any]] | None:
    if logprobs is None:
        return [] if asked.get("logprobs") else None
    assert asked.get("logprobs"), "logprobs that nobody asked for"
    assert set(logprobs) == {"content", "refusal"}
    assert logprobs["refusal"] is None
    for entry in logprobs["content"]:
        top = entry["top_logprobs"]
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(top) == asked.get("top_logprobs", 0)
        assert all(set(one) == {"token", "logprob", "bytes"} for one in top)
        order = [one["logprob"] for one in top]
        assert order == sorted(order, reverse=True)
        for one in (entry, *top):
            assert type(one["logprob"]) is float
            assert one["logprob"] <= 0.0
            # Raises for what is not a byte.
            bytes(one["bytes"])
    return logprobs["content"]


def _checked_usage(usage: Any) -> int:
    """The completion's tokens."""
    assert set(usage) - {"prompt_tokens_details"} == {
        "prompt_tokens",
        "completion_tokens",
        "total_tokens",
    }
    tokens: int = usage["completion_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + tokens
    return tokens
