"""What a request's ``model`` may be: the served model's name, or a LoRA adapter's.

Pure. A name stands for one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..errors import InvalidRequestError
from ..lora import LoRARequest
from .protocol import ChatCompletionRequest, ModelNotFoundError

__all__ = ["adapter_cards", "check_adapter_names", "check_model", "check_model_name"]


def check_model(
    request: ChatCompletionRequest, served: str, adapters: Mapping[str, LoRARequest] | None = None
) -> ChatCompletionRequest:
    """The request, with the adapter that its model names. Raises ``ModelNotFoundError`` if that is neither
    the one ``served`` nor one of ``adapters``."""
    adapters = adapters or {}
    check_model_name(request.model, served, adapters)
    adapter = adapters.get(request.model or "")
    return request if adapter is None else replace(request, lora_request=adapter)


def check_model_name(model: str | None, served: str, adapters: Iterable[str] = ()) -> None:
    """None is the one ``served``. Raises ``ModelNotFoundError`` for what is neither that nor one of
    ``adapters``."""
    names = [served, *adapters]
    if model is not None and model not in names:
        allowed = ", ".join(map(repr, names))
        raise ModelNotFoundError(
            f"the model {model!r} is not served here; allowed: {allowed}", parameter="model"
        )


def check_adapter_names(names: Iterable[str], served: str) -> None:
    """Raises ``InvalidRequestError`` if one of them is the served model's."""
    if served in names:
        raise InvalidRequestError(
            f"lora_name is {served!r}, which is the served model's; allowed: another name",
            parameter="lora_name",
        )


def adapter_cards(
    adapters: Mapping[str, LoRARequest], *, parent: str, created: int
) -> list[dict[str, Any]]:
    """Adapters as GET /v1/models lists them."""
    return [
        {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "trioleg",
            "root": one.lora_path,
            "parent": one.base_model_name or parent,
        }
        for name, one in adapters.items()
    ]
