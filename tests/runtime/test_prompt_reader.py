"""Long prompts, short ones, and clients that leave: who waits for whom while texts are tokenized."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import trio
from tiny_tokenizers import byte_fallback_tokenizer

from trioleg.errors import InvalidRequestError
from trioleg.prompts import Tokenizing, prepare_prompt
from trioleg.runtime.prompts import PromptReader
from trioleg.tokenizer import Tokenizer

LONG = "a" * 100_001
ROOM = 1_000_000
# Only to end a test that hangs.
PATIENCE = 60.0


class HeldUp:
    """Long texts are tokenized as ever, but not before ``go_on``. ``begun`` counts them."""

    def __init__(self) -> None:
        self.tokenizer = byte_fallback_tokenizer()
        self.go_on = threading.Event()
        self.begun = 0
        self._news = trio.Event()

    def tokenize(self, tokenizer: Tokenizer, text: str, **more: Any) -> Any:
        if text == LONG:
            trio.from_thread.run_sync(self._note)
            assert self.go_on.wait(PATIENCE)
        return tokenizer.backend.encode_batch_fast([text], **more)[0]

    def _note(self) -> None:
        self.begun += 1
        self._news.set()
        self._news = trio.Event()

    async def wait_begun(self, number: int) -> None:
        while self.begun < number:
            await self._news.wait()


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldUp]:
    held_up = HeldUp()
    monkeypatch.setattr(
        Tokenizer, "tokenize", lambda self, *args, **more: held_up.tokenize(self, *args, **more)
    )
    yield held_up
    held_up.go_on.set()


async def test_a_short_prompt_never_waits_for_long_ones(held_up: HeldUp) -> None:
    reader = PromptReader(held_up.tokenizer)
    answered: list[int] = []

    async def read_long() -> None:
        answered.append(len(await reader.read(LONG, ROOM)))

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(read_long)
            await held_up.wait_begun(1)
            assert await reader.read("aab", ROOM) == held_up.tokenizer.encode("aab")
            assert answered == []
            held_up.go_on.set()
    assert answered == [len(LONG)] * 3


async def test_one_that_leaves_waits_for_nothing_and_its_place_comes_back(held_up: HeldUp) -> None:
    reader = PromptReader(held_up.tokenizer)
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader.read, LONG, ROOM)
            await held_up.wait_begun(1)
            # Its thread cannot end before `go_on`, and this block ends.
            nursery.cancel_scope.cancel()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader.read, LONG, ROOM)
            # One that leaves while it waits for its turn was never in anybody's way.
            with trio.move_on_after(0):
                await reader.read(LONG, ROOM)
            held_up.go_on.set()
            await held_up.wait_begun(2)
        assert len(await reader.read(LONG, ROOM)) == len(LONG)
        assert held_up.begun == 3


def test_too_many_tokens_are_counted_before_they_are_listed(monkeypatch) -> None:
    class Uncountable:
        def __len__(self) -> int:
            return 1_250_000

        @property
        def ids(self) -> list[int]:
            raise AssertionError("a million numbers, for nothing")

    monkeypatch.setattr(Tokenizer, "tokenize", lambda *_, **__: Uncountable())
    work = prepare_prompt(LONG, byte_fallback_tokenizer(), 65_536)
    assert isinstance(work, Tokenizing)
    assert work.length == len(LONG)
    with pytest.raises(InvalidRequestError, match="prompt has 1250000 tokens; allowed: 1 to 65535"):
        work.run()
