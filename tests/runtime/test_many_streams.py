"""3,000 open streams cost no descriptor, neither here nor in the engine: all share one pair of sockets."""

from __future__ import annotations

import json
import os
from contextlib import AsyncExitStack
from pathlib import Path

import trio
from programs import descendants

from trioleg import LLMConfig, SamplingParams, open_llm

NUM_STREAMS = 3000
# Only to end a test that hangs.
PATIENCE = 120


def descriptors() -> list[int]:
    """Of this process, and of those below it: the engine and its guardian."""
    return [len(os.listdir(f"/proc/{pid}/fd")) for pid in [os.getpid(), *descendants(os.getpid())]]


async def test_a_stream_takes_no_descriptor(smollm2: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    fields = {"token_ids": [504], "step_interval_s": 0.5, "max_num_seqs": NUM_STREAMS}
    script.write_text(json.dumps(fields))
    params = SamplingParams(max_tokens=1000, ignore_eos=True)
    with trio.fail_after(PATIENCE):
        async with (
            open_llm("smollm2-135m", LLMConfig(), script=script) as llm,
            AsyncExitStack() as streams,
        ):
            first = await streams.enter_async_context(llm.open_stream([504], params))
            await first.receive()
            before = descriptors()
            assert len(before) >= 3
            others = [
                await streams.enter_async_context(llm.open_stream([504], params))
                for _ in range(NUM_STREAMS - 1)
            ]
            for stream in others:
                assert (await stream.receive()).outputs[0].token_ids
            assert llm.statistics().open_streams == NUM_STREAMS
            assert descriptors() == before
