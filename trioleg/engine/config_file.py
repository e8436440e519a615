"""The fields of a ``config.json``, each read with its check.

Rules of this file: no torch, no trio; imports only ``errors`` and ``model_files``. It knows fields and
refusals, no model. A refusal names the file, the field, its value and what is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ModelStoreError
from ..model_files import LARGEST_INTEGER, LARGEST_NUMBER, SMALLEST_NUMBER, read_json_object

__all__ = ["ConfigFile", "open_config_file"]

# Of a value in a refusal: a line is for a person.
_SHOWN = 200


def open_config_file(path: Path) -> ConfigFile:
    """Reads ``path``. Raises ``ModelStoreError`` if that cannot be done, or it holds no JSON object."""
    return ConfigFile(path, read_json_object(path))


class ConfigFile:
    """One object of the file: the whole, or a section of it. Every method that reads raises
    ``ModelStoreError`` for a value that it does not allow.

    ``absent`` is what a missing field means, ``null`` what an explicit null means (the same, unless
    given). A field without either is required.
    """

    def __init__(self, path: Path, fields: Mapping[str, Any], *, section: str = "") -> None:
        self.fields = fields
        self._path = path
        self._section = section

    def refusal(self, name: str, value: Any, allowed: str) -> ModelStoreError:
        shown = repr(value)
        shown = f"{shown[:_SHOWN]}…" if len(shown) > _SHOWN else shown
        return ModelStoreError(
            f"{self._path}: {self._section}{name} is {shown}; this engine allows: {allowed}"
        )

    def integer(
        self,
        name: str,
        *,
        minimum: int = 1,
        maximum: int = LARGEST_INTEGER,
        absent: int | None = None,
        null: int | None = None,
    ) -> int:
        null = absent if null is None else null
        value: Any = self.fields.get(name, null if absent is None else absent)
        value = null if value is None else value
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer or not minimum <= value <= maximum:
            raise self.refusal(name, value, f"an integer from {minimum} to {maximum}")
        return int(value)

    def number(self, name: str, *, absent: float | None = None) -> float:
        """A number that float32 can compute with, as a float."""
        value: Any = self.fields.get(name)
        value = absent if value is None else value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not SMALLEST_NUMBER <= value <= LARGEST_NUMBER:
            allowed = f"a number from {SMALLEST_NUMBER:g} to {LARGEST_NUMBER:g}"
            raise self.refusal(name, value, allowed)
        return float(value)

    def flag(self, name: str, *, absent: bool = False) -> bool:
        value = self.fields.get(name)
        value = absent if value is None else value
        if not isinstance(value, bool):
            raise self.refusal(name, value, "true or false")
        return value

    def require(self, name: str, *allowed: Any) -> None:
        """The field is missing, null, or one of these values."""
        value = self.fields.get(name)
        if value is not None and value not in allowed:
            raise self.refusal(name, value, ", ".join(map(repr, allowed)) or "null")

    def section(self, name: str) -> ConfigFile:
        """The object in a field; an empty one, if it is missing or null."""
        value = self.fields.get(name)
        value = {} if value is None else value
        if not isinstance(value, dict):
            raise self.refusal(name, value, "an object, or null")
        return ConfigFile(self._path, value, section=f"{self._section}{name}.")
