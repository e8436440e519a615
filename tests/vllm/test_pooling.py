"""A pooling model: vLLM's engine makes a vector of a prompt, our front end reads it off the wire."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import trio
from programs import running
from test_interop import MAX_MODEL_LEN, VLLM, VLLM_ENV, VLLM_START_S, data_parallel, free_port

from trioleg import LLMConfig, PoolingParams, open_llm
from trioleg.errors import InvalidRequestError


async def test_a_vector_of_a_prompt(smollm2: Path) -> None:
    port = free_port()
    pooling = ("--runner", "pooling", "--convert", "embed")
    settings = ("--dtype", "float32", "--max-model-len", MAX_MODEL_LEN, "--headless")
    command = ("serve", str(smollm2), *pooling, *settings, *data_parallel(port))
    config = LLMConfig(start_timeout=VLLM_START_S)
    with running(*VLLM, *command, env=VLLM_ENV):
        opening = partial(open_llm, attach=f"tcp://127.0.0.1:{port}")
        async with opening(smollm2, config) as llm:
            with trio.fail_after(120):
                first = await llm.encode("The sea is blue.")
                again = await llm.encode("The sea is blue.")
                other = await llm.encode("Prices fell in March.", PoolingParams(task="embed"))
            with pytest.raises(InvalidRequestError, match="asks for 'generate'"):
                await llm.generate("The sea is blue.")
    assert first.outputs.shape == (576,)
    assert math.hypot(*first.outputs.data) == pytest.approx(1.0, abs=1e-3)
    assert again.outputs.data == pytest.approx(first.outputs.data, abs=1e-4)
    assert other.outputs.data != pytest.approx(first.outputs.data, abs=1e-2)
