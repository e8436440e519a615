"""Settings: what cannot be is refused by name before anything is started."""

from __future__ import annotations

from typing import Any

import pytest

from trioleg.config import EngineConfig, LLMConfig
from trioleg.errors import InvalidRequestError

_INTEGERS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_gpu_blocks_override",
)


@pytest.mark.parametrize("name", _INTEGERS)
@pytest.mark.parametrize("value", [0, -1, 2**31, 10**22, True, 1.0, "64"])
def test_integers_of_the_engine_have_bounds(name: str, value: Any) -> None:
    assert EngineConfig(**{name: 2**31 - 1})
    with pytest.raises(InvalidRequestError) as caught:
        EngineConfig(**{name: value})
    assert str(caught.value) == f"{name} is {value!r}; allowed: an integer from 1 to 2147483647"
    assert caught.value.parameter == name


@pytest.mark.parametrize("value", [-2, 2**31])
def test_max_logprobs(value: int) -> None:
    assert EngineConfig(max_logprobs=-1).max_logprobs == -1
    assert EngineConfig(max_logprobs=0).max_logprobs == 0
    with pytest.raises(
        InvalidRequestError, match=rf"max_logprobs is {value}; allowed: -1 \(no bound\), or an"
    ):
        EngineConfig(max_logprobs=value)


@pytest.mark.parametrize("text", ["0", "-1", "many", "9" * 5000, "4294967296"])
def test_the_chunk_size_of_the_environment(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIOLEG_OUTPUT_PROC_CHUNK_SIZE", "7")
    assert LLMConfig().output_chunk_size == 7
    monkeypatch.setenv("TRIOLEG_OUTPUT_PROC_CHUNK_SIZE", text)
    with pytest.raises(InvalidRequestError, match=r"TRIOLEG_OUTPUT_PROC_CHUNK_SIZE is .*; allowed"):
        LLMConfig()
