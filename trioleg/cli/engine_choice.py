"""Whose engine ``trioleg serve`` is for: our own, one of vLLM's, or one that somebody else starts.

Rules of this file: an option that means nothing for that engine is refused, by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ..config import EngineConfig, VLLMConfig
from ..errors import InvalidRequestError

__all__ = ["check_engine_choice", "engine_config", "vllm_config"]

# What the front end must know of an engine, whoever starts it, to refuse what it would not take.
_ALSO_OF_THE_FRONT_END = ("max_logprobs", "scheduling_policy")
# Not options of ``vllm serve``, or with another meaning there.
_OF_OUR_ENGINE_ALONE = ("device", "torch_profiler_dir")
_FOR_VLLM = {"vllm_python": "--vllm-python", "vllm_flags": "what stands behind --"}
_FOR_ATTACH = {
    "curve_keys": "--curve-keys",
    "allow_unauthenticated": "--allow-unauthenticated",
}


def check_engine_choice(context: click.Context, engine: Iterable[str]) -> None:
    """Raises ``click.UsageError`` for options of ``serve`` that do not go together. ``engine``: the names of those
    that our own engine has."""
    asked = context.params
    if asked["model"].startswith("-"):
        raise click.UsageError(f"MODEL is {asked['model']!r}; allowed: a model, before the `--`")
    is_vllm, is_attached = asked["engine_kind"] == "vllm", asked["attach"] is not None
    if is_vllm and is_attached:
        raise click.UsageError("--engine vllm starts an engine; with --attach somebody else does")
    if not is_vllm:
        _refuse(asked, _FOR_VLLM, "is for --engine vllm, without --attach")
    if not is_attached:
        _refuse(asked, _FOR_ATTACH, "is for an engine that joins by itself: give --attach")
    for name in _given(context, engine):
        if is_attached:
            raise click.UsageError(
                f"{_option(name)} is for an engine that we start; with --attach give it to the engine itself"
            )
        if is_vllm and name in _OF_OUR_ENGINE_ALONE:
            raise click.UsageError(
                f"{_option(name)} is for our own engine; for vLLM's, give its own flags behind --"
            )


def engine_config(engine: Mapping[str, Any], vllm: VLLMConfig | None) -> EngineConfig:
    """Our own engine's settings; of vLLM's, what the front end must know."""
    if vllm is None:
        return EngineConfig(**engine)
    return EngineConfig(**{name: engine[name] for name in _ALSO_OF_THE_FRONT_END})


def vllm_config(
    context: click.Context, engine: Mapping[str, Any], python: Path | None, flags: Sequence[str]
) -> VLLMConfig:
    """vLLM's engine, with the options that were given for ours, whose names and meanings are vLLM's, and then
    ``flags``. Raises ``click.UsageError``."""
    given = [flag for name in _given(context, engine) for flag in _as_flags(name, engine[name])]
    try:
        return VLLMConfig(python=python, arguments=(*given, *flags))
    except InvalidRequestError as error:
        raise click.UsageError(str(error)) from None


def _refuse(asked: Mapping[str, Any], options: Mapping[str, str], why: str) -> None:
    for name, shown in options.items():
        if asked[name]:
            raise click.UsageError(f"{shown} {why}")


def _given(context: click.Context, engine: Iterable[str]) -> Iterator[str]:
    """The options that somebody gave, but for those that the front end needs in any case."""
    for name in engine:
        source = context.get_parameter_source(name)
        if name not in _ALSO_OF_THE_FRONT_END and source is not click.core.ParameterSource.DEFAULT:
            yield name


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _as_flags(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [_option(name if value else f"no_{name}")]
    return [_option(name), str(value)]
