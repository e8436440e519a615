"""What operators may ask of a running engine over HTTP: sleep, pause, caches, and LoRA adapters.

Paths, parameters and answers are vLLM's, which has them behind environment variables (VLLM_SERVER_DEV_MODE,
VLLM_ALLOW_RUNTIME_LORA_UPDATING). Here one setting turns them on, ``ServerConfig.enable_engine_controls``: a
variable that is set for an engine is inherited by whatever is started beside it, and whoever reaches these paths
can stop the service or have any directory read. Until it is on they are a 404 that says so. Errors have OpenAI's
form.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar, cast

import msgspec
from quart import Response, request

from ..errors import InvalidRequestError
from ..runtime.llm import LLM
from .failures import json_response
from .fields import object_of, refusal
from .incoming import IncomingRequest
from .model_names import check_adapter_names
from .protocol import ControlsOffError

__all__ = ["Controls"]

_Value = TypeVar("_Value")
_Handler = Callable[[], Awaitable[Response]]

# The bodies about adapters. Their texts are needed, everything else may be left out.
_LOAD = {"lora_name": str, "lora_path": str, "load_inplace": bool, "is_3d_lora_weight": bool}
_UNLOAD = {"lora_name": str, "lora_int_id": int}
_ALLOWED = {str: "a text that is not empty", bool: "true, false or null", int: "an integer or null"}
# As vLLM reads a bool in a URL, or nearly.
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_MODES = {mode: mode for mode in ("abort", "wait", "keep")}
_LEVELS = {str(level): level for level in range(3)}


class Controls:
    """The handlers, bound to one LLM. ``is_on`` False: all of them are a 404."""

    def __init__(self, llm: LLM, served_model_name: str, *, is_on: bool) -> None:
        self._llm = llm
        self._name = served_model_name
        self._is_on = is_on

    def table(self) -> tuple[tuple[str, str, _Handler], ...]:
        """Method, path and handler of everything that is served, or refused."""
        handlers = (
            ("POST", "/sleep", self.sleep),
            ("POST", "/wake_up", self.wake_up),
            ("GET", "/is_sleeping", self.is_sleeping),
            ("POST", "/pause", self.pause),
            ("POST", "/resume", self.resume),
            ("GET", "/is_paused", self.is_paused),
            ("POST", "/reset_prefix_cache", self.reset_prefix_cache),
            ("POST", "/v1/load_lora_adapter", self.load_lora_adapter),
            ("POST", "/v1/unload_lora_adapter", self.unload_lora_adapter),
        )
        return handlers if self._is_on else tuple((*one[:2], _off(one[2])) for one in handlers)

    async def sleep(self) -> Response:
        """POST /sleep?level=1&mode=abort: requests wait in the engine until it is woken up."""
        asked = _query("level", "mode")
        level = _one_of(asked, "level", _LEVELS, 1)
        await self._llm.sleep(level, _one_of(asked, "mode", _MODES, "abort"))
        return _json(status="sleeping", level=level)

    async def wake_up(self) -> Response:
        """POST /wake_up?tags=weights&tags=kv_cache: all of it without tags."""
        _query("tags")
        tags = request.args.getlist("tags") or None
        is_awake = await self._llm.wake_up(tags)
        return _json(status="awake" if is_awake else "sleeping", tags=tags)

    async def is_sleeping(self) -> Response:
        """GET /is_sleeping."""
        _query()
        return _json(is_sleeping=await self._llm.is_sleeping())

    async def pause(self) -> Response:
        """POST /pause?mode=abort&clear_cache=true: see ``LLM.pause``."""
        asked = _query("mode", "clear_cache")
        mode = _one_of(asked, "mode", _MODES, "abort")
        clear_cache = _one_of(asked, "clear_cache", _BOOLEANS, True)
        await self._llm.pause(mode, clear_cache=clear_cache)
        return _json(status="paused")

    async def resume(self) -> Response:
        """POST /resume."""
        _query()
        await self._llm.resume()
        return _json(status="resumed")

    async def is_paused(self) -> Response:
        """GET /is_paused."""
        _query()
        return _json(is_paused=await self._llm.is_paused())

    async def reset_prefix_cache(self) -> Response:
        """POST /reset_prefix_cache?reset_running_requests=false&reset_external=false."""
        names = ("reset_running_requests", "reset_external")
        asked = _query(*names)
        running, external = (_one_of(asked, name, _BOOLEANS, False) for name in names)
        success = await self._llm.reset_prefix_cache(running, reset_external=external)
        return _json(success=success)

    async def load_lora_adapter(self) -> Response:
        """POST /v1/load_lora_adapter: from now on ``model`` may be its name."""
        asked = _fields(await self._body(), _LOAD)
        name = asked.pop("lora_name")
        check_adapter_names([name], self._name)
        await self._llm.adapters.load(name, asked.pop("lora_path"), **asked)
        return _text(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_lora_adapter(self) -> Response:
        """POST /v1/unload_lora_adapter: no request gets it any more; those that have it go on."""
        asked = _fields(await self._body(), _UNLOAD)
        name, number = asked["lora_name"], asked.get("lora_int_id")
        known = self._llm.adapters.by_name.get(name)
        if known is not None and number not in (None, known.lora_int_id):
            raise InvalidRequestError(
                f"lora_int_id is {number}; allowed: {known.lora_int_id}, which {name!r} has, or null",
                parameter="lora_int_id",
            )
        await self._llm.adapters.unload(name)
        return _text(f"Success: LoRA adapter '{name}' removed successfully.")

    async def _body(self) -> bytes:
        _query()
        incoming = cast(IncomingRequest, request)
        return await incoming.body_within(incoming.arrival(), self._llm.timeouts)


def _off(handler: _Handler) -> _Handler:
    # Async, though it awaits nothing, because Quart runs a plain function in a thread.
    async def refuse() -> Response:  # noqa: ASYNC124
        raise ControlsOffError(
            f"{request.method} {request.path} is off; allowed: only on a server started with "
            "--enable-engine-controls"
        )

    refuse.__name__ = handler.__name__
    return refuse


def _fields(body: bytes, known: Mapping[str, type]) -> dict[str, Any]:
    """The fields of a body, each of its type in ``known``; what is null is left out. Raises
    ``InvalidRequestError``."""
    fields = {name: value for name, value in object_of(body).items() if value is not None}
    for name in fields:
        if name not in known:
            raise InvalidRequestError(
                f"unknown parameter: {name!r:.60}; allowed: {', '.join(known)}", parameter=name
            )
    for name, kind in known.items():
        value = fields.get(name)
        is_missing = kind is str and not value
        if is_missing or (value is not None and type(value) is not kind):
            raise refusal(name, value, _ALLOWED[kind])
    return fields


def _query(*allowed: str) -> Mapping[str, str]:
    """What the URL asks for. Raises ``InvalidRequestError`` for a parameter that nobody knows."""
    for name in request.args:
        if name not in allowed:
            words = ", ".join(allowed) or "no parameters"
            raise InvalidRequestError(
                f"unknown parameter: {name!r:.60}; allowed: {words}", parameter=name
            )
    return cast(Mapping[str, str], request.args)


def _one_of(
    asked: Mapping[str, str], name: str, allowed: Mapping[str, _Value], default: _Value
) -> _Value:
    if name not in asked:
        return default
    value = asked[name].lower()
    if value not in allowed:
        raise InvalidRequestError(
            f"{name} is {asked[name]!r:.60}; allowed: {', '.join(allowed)}", parameter=name
        )
    return allowed[value]


def _json(**fields: Any) -> Response:
    return json_response(msgspec.json.encode(fields))


def _text(text: str) -> Response:
    return Response(text, content_type="text/plain; charset=utf-8")
