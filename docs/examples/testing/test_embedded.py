"""A test of code that embeds trioleg, without a server: the engine is in the test's own Trio loop.

Its clock jumps over every wait, so the two minutes of this answer take no time. With pytest-trio the test may be
``async`` itself and take the fixture ``autojump_clock``.
"""

import trio
import trio.testing

from trioleg.testing import Script, byte_tokenizer, open_scripted_llm


async def ask(llm, question):
    """The code under test."""
    answer = await llm.generate(question)
    return answer.outputs[0].text


async def two_minutes():
    steps = [list(b"caf"), [0xC3], [0xA9]]  # a byte is a token; the last two are one character
    script = Script(steps=steps, step_interval_s=60.0, finish="length")
    async with open_scripted_llm(script, byte_tokenizer()) as (llm, _):
        assert await ask(llm, "Where?") == "café"
    assert trio.current_time() >= 120


def test_a_slow_answer():
    trio.run(two_minutes, clock=trio.testing.MockClock(autojump_threshold=0))
