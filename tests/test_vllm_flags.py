"""What an engine of vLLM's that we start is told, and what it cannot be."""

from __future__ import annotations

import pytest

from trioleg import EngineConfig, LLMConfig, VLLMConfig
from trioleg.errors import InvalidRequestError


@pytest.mark.parametrize(
    "argument",
    [
        *("--headless", "--headles", "--head", "--no-headless", "--no_headless"),
        *(
            "--data-parallel-address=1.2.3.4",
            "--data-parallel-add",
            "--data_parallel_rpc",
            "--data",
        ),
        *("-dp", "-dp=2", "-dpa", "-dph", "-asc"),
        *("--model", "--config", "--config=file.yaml", "--port", "--served-model-name", "--serv"),
        *("--max-logprobs=5", "--max-logp", "--scheduling-pol", "--stream-interval"),
        *("--api-key=secret", "--api", "--ssl-keyfile", "--chat-template", "--tool-call-parser"),
        *("--generation-config", "--override-generation-config", "--tokenizer"),
        *("--reasoning-parser",),
    ],
)
def test_what_is_not_for_the_engine_is_refused(argument: str) -> None:
    """By its name, by its beginning, with underscores: as vLLM's parser reads them."""
    with pytest.raises(InvalidRequestError, match="; allowed: other flags of vllm") as refused:
        VLLMConfig(arguments=("--dtype", "float32", argument))
    assert refused.value.parameter == "arguments"
    assert argument.partition("=")[0] in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "argument",
    [
        *("--tensor-parallel-size=2", "-tp", "-pp=2", "--enforce-eager", "--max-model-len", "1024"),
        *(
            "--enable-lora",
            "--enable-prefix-caching",
            "--no-enable-prefix-caching",
            "--seed",
            "-O3",
        ),
        *("--max-num-seqs", "--max-loras", "--tokenizer-mode", "--compilation-config.level", "--"),
        *('{"method": "ngram"}', "data-parallel", "--gpu-memory-utilization", "--revision", ""),
    ],
)
def test_what_is_the_engines_is_left_to_it(argument: str) -> None:
    assert VLLMConfig(arguments=(argument,)).arguments == (argument,)


@pytest.mark.parametrize("arguments", ["--seed", ("--seed", 1), None, {"--seed"}])
def test_what_is_no_list_of_texts(arguments: object) -> None:
    with pytest.raises(InvalidRequestError, match="arguments"):
        VLLMConfig(arguments=arguments)


def test_a_list_and_a_string_are_taken_too() -> None:
    config = VLLMConfig(python="/opt/vllm/bin/python", arguments=["--seed", "1"])
    assert config.arguments == ("--seed", "1")
    hash(config)


def test_settings_of_our_engine_mean_nothing_for_vllms() -> None:
    LLMConfig(vllm=VLLMConfig(), engine=EngineConfig(max_logprobs=5, scheduling_policy="priority"))
    with pytest.raises(InvalidRequestError, match=r"--max-model-len in VLLMConfig\.arguments"):
        LLMConfig(vllm=VLLMConfig(), engine=EngineConfig(max_model_len=300))
