"""What a model's directory says of the vectors that are made of prompts.

Rules of this file: pure and synchronous; imports only ``errors`` and ``model_files``. It reads what vLLM reads, and
means by it what vLLM does, since on this wire the engine leaves these questions to the front end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import InvalidRequestError, ModelStoreError
from .model_files import LARGEST_INTEGER, read_json_array, read_json_object

__all__ = ["PoolingModel"]

# sentence-transformers keeps the settings of its tokenizers in a file with the architecture's name in it.
_TOKENIZER_FILES = "sentence_*_config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingModel:
    """use_activation: whether the model's last step (for embeddings: scaling to length 1) is done where nobody
    asks. do_lower_case: texts are turned into small letters before they are tokenized. is_matryoshka: it was
    trained so that the beginning of a vector is one, too; matryoshka_dimensions: how long such a beginning may be,
    () for any length."""

    use_activation: bool = True
    do_lower_case: bool = False
    is_matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()

    @classmethod
    def from_directory(cls, path: Path, config: Mapping[str, Any]) -> PoolingModel:
        """Reads modules.json and sentence_*_config.json, where there are any. ``config``: what config.json holds.

        Raises ``ModelStoreError`` naming the file that cannot be used.
        """
        dimensions = _dimensions(config, path / "config.json")
        return cls(
            use_activation=_normalizes(path / "modules.json"),
            do_lower_case=_lowers(path),
            is_matryoshka=bool(dimensions) or config.get("is_matryoshka") is True,
            matryoshka_dimensions=dimensions,
        )

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raises ``InvalidRequestError`` if a vector cannot be shortened to so many."""
        if dimensions is None:
            return
        if not self.is_matryoshka:
            allowed = "null, since the model's vectors are not made to be shortened (its config.json has neither "
            allowed += "is_matryoshka nor matryoshka_dimensions)"
        elif self.matryoshka_dimensions and dimensions not in self.matryoshka_dimensions:
            allowed = f"{', '.join(map(str, self.matryoshka_dimensions))}, or null"
        else:
            return
        raise InvalidRequestError(
            f"dimensions is {dimensions}; allowed: {allowed}", parameter="dimensions"
        )


def _dimensions(config: Mapping[str, Any], file: Path) -> tuple[int, ...]:
    value = config.get("matryoshka_dimensions") or []
    if not isinstance(value, list) or not all(
        type(one) is int and 0 < one <= LARGEST_INTEGER for one in value
    ):
        raise ModelStoreError(
            f"{file}: matryoshka_dimensions is {value!r:.80}; allowed: a list of integers from 1 to {LARGEST_INTEGER}"
        )
    return tuple(value)


def _normalizes(file: Path) -> bool:
    """True, unless sentence-transformers' chain of modules pools and does not scale."""
    kinds = [
        str(one.get("type"))
        for one in read_json_array(file, optional=True)
        if isinstance(one, dict)
    ]
    names = {kind.rpartition(".")[2] for kind in kinds if kind.startswith("sentence_transformers.")}
    return "Pooling" not in names or "Normalize" in names


def _lowers(path: Path) -> bool:
    """As vLLM, which takes these settings only where they have a length, too."""
    for file in sorted(path.glob(_TOKENIZER_FILES)):
        settings = read_json_object(file)
        if "max_seq_length" in settings:
            return settings.get("do_lower_case") is True
    return False
