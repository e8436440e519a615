"""LoRA adapters by name: small weights beside a model's own, which a request may ask for.

Rules of this file: plain data, checked where it is made; imports nothing but ``errors``. Classes and fields are
vLLM's; ``ipc/versions.py`` knows how it travels to an engine. An engine of vLLM's dies in the step in
which it meets an adapter that it cannot read, so nothing is sent there that it has not loaded before
(``runtime/adapters.py``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import msgspec

from .errors import InvalidRequestError

__all__ = [
    "LoRAModulePath",
    "LoRARequest",
    "check_lora_id",
    "check_lora_request",
    "read_lora_module",
]

# An engine keeps them in signed 64-bit integers.
_LARGEST_ID = 2**63 - 1


class LoRARequest(msgspec.Struct, array_like=True, frozen=True):
    """An adapter, and the request to use it.

    ``lora_int_id``: from 1; the engine's own name for it. ``lora_path``: a directory on the engine's machine, or
    what else the engine can read. ``base_model_name``: for those who list models. ``load_inplace``: when it is
    added, it replaces what the engine has under this id. ``is_3d_lora_weight``: see vLLM. Raises
    ``InvalidRequestError``.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            _check_text(name, getattr(self, name))
        if self.base_model_name is not None:
            _check_text("base_model_name", self.base_model_name)
        check_lora_id("lora_int_id", self.lora_int_id)
        for name in ("load_inplace", "is_3d_lora_weight"):
            if not isinstance(getattr(self, name), bool):
                raise _refusal(name, getattr(self, name), "true or false")


@dataclass(frozen=True, slots=True)
class LoRAModulePath:
    """An adapter that is loaded when the engine starts. Raises ``InvalidRequestError``."""

    name: str
    path: str
    base_model_name: str | None = None
    is_3d_lora_weight: bool = False

    def __post_init__(self) -> None:
        self.request(1)

    def request(self, lora_int_id: int) -> LoRARequest:
        return LoRARequest(
            self.name,
            lora_int_id,
            self.path,
            base_model_name=self.base_model_name,
            is_3d_lora_weight=self.is_3d_lora_weight,
        )


def check_lora_id(name: str, value: object) -> None:
    """Raises ``InvalidRequestError`` if the parameter ``name`` is no adapter's id."""
    if type(value) is not int or not 1 <= value <= _LARGEST_ID:
        raise _refusal(name, value, f"an integer from 1 to {_LARGEST_ID}")


def check_lora_request(value: object, *, optional: bool = False) -> None:
    """Raises ``InvalidRequestError`` if it is no ``LoRARequest``."""
    if not isinstance(value, LoRARequest) and not (optional and value is None):
        raise _refusal("lora_request", value, f"a LoRARequest{' or None' * optional}")


def read_lora_module(text: str) -> LoRAModulePath:
    """``name=path``, or an object in JSON with the fields of ``LoRAModulePath``. Raises ``InvalidRequestError``."""
    name, separator, path = text.partition("=")
    if separator and not text.lstrip().startswith("{"):
        return LoRAModulePath(name, path)
    try:
        return LoRAModulePath(**json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, InvalidRequestError):
            raise
        allowed = 'name=path, or {"name": "…", "path": "…"}'
        raise _refusal("lora_modules", text, f"{allowed} ({error})") from None


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise _refusal(name, value, "a text that is not empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        # It could not be sent, nor name a file.
        raise _refusal(name, value, "a text without half characters") from None


def _refusal(name: str, value: object, allowed: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} is {value!r:.200}; allowed: {allowed}", parameter=name)
