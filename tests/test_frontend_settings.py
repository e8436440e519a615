"""What vLLM's arguments become, and which of them are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trioleg.errors import InvalidRequestError
from trioleg.frontend_settings import FrontendSettings, read_settings
from trioleg.lora import LoRAModulePath


def read(of_environment: str | None = None, **args: Any) -> FrontendSettings:
    return read_settings({"model_tag": "owner/name", **args}, of_environment)


def test_what_vllm_says_of_itself_is_enough() -> None:
    settings = read(engine_ready_timeout_secs=600, http_timeout_keep_alive=5)
    assert settings.model == settings.server.served_model_name == "owner/name"
    assert settings.llm.start_timeout == 600
    assert settings.server.keep_alive_timeout == 5
    assert settings.server.api_keys == ()
    assert settings.hypercorn == {}
    assert (settings.log_level, settings.log_stats) == ("info", True)
    assert settings.of_the_engine == ()


def test_everything_that_is_honoured() -> None:
    settings = read(
        served_model_name=["short"],
        revision="abc",
        max_logprobs=-1,
        scheduling_policy="priority",
        generation_config="vllm",
        stream_interval=4,
        max_num_queued_reqs=7,
        max_num_queued_tokens=900,
        sse_keep_alive_interval=3,
        disable_log_stats=True,
        uvicorn_log_level="trace",
        root_path="/api",
        ssl_certfile="c",
        ssl_keyfile="k",
        ssl_ca_certs="a",
        ssl_ciphers="x",
        ssl_cert_reqs=2,
        h11_max_incomplete_event_size=9,
    )
    assert settings.model == "owner/name@abc"
    assert settings.server.served_model_name == "short"
    assert settings.llm.engine.max_logprobs == -1
    assert settings.llm.engine.scheduling_policy == "priority"
    assert settings.llm.generation_config == "vllm"
    assert settings.llm.stream_interval == 4
    assert settings.llm.max_inflight_requests == 7
    assert settings.llm.max_queued_prompt_tokens == 900
    assert settings.server.sse_keep_alive_interval == 3
    assert (settings.log_level, settings.log_stats) == ("debug", False)
    assert settings.hypercorn == {
        "root_path": "/api",
        "certfile": "c",
        "keyfile": "k",
        "ca_certs": "a",
        "ciphers": "x",
        "verify_mode": 2,
        "h11_max_incomplete_size": 9,
    }
    assert settings.of_the_engine == ()


@pytest.mark.parametrize("module", ["sql=/sql", {"name": "sql", "path": "/sql"}])
def test_adapters_to_load(module: Any) -> None:
    assert read(lora_modules=[module]).llm.lora_modules == (LoRAModulePath("sql", "/sql"),)


def test_keys_are_those_of_the_command_line_or_else_of_the_environment() -> None:
    assert read("of-env", api_key=["a", "", "b"]).server.api_keys == ("a", "b")
    assert read("of-env").server.api_keys == ("of-env",)
    assert read("").server.api_keys == ()
    settings = read(api_key="older-vllm")
    assert settings.server.api_keys == ("older-vllm",)
    assert "older-vllm" not in repr(settings)


@pytest.mark.parametrize(("asked", "drain"), [(0, 0), (1, 1), (5, 1), (8, 4), (60, 56)])
def test_a_drain_ends_before_vllm_kills(asked: int, drain: int) -> None:
    """It waits for as long as was asked for, and five seconds at least; four are for the end behind the drain."""
    assert read(shutdown_timeout=asked).server.drain_timeout == drain


def test_a_folder_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the store knows a model of that name, and whatever the revision."""
    (tmp_path / "smollm2-135m").mkdir()
    monkeypatch.chdir(tmp_path)
    settings = read_settings({"model": "smollm2-135m", "revision": "abc"})
    assert settings.model == str(tmp_path / "smollm2-135m")
    assert settings.server.served_model_name == "smollm2-135m"


def test_what_is_not_known_is_the_engines() -> None:
    assert read(tensor_parallel_size=2, of_another_year={"x": 1}).of_the_engine == (
        "of_another_year",
        "tensor_parallel_size",
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("allowed_origins", ["*"]),
        ("chat_template", "{{ x }}"),
        ("enable_auto_tool_choice", True),
        ("generation_config", "a/folder"),
        ("h11_max_header_count", 3),
        ("lora_modules", "sql=/sql"),
        ("lora_modules", [{"name": "a", "paths": "b"}]),
        ("http_timeout_keep_alive", -1),
        ("lora_modules", ["[" * 50_000]),
        ("max_logprobs", "20"),
        ("max_num_queued_reqs", 0),
        ("max_num_queued_tokens", -1),
        ("max_num_queued_tokens", True),
        ("middleware", ["a.b"]),
        ("override_generation_config", {"temperature": 1}),
        ("scheduling_policy", "lottery"),
        ("served_model_name", ["a", "b"]),
        ("shutdown_timeout", -1),
        ("shutdown_timeout", 10**400),
        ("shutdown_timeout", float("nan")),
        ("engine_ready_timeout_secs", 0),
        ("stream_interval", 0),
        ("tokenizer", "other/name"),
        ("uvicorn_log_level", "loud"),
    ],
)
def test_what_cannot_be_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read(**{name: value})
    assert refused.value.parameter == name
    assert "; allowed: " in str(refused.value)
    assert name.replace("_", "-") in str(refused.value).replace("_", "-")


def test_a_key_is_not_said_when_it_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read(api_key=[7, "secret"])
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("nothing", [None, False, "", [], {}])
def test_what_asks_for_nothing_is_not_refused(nothing: Any) -> None:
    assert read(allowed_origins=nothing).of_the_engine == ()


def test_there_is_a_model() -> None:
    with pytest.raises(InvalidRequestError, match="model_tag is missing"):
        read_settings({})
