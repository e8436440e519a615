"""A model in one GGUF file or several: settings, each of which must be taken, and tensors.

Rules of this file: imports ``header`` and ``errors``.

A setting that a translation understands is taken with ``Model.take``; what nobody took is refused at the
end by ``refuse_the_rest``. So a setting that changes the model, and that we have never heard of, cannot
go unseen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar, overload

from ..errors import ModelStoreError
from .header import Tensor, open_gguf_file

__all__ = ["Model", "open_gguf"]

_Value = TypeVar("_Value")
_REQUIRED: Any = object()
_KINDS: dict[Any, str] = {
    bool: "True or False",
    float: "a number",
    int: "an integer",
    list: "an array",
    str: "a string",
}

# Namespaces that say how a model is to be computed and spelled. The others (general, split, quantize, …)
# tell where a file comes from.
_TOKENIZER = "tokenizer."


@dataclass(frozen=True, slots=True)
class Model:
    """One model, from one file or several. ``name`` is the (first) file's, for errors."""

    name: str
    settings: dict[str, Any]
    tensors: list[Tensor]
    _taken: set[str] = field(default_factory=set)

    @property
    def architecture(self) -> str:
        return self.take("general.architecture", str)

    @overload
    def take(self, name: str, kind: type[_Value]) -> _Value: ...
    @overload
    def take(self, name: str, kind: type[_Value], default: _Value | None) -> _Value | None: ...
    def take(self, name: str, kind: type[_Value], default: Any = _REQUIRED) -> Any:
        """The value of a setting, of type ``kind`` (``float`` also takes an integer).

        Raises ``ModelStoreError`` if it is of another type, or not there and without a default.
        """
        self._taken.add(name)
        value = self.settings.get(name)
        if value is None:
            if default is _REQUIRED:
                raise ModelStoreError(f"{self.name} has no {name}")
            return default
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            self.refuse(name, _KINDS[kind])
        return value

    def ignore(self, *names: str) -> None:
        """Takes settings, whatever they are, that change nothing."""
        self._taken.update(names)

    def refuse(self, name: str, allowed: str) -> NoReturn:
        """Raises ``ModelStoreError`` that names the file, the setting, its value and what is allowed."""
        shown = repr(self.settings.get(name))
        if len(shown) > 60:
            shown = f"{shown[:60]}…"
        raise ModelStoreError(f"{self.name}: {name} is {shown}; what can be converted: {allowed}")

    def refuse_the_rest(self) -> None:
        """Raises ``ModelStoreError`` for settings of the model or its tokenizer that nobody took."""
        ours = (f"{self.architecture}.", _TOKENIZER)
        rest = sorted(
            name for name in self.settings if name.startswith(ours) and name not in self._taken
        )
        if rest:
            raise ModelStoreError(f"{self.name}: cannot convert the settings {', '.join(rest)}")


@contextmanager
def open_gguf(paths: Sequence[Path]) -> Iterator[Model]:
    """Opens the file, or all parts of a split model; the first has the settings. Leaving closes them.

    Raises as ``open_gguf_file`` does, and ``ModelStoreError`` for parts that are not of one model.
    """
    with ExitStack() as files:
        headers = [files.enter_context(open_gguf_file(path)) for path in paths]
        tensors = [tensor for _, tensors in headers for tensor in tensors]
        model = Model(paths[0].name, headers[0][0], tensors)
        _check_parts(model, len(paths))
        yield model


def _check_parts(model: Model, found: int) -> None:
    count = model.take("split.count", int, 1) or 1
    if count < 1:
        model.refuse("split.count", "an integer of at least 0")
    if count != found:
        raise ModelStoreError(
            f"{model.name} is one of {count} parts of a model, which are found by their names; but it "
            f"is not named NAME-00001-of-{count:05}.gguf"
        )
    total = model.take("split.tensors.count", int, len(model.tensors))
    names = {tensor.name for tensor in model.tensors}
    if len(names) != len(model.tensors) or len(names) != total:
        raise ModelStoreError(f"{model.name}: its parts hold {len(names)} of {total} tensors")
