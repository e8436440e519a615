"""What `vllm serve` was asked for, as the settings of a front end: each is honoured, or refused by name with the
reason.

Rules of this file: pure. vLLM hands over what differs from its defaults (``--args-json``), of 0.23 to 0.33 under
the same names. Three kinds: what a front end does, and this one does (``_HONOURED``); what it does, and this one
does not, so that to start would be to pretend (``_REFUSED``); and all the rest, which is the engine's business and
known to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .config import GENERATION_CONFIGS, EngineConfig, LLMConfig, ServerConfig
from .errors import InvalidRequestError
from .lora import LoRAModulePath, read_lora_module

__all__ = ["FrontendSettings", "read_settings"]

# vLLM waits for its front end as long as for its engines, and at least so long, then it kills it.
_LEAST_PATIENCE_S = 5.0
# Of that, what is needed behind the drain: last frames (2 s at most), connections, sockets (a second each).
_BEHIND_THE_DRAIN_S = 4.0
_GRACEFUL_TIMEOUT_S = 1.0
# After the engine's death vLLM ends us at once; where it does not, its other half is gone.
_ENGINE_DEATH_LINGER_S = 1.0

_TEXT, _FLAG, _NUMBER, _COUNT = "text", "true or false", "a number, 0 or more", "an integer from 1"
_LOG_LEVELS = {"trace": "debug", "critical": "error"}
_LOG_LEVEL = "critical, error, warning, info, debug or trace"


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_number(value: Any) -> bool:
    # Above, it is no time that anybody waits, and no number of ours.
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**31


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_integer(value) and value >= 1


def _is_one_name(value: Any) -> bool:
    return _is_text(value) or (isinstance(value, list) and len(value) == 1 and _is_text(value[0]))


def _are_keys(value: Any) -> bool:
    return _is_text(value) or (
        isinstance(value, list) and all(isinstance(one, str) for one in value)
    )


def _are_modules(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str | dict) for one in value)


def _one_of(*allowed: Any) -> Callable[[Any], bool]:
    return lambda value: value in allowed


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


# What each may be, and that in words. None, vLLM's word for "not said", may be anything.
_HONOURED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (_is_text, _TEXT),
    "model_tag": (_is_text, _TEXT),
    "revision": (_is_text, _TEXT),
    "served_model_name": (_is_one_name, "one name"),
    "api_key": (_are_keys, "a list of texts"),
    "root_path": (_is_text, _TEXT),
    "ssl_certfile": (_is_text, _TEXT),
    "ssl_keyfile": (_is_text, _TEXT),
    "ssl_ca_certs": (_is_text, _TEXT),
    "ssl_ciphers": (_is_text, _TEXT),
    "ssl_cert_reqs": (_is_integer, "0, 1 or 2, as in Python's ssl"),
    "h11_max_incomplete_event_size": (_is_integer, "a number of bytes"),
    "uvicorn_log_level": (
        _one_of("critical", "error", "warning", "info", "debug", "trace"),
        _LOG_LEVEL,
    ),
    "disable_log_stats": (_is_flag, _FLAG),
    "sse_keep_alive_interval": (_is_number, _NUMBER),
    "shutdown_timeout": (_is_number, _NUMBER),
    "engine_ready_timeout_secs": (_is_number, _NUMBER),
    "http_timeout_keep_alive": (_is_number, _NUMBER),
    "max_logprobs": (_is_integer, "an integer"),
    "scheduling_policy": (_is_text, _TEXT),
    "stream_interval": (_is_count, _COUNT),
    "max_num_queued_reqs": (_is_count, _COUNT),
    "max_num_queued_tokens": (_is_count, _COUNT),
    "generation_config": (_one_of(*GENERATION_CONFIGS), " or ".join(GENERATION_CONFIGS)),
    "lora_modules": (_are_modules, 'a list of name=path, or of {"name": "…", "path": "…"}'),
    # Values at which there is nothing to do.
    "tokenizer_mode": (_one_of("auto", "hf"), '"auto" and "hf"'),
    "response_role": (_one_of("assistant"), '"assistant"'),
    "chat_template_content_format": (_one_of("auto", "string"), '"auto" and "string"'),
    "fingerprint_mode": (_one_of("none"), '"none"; answers here have no fingerprint'),
}

_NOT_SERVED = "this front end does not do it"
_ONLY_THE_MODELS = "the front end reads the model's own"
# Values at which a setting asks for nothing.
_NOTHING: tuple[Any, ...] = (None, False, "", [], {})
_REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            "allow_credentials",
            "allowed_headers",
            "allowed_methods",
            "allowed_origins",
            "default_chat_template_kwargs",
            "enable_auto_tool_choice",
            "enable_force_include_usage",
            "enable_log_outputs",
            "enable_offline_docs",
            "enable_per_request_metrics",
            "enable_prompt_embeds",
            "enable_request_id_headers",
            "enable_scale_out",
            "enable_server_load_tracking",
            "enable_ssl_refresh",
            "enable_tokenizer_info_endpoint",
            "fingerprint_value",
            "grpc_port",
            "h11_max_header_count",
            "io_processor_plugin",
            "middleware",
            "otlp_traces_endpoint",
            "reasoning_parser",
            "reasoning_parser_plugin",
            "return_tokens_as_token_ids",
            "tokens_only",
            "tool_call_parser",
            "tool_parser_plugin",
            "tool_server",
            "trust_request_chat_template",
        ),
        _NOT_SERVED,
    ),
    **dict.fromkeys(("tokenizer", "tokenizer_revision"), f"{_ONLY_THE_MODELS} tokenizer"),
    "chat_template": f"{_ONLY_THE_MODELS} chat template",
    "skip_tokenizer_init": "the front end needs the tokenizer",
    "hf_config_path": f"{_ONLY_THE_MODELS} config.json",
    "override_generation_config": f"{_ONLY_THE_MODELS} generation_config.json",
}

# Fields of ``LLMConfig``, and what ``--args-json`` calls them.
_OF_THE_LLM = {
    "generation_config": "generation_config",
    "stream_interval": "stream_interval",
    "start_timeout": "engine_ready_timeout_secs",
    "max_inflight_requests": "max_num_queued_reqs",
    "max_queued_prompt_tokens": "max_num_queued_tokens",
}
# Hypercorn's names, and what ``--args-json`` calls them.
_OF_HYPERCORN = {
    "certfile": "ssl_certfile",
    "keyfile": "ssl_keyfile",
    "ca_certs": "ssl_ca_certs",
    "ciphers": "ssl_ciphers",
    "verify_mode": "ssl_cert_reqs",
    "root_path": "root_path",
    "h11_max_incomplete_size": "h11_max_incomplete_event_size",
}
_OUR_NAMES = {
    **{ours: theirs for ours, theirs in _OF_THE_LLM.items() if ours != theirs},
    "keep_alive_timeout": "http_timeout_keep_alive",
    "api_keys": "api_key",
}


@dataclass(frozen=True, slots=True)
class FrontendSettings:
    """``hypercorn``: settings by Hypercorn's own names. ``of_the_engine``: names of what was left to the engine."""

    model: str
    llm: LLMConfig
    server: ServerConfig
    hypercorn: Mapping[str, Any]
    log_level: str
    log_stats: bool
    of_the_engine: tuple[str, ...] = field(repr=False)


def read_settings(args: Mapping[str, Any], api_key: str | None = None) -> FrontendSettings:
    """The settings in what vLLM hands over. ``api_key``: of the environment (VLLM_API_KEY), where ``args`` name
    none.

    Raises ``InvalidRequestError``, which names the setting.
    """
    given = {name: value for name, value in args.items() if value is not None}
    for name, value in given.items():
        _check(name, value)
    model = given.get("model_tag") or given.get("model")
    if model is None:
        raise InvalidRequestError(
            "model_tag is missing; allowed: the model's name", parameter="model_tag"
        )
    with _in_vllms_words():
        return _settings(given, model, api_key)


@contextmanager
def _in_vllms_words() -> Iterator[None]:
    """A refusal of ours calls a setting by its name here; who gave it knows vLLM's."""
    try:
        yield
    except InvalidRequestError as error:
        ours = error.parameter or ""
        theirs = _OUR_NAMES.get(ours)
        if theirs is None:
            raise
        message = str(error).replace(ours, _option(theirs), 1)
        raise InvalidRequestError(message, parameter=theirs) from None


def _settings(given: Mapping[str, Any], model: str, api_key: str | None) -> FrontendSettings:
    return FrontendSettings(
        model=_model(model, given.get("revision")),
        llm=_llm_config(given),
        server=_server_config(given, model, api_key),
        hypercorn={ours: given[name] for ours, name in _OF_HYPERCORN.items() if name in given},
        log_level=_log_level(given.get("uvicorn_log_level", "info")),
        log_stats=not given.get("disable_log_stats", False),
        of_the_engine=tuple(sorted(given.keys() - _HONOURED.keys() - _REFUSED.keys())),
    )


def _check(name: str, value: Any) -> None:
    if name in _REFUSED and value not in _NOTHING:
        allowed = f"not to give it, since {_REFUSED[name]}"
    elif name in _HONOURED and not _HONOURED[name][0](value):
        allowed = _HONOURED[name][1]
    else:
        return
    # A key belongs into no log.
    shown = "no list of texts" if name == "api_key" else f"{value!r:.60}"
    raise InvalidRequestError(f"{_option(name)} is {shown}; allowed: {allowed}", parameter=name)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _model(name: str, revision: str | None) -> str:
    """As the store takes it, in which a name that it knows goes before a folder; in vLLM there are no such names."""
    if Path(name).is_dir():
        return str(Path(name).absolute())
    return name if revision is None else f"{name}@{revision}"


def _llm_config(given: Mapping[str, Any]) -> LLMConfig:
    engine = {name: given[name] for name in ("max_logprobs", "scheduling_policy") if name in given}
    settings = {ours: given[name] for ours, name in _OF_THE_LLM.items() if name in given}
    modules = tuple(_lora_module(one) for one in given.get("lora_modules", []))
    return LLMConfig(engine=EngineConfig(**engine), lora_modules=modules, **settings)


def _lora_module(value: str | dict[str, Any]) -> LoRAModulePath:
    """As it was written, or as vLLM has read it."""
    return read_lora_module(value if isinstance(value, str) else json.dumps(value))


def _server_config(given: Mapping[str, Any], model: str, api_key: str | None) -> ServerConfig:
    keep_alive = given.get("http_timeout_keep_alive", ServerConfig().keep_alive_timeout)
    return ServerConfig(
        served_model_name=_one(given.get("served_model_name")) or model,
        keep_alive_timeout=keep_alive,
        drain_timeout=_drain_timeout(given.get("shutdown_timeout", 0)),
        graceful_timeout=_GRACEFUL_TIMEOUT_S,
        engine_death_linger=_ENGINE_DEATH_LINGER_S,
        sse_keep_alive_interval=given.get("sse_keep_alive_interval") or None,
        api_keys=_keys(given.get("api_key") or [api_key or ""]),
    )


def _drain_timeout(shutdown_timeout: float) -> float:
    """As long as it was asked for, and so that vLLM has not to kill us."""
    patience = max(shutdown_timeout, _LEAST_PATIENCE_S)
    return min(shutdown_timeout, patience - _BEHIND_THE_DRAIN_S)


def _one(name: str | list[str] | None) -> str | None:
    return name[0] if isinstance(name, list) else name


def _keys(keys: str | list[str]) -> tuple[str, ...]:
    """As vLLM has it, an empty one is none."""
    return tuple(key for key in ([keys] if isinstance(keys, str) else keys) if key)


def _log_level(level: str) -> str:
    return _LOG_LEVELS.get(level, level)
